"""Bytes that were stored once must decode to the same values, and the same values encode to them, for ever.

A file holds cases: codec, its options, dtype, key, columns, and the bytes of the elements, of the payload and of what
came back, in hexadecimal. What a codec that is not `reproducible` encodes may change with the library that it is made
of; what it encoded must decode. Cases are added (``python -m tests.golden.add``), never changed.
"""

import json
from pathlib import Path

import pytest
import torch

from actstore.base.spec import Spec
from actstore.codecs import names
from actstore.codecs.dispatch import KernelCodec
from actstore.policy import parse_decision
from tests.codecs.contract import KEY, aligned, compiled, first_of_each, implementations, storage_bytes, tensor_of
from tests.oracles import find
from tests.oracles.samples import DTYPES

FILES = sorted(Path(__file__).parent.glob("*.json"))
CASES = [
    pytest.param(case, id=f"{case['codec']}-{case['name']}-{case['dtype']}")
    for path in FILES
    for case in json.loads(path.read_text())
]
COMPILED = compiled(find.variants())
FIRST = first_of_each(find.variants())


def kernel_is_slow(case):
    """Whether a kernel would be compiled for this case alone: that takes a hundred times as long as the rest."""
    codec = parse_decision(case["codec"]).codec
    if not isinstance(codec, KernelCodec) or case["dtype"] not in DTYPES:
        return False
    return (codec, case["dtype"]) not in COMPILED or (case["name"] == "rows" and codec not in FIRST)


def test_every_codec_and_option_has_stored_bytes():
    assert {path.stem for path in FILES} == set(names())
    stored = {parse_decision(case.values[0]["codec"]).codec for case in CASES}
    assert set(find.variants()) <= stored


@pytest.mark.parametrize("case", CASES)
def test_stored_bytes(case):
    check(case, lambda way: way.name != "codec" or not kernel_is_slow(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if kernel_is_slow(case.values[0])])
def test_stored_bytes_of_other_dtypes(case):
    check(case, lambda way: way.name == "codec")


def shape_of(case):
    """The shape of a case; of those stored before groups ended with rows, that of one row."""
    return case["shape"] if case["name"] == "rows" or "axis=token" in case["codec"] else [-1]


def check(case, chosen):
    """Decode and encode by the implementations that are chosen."""
    codec = parse_decision(case["codec"]).codec
    elements, payload, decoded = (bytes.fromhex(case[key]) for key in ("elements", "payload", "decoded"))
    tensor = tensor_of(elements, getattr(torch, case["dtype"])).view(shape_of(case))
    assert case["key"] == KEY
    for way in filter(chosen, implementations(codec, tensor.dtype)):
        _, out = aligned(codec.size(Spec.of(tensor)).nbytes)
        if codec.reproducible:
            way.encode(tensor, out)
            assert bytes(out[: len(payload)].tolist()) == payload
        else:
            out[: len(payload)] = tensor_of(payload, torch.uint8)
        back = torch.empty_like(tensor)
        way.decode(out[: len(payload)], back)
        assert storage_bytes(back) == decoded
