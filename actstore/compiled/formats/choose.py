"""The form of a codec inside of graphs, for one tensor."""

from __future__ import annotations

from torch import Tensor

from actstore.codecs import Bit1, Codec, Int8, Raw
from actstore.codecs.affine import AffineCodec
from actstore.compiled.formats.affine import AffineGraph
from actstore.compiled.formats.base import GraphCodec
from actstore.compiled.formats.bit1 import Bit1Graph
from actstore.compiled.formats.groups import group_tensor, storage_order
from actstore.compiled.formats.int8 import Int8Graph
from actstore.compiled.formats.planes import BYTE
from actstore.compiled.formats.raw import RawGraph


def graph_codec(codec: Codec, tensor: Tensor) -> tuple[GraphCodec | None, str]:
    """Return the form of `codec` for a tensor of a graph; None and the reason where it has none."""
    if reason := why_unavailable(codec):
        return None, reason
    if isinstance(codec, Raw):
        dims, reason = storage_order(tensor)
        return (None if dims is None else RawGraph(dims)), reason
    if isinstance(codec, Int8 | AffineCodec):
        grouping, reason = group_tensor(tensor, codec.group)
    else:
        grouping, reason = group_tensor(tensor, BYTE, in_rows=False)
    if grouping is None:
        return None, reason
    if isinstance(codec, AffineCodec) or (isinstance(codec, Int8) and codec.affine):
        return AffineGraph(codec, grouping, tensor.dtype), ""
    return (Int8Graph(codec, grouping, tensor.dtype) if isinstance(codec, Int8) else Bit1Graph(grouping)), ""


def why_unavailable(codec: Codec) -> str:
    """Return the reason why graphs cannot hold payloads of `codec`; empty where they can."""
    if codec.keyed:
        return f"{codec.name} rounds at random, and compiled graphs have no keys for random bits"
    if isinstance(codec, Bit1 | Raw | AffineCodec) or (isinstance(codec, Int8) and codec.axis == "element"):
        return ""
    options = " with these options" if isinstance(codec, Int8) else ""
    return f"{codec.name}{options} does not run inside of compiled graphs"
