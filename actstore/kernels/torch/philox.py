"""Random bytes by position and key as PyTorch operations: Philox4x32-10. The numbers: csrc/philox.md."""

from __future__ import annotations

import torch

_WORD_MASK = 0xFFFFFFFF


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low word of a product of two words, in signed 64-bit arithmetic."""
    high = ((a >> 16) * b + ((a & 0xFFFF) * b >> 16)) >> 16
    return high, a * b & _WORD_MASK


def philox(block: torch.Tensor, purpose: int, key: int) -> torch.Tensor:
    """Compute four random words, int64 (blocks, 4), for each counter (`block`, `purpose`) under a 63-bit key."""
    a, b = block & _WORD_MASK, block >> 32
    c, d = torch.full_like(a, purpose), torch.zeros_like(a)
    low, high = key & _WORD_MASK, key >> 32
    for _ in range(10):
        first_high, first_low = _multiply(a, 0xD2511F53)
        second_high, second_low = _multiply(c, 0xCD9E8D57)
        a, b, c, d = second_high ^ b ^ low, second_low, first_high ^ d ^ high, first_low
        low, high = low + 0x9E3779B9 & _WORD_MASK, high + 0xBB67AE85 & _WORD_MASK
    return torch.stack([a, b, c, d], 1)


def offsets(start: int, count: int, key: int, device: torch.device) -> torch.Tensor:
    """Draw the noise of elements `start` (a multiple of 16) to `start + count`: float32 of (-1/2, 1/2)."""
    blocks = torch.arange(start // 16, -(-(start + count) // 16), device=device)
    words = philox(blocks, 0, key).unsqueeze(2) >> torch.tensor([0, 8, 16, 24], device=device)
    return ((words & 0xFF).to(torch.float32) * 2.0**-8 - 0.498046875).flatten()[:count]
