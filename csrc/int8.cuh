#pragma once
// Scales and codes of symmetric 8-bit blocks. The numbers: int8.md.
#include "groups.cuh"

constexpr u32 FLUSH = 0x08800000u;     // 2^-110
constexpr u32 LEAST = 0x0500u;         // 2^-117 as bfloat16: the scale of a group below FLUSH where signs are kept
constexpr u32 ZERO = 0x4b400000u;      // MAGIC: the sum that has code 0
constexpr u32 UNSIGNED = 0x4b000000u;  // 2^23: the low byte of such a float is an integer to add
constexpr int NOT_FINITE = 0x80;

template <bool KEEP>
struct Int8Scale {
    u32 stored;  // bfloat16 bits
    float reciprocal;
    // `top`: the largest finite magnitude of the group, as bits
    __device__ explicit Int8Scale(u32 top) : stored(0), reciprocal(0.0f) {
        if (KEEP && top) stored = LEAST;
        if (top < FLUSH) return;
        stored = bf16_up(__fdiv_rn(__uint_as_float(top), 127.0f));
        reciprocal = __frcp_rn(__uint_as_float(stored << 16));
    }
};

// The code of a finite value, `steps` rounded, in the low byte; where signs are kept, 1 or -1 instead of a 0 that would
// lose the sign.
template <bool KEEP>
__device__ inline u32 int8_nearest(float value, float steps) {
    const u32 sum = __float_as_uint(__fadd_rn(steps, MAGIC)), word = __float_as_uint(value);
    return KEEP && sum == ZERO && word & ~SIGN ? (word & SIGN ? 0xffu : 1u) : sum;
}

// Byte `i` of four codes as float32: code + 128 is the low byte of 2^23 + code + 128, since conversions from integers
// run at a quarter of this rate.
__device__ inline float int8_code(u32 codes, int i) {
    const u32 biased = __byte_perm(codes ^ 0x80808080u, UNSIGNED, 0x7650 | i);
    return __fsub_rn(__uint_as_float(biased), 8388736.0f);
}

// A bit for each of four codes that is that of an element that was not finite. Most words have none.
__device__ inline u32 int8_missing(u32 codes) {
    const u32 biased = codes ^ 0x80808080u;
    u32 missing = 0;
    if ((biased - 0x01010101u) & ~biased & 0x80808080u) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) missing |= u32((codes >> (i * 8) & 0xff) == NOT_FINITE) << i;
    }
    return missing;
}
