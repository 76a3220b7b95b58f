"""Stores cases for every codec and option that has none yet: ``python -m tests.golden.add``. Never changes one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from actstore.policy.options import codec_text
from tests.codecs.contract import KEY, columns_of, storage_bytes
from tests.oracles import find
from tests.oracles.samples import EVERY_DTYPE, elements

SHAPE = (5, 60)


def main() -> None:
    for codec in find.variants():
        path = Path(__file__).parent / f"{codec.name}.json"
        cases = json.loads(path.read_text()) if path.exists() else []
        known = {(case["codec"], case["dtype"]) for case in cases}
        for dtype in EVERY_DTYPE:
            if codec.accepts(getattr(torch, dtype)) and (codec_text(codec), dtype) not in known:
                cases += [case(codec, dtype, name) for name in ("normal", "special")]
        lines = ",\n".join(json.dumps(entry) for entry in cases)
        path.write_text(f"[\n{lines}\n]\n")


def case(codec, dtype, name):
    tensor = elements(name, dtype, int(np.prod(SHAPE))).view(SHAPE)
    data, columns = storage_bytes(tensor), columns_of(tensor)
    payload = find.encode(codec, data, dtype, KEY, columns)
    back = find.decode(codec, payload, tensor.numel(), dtype, KEY, columns)
    return {
        "codec": codec_text(codec),
        "name": name,
        "dtype": dtype,
        "shape": list(SHAPE),
        "key": KEY,
        "elements": data.hex(),
        "payload": payload.hex(),
        "decoded": back.hex(),
    }


if __name__ == "__main__":
    main()
