"""Shows the simulated device what it cannot see: codecs, operators of the user's, reads and writes of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actstore.codecs import Codec
from actstore.codecs.base import Bound
from tests.simulation.device import SimDevice

Here = Callable[[], SimDevice | None]  # the device of now


def trace_codecs(monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    """Encode and decode of each `Bound` say what they read and write on the current stream."""

    def traced(bind: Callable[[Any, torch.Tensor], Bound]) -> Callable[[Codec, torch.Tensor], Bound]:
        def traced_bind(self: Codec, src: torch.Tensor) -> Bound:
            bound = bind(self, src)

            def encode(src: torch.Tensor, out: torch.Tensor, key: int) -> int | None:
                device = here()
                if device is None:
                    return bound.encode(src, out, key)
                device.compute(reads=[src], writes=[out[: bound.nbytes]], what=f"{self.name}.encode")
                bound.encode(src, out, key)
                return None  # as kernels of an accelerator, which nobody waits for

            def decode(buf: torch.Tensor, out: torch.Tensor, key: int) -> object:
                device = here()
                if device is not None:
                    device.compute(reads=[buf[: bound.nbytes]], writes=[out], what=f"{self.name}.decode")
                return bound.decode(buf, out, key)

            return bound._replace(encode=encode, decode=decode)

        return traced_bind

    for codec in (Codec, *_subclasses(Codec)):
        if "bind" in vars(codec):
            monkeypatch.setattr(codec, "bind", traced(codec.bind))


def _subclasses(of: type[Codec]) -> Iterator[type[Codec]]:
    for each in of.__subclasses__():
        yield each
        yield from _subclasses(each)


def trace_files(monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    """Reads and writes of files are accesses of the host thread, and take the time of the link "disk"."""
    pwrite, pwritev, preadv = os.pwrite, os.pwritev, os.preadv

    def say(view: Any, write: bool, what: str) -> None:
        device = here()
        if device is not None:
            array = np.frombuffer(view, dtype=np.uint8)
            device.host_bytes(array.ctypes.data, array.nbytes, write, what)
            thread = device.scheduler.here
            _, thread.now_ns = device.links["disk"].take(thread.now_ns, array.nbytes)

    def traced_pwrite(fd: int, view: Any, at: int) -> int:
        say(view, False, "a write to a file")
        return pwrite(fd, view, at)

    def traced_pwritev(fd: int, views: Sequence[Any], at: int) -> int:
        for view in views:
            say(view, False, "a write to a file")
        return pwritev(fd, views, at)

    def traced_preadv(fd: int, views: Sequence[Any], at: int) -> int:
        for view in views:
            say(view, True, "a read of a file")
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "pwrite", traced_pwrite)
    monkeypatch.setattr(os, "pwritev", traced_pwritev)
    monkeypatch.setattr(os, "preadv", traced_preadv)


class TraceOperators(TorchDispatchMode):
    """Each operator of PyTorch reads its arguments and writes its results, on the current stream of its thread.

    One that touches nothing but pinned memory is work of the host thread.

    Parameters
    ----------
    ns_per_byte : virtual time that an operator takes for each byte
    """

    def __init__(self, device: SimDevice, ns_per_byte: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._device = device
        self._ns_per_byte = ns_per_byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan = _plan(func)
        if plan is None:
            return func(*args, **kwargs)
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for (_, written), value in zip(plan, args, strict=False):
            _collect(value, writes if written else reads)
        for name, written in plan[len(args) :]:
            _collect(kwargs.get(name), writes if written else reads)
        out = func(*args, **kwargs)
        seen = {tensor.untyped_storage().data_ptr() for tensor in (*reads, *writes)}
        results: list[torch.Tensor] = []
        _collect(out, results)
        writes += [result for result in results if result.untyped_storage().data_ptr() not in seen]
        if all(self._device.is_pinned(tensor) for tensor in (*reads, *writes)):  # the host itself reads a number
            for write, tensors in ((False, reads), (True, writes)):
                for tensor in tensors:
                    self._device.host(tensor, write, str(func))
            return out
        nbytes = sum(tensor.nbytes for tensor in (*reads, *writes))
        self._device.compute(int(self._ns_per_byte * nbytes), reads, writes, str(func))
        return out


@cache
def _plan(func: Any) -> tuple[tuple[str, bool], ...] | None:
    """Names of the arguments, and whether they are written; None for a view."""
    if func.is_view:
        return None
    arguments = func._schema.arguments
    return tuple((each.name, each.alias_info is not None and each.alias_info.is_write) for each in arguments)


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.device.type == "cpu" and value.numel():
            into.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, into)
