"""csrc/raw.cu itself, on the CPU."""

import pytest

from actstore.kernels.raw_cuda import blocks
from tests.emulator.emulator import Buffer, Emulator, Launch

NBYTES = (1, 3, 4, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 16383, 16384, 16385, 40001)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator("raw", ["raw_encode", "raw_decode"], tmp_path_factory.mktemp("emulator"))


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8, 12])
def test_copies(emulator, offset):
    launches, expected = [], []
    for nbytes in NBYTES:
        data = bytes(i * 7 % 251 for i in range(nbytes))
        empty = b"\xa5" * nbytes
        launches.append(Launch("raw_encode", blocks(nbytes), (Buffer(data, offset), Buffer(empty), nbytes)))
        launches.append(Launch("raw_decode", blocks(nbytes), (Buffer(data), Buffer(empty, offset), nbytes)))
        expected += [[data, data]] * 2
    assert emulator.run(launches) == expected
