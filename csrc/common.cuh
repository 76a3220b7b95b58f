#pragma once
// Shared by all kernels. It includes no header: NVRTC has none of its own, and the emulator of the tests defines the
// same intrinsics. CuPy compiles with -ftz=true, and any compiler may contract a product with a sum. Where a bit
// depends on that, kernels use intrinsics with a defined rounding, and keep every float32 normal.

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

[[maybe_unused]] constexpr u32 SIGN = 0x80000000u;
[[maybe_unused]] constexpr u32 INF = 0x7f800000u;
[[maybe_unused]] constexpr u32 ALL_LANES = 0xffffffffu;

__device__ inline bool aligned16(const void* pointer) { return (reinterpret_cast<u64>(pointer) & 15) == 0; }
__device__ inline i64 round_up16(i64 nbytes) { return (nbytes + 15) & ~i64(15); }

__device__ inline float clamp(float value, float largest) { return fminf(fmaxf(value, -largest), largest); }

// The bytes 0 of four words as one word.
__device__ inline u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// A float type by its bits: `widen` to float32, `narrow` a float32 of at most `largest` to the nearest, ties to even;
// `pack` the next ones into a word.
struct F32 {
    using bits = u32;
    static constexpr bits nan = 0x7fc00000u;
    __device__ static float largest() { return __uint_as_float(0x7f7fffffu); }
    __device__ static float widen(bits value) { return __uint_as_float(value); }
    __device__ static bits narrow(float value) { return __float_as_uint(value); }
    __device__ static u32 pack(const float* values) { return __float_as_uint(*values); }
};

struct BF16 {
    using bits = u16;
    static constexpr bits nan = 0x7fc0;
    __device__ static float largest() { return __uint_as_float(0x7f7f0000u); }
    __device__ static float widen(bits value) { return __uint_as_float(u32(value) << 16); }
    __device__ static bits narrow(float value) {
        const u32 word = __float_as_uint(value);
        return bits((word + 0x7fffu + ((word >> 16) & 1)) >> 16);
    }
    __device__ static u32 pack(const float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(values[1]), "f"(values[0]));
        return both;
#else
        return narrow(values[0]) | u32(narrow(values[1])) << 16;
#endif
    }
};

struct F16 {
    using bits = u16;
    static constexpr bits nan = 0x7e00;
    __device__ static float largest() { return 65504.0f; }
#ifdef __CUDA_ARCH__
    // One instruction each; without .ftz they keep the denormals of float16.
    __device__ static float widen(bits value) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
        return wide;
    }
    __device__ static bits narrow(float value) {
        bits half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
        return half;
    }
#else
    static float widen(bits value) {
        const u32 sign = u32(value & 0x8000) << 16, moved = u32(value & 0x7fff) << 13;
        u32 magnitude = moved + 0x38000000u;
        if (moved >= 0x0f800000u) magnitude += 0x38000000u;  // Inf, NaN
        if (moved < 0x00800000u) magnitude = __float_as_uint(__uint_as_float(moved + 0x38800000u) - 0x1p-14f);
        return __uint_as_float(sign | magnitude);
    }
    static bits narrow(float value) {
        const u32 word = __float_as_uint(value), magnitude = word & ~SIGN;
        const u32 denormal = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
        const u32 normal = (magnitude - 0x37fff001u + ((magnitude >> 13) & 1)) >> 13;
        return bits((word & SIGN) >> 16 | (magnitude < 0x38800000u ? denormal : normal));
    }
#endif
    __device__ static u32 pack(const float* values) { return narrow(values[0]) | u32(narrow(values[1])) << 16; }
};
