"""Stores cases for every codec and option that has none yet: ``python -m tests.golden.add``. Never changes one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from actstore.policy.options import codec_text
from tests.codecs.contract import KEY, sizes_of, storage_bytes
from tests.oracles import find
from tests.oracles.samples import EVERY_DTYPE, elements

SHAPE = (5, 60)


def main() -> None:
    for codec in find.variants():
        path = Path(__file__).parent / f"{codec.name}.json"
        cases = json.loads(path.read_text()) if path.exists() else []
        known = {(case["codec"], case["dtype"], case["name"] == "rows") for case in cases}
        for dtype in EVERY_DTYPE:
            if not codec.accepts(getattr(torch, dtype)):
                continue
            if (codec_text(codec), dtype, False) not in known:
                cases += [case(codec, dtype, name) for name in ("normal", "special")]
            if (codec_text(codec), dtype, True) not in known and ends_groups_with_rows(codec, dtype):
                cases.append(case(codec, dtype, "rows"))
        lines = ",\n".join(json.dumps(entry) for entry in cases)
        path.write_text(f"[\n{lines}\n]\n")


def ends_groups_with_rows(codec, dtype):
    data, sizes = storage_bytes(elements("normal", dtype, int(np.prod(SHAPE)))), SHAPE
    rows, flat = (find.encode(codec, data, dtype, KEY, shape) for shape in (sizes, ()))
    return rows != flat and "axis=token" not in codec_text(codec)


def case(codec, dtype, name):
    """A case of elements in the shape of rows, or in a row."""
    tensor = elements("special" if name == "special" else "normal", dtype, int(np.prod(SHAPE)))
    if name == "rows" or "axis=token" in codec_text(codec):
        tensor = tensor.view(SHAPE)
    data, sizes = storage_bytes(tensor), sizes_of(tensor)
    payload = find.encode(codec, data, dtype, KEY, sizes)
    back = find.decode(codec, payload, tensor.numel(), dtype, KEY, sizes)
    return {
        "codec": codec_text(codec),
        "name": name,
        "dtype": dtype,
        "shape": list(tensor.shape),
        "key": KEY,
        "elements": data.hex(),
        "payload": payload.hex(),
        "decoded": back.hex(),
    }


if __name__ == "__main__":
    main()
