"""Bytes that were stored once must decode to the same values, and the same values encode to them, for ever.

A file holds cases: codec, its options, dtype, and the bytes of the elements, of the payload and of what came back, in
hexadecimal. Cases are added, never changed.
"""

import json
from pathlib import Path

import pytest
import torch

from actstore.codecs import Exact, get, names
from actstore.spec import Spec
from tests.codecs.contract import aligned, implementations, storage_bytes, tensor_of

FILES = sorted(Path(__file__).parent.glob("*.json"))
CASES = [
    pytest.param(path.stem, case, id=f"{path.stem}-{case['name']}-{case['dtype']}")
    for path in FILES
    for case in json.loads(path.read_text())
]


def test_every_codec_has_stored_bytes():
    assert {path.stem for path in FILES} == set(names())


@pytest.mark.parametrize(("name", "case"), CASES)
def test_stored_bytes(name, case):
    codec = get(name)(**case["options"])
    elements, payload, decoded = (bytes.fromhex(case[key]) for key in ("elements", "payload", "decoded"))
    tensor = tensor_of(elements, getattr(torch, case["dtype"]))
    assert codec.size(Spec.of(tensor)) == Exact(len(payload))
    for _, encode, decode in implementations(codec, tensor.dtype):
        _, out = aligned(len(payload))
        encode(tensor, out)
        assert bytes(out.tolist()) == payload
        back = torch.empty_like(tensor)
        decode(out, back)
        assert storage_bytes(back) == decoded
