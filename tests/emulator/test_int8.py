"""csrc/int8.cu itself, on the CPU, against the oracle."""

import pytest

from actstore.codecs.int8 import GROUPS, Int8
from actstore.kernels.int8_cuda import blocks, log2_lanes
from tests.emulator.emulator import Buffer, Emulator, Launch
from tests.oracles import int8 as oracle
from tests.oracles.samples import DTYPES, ITEMSIZE, SUFFIX, every_code_and_scale, random_bits, samples

NUMELS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 100, 127, 128, 129, 255, 256, 511, 513, 1000, 1024, 1025, 4100)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    names = [f"int8_{verb}_{suffix}" for verb in ("encode", "decode") for suffix in SUFFIX.values()]
    return Emulator("int8", names, tmp_path_factory.mktemp("emulator"))


def check(emulator, dtype, group, cases, misaligned=0, flush_denormals=True):
    """Encode and decode each case; the bytes must be the oracle's."""
    shift, suffix, itemsize = log2_lanes(group), SUFFIX[dtype], ITEMSIZE[dtype]
    numels = [len(data) // itemsize for data in cases]
    payloads = [oracle.encode(data, dtype, group) for data in cases]
    offset = misaligned * itemsize
    encodes = [
        Launch(
            f"int8_encode_{suffix}",
            blocks(numel, group),
            (Buffer(data, offset), Buffer(b"\xa5" * Int8(group)._nbytes(numel, itemsize)), numel, shift),
            flush_denormals=flush_denormals,
        )
        for data, numel in zip(cases, numels, strict=True)
    ]
    decodes = [
        Launch(
            f"int8_decode_{suffix}",
            blocks(numel, group),
            (Buffer(payload), Buffer(b"\xa5" * numel * itemsize, offset), numel, shift),
            flush_denormals=flush_denormals,
        )
        for payload, numel in zip(payloads, numels, strict=True)
    ]
    results = emulator.run(encodes + decodes)
    for numel, data, payload, (_, found) in zip(numels, cases, payloads, results[: len(cases)], strict=True):
        assert found == payload, (dtype, group, numel, data.hex() if numel < 40 else "")
    for numel, payload, (_, found) in zip(numels, payloads, results[len(cases) :], strict=True):
        assert found == oracle.decode(payload, numel, dtype, group), (dtype, group, numel)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_and_tails(emulator, dtype, group):
    check(emulator, dtype, group, [random_bits(numel, dtype, seed=numel) for numel in NUMELS])


@pytest.mark.parametrize("flush_denormals", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(emulator, dtype, flush_denormals):
    check(emulator, dtype, 128, samples(dtype).values(), flush_denormals=flush_denormals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("misaligned", [1, 3])
def test_elements_at_any_address(emulator, dtype, misaligned):
    check(emulator, dtype, 128, [random_bits(numel, dtype, seed=numel) for numel in (5, 128, 300)], misaligned)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_of_16_bits(emulator, dtype):
    check(emulator, dtype, 32, [b"".join(i.to_bytes(2, "little") for i in range(1 << 16))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_code_with_any_normal_scale(emulator, dtype):
    numel, payload = 256 * 32, every_code_and_scale()
    args = (Buffer(payload), Buffer(bytes(numel * ITEMSIZE[dtype])), numel, 0)
    (((_, found)),) = emulator.run([Launch(f"int8_decode_{SUFFIX[dtype]}", blocks(numel, 32), args)])
    assert found == oracle.decode(payload, numel, dtype, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_blocks(emulator, dtype):
    check(emulator, dtype, 128, [random_bits(3 * 8192 + 77, dtype, seed=1)])
