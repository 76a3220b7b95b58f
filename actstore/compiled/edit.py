"""Edits of partitioned graphs: payloads leave forward in place of tensors, and backward decodes each where it is read.

A tensor is encoded after its last use in forward, so that the compiler does not compute its producer once more for the
payload, and decoded before its first use in backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves

from actstore.base.note import SMALL
from actstore.codecs import Codec, Raw
from actstore.compiled.arrange import channels_last_nodes, write
from actstore.compiled.formats.codecs import GraphCodec, graph_codec
from actstore.compiled.formats.sizes import hinted_nbytes, is_fixed
from actstore.compiled.graph import (
    GETITEM,
    SPLITS,
    VIEWS,
    Boundary,
    SavedNode,
    name_of,
    outputs_of,
    positions,
    root_of,
    views_between,
)
from actstore.compiled.rules import GraphRules
from actstore.compiled.table import EXTRA, INPUT, KEPT, PAYLOAD, SAMPLE, TOKEN, SavedRow, Table
from actstore.compiled.tiers import (
    TierGraph,
    add_sample,
    count_readers,
    fetch_early,
    is_sample,
    is_token,
    name_puts,
    name_samples,
)
from actstore.compiled.treatment import BITS, Treatment, Treatments, payload_node

NO_CHECK = "saved_tensor_with_no_vc_check"  # autograd saves such tensors after all remaining ones, without hooks
Decompositions = Mapping[Any, Callable[..., Any]] | None


def trace(function: Callable[..., Any], values: Sequence[Tensor], decompositions: Decompositions) -> GraphModule:
    """Trace a function of tensors without data, which a graph's nodes have as their values."""
    fake: Any = values[0]
    with fake.fake_mode, torch.no_grad():
        traced: GraphModule = make_fx(function, decomposition_table=decompositions)(*values)
        return traced


def splice(graph: Graph, traced: GraphModule, arguments: Sequence[Node], before: Node) -> list[Node]:
    """Copy a traced function into a graph, and return the nodes of its results."""
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "output":
                return [copies[result] for result in pytree.tree_leaves(node.args[0])]
            if node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
    raise AssertionError("a graph ends with its output.")


def add_placeholder(graph: Graph, name: str, section: Node, before: Node) -> Node:
    """Add the placeholder that brings a node of the forward graph to the backward graph."""
    if before.meta.get(NO_CHECK):
        section.meta[NO_CHECK] = True
    with graph.inserting_before(before):
        node = graph.placeholder(name)
    node.meta.update({key: section.meta[key] for key in ("val", "tensor_meta", NO_CHECK) if key in section.meta})
    return node


def set_outputs(forward: Graph, outputs: list[Any], num_outputs: int) -> None:
    """Set what a forward graph returns: `num_outputs` outputs of the region, then what it saves."""
    output = forward.output_node()
    if "desc" in output.meta:
        from torch._functorch._aot_autograd import descriptors

        checked: Any = descriptors.SavedForBackwardsAOTOutput
        unchecked: Any = getattr(descriptors, "SavedForBackwardsNoVcCheckAOTOutput", checked)
        output.meta["desc"] = [
            *output.meta["desc"][:num_outputs],
            *(
                (unchecked if isinstance(node, Node) and node.meta.get(NO_CHECK) else checked)(number)
                for number, node in enumerate(outputs[num_outputs:])
            ),
        ]
    output.args = (tuple(outputs),)
    output.meta.pop("output_stack_traces", None)  # one for each output


def place_after(node: Node) -> Node:
    """Return the first node after `node` where an operator may stand: parts of one result stay close to it."""
    following = node.next
    while following.op == "placeholder" or name_of(following) == GETITEM:
        following = following.next
    return following


@dataclass
class NodeRow:
    """A node that forward saves, with what it stands for: `saved` bytes, or `per_byte` of its own, as in a table."""

    node: Node
    treatment: Treatment
    saved: int = 0
    per_byte: int = 0


class GraphPayload(NamedTuple):
    """The payload of one tensor in both graphs: what forward saves, what backward reads, how to decode it, and what
    measures it."""

    codec: GraphCodec
    sections: list[Node]
    reads: list[Node]
    decoding: GraphModule
    sample: Node | None = None


Key = tuple[Node, Codec, tuple[str, ...]]  # of a payload: its tensor, its codec and its tiers


class Editor:
    """The edits of one region.

    Parameters
    ----------
    num_outputs : outputs of the forward graph that the region returns
    decompositions : of operators that the compiler takes apart
    fuses : whether the compiler is Inductor, which keeps images of some nodes with the channels last in memory
    samples : whether to measure the errors of payloads in the steps that a store samples
    """

    def __init__(
        self,
        forward: GraphModule,
        backward: GraphModule,
        boundary: Boundary,
        num_outputs: int,
        decompositions: Decompositions,
        *,
        fuses: bool = False,
        samples: bool = False,
    ) -> None:
        self._fuses = fuses
        self._samples = samples
        self._last_channels: Set[Node] = frozenset()  # such nodes of the forward graph
        self._forward = forward.graph
        self._backward = backward.graph
        self._modules = (forward, backward)
        self._boundary = boundary
        self._num_outputs = num_outputs
        self._decompositions = decompositions
        self._originals = set(forward.graph.nodes)
        self._payloads: dict[Key, GraphPayload] = {}
        self._whole: dict[Key, Node] = {}  # payloads that backward decodes once, for reads of all of their parts: where
        self._decoded: dict[Key, Node] = {}  # of these
        self._traces: dict[tuple[Any, ...], tuple[GraphCodec, GraphModule, GraphModule]] = {}

    def apply(self, treatments: Treatments, rules: GraphRules, extra: Set[Node] = frozenset()) -> Table:
        """Apply the treatments. Returns a row for each tensor that autograd saves through hooks, in its order.

        extra : what PyTorch's own partition does not save
        """
        outputs = outputs_of(self._modules[0])
        returned, rest = outputs[: self._num_outputs], outputs[self._num_outputs + len(self._boundary.tensors) :]
        masks = [(node, owner, self._copy_to_forward(node)) for node, owner in treatments.masks.items()]
        if self._fuses:
            self._last_channels = channels_last_nodes(self._modules[0])
        rows: list[NodeRow] = []
        for node, owner, mask in masks:
            rows += self._save_mask(node, owner, mask)
        self._backward.eliminate_dead_code()  # of what the masks are computed from
        self._whole = self._find_whole(treatments)
        for treatment in treatments.of:
            rows += self._save(treatment, rows)
        for payload in self._payloads.values():
            count_readers(zip(payload.sections, payload.reads, strict=True))
        fetch_early(self._backward)
        set_outputs(self._forward, [*returned, *(row.node for row in rows), *rest], self._num_outputs)
        for module in self._modules:
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()
        checked = [row for row in rows if not row.node.meta.get(NO_CHECK)]
        table = _table(checked, rules, extra)
        named = list(zip((row.node for row in checked), table, strict=True))
        name_puts(named)
        name_samples(named)
        return table

    # -- one tensor ---------------------------------------------------------------------------------------------------

    def _find_whole(self, treatments: Treatments) -> dict[Key, Node]:
        """Return the results that are one payload, because all of their parts are saved, and where each is decoded.

        Such are queries, keys and values of one product: its rows lie side by side, theirs do not. What takes time to
        decode is one payload only where backward reads all parts at one place.
        """
        parts: dict[Key, list[Treatment]] = {}
        for each in treatments.of:
            root = root_of(each.saved.node)
            if each.codec is not None and each.saved.read.users and root.op == "call_function":
                parts.setdefault((root, each.codec, each.tiers), []).append(each)
        found: dict[Key, Node] = {}
        places = positions(self._backward.nodes)
        for key, some in parts.items():
            root, codec, _ = key
            saved = [each.saved for each in some]
            begins = {self._first_use(each.read) for each in saved}
            if len(saved) == 1 or (len(begins) > 1 and not isinstance(codec, Raw)):
                continue
            known = all(views_between(root, each.node, parts=True) is not None for each in saved)
            if known and graph_codec(codec, root.meta["val"])[0] and _are_all(saved, root, codec):
                found[key] = min(begins, key=places.__getitem__)
        return found

    def _save(self, treatment: Treatment, rows: list[NodeRow]) -> list[NodeRow]:
        """Return the nodes that forward saves for one tensor."""
        node, read = treatment.saved
        if treatment.codec is None:
            return [NodeRow(node, treatment)]
        if not read.users:  # masks are all that backward needs of it
            self._backward.erase_node(read)
            own = [row for row in rows if row.treatment is treatment]
            (own or rows)[0].saved += hinted_nbytes(treatment.saved.value)
            return []
        parts = (root_of(node), treatment.codec, treatment.tiers) in self._whole
        root, views = payload_node(node, treatment.codec, parts=parts)
        key = root, treatment.codec, treatment.tiers
        found = self._payloads.get(key)
        made: list[NodeRow] = []
        if found is None:
            found = self._payloads[key] = self._encode(root, treatment.codec, treatment.tiers, read)
            made = [NodeRow(section, treatment) for section in found.sections]
            made[0].saved = hinted_nbytes(root.meta["val"]) if is_fixed(root.meta["val"]) else -1
            made[0].per_byte = found.codec.per_byte
            made += [] if found.sample is None else [NodeRow(found.sample, treatment)]
        self._put(self._decode(found, read, key), read, views)
        return made

    def _save_mask(self, node: Node, owner: Treatment, mask: Node) -> list[NodeRow]:
        """Return the nodes that forward saves for a mask that backward would compute by `node`."""
        first = self._boundary.tensors[0].read
        if graph_codec(BITS, mask.meta["val"])[0] is None:
            node.replace_all_uses_with(add_placeholder(self._backward, f"{node.name}_mask", mask, first))
            self._backward.erase_node(node)
            return [NodeRow(mask, owner)]
        found = self._encode(mask, BITS, owner.tiers, first)
        self._put(self._decode(found, node), node, [])
        return [NodeRow(section, owner) for section in found.sections]

    def _encode(self, source: Node, codec: Codec, tiers: tuple[str, ...], before: Node) -> GraphPayload:
        """Encode a node of the forward graph; the backward graph gets placeholders before the node `before`."""
        value = source.meta["val"]
        if source in self._last_channels:  # groups in the order of memory, or each loop would transpose
            value = value.contiguous(memory_format=torch.channels_last)
        form, encoding, decoding = self._trace(codec, tiers, value)
        if _divides(form, value):
            write(source)
        place = self._after_uses(source)
        sections = splice(self._forward, encoding, [source], place)
        reads = [
            add_placeholder(self._backward, f"{source.name}_payload_{section.name}", section, before)
            for section in sections
        ]
        sample = None
        if self._samples and not codec.lossless and is_fixed(value):
            sample = add_sample(self._forward, source, value, sections, codec, place)
            add_placeholder(self._backward, f"{source.name}_sample", sample, before)
        return GraphPayload(form, sections, reads, decoding, sample)

    def _trace(
        self, codec: Codec, tiers: tuple[str, ...], value: Tensor
    ) -> tuple[GraphCodec, GraphModule, GraphModule]:
        """Return the form of a codec for a tensor, and its traced functions; those of one shape are traced once."""
        shape = tuple(value.shape)
        key = (codec, tiers, shape, value.stride(), value.dtype, value.device) if is_fixed(value) else None
        if key is not None and key in self._traces:
            return self._traces[key]
        inner, reason = graph_codec(codec, value)
        assert inner is not None, reason
        form = TierGraph(inner, tiers, value.device) if tiers else inner
        # functions, because the tracer takes the self of a method for an argument
        encoding = trace(lambda tensor: form.encode(tensor), [value], self._decompositions)  # noqa: PLW0108
        values = [node.meta["val"] for node in tree_leaves(encoding.graph.output_node().args[0])]
        found = form, encoding, trace(lambda *payload: form.decode(payload), values, self._decompositions)
        if key is not None:
            self._traces[key] = found
        return found

    def _decode(self, found: GraphPayload, read: Node, key: Key | None = None) -> Node:
        """Return the node of the decoded tensor, right before the first use of `read`, or of all parts."""
        if key in self._decoded:
            return self._decoded[key]
        place = None if key is None else self._whole.get(key)
        (decoded,) = splice(self._backward, found.decoding, found.reads, place or self._first_use(read))
        shared = False
        if key is not None and place is not None:
            self._decoded[key] = decoded
            shared = not isinstance(key[1], Raw)  # what was read is written already
        if shared or _divides(found.codec, decoded.meta["val"]):
            write(decoded)
        return decoded

    def _put(self, decoded: Node, read: Node, views: list[Node]) -> None:
        """Put views of a decoded tensor in place of `read`."""
        with self._backward.inserting_before(self._first_use(read)):
            for view in views:
                decoded = self._backward.node_copy(view, {view.all_input_nodes[0]: decoded}.__getitem__)
        read.replace_all_uses_with(decoded)
        self._backward.erase_node(read)

    def _first_use(self, read: Node) -> Node:
        return min(read.users, key=positions(self._backward.nodes).__getitem__)

    # -- the graphs ---------------------------------------------------------------------------------------------------

    def _after_uses(self, node: Node) -> Node:
        """Return the node before which the payload of `node` is made: after the last use of it and of its views."""
        users, todo = {node}, [node]
        while todo:
            for user in todo.pop().users:
                if user in self._originals and user.op != "output" and user not in users:
                    users.add(user)
                    if name_of(user) in VIEWS | SPLITS or name_of(user) == GETITEM:
                        todo.append(user)
        return place_after(max(users, key=positions(self._forward.nodes).__getitem__))

    def _copy_to_forward(self, node: Node) -> Node:
        """Return the node of the forward graph that computes what `node` computes in backward from saved tensors."""
        known = {saved.read: saved.node for saved in self._boundary.tensors} | self._boundary.symbols
        by_name = {each.name: each for each in self._originals}
        cone, todo = {node}, [node]
        while todo:
            for source in todo.pop().all_input_nodes:
                if source not in cone and source not in known:
                    cone.add(source)
                    todo.append(source)
        for each in sorted(cone, key=positions(self._backward.nodes).__getitem__):
            same = by_name.get(each.name)
            if same is not None and same.target is each.target:
                known[each] = same
                continue
            position = positions(self._forward.nodes)
            last = max((known[source] for source in each.all_input_nodes), key=position.__getitem__)
            with self._forward.inserting_before(place_after(last)):
                known[each] = self._forward.node_copy(each, known.__getitem__)
            self._originals.add(known[each])
        return known[node]


def _divides(codec: GraphCodec, value: Tensor) -> bool:
    """Return whether a loop over rows would find groups by division, which takes longer on a CPU than a loop more."""
    return codec.crosses_rows and value.device.type == "cpu"


def _are_all(parts: list[SavedNode], root: Node, codec: Codec) -> bool:
    """Return whether parts have as many bytes as a result of fixed sizes; without a codec, or each of them as many."""
    if not is_fixed(root.meta["val"]):
        return False
    nbytes, whole = [hinted_nbytes(part.value) for part in parts], hinted_nbytes(root.meta["val"])
    return sum(nbytes) == whole or (isinstance(codec, Raw) and all(each == whole for each in nbytes))


def _table(rows: list[NodeRow], rules: GraphRules, extra: Set[Node]) -> Table:
    """Return the rows of the report. Sites of one module are numbered in the order in which they are saved."""
    # the hooks around the region count its inputs as sites of the compiled module
    counts = Counter({rules.target: sum(row.treatment.kind == INPUT for row in rows)})
    indices: dict[int, int] = {}
    table = []
    for row in rows:
        treatment = row.treatment
        if treatment.kind == INPUT and row.node is treatment.saved.node:
            table.append(SavedRow(INPUT))
            continue
        if treatment.note == SMALL:
            index = -1
        elif id(treatment) in indices:
            index = indices[id(treatment)]
        else:
            index = indices[id(treatment)] = counts[treatment.name]
            counts[treatment.name] += 1
        kind = KEPT if row.node is treatment.saved.node else TOKEN if is_token(row.node) else PAYLOAD
        kind = SAMPLE if is_sample(row.node) else kind
        saved, per_byte = row.saved, row.per_byte
        if treatment.saved.node in extra:
            kind, saved, per_byte = EXTRA if kind == KEPT else kind, 0, 0
        name = rules.relative(treatment.name) + (f"/{treatment.tag}" if treatment.tag else "")
        why = treatment.note, treatment.exact
        table.append(
            SavedRow(kind, name, index, treatment.decision, *why, saved, per_byte, tensors=int(row.saved != 0))
        )
    return tuple(table)
