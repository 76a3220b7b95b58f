"""Operators that put payloads of a graph into tiers, and bring them back.

They are pure functions of tensors, also to the compiler: a put returns a token, which the graph saves, and a read takes
it. So neither can be dropped or reordered but with what needs it. Cached code has nothing but text and numbers in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from actstore.codecs import Codec, Raw
from actstore.compiled import tokens
from actstore.compiled.formats.codecs import GraphCodec, graph_codec
from actstore.compiled.table import SavedRow
from actstore.policy import Encode, Offload

_HOST = torch.Tag.cudagraph_unsafe  # a replayed CUDA graph would run no host code
_AS_IT_IS = (torch.Tag.flexible_layout, _HOST)  # a copy of a token would not own its payload


@torch.library.custom_op(
    "actstore::put",
    mutates_args=(),
    schema="(Tensor payload, str decision, str name, int number, int readers) -> Tensor",
    tags=(torch.Tag.needs_exact_strides, _HOST),
)
def put(payload: Tensor, decision: str, name: str, number: int, readers: int) -> Tensor:
    """Put a contiguous payload into a tier, and return its token."""
    return tokens.put(payload, decision, name, number, readers)


@put.register_fake
def _(payload: Tensor, decision: str, name: str, number: int, readers: int) -> Tensor:
    return torch.empty(tokens.token_shape(payload), dtype=payload.dtype, device="cpu")


@torch.library.custom_op("actstore::ahead", mutates_args=(), schema="(Tensor token) -> Tensor", tags=_AS_IT_IS)
def ahead(token: Tensor) -> Tensor:
    """Start to fetch what backward reads first. The result is for reads, which come after it."""
    tokens.fetch_ahead(token)
    return torch.empty(0)


@ahead.register_fake
def _(token: Tensor) -> Tensor:
    return torch.empty(0, device="cpu")


@torch.library.custom_op(
    "actstore::read", mutates_args=(), schema="(Tensor token, Tensor after, Device device) -> Tensor", tags=_AS_IT_IS
)
def read(token: Tensor, after: Tensor, device: torch.device) -> Tensor:
    """Return the payload of a token on its device."""
    return tokens.read(token, device)


@read.register_fake
def _(token: Tensor, after: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tokens.payload_shape(token), dtype=token.dtype, device=device)


_PUT, _AHEAD, _READ = (getattr(torch.ops.actstore, name).default for name in ("put", "ahead", "read"))


class TierGraph(GraphCodec):
    """A codec in a graph whose payloads wait in tiers: in place of each section forward saves its token."""

    def __init__(self, inner: GraphCodec, tiers: tuple[str, ...], device: torch.device) -> None:
        self.text = inner.text
        self.per_byte = inner.per_byte
        self.crosses_rows = inner.crosses_rows
        self._inner = inner
        self._decision = str(Offload(Raw(), tiers))
        self._device = device

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        return [_PUT(section.contiguous(), self._decision, "", 0, 1) for section in self._inner.encode(tensor)]

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        return self._inner.decode([_READ(token, token, self._device) for token in payload])


def is_token(node: Node) -> bool:
    """Return whether a node of the forward graph is a token."""
    return node.target is _PUT


def name_puts(rows: Iterable[tuple[Node, SavedRow]]) -> None:
    """Tell the puts of a forward graph the sites that account for them."""
    for node, row in rows:
        if is_token(node):
            node.args = (*node.args[:2], row.name, row.number, node.args[4])


def count_readers(pairs: Iterable[tuple[Node, Node]]) -> None:
    """Tell the puts how often backward reads their payloads, from each token and its placeholder in backward."""
    for node, placeholder in pairs:
        if is_token(node):
            node.args = (*node.args[:4], len(placeholder.users))


def fetch_early(backward: Graph) -> None:
    """Let a backward graph start with the fetch of what it reads first. Reads then keep the engine ahead of them."""
    reads: list[Any] = backward.find_nodes(op="call_function", target=_READ)
    if not reads:
        return
    token = reads[0].args[0]
    last = backward.find_nodes(op="placeholder")[-1]
    with backward.inserting_after(last):
        begun = backward.call_function(_AHEAD, (token,))
    with token.meta["val"].fake_mode:
        begun.meta["val"] = torch.empty(0, device="cpu")
    for node in reads:
        node.args = (node.args[0], begun, node.args[2])


@torch.library.custom_op(
    "actstore::sample",
    mutates_args=(),
    schema="(Tensor tensor, Tensor[] payload, int[] strides, str codec, str decision, str name, int number) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
)
def sample(
    tensor: Tensor, payload: list[Tensor], strides: list[int], codec: str, decision: str, name: str, number: int
) -> Tensor:
    """Measure the payload of a tensor, whose groups are those of a tensor with these strides.

    Its result has no elements. Forward saves it, so that no compiler drops the operator.
    """
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
