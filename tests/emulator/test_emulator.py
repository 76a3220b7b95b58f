"""The emulator itself: what it computes, and that it catches what a kernel must not do."""

import struct

import pytest

from actstore.base import source
from tests.emulator.emulator import Buffer, Emulator, Launch, compiler

KERNELS = """
#include "common.cuh"
extern "C" __global__ void block_sum(const u32* in, u32* out, i64 n) {
    __shared__ u32 sums[32];
    const i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 value = at < n ? in[at] : 0;
    for (int flip = 16; flip; flip >>= 1) value += __shfl_xor_sync(ALL_LANES, value, flip);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        value = 0;
        for (u32 warp = 0; warp < blockDim.x / 32; ++warp) value += sums[warp];
        out[blockIdx.x] = value;
    }
}
extern "C" __global__ void warp_words(u32* out) {
    const u32 lane = threadIdx.x % 32, half = lane < 16 ? 0xffffu : 0xffff0000u;
    u32* mine = out + threadIdx.x * 6;
    mine[0] = __ballot_sync(ALL_LANES, lane % 3 == 0);
    mine[1] = __shfl_up_sync(ALL_LANES, lane, 2);
    mine[2] = __shfl_down_sync(ALL_LANES, lane, 3);
    if (lane < 16) mine[3] = __shfl_sync(half, threadIdx.x, 5);
    if (lane >= 16) mine[3] = __shfl_sync(half, threadIdx.x, 21);
    mine[4] = __all_sync(ALL_LANES, lane < 32) + 2 * __any_sync(ALL_LANES, lane == 40);
    mine[5] = __byte_perm(0x44332211u, 0x88776655u, 0x6042);
}
extern "C" __global__ void overrun(u8* out, i64 n) { if (threadIdx.x <= n) out[threadIdx.x] = 1; }
extern "C" __global__ void misaligned(const uint4* in, u32* out) { out[0] = in->x; }
extern "C" __global__ void left(u32* out) {
    if (threadIdx.x == 3) return;
    out[0] = __shfl_xor_sync(ALL_LANES, 1u, 1);
}
extern "C" __global__ void diverged(u32* out) {
    out[0] = threadIdx.x < 7 ? __shfl_xor_sync(ALL_LANES, 1u, 1) : __ballot_sync(ALL_LANES, 1);
}
extern "C" __global__ void outside(u32* out) { if (threadIdx.x < 4) out[0] = __shfl_sync(0xfu, 1u, 9); }
extern "C" __global__ void stuck(u32* out) {
    if (threadIdx.x < 32) out[0] = __ballot_sync(threadIdx.x == 0 ? 1u : ~1u, 1);
    if (threadIdx.x == 0) __ballot_sync(3u, 1);
    __syncthreads();
}
"""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if compiler() is None:
        pytest.skip("needs g++ to run the CUDA sources on the CPU")
    folder = tmp_path_factory.mktemp("emulator")
    (folder / "probe.cu").write_text(KERNELS)
    (folder / "common.cuh").write_bytes((source.folder() / "common.cuh").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "folder", lambda: folder)
        probe = Emulator("probe")
    yield probe
    probe.close()


def test_shared_memory_barriers_and_shuffles(emulator):
    numbers = [i * i for i in range(500)]
    out = emulator.run([Launch("block_sum", 3, (Buffer(struct.pack("<500I", *numbers)), Buffer(bytes(12)), 500))])
    assert struct.unpack("<3I", out[0][1]) == tuple(sum(numbers[i : i + 256]) for i in (0, 256, 512))


def test_warp_operations(emulator):
    (((out),),) = emulator.run([Launch("warp_words", 1, (Buffer(bytes(64 * 24)),), threads=64)])
    for thread, words in enumerate(struct.iter_unpack("<6I", out)):
        lane = thread % 32
        base = thread - lane
        assert words == (
            sum(1 << i for i in range(0, 32, 3)),
            lane - 2 if lane >= 2 else lane,
            lane + 3 if lane <= 28 else lane,
            base + (5 if lane < 16 else 21),
            1,
            0x77115533,
        )


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (Launch("overrun", 1, (Buffer(bytes(9)), 9)), "heap-buffer-overflow"),
        (Launch("misaligned", 1, (Buffer(bytes(16), 4), Buffer(bytes(4)))), "misaligned address"),
        (Launch("left", 1, (Buffer(bytes(4)),)), "a lane that has left"),
        (Launch("diverged", 1, (Buffer(bytes(4)),)), "different warp operations"),
        (Launch("outside", 1, (Buffer(bytes(4)),)), "a lane outside its mask"),
        (Launch("stuck", 1, (Buffer(bytes(4)),)), "different warp operations|waits for ever"),
    ],
    ids=lambda value: value.kernel if isinstance(value, Launch) else "",
)
def test_catches(emulator, launch, words):
    with pytest.raises(AssertionError, match=words):
        emulator.run([launch])
