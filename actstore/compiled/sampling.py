"""An operator of graphs that measures the loss of a payload, in the steps that the store samples.

Its result has no elements. Forward saves it, so that no compiler drops the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from actstore.codecs import Codec
from actstore.compiled import tokens
from actstore.compiled.formats.codecs import graph_codec
from actstore.compiled.table import SavedRow
from actstore.compiled.tiers import is_token
from actstore.policy import Encode


@torch.library.custom_op(
    "actstore::sample",
    mutates_args=(),
    schema="(Tensor tensor, Tensor[] payload, int[] strides, str codec, str decision, str name, int number) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
)
def sample(
    tensor: Tensor, payload: list[Tensor], strides: list[int], codec: str, decision: str, name: str, number: int
) -> Tensor:
    """Measure the payload of a tensor, whose groups are those of a tensor with these strides."""
    puts = tokens.running_puts()
    if puts is not None and puts.samples:

        def decoded() -> Tensor:
            encode = tokens.decision_of(codec)
            assert isinstance(encode, Encode), codec
            like = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
            form, reason = graph_codec(encode.codec, like)
            assert form is not None, reason
            return form.decode(payload)

        puts.sample(tensor, decoded, tokens.decision_of(decision), name, number)
    return torch.empty(0)


@sample.register_fake
def _(
    tensor: Tensor, payload: list[Tensor], strides: list[int], codec: str, decision: str, name: str, number: int
) -> Tensor:
    return torch.empty(0, device="cpu")


_SAMPLE = torch.ops.actstore.sample.default


def add_sample(
    graph: Graph, source: Node, encoded: Tensor, sections: Sequence[Node], codec: Codec, before: Node
) -> Node:
    """Measure the payload of a node of the forward graph.

    encoded : the tensor as it is encoded, with the strides that decide about its groups
    sections : of the payload, or their tokens
    """
    payload = [node.all_input_nodes[0] if is_token(node) else node for node in sections]
    with graph.inserting_before(before):
        node = graph.call_function(_SAMPLE, (source, payload, list(encoded.stride()), str(Encode(codec)), "", "", 0))
    with source.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(0, device="cpu")
    return node


def is_sample(node: Node) -> bool:
    """Return whether a node of the forward graph measures a payload."""
    return node.target is _SAMPLE


def name_samples(rows: Iterable[tuple[Node, SavedRow]]) -> None:
    """Tell the operators that measure payloads the sites that these are of."""
    for node, row in rows:
        if is_sample(node):
            node.args = (*node.args[:4], str(row.decision), row.name, row.number)
