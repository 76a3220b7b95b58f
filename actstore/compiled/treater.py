"""The treatments of what partitions of one joint graph save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from actstore.compiled.budget.lossy import LossyModules, LossyPayload
from actstore.compiled.formats.codecs import graph_codec
from actstore.compiled.formats.sizes import hint, hinted_nbytes
from actstore.compiled.graph import Boundary, boundary_of, root_of
from actstore.compiled.names import NodeNames
from actstore.compiled.rules import GraphRules
from actstore.compiled.table import PAYLOAD
from actstore.compiled.treatment import BITS, Planned, Treatments, payload_node, treat
from actstore.errors import StateError
from actstore.policy import Encode

Graphs = tuple[GraphModule, GraphModule]


class Treater:
    """The treatments of one region.

    Parameters
    ----------
    rules : the policy for the region
    names : of its nodes
    metadata : of AOTAutograd; None where it gives none
    options : of PyTorch's partitioner
    """

    def __init__(self, rules: GraphRules, names: NodeNames, metadata: Any, options: Mapping[str, Any]) -> None:
        self._rules = rules
        self._names = names
        self._metadata = metadata
        self._num_outputs: int = options["num_fwd_outputs"]
        self._static: Sequence[int] = options.get("static_lifetime_input_indices") or ()

    def treat(self, graphs: Graphs, boundary: Boundary, planned: Planned) -> Treatments:
        """Return the treatments of two partitioned graphs.

        planned : returns the decision of a plan, by the name of the node whose memory waits, and by the module
        """
        inputs = _inputs(graphs[0], self._metadata)
        return treat(
            *graphs,
            boundary,
            self._rules,
            self._names,
            num_outputs=self._num_outputs,
            inputs=inputs,
            active=_active(inputs, self._metadata),
            static={inputs[index] for index in self._static},
            planned=planned,
        )

    def lossy(
        self, graphs: Graphs, modules: LossyModules, wanted: Set[str] | None = None
    ) -> tuple[dict[str, LossyPayload], int]:
        """Return the payloads with a loss of two partitioned graphs, by the node whose memory each stands for.

        And the bytes of the masks that forward then saves for decisions of backward.

        Parameters
        ----------
        wanted : the nodes whose memory is to be encoded; None for all that may be
        """

        def planned(root: str, module: str | None) -> Encode | None:
            allowed = module is not None and modules.of(module) is not None
            return Encode(modules.codec) if allowed and (wanted is None or root in wanted) else None

        try:
            boundary = boundary_of(*graphs, self._num_outputs)
        except StateError:
            return {}, 0
        found = self.treat(graphs, boundary, planned)
        parts: dict[Node, dict[Node, set[str]]] = {}
        whole = set[Node]()
        for each in found.of:
            root = root_of(each.saved.node)
            if each.kind != PAYLOAD or each.codec is None or each.codec.lossless:
                whole.add(root)
                continue
            node, _ = payload_node(each.saved.node, each.codec)
            parts.setdefault(root, {}).setdefault(node, set()).add(each.name)
        decisions = Counter[Node]()
        for mask, owner in found.masks.items():
            decisions[root_of(owner.saved.node)] += hint(mask.meta["val"].numel())
        payloads = {
            root.name: LossyPayload(
                modules.codec,
                tuple(size for part in of_root for size in modules.sizes(part.meta["val"])),
                frozenset().union(*of_root.values()),
                decisions[root],
            )
            for root, of_root in parts.items()
            if root not in whole and hinted_nbytes(root.meta["val"]) >= self._rules.min_nbytes
        }
        return payloads, sum(map(_mask_nbytes, found.masks))


def _mask_nbytes(mask: Node) -> int:
    """Return the bytes of a mask that forward saves: of bits, or of bools."""
    numel = hint(mask.meta["val"].numel())
    return numel if graph_codec(BITS, mask.meta["val"])[0] is None else -(-numel // 8)


def _inputs(forward: GraphModule, metadata: Any) -> list[Node]:
    """Return the inputs of a graph, without the tokens of effects before them, such as those of checks."""
    return list(forward.graph.find_nodes(op="placeholder"))[len(getattr(metadata, "tokens", ())) :]


def _active(inputs: list[Node], metadata: Any) -> set[Node] | None:
    """Return the inputs of a graph that require a gradient; None where PyTorch does not tell."""
    infos = getattr(metadata, "input_info", None)
    if infos is None or len(infos) != len(inputs):
        return None
    tensors = zip(inputs, infos, strict=True)
    return {node for node, info in tensors if info.requires_grad and isinstance(node.meta.get("val"), Tensor)}
