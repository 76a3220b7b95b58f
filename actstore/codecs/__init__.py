"""Codecs: pure functions from dense tensors to bytes and back."""

from typing import TYPE_CHECKING, Any

from actstore.base.spec import Spec
from actstore.codecs.base import AtMost, Bound, Codec, Exact, Size
from actstore.codecs.checks import check_buffers, check_dtype
from actstore.codecs.registry import CLASSES, get, load, names
from actstore.kernels.base import storage_slice

if TYPE_CHECKING:
    from actstore.codecs.affine import Int2, Int3, Int4, Int5, Int6
    from actstore.codecs.bit1 import Bit1
    from actstore.codecs.blosc import Lz4, Zstd
    from actstore.codecs.bnb8 import Bnb8
    from actstore.codecs.e5m6 import E5m6
    from actstore.codecs.expack import Expack
    from actstore.codecs.fp8 import Fp8
    from actstore.codecs.hadamard128 import Hadamard128
    from actstore.codecs.int8 import Int8
    from actstore.codecs.intpack import Intpack
    from actstore.codecs.nf4 import Nf4
    from actstore.codecs.raw import Raw
    from actstore.codecs.sparse import Nm, Topk, Zmask

__all__ = [
    "AtMost",
    "Bit1",
    "Bnb8",
    "Bound",
    "Codec",
    "E5m6",
    "Exact",
    "Expack",
    "Fp8",
    "Hadamard128",
    "Int2",
    "Int3",
    "Int4",
    "Int5",
    "Int6",
    "Int8",
    "Intpack",
    "Lz4",
    "Nf4",
    "Nm",
    "Raw",
    "Size",
    "Spec",
    "Topk",
    "Zmask",
    "Zstd",
    "check_buffers",
    "check_dtype",
    "get",
    "names",
    "storage_slice",
]


def __getattr__(name: str) -> Any:
    """Import the module of a codec when its class is first used."""
    if name not in CLASSES:
        raise AttributeError(f"module 'actstore.codecs' has no attribute {name!r}")
    found = globals()[name] = load(name)
    return found
