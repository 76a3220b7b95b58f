"""Elements for properties of codecs of floats, and what their bounds are made of."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from actstore.base.spec import Spec
from tests.codecs.contract import KEY, aligned, implementations, tensor_of
from tests.oracles.samples import ITEMSIZE, SPECIAL, to_bytes

KINDS = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "heavy-tailed": lambda rng, n: rng.standard_t(2, n),
    "one-sided": lambda rng, n: rng.exponential(size=n),
    "sparse": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "constant": lambda rng, n: np.full(n, rng.standard_normal()),
    "powers": lambda rng, n: rng.choice([-1, 1], n) * 2.0 ** rng.uniform(-25, 1, n),
}


@st.composite
def float_tensors(draw, dtype):
    """1 to 600 elements of any magnitude, a few of them special, or any bits."""
    numel = draw(st.integers(1, 600))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    unsigned = np.dtype(f"<u{ITEMSIZE[dtype]}")
    kind = draw(st.sampled_from([*KINDS, "bits"]))
    if kind == "bits":
        data = rng.integers(0, 256, numel * unsigned.itemsize, dtype=np.uint8).tobytes()
        return tensor_of(data, getattr(torch, dtype))
    scale = 2.0 ** draw(st.one_of(st.integers(-20, 20), st.integers(-149, 127)))
    bits = np.frombuffer(to_bytes(KINDS[kind](rng, numel) * scale, dtype), unsigned).copy()
    special = np.array(SPECIAL[dtype], unsigned)
    special = np.concatenate([special, special | unsigned.type(1 << (8 * unsigned.itemsize - 1))])
    for position in draw(st.lists(st.integers(0, numel - 1), max_size=3)):
        bits[position] = draw(st.sampled_from(list(special)))
    return tensor_of(bits.tobytes(), getattr(torch, dtype))


def roundtrip(codec, x, key=KEY):
    """The payload, and what comes back."""
    _, payload = aligned(codec.size(Spec.of(x)).nbytes)
    codec.encode(x, payload, key)
    back = torch.empty_like(x)
    codec.decode(payload, back, key)
    return payload, back


def every_pattern(dtype):
    """Each pattern of a 16-bit dtype, in order."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def ulp(values):
    """The distance between neighbours of the dtype at finite values, float64."""
    info = torch.finfo(values.dtype)
    magnitudes = values.double().abs().nan_to_num(1).clamp(min=info.smallest_normal)
    return 2.0 ** magnitudes.log2().floor() * info.eps


def top_of_groups(x, group):
    """The largest finite magnitude of each element's group, float64; 0 where none is finite."""
    magnitudes = x.double().abs().where(x.isfinite(), 0)
    padded = torch.nn.functional.pad(magnitudes, (0, -len(x) % group)).view(-1, group)
    return padded.amax(1).repeat_interleave(group)[: len(x)]


def check_all_threads(codec, dtype):
    """A tensor large enough for all threads has the bytes that the fallback writes on one."""
    x = torch.randn((1 << 20) + 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    one, other = implementations(codec, dtype, cuda=False)
    (_, out), (_, other_out) = (aligned(codec.size(Spec.of(x)).nbytes) for _ in range(2))
    one.encode(x, out)
    other.encode(x, other_out)
    assert torch.equal(out, other_out)
    back, other_back = torch.empty_like(x), torch.empty_like(x)
    one.decode(out, back)
    other.decode(out, other_back)
    assert torch.equal(back, other_back)
