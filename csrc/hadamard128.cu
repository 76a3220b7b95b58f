// hadamard128: random signs and the Walsh-Hadamard transform of 128 elements. Format: hadamard128.md.
#include "groups.cuh"
#include "philox.cuh"

constexpr int LOG2_LANES = 2;        // 4 lanes own the 128 elements: 16 of the first half and 16 of the second each
constexpr u32 TINY = 0x0f800000u;    // 2^-96
constexpr u32 FACTOR = 0x3db504f3u;  // 2^-3.5

// The random signs of a thread's elements, those of each run as 16 bits.
struct Signs {
    u32 runs[RUNS];
    __device__ Signs(u64 key, int lane) {
        const Words words = philox(0, 1, key);
        const int shift = lane % 2 * RUN;
        runs[0] = (lane < 2 ? words.a : words.b) >> shift;
        runs[1] = (lane < 2 ? words.c : words.d) >> shift;
    }
    __device__ float flip(float value, int index) const {
        return __uint_as_float(__float_as_uint(value) ^ (runs[index / RUN] >> (index % RUN) & 1) << 31);
    }
};

__device__ inline void butterfly(float& low, float& high) {
    const float sum = __fadd_rn(low, high);
    high = __fsub_rn(low, high);
    low = sum;
}

// Elements 64, 32, ... 1 apart meet, in this order.
__device__ inline void transform(float* values, int lane) {
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
        const bool tiny = (__float_as_uint(values[i]) & ~SIGN) < TINY;
        values[i] = __fmul_rn(tiny ? 0.0f : values[i], __uint_as_float(FACTOR));
    }
#pragma unroll
    for (int i = 0; i < RUN; ++i) butterfly(values[i], values[RUN + i]);
#pragma unroll
    for (int apart = 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const float other = __shfl_xor_sync(ALL_LANES, values[i], apart);
            values[i] = lane & apart ? __fsub_rn(other, values[i]) : __fadd_rn(values[i], other);
        }
    }
#pragma unroll
    for (int apart = RUN / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int i = 0; i < OWNED; ++i)
            if (!(i & apart)) butterfly(values[i], values[i + apart]);
    }
}

template <class T>
__device__ void forward(const typename T::bits* __restrict__ src, u32* __restrict__ scratch, i64 numel, u64 key) {
    Part part(numel, nullptr, LOG2_LANES);
    float values[OWNED];
    load_part<T>(src, part, values);
    const Signs signs(key, part.lane);
#pragma unroll
    for (int i = 0; i < OWNED; ++i) values[i] = signs.flip(values[i], i);
    transform(values, part.lane);
    const u32 missing = team_max(top_magnitude(values), part.shift) >= INF ? 0xffff : 0;
    part.numel = part.groups() * (OWNED << LOG2_LANES);  // the scratch has whole groups
    part.full = part.first < part.numel;
#pragma unroll
    for (int u = 0; u < RUNS; ++u) store_run<F32>(scratch, part, u, values + u * RUN, missing);
}

template <class T>
__device__ void inverse(const u32* __restrict__ scratch, typename T::bits* __restrict__ dst, i64 numel, u64 key) {
    const Part part(numel, nullptr, LOG2_LANES);
    Part whole = part;
    whole.numel = part.groups() * (OWNED << LOG2_LANES);
    whole.full = part.first < whole.numel;
    float values[OWNED];
    load_part<F32>(scratch, whole, values);
    transform(values, part.lane);
    const u32 missing = team_max(top_magnitude(values), part.shift) >= INF ? 0xffff : 0;
    const Signs signs(key, part.lane);
#pragma unroll
    for (int i = 0; i < OWNED; ++i) values[i] = clamp(signs.flip(values[i], i), T::largest());
#pragma unroll
    for (int u = 0; u < RUNS; ++u) store_run<T>(dst, part, u, values + u * RUN, missing);
}

#define HADAMARD128_KERNELS(name, T)                                                                              \
    extern "C" __global__ void hadamard128_forward_##name(const T::bits* src, u32* scratch, i64 numel, u64 key) { \
        forward<T>(src, scratch, numel, key);                                                                     \
    }                                                                                                             \
    extern "C" __global__ void hadamard128_inverse_##name(const u32* scratch, T::bits* dst, i64 numel, u64 key) { \
        inverse<T>(scratch, dst, numel, key);                                                                     \
    }

HADAMARD128_KERNELS(f32, F32)
HADAMARD128_KERNELS(f16, F16)
HADAMARD128_KERNELS(bf16, BF16)
