"""PyTorch's checkpoints that an exception has left."""

from __future__ import annotations

import inspect
from traceback import walk_tb
from typing import Any

from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils.checkpoint import checkpoint

_CODE = inspect.unwrap(checkpoint).__code__


def innermost_pack() -> Any:
    """What packs what this thread saves; None where no saved-tensor hooks are entered."""
    hooks: Any = _top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def end_left(error: BaseException, pack: Any) -> None:
    """End the checkpoints that `error` has left, until `pack` is the innermost hook again.

    A checkpoint enters its hooks in a generator. PyTorch before 2.13 does not end that when the forward inside fails:
    the hooks stay entered for as long as the error's traceback lives, on top of those that are to be left next.
    """
    for frame in reversed([frame for frame, _ in walk_tb(error.__traceback__)]):
        if innermost_pack() is pack:
            return
        if frame.f_code is _CODE and (generator := frame.f_locals.get("gen")) is not None:
            generator.close()
