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
from actstore.policy import parse_decision
from tests.codecs.contract import KEY, aligned, implementations, storage_bytes, tensor_of
from tests.oracles import find

FILES = sorted(Path(__file__).parent.glob("*.json"))
CASES = [
    pytest.param(case, id=f"{case['codec']}-{case['name']}-{case['dtype']}")
    for path in FILES
    for case in json.loads(path.read_text())
]


def test_every_codec_and_option_has_stored_bytes():
    assert {path.stem for path in FILES} == set(names())
    stored = {parse_decision(case.values[0]["codec"]).codec for case in CASES}
    assert set(find.variants()) <= stored


@pytest.mark.parametrize("case", CASES)
def test_stored_bytes(case):
    codec = parse_decision(case["codec"]).codec
    elements, payload, decoded = (bytes.fromhex(case[key]) for key in ("elements", "payload", "decoded"))
    tensor = tensor_of(elements, getattr(torch, case["dtype"])).view(case["shape"])
    assert case["key"] == KEY
    for way in implementations(codec, tensor.dtype):
        _, out = aligned(codec.size(Spec.of(tensor)).nbytes)
        if codec.reproducible:
            way.encode(tensor, out)
            assert bytes(out[: len(payload)].tolist()) == payload
        else:
            out[: len(payload)] = tensor_of(payload, torch.uint8)
        back = torch.empty_like(tensor)
        way.decode(out[: len(payload)], back)
        assert storage_bytes(back) == decoded
