"""The collectives of a training step, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actstore import ActivationStore
from tests.distributed.training import Rank

NAMESPACES = ("_c10d_functional", "_dtensor", "c10d")
WAITS = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """A mode that counts collectives by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = operator._schema.name.partition("::")
        if namespace in NAMESPACES and name not in WAITS:
            self.count[name] += 1
        return operator(*args, **(kwargs or {}))


def collectives(build: Callable[[], Rank], policy: str | None) -> Counter[str]:
    """How often each collective runs in a step."""
    torch.manual_seed(0)
    rank = build()
    store = None if policy is None else ActivationStore(rank.model, policy, min_bytes=0)
    with Collectives() as mode:
        rank.step(0, lambda: store or nullcontext())
    return mode.count


def check_counts(build: Callable[[], Rank], extra: Mapping[str, int]) -> None:
    """Under each policy a step runs the collectives of plain training, and so many more."""
    plain = collectives(build, None).total()
    found = {policy: collectives(build, policy).total() - plain for policy in extra}
    assert plain > 0
    assert found == dict(extra), plain
