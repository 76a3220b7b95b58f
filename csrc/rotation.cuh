#pragma once
// Random signs and the Walsh-Hadamard transform of 128 elements. The numbers: hadamard128.md.
#include "philox.cuh"

#ifdef ROTATED  // by a source whose kernels encode rotated elements
constexpr int ROTATION_NUMEL = 128;
#else
constexpr int ROTATION_NUMEL = 1;
#endif

constexpr u32 TINY = 0x0f800000u;    // 2^-96
constexpr u32 FACTOR = 0x3db504f3u;  // 2^-3.5

// The product with the factor; 0 of a magnitude below `TINY`.
__device__ inline float scaled(float value) {
#ifdef __CUDA_ARCH__
    float small;  // 2^-30 of it, flushed to zero
    asm("mul.ftz.f32 %0, %1, 0f30800000;" : "=f"(small) : "f"(value));
    return __fmaf_rn(small, __uint_as_float(FACTOR + (30u << 23)), 0.0f);  // the zero takes the sign from a zero
#else
    return __fmul_rn((__float_as_uint(value) & ~SIGN) < TINY ? 0.0f : value, __uint_as_float(FACTOR));
#endif
}

// The random signs from element `at` of 128 on, in the same 32.
__device__ inline u32 signs_from(int at, u64 key) {
    const Words words = philox(0, 1, key);
    const u32 low = at & 32 ? words.b : words.a, high = at & 32 ? words.d : words.c;
    return (at & 64 ? high : low) >> (at & 31);
}

__device__ inline float flip(float value, u32 signs, int i) {
    return __uint_as_float(__float_as_uint(value) ^ (signs << (31 - i) & SIGN));
}

// Numbers meet: the first becomes the sum, the second the difference. Here those of lanes `apart`.
template <int COUNT>
__device__ void meet_lanes(float* values, int lane, int apart) {
    const float sign = lane & apart ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        values[i] = __fmaf_rn(values[i], sign, __shfl_xor_sync(ALL_LANES, values[i], apart));
}

// Here those of a lane, `APART` and less.
template <int COUNT, int APART, int LEAST = 1>
__device__ void meet(float* values) {
#pragma unroll
    for (int apart = APART; apart >= LEAST; apart /= 2) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i & apart) continue;
            const float low = values[i], high = values[i + apart];
            values[i] = __fadd_rn(low, high);
            values[i + apart] = __fsub_rn(low, high);
        }
    }
}

template <int COUNT>
__device__ bool all_finite(const float* values) {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) zero = __fmaf_rn(values[i], 0.0f, zero);
    return zero == 0.0f;
}

// Rotates elements of teams of `1 << shift` lanes, as they are in groups.cuh: two runs of RUN = 16 in a lane.
template <int RUN>
__device__ void rotate(float* values, int shift, u64 key) {
    const int lane = int(threadIdx.x) & 31, team = lane >> shift;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const u32 signs = signs_from(((team << (shift + 1)) + (u << shift) + (lane - (team << shift))) * RUN, key);
#pragma unroll
        for (int i = 0; i < RUN; ++i) values[u * RUN + i] = scaled(flip(values[u * RUN + i], signs, i));
    }
#pragma unroll
    for (int step = 2; step >= 0; --step) {  // RUN << step elements apart
        if (step == shift)
            meet<2 * RUN, RUN, RUN>(values);
        else
            meet_lanes<2 * RUN>(values, lane, 1 << (step < shift ? step : step - 1));
    }
    meet<2 * RUN, RUN / 2>(values);

    u32 bad = u32(!all_finite<RUN>(values)) | u32(!all_finite<RUN>(values + RUN)) << 1;
    if (!__any_sync(ALL_LANES, bad)) return;
    if (shift <= 2) bad = bad ? 3 : 0;
    for (int apart = 1; apart < (shift <= 2 ? 4 : 8); apart *= 2) bad |= __shfl_xor_sync(ALL_LANES, bad, apart);
#pragma unroll
    for (int i = 0; i < 2 * RUN; ++i)
        if (bad >> (i / RUN) & 1) values[i] = __uint_as_float(F32::nan);
}

// Rotates vectors back; whether all 128 results are finite.
template <int NUMEL>
__device__ bool rotate_back(float* values, int lane, u32 signs) {
    constexpr int LANES = 128 / NUMEL;
#pragma unroll
    for (int i = 0; i < NUMEL; ++i) values[i] = scaled(values[i]);
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) meet_lanes<NUMEL>(values, lane, apart);
    meet<NUMEL, NUMEL / 2>(values);
    const u32 bad = __ballot_sync(ALL_LANES, !all_finite<NUMEL>(values)) >> (lane & ~(LANES - 1));
#pragma unroll
    for (int i = 0; i < NUMEL; ++i) values[i] = flip(values[i], signs, i);
    return !(LANES == 32 ? bad : bad & 0xffff);
}
