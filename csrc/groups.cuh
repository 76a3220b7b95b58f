#pragma once
// Codecs of groups: each thread owns 32 elements of one group of 32 << shift, so that a group is a team of 1 << shift
// neighboring lanes. The elements come in runs of 16: run `u` of lane `l` is run `u << shift | l` of the group, so
// that a team reads and writes consecutive sectors. All threads stay to the end: the shuffles name all lanes.
#include "rotation.cuh"

constexpr int OWNED = 32;
constexpr int RUN = 16;
constexpr int RUNS = OWNED / RUN;
[[maybe_unused]] constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: the sum holds the nearest integer in its low bits

struct Part {
    i64 given, numel, group, first;  // rotated elements are whole rotations of those that are given
    u64 key;
    int lane, shift;
    bool full;  // the whole group exists

    // `count`, where it is not null, holds the number of elements, at most `most`.
    __device__ Part(i64 most, const i64* count, i64 log2_lanes, u64 key)
        : given(count ? *count : most),
          numel((given + ROTATION_NUMEL - 1) / ROTATION_NUMEL * ROTATION_NUMEL),
          key(key),
          shift(int(log2_lanes)) {
        const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x;
        group = thread >> shift;
        lane = int(thread) & ((1 << shift) - 1);
        const i64 size = i64(OWNED) << shift;
        first = group * size;
        full = first + size <= numel;
    }
    __device__ i64 run(int index) const { return first + (i64(index) << shift | lane) * RUN; }
    __device__ i64 groups() const { return (numel + (i64(OWNED) << shift) - 1) / (i64(OWNED) << shift); }
};

// The 32 elements of a thread; 0 after the last element. A source of rotated elements rotates them.
template <class T>
__device__ void load_part(const typename T::bits* __restrict__ src, const Part& part, float* values) {
    constexpr int PER_WORD = 4 / sizeof(typename T::bits);
    constexpr int VECTORS = RUN / 4 / PER_WORD;
    if (part.first + (i64(OWNED) << part.shift) <= part.given && aligned16(src)) {
#pragma unroll
        for (int u = 0; u < RUNS; ++u) {
            const uint4* vectors = reinterpret_cast<const uint4*>(src + part.run(u));
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                const uint4 loaded = vectors[v];
                const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
                for (int i = 0; i < 4 * PER_WORD; ++i)
                    values[u * RUN + v * 4 * PER_WORD + i] =
                        T::widen(typename T::bits(words[i / PER_WORD] >> (i % PER_WORD * 16)));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const i64 at = part.run(i / RUN) + i % RUN;
            values[i] = at < part.given ? T::widen(src[at]) : 0.0f;
        }
    }
    if (ROTATION_NUMEL > 1) rotate<RUN>(values, part.shift, part.key);
}

// Writes run `u` of a thread: 16 values, finite and at most the largest of T, or NaN where a bit of `missing` is set.
template <class T>
__device__ void store_run(typename T::bits* __restrict__ dst, const Part& part, int u, const float* values,
                          u32 missing) {
    constexpr int PER_WORD = 4 / sizeof(typename T::bits);
    constexpr int VECTORS = RUN / 4 / PER_WORD;
    const i64 at = part.run(u);
    if (part.full && aligned16(dst)) {
        u32 words[RUN / PER_WORD] = {};
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const typename T::bits element = missing >> i & 1 ? T::nan : T::narrow(values[i]);
            words[i / PER_WORD] |= u32(element) << (i % PER_WORD * 16);
        }
        uint4* vectors = reinterpret_cast<uint4*>(dst + at);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            vectors[v] = make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (at + i < part.numel) dst[at + i] = missing >> i & 1 ? T::nan : T::narrow(values[i]);
    }
}

// The codes after the last element must be 0: they are the padding up to the next section.
__device__ inline void store_codes(u8* __restrict__ payload, const Part& part, int u, const u32* words) {
    const i64 at = part.run(u);
    if (part.full) {
        *reinterpret_cast<uint4*>(payload + at) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (at + i < round_up16(part.numel)) payload[at + i] = u8(words[i / 4] >> (i % 4 * 8));
    }
}

__device__ inline u32 team_max(u32 value, int shift) {
    for (int lane = 1; lane < 1 << shift; lane <<= 1) value = max(value, __shfl_xor_sync(ALL_LANES, value, lane));
    return value;
}

// The largest magnitude of a thread's values, as bits: finite < Inf < NaN.
__device__ inline u32 top_magnitude(const float* values) {
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < OWNED; ++i) top = max(top, __float_as_uint(values[i]) & ~SIGN);
    return top;
}

__device__ inline bool is_finite(float value) { return (__float_as_uint(value) & ~SIGN) < INF; }

// A positive finite float32 as bfloat16 bits, rounded up.
__device__ inline u32 bf16_up(float value) { return (__float_as_uint(value) + 0xffffu) >> 16; }
