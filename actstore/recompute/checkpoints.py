"""The model's own checkpoints: those that an exception has left, and warnings of those beside a region of a store."""

from __future__ import annotations

import inspect
import warnings
from traceback import walk_tb
from typing import Any

from torch.utils.checkpoint import checkpoint

from actstore.base.caller import stacklevel
from actstore.base.checkpoints import innermost_pack

_CODE = inspect.unwrap(checkpoint).__code__


class RegionWarnings:
    """Warnings of modules that the model checkpoints itself, or gives a cache. A store gives each once.

    Attributes
    ----------
    doubled, cached : whether it has given them
    """

    def __init__(self) -> None:
        self.doubled = False
        self.cached = False

    def tell_inside(self, region: str) -> None:
        """Warn that a region is entered in a checkpoint of the model."""
        self._tell(
            f"{region}: the model runs this module inside a checkpoint of its own, so that the rule has no effect"
        )

    def tell_around(self, region: str) -> None:
        """Warn that a checkpoint of the model runs in a region."""
        self._tell(
            f"{region}: the model checkpoints this module, or a part of it, by itself. Together they hold no "
            "less, and may compute it three times"
        )

    def tell_cache(self, region: str, cache: str) -> None:
        """Warn that a region runs without a cache that it was given."""
        if not self.cached:
            self.cached = True
            warnings.warn(
                f"{region} is given a {cache}: its second run would append to that once more. Recomputed modules run "
                "without it, as under Transformers' own checkpoints, and it stays empty. To turn caches off, call "
                "model(..., use_cache=False).",
                RuntimeWarning,
                stacklevel=stacklevel(),
            )

    def _tell(self, what: str) -> None:
        if not self.doubled:
            self.doubled = True
            warnings.warn(
                f"{what}. Switch the model's own checkpoints off (Transformers: "
                "model.gradient_checkpointing_disable()), or leave the rule out.",
                RuntimeWarning,
                stacklevel=stacklevel(),
            )


def end_left(error: BaseException, pack: Any) -> None:
    """End the checkpoints that `error` has left, until `pack` is the innermost hook again.

    A checkpoint enters its hooks in a generator. PyTorch before 2.13 does not end that when the forward inside fails:
    the hooks stay entered for as long as the error's traceback lives, above the hooks that must be left next.
    """
    for frame in reversed([frame for frame, _ in walk_tb(error.__traceback__)]):
        if innermost_pack() is pack:
            return
        if frame.f_code is _CODE and (generator := frame.f_locals.get("gen")) is not None:
            generator.close()
