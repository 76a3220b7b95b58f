"""Codecs as operators of a graph: a payload is one tensor for each section of the codec's format, of eager's bytes.

Numbers become codes and codes numbers by the functions of `kernels/torch`, traced along rows of a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from actstore.base.layout import layout_of
from actstore.codecs import Bit1, Codec, Int8, Raw
from actstore.codecs.affine import AffineCodec
from actstore.compiled.formats.sizes import hint
from actstore.kernels.affine import widths
from actstore.kernels.rows import fit
from actstore.kernels.torch import affine, int8
from actstore.kernels.torch.bits import BYTE, pack_bools, unpack_bools
from actstore.policy.options import codec_text

MAX_IMAGE_LEAD = 3  # dimensions of an image in front of its groups: Inductor takes four for an image, and turns them
_CHANNELS_LAST = 0, 2, 3, 1


@dataclass(frozen=True)
class Grouping:
    """The way from a tensor to its groups of consecutive elements in storage order, and back.

    Attributes
    ----------
    dims : dimensions in storage order, the one with the largest stride first
    lead : number of dimensions before the tail; they stay as they are
    tail : sizes of the remaining dimensions, which are static, and cut into groups
    group : elements in a group
    image : height and width of an image whose channels are cut, joined to one dimension; empty for other tensors
    """

    dims: tuple[int, ...]
    lead: int
    tail: tuple[int, ...]
    group: int
    image: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements in the tail."""
        return prod(self.tail)

    @property
    def crosses_rows(self) -> bool:
        """True where groups start and end inside of rows."""
        return len(self.tail) > 1

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the elements in storage order, (lead ..., elements of the tail)."""
        ordered = tensor.permute(self.dims)
        if self.image:
            return ordered.flatten(1, 2)
        return ordered if len(self.tail) == 1 else ordered.flatten(self.lead)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Return the groups of `group` elements, (lead ..., groups, group), then a shorter last one.

        A last group filled with zeros would be shorter code, but Inductor's loops then read wrong elements of it.
        """
        whole = self.numel - self.numel % self.group
        parts: list[Tensor] = []
        if whole:
            parts.append((rows[..., :whole] if whole < self.numel else rows).unflatten(-1, (-1, self.group)))
        if whole < self.numel:
            parts.append(rows[..., whole:].unsqueeze(-2))
        return parts

    def split_numbers(self, numbers: Tensor) -> list[Tensor]:
        """Return numbers of groups, (lead ..., groups), for each part of `split`, with a last dimension of one."""
        whole = self.numel // self.group
        parts = [numbers[..., :whole], numbers[..., whole:]] if whole and self.numel % self.group else [numbers]
        return [part.unsqueeze(-1) for part in parts]

    def join(self, groups: Sequence[Tensor]) -> Tensor:
        """Return the elements of groups in storage order: the inverse of `split`."""
        return joined([each.flatten(-2) for each in groups])

    def restore(self, rows: Tensor) -> Tensor:
        """Return the tensor from its elements in storage order: the inverse of `rows`."""
        if self.image:
            rows = rows.unflatten(1, self.image)
        elif len(self.tail) != 1:
            rows = rows.unflatten(-1, self.tail)
        return torch.permute(rows, [self.dims.index(dim) for dim in range(len(self.dims))])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return parts of each row side by side."""
    return torch.cat(list(parts), -1) if len(parts) > 1 else parts[0]


def storage_order(tensor: Tensor) -> tuple[tuple[int, ...] | None, str]:
    """Return the dimensions of a tensor of a graph in storage order, or None and the reason why they have none."""
    shape, stride = tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride()))
    if 0 in shape:
        return None, "it has no elements"
    if layout_of(shape, stride).compact is None or any(st == 0 and n > 1 for n, st in zip(shape, stride, strict=True)):
        return None, "its elements overlap in memory"
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))), ""


def group_tensor(tensor: Tensor, group: int, *, in_rows: bool = True) -> tuple[Grouping | None, str]:
    """Return the groups of a tensor of a graph, or None and the reason why it has none.

    With `in_rows` groups of at most `group` elements end with rows, else those of `group` elements follow each other.
    """
    if not tensor.shape:
        return None, "it has no dimension to cut into groups"
    dims, reason = storage_order(tensor)
    if dims is None:
        return None, reason
    width = 0
    if in_rows:
        group, width = fit(tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride())), group)
    sizes = [tensor.shape[dim] for dim in dims]
    tail: list[int] = []
    for lead in range(len(dims) - 1, -1, -1):
        size: object = sizes[lead]
        if not isinstance(size, int):
            return None, "a size that changes from run to run stands inside of its groups"
        tail.insert(0, size)
        is_deep = dims == _CHANNELS_LAST and lead == MAX_IMAGE_LEAD
        if width == prod(tail) and is_deep and all(isinstance(each, int) for each in sizes[1:3]):
            return Grouping(dims, lead, tuple(tail), group, tuple(sizes[1:3])), ""
        if width == prod(tail) or (not width and prod(tail) % group == 0 and not is_deep):
            break
    return Grouping(dims, len(dims) - len(tail), tuple(tail), group), ""


class GraphCodec(ABC):
    """A codec as two functions of tensors, which are traced into the graphs. Its payload is a list of tensors.

    Attributes
    ----------
    text : the codec as policy text
    per_byte : bytes of the tensor for each byte of the first payload, for sizes that change from run to run
    crosses_rows : whether groups start and end inside of rows, so that a loop over rows divides to find an element's
    """

    text: str
    per_byte: int
    crosses_rows: bool = False

    @abstractmethod
    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the payload of a tensor."""

    @abstractmethod
    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        """Return the tensor of a payload: dense, its dimensions in the order of the encoded one's strides."""


class RawGraph(GraphCodec):
    """The elements of a tensor in storage order, without gaps. The bytes: csrc/raw.md.

    Parameters
    ----------
    dims : the dimensions in storage order, the one with the largest stride first
    """

    text = "raw"
    per_byte = 1

    def __init__(self, dims: tuple[int, ...]) -> None:
        self._dims = dims

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        return (tensor.permute(self._dims),)

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        return torch.permute(payload[0], [self._dims.index(dim) for dim in range(len(self._dims))])


class Bit1Graph(GraphCodec):
    """Bools as bits, eight in a byte. The bytes: csrc/bit1.md."""

    text = "bit1"
    per_byte = BYTE

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        return (pack_bools(self._grouping.rows(tensor)),)

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        return self._grouping.restore(unpack_bools(payload[0])[..., : self._grouping.numel])


class Int8Graph(GraphCodec):
    """Symmetric 8-bit groups: codes, int8, and scales, bfloat16. The bytes: csrc/int8.md."""

    def __init__(self, codec: Int8, grouping: Grouping, dtype: torch.dtype) -> None:
        self.text = codec_text(codec)
        self.per_byte = dtype.itemsize
        self.crosses_rows = grouping.crosses_rows
        self._keep = codec.signs == "keep"
        self._grouping = grouping
        self._dtype = dtype

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        grouping = self._grouping
        groups = grouping.split(grouping.rows(tensor))
        encoded = [int8.quantize(each.to(torch.float32), None, self._keep) for each in groups]
        return grouping.join([codes for codes, _ in encoded]), joined([scales for _, scales in encoded])

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        grouping, (codes, scales) = self._grouping, payload
        parts = zip(grouping.split(codes), grouping.split_numbers(scales), strict=True)
        decoded = [int8.dequantize(groups, scale, self._dtype, None, self._keep) for groups, scale in parts]
        return grouping.restore(grouping.join(decoded))


class AffineGraph(GraphCodec):
    """Codes from the minimum of a group: their planes, uint8, then scales and minima, bfloat16.

    These are int8(affine), and int6 to int2. The bytes: csrc/affine.md.
    """

    def __init__(self, codec: Int8 | AffineCodec, grouping: Grouping, dtype: torch.dtype) -> None:
        self._bits = 8 if isinstance(codec, Int8) else codec.bits
        self._keep = codec.signs == "keep"
        self._grouping = grouping
        self._dtype = dtype
        self.text = codec_text(codec)
        self.per_byte = dtype.itemsize * BYTE // widths(self._bits)[0]
        self.crosses_rows = grouping.crosses_rows

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        grouping = self._grouping
        groups = grouping.split(grouping.rows(tensor).to(torch.float32))
        encoded = [affine.quantize(each, None, self._bits, self._keep) for each in groups]
        codes, scales, minima = zip(*encoded, strict=True)
        return [*affine.pack_planes(grouping.join(codes), self._bits), joined(scales), joined(minima)]

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        grouping, (*planes, scales, minima) = self._grouping, payload
        codes = grouping.split(affine.unpack_planes(planes, self._bits, grouping.numel))
        numbers = zip(grouping.split_numbers(scales), grouping.split_numbers(minima), strict=True)
        parts = [
            affine.dequantize(groups, scale, minimum, self._bits, self._dtype, None, self._keep)
            for groups, (scale, minimum) in zip(codes, numbers, strict=True)
        ]
        return grouping.restore(grouping.join(parts))


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
