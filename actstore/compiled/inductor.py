"""The partitioner as an option of Inductor, with an identity for its caches."""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from actstore.compiled.partition import Partitioner


class InductorPartitioner(CustomPartitionerFn):
    """A `Partitioner` for Inductor. Regions of one `digest` and one graph share compiled code, in all processes."""

    def __init__(self, partitioner: Partitioner, digest: str) -> None:
        self._partitioner = partitioner
        self._digest = digest

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return self._partitioner(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Return the digest."""
        return self._digest

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self._digest,)  # the caches hash Inductor's options as a pickle

    def __deepcopy__(self, memo: Any) -> InductorPartitioner:
        return self
