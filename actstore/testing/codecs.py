"""Checks of the codec contract: sizes, bytes, errors, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from functools import partial

import torch
from torch import Tensor

from actstore.base.spec import Spec
from actstore.codecs.base import AtMost, Codec, Exact
from actstore.errors import ActstoreError, PayloadError, SpecError
from actstore.policy import Encode, parse_decision
from actstore.policy.options import codec_text

GUARD_NBYTES = 64  # on either side of a buffer; encode must not change them
KEYS = (0, 0x1234_5678_9ABC_DEF0, 2**63 - 1)
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
SIZES = (0, 1, 15, 17, 127, 129, 1025)
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": lambda x: x.permute(3, 1, 0, 2),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "later rows": lambda x: x[1:],
    "an odd offset": lambda x: x.flatten()[3:],
    "a scalar": lambda x: x[0, 0, 0, 0],
}


def check_codec(
    codec: Codec, error: Callable[[Tensor], Tensor] | None = None, *, device: torch.device | str = "cpu"
) -> None:
    """Check every promise of `Codec` on one set of its options, with tensors of every dtype, size and order of strides.

    Parameters
    ----------
    error : the bound that a lossy codec states: from a tensor, the largest absolute error of each of its elements. It
        is called for tensors whose elements are all finite and at most 2**12
    device : device of the tensors

    Raises
    ------
    AssertionError : a promise is broken; the message names it and the tensor
    """
    assert codec.lossless or error is not None, f"{codec!r} is lossy: give check_codec the error bound that it states"
    check_value(codec)
    taken = [dtype for dtype in DTYPES if codec.accepts(dtype)]
    assert taken, f"{codec!r} accepts no dtype"
    for dtype in set(DTYPES) - set(taken):
        _require_refused(SpecError, f"size of {dtype}", partial(codec.size, _spec(1, dtype, device)))
    for dtype in taken:
        small, large = (codec.size(_spec(rows, dtype, device)) for rows in (1, 2**20))
        assert type(large) is type(small), f"the size of {codec!r} is of two kinds"
        assert small.nbytes <= large.nbytes, f"{2**34} elements have {large.nbytes} bytes, {2**14} have {small.nbytes}"
        for what, tensor in samples(dtype, device):
            payload = check_bytes(codec, tensor, f"{what} of {Spec.of(tensor)}", error)
        check_refusals(codec, tensor, payload)


def check_value(codec: Codec) -> None:
    """Check that a codec is an immutable value, and that the policy text can express it."""
    assert copy.deepcopy(codec) == codec == pickle.loads(pickle.dumps(codec)), f"a copy of {codec!r} is not equal to it"
    assert hash(copy.deepcopy(codec)) == hash(codec), f"a copy of {codec!r} has another hash"
    try:
        codec.name = codec.name  # type: ignore[misc]  # must fail
    except FrozenInstanceError:
        text = codec_text(codec)
        found = parse_decision(text)
        assert found == Encode(codec), (
            f"the policy text '{text}' is {found!r}, and must be Encode({codec!r}). Offer the codec as an entry point "
            "under its name, one that actstore does not have, and annotate its options as bool, int, float or Literal"
        )
    else:
        raise AssertionError(f"{codec!r} can be changed. Decorate its class with @dataclass(frozen=True).")


def check_bytes(codec: Codec, tensor: Tensor, what: str, error: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Encode and decode one tensor in every way, and return its payload."""
    size, before = codec.size(Spec.of(tensor)), _storage(tensor)
    bound = codec.bind(tensor)
    assert (bound.nbytes, bound.exact) == (size.nbytes, isinstance(size, Exact)), f"{what}: bind says another size"
    for key in KEYS if codec.keyed else KEYS[:1]:
        payload = None
        for encode, poison, spare in ((codec.encode, 0xA5, 0), (codec.encode, 0x3C, 48), (bound.encode, 0xA5, 0)):
            memory, out = _guarded(size.nbytes + spare, poison, tensor.device)
            said = encode(tensor, out, key)
            assert said is not None or bound.exact, f"{what}: encode does not say how many bytes it used"
            used = size.nbytes if said is None else said
            _check_size(size, used, out, what)
            guards = torch.cat([memory[: out.storage_offset()], memory[out.storage_offset() + size.nbytes :]])
            assert bool((guards == poison).all()), f"{what}: encode wrote beyond the {size} that it declares"
            assert payload is None or torch.equal(payload, out[:used]), f"{what}: the same tensor gave other bytes"
            payload = out[:used].clone()
            assert torch.equal(_storage(tensor), before), f"{what}: encode changed the tensor"
            for decode, held in ((codec.decode, out), (codec.decode, out[:used]), (bound.decode, out)):
                back = _blank(tensor)
                decode(held, back, key)
                _check_values(codec, tensor, back, what, error)
            assert torch.equal(out[:used], payload), f"{what}: decode changed the payload"
    assert payload is not None
    return payload


def check_refusals(codec: Codec, tensor: Tensor, payload: Tensor) -> None:
    """Check that a codec refuses what it cannot encode or decode, before it writes anything."""
    nbytes = codec.size(Spec.of(tensor)).nbytes
    _, out = _guarded(nbytes, 0xA5, tensor.device)
    short = out[: nbytes - 1]
    _require_refused(SpecError, "encode into a buffer of one byte too few", lambda: codec.encode(tensor, short))
    assert bool((short == 0xA5).all()), "encode wrote into a buffer that it refused"
    _, out = _guarded(len(payload) - 1, 0xA5, tensor.device)
    if isinstance(codec.size(Spec.of(tensor)), Exact) or tensor.is_cpu:
        out.copy_(payload[:-1])
        cut = _blank(tensor)
        _require_refused(PayloadError, "decode of a payload that is cut", lambda: codec.decode(out, cut))
    gaps = torch.ones(8, 8, device=tensor.device).to(tensor.dtype)[:, ::2]
    _, out = _guarded(2**14, 0xA5, tensor.device)
    _require_refused(SpecError, "encode of strides with gaps", lambda: codec.encode(gaps, out))


def _check_size(size: Exact | AtMost, used: int, out: Tensor, what: str) -> None:
    if isinstance(size, Exact):
        assert used == size.nbytes, f"{what}: encode returns {used}, and size says {size}"
    else:
        assert used <= size.nbytes, f"{what}: encode returns {used}, and size says {size}"
        if out.is_cpu and used:
            length = int.from_bytes(out[:8].numpy().tobytes(), "little")
            assert length == used, f"{what}: the payload has {used} bytes, and begins with the length {length}"


def _check_values(
    codec: Codec, tensor: Tensor, back: Tensor, what: str, error: Callable[[Tensor], Tensor] | None
) -> None:
    tensor = tensor.detach()
    if codec.lossless:
        assert torch.equal(_storage(back), _storage(tensor)), f"{what}: not bit for bit, and {codec!r} is lossless"
        return
    finite = tensor.isfinite()
    assert not bool(back[~finite].isfinite().any()), f"{what}: NaN or Inf came back as a number, which hides it"
    if error is not None and bool(finite.all()):
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        beyond = (tensor.to(wide) - back.to(wide)).abs() - error(tensor)
        worst = float(beyond.max()) if beyond.numel() else 0.0
        assert worst <= 0, f"{what}: the error of an element is {worst:.3g} beyond the bound that is stated"


def _require_refused(kind: type[ActstoreError], what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{what} does not raise {kind.__name__}.")


def _spec(rows: int, dtype: torch.dtype, device: torch.device | str) -> Spec:
    return Spec((rows, 2**14), (2**14, 1), dtype, torch.device(device))


def _guarded(nbytes: int, poison: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return poisoned memory, and `nbytes` in the middle of it, which start at a multiple of 16."""
    memory = torch.full((nbytes + 2 * GUARD_NBYTES + 16,), poison, dtype=torch.uint8, device=device)
    start = GUARD_NBYTES + -(memory.data_ptr() + GUARD_NBYTES) % 16
    return memory, memory[start : start + nbytes]


def _storage(tensor: Tensor) -> Tensor:
    """Copy the bytes of the elements in storage order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).clone().view(torch.uint8)


def _blank(tensor: Tensor) -> Tensor:
    """Return a poisoned tensor of the same spec."""
    nbytes = (tensor.storage_offset() + tensor.numel()) * tensor.dtype.itemsize
    memory = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=tensor.device).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def samples(dtype: torch.dtype, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a dtype, each with its description: values, sizes, orders of strides."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(3).to(dtype).to(device)

    for size in SIZES:
        yield "normal values", normal(size)
    wide = torch.randn(1000, generator=generator) * 2.0 ** torch.randint(-20, 9, (1000,), generator=generator)
    yield "values of many sizes", wide.to(dtype).to(device)
    yield "zeros of both signs", torch.tensor([0.0, -0.0] * 100).to(dtype).to(device)
    if dtype.is_floating_point or dtype.is_complex:
        special = torch.randn(400, generator=generator)
        special[::90], special[7], special[200] = float("nan"), float("inf"), -float("inf")
        yield "values with NaN and Inf", special.to(dtype).to(device)
    for name, order in ORDERS.items():
        yield name, order(normal(2, 3, 5, 7))
    yield "a matrix", normal(8, 64)
