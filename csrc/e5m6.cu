// e5m6: 12-bit floats. Format: e5m6.md.
#include "vectors.cuh"

constexpr int RUN = 16;                // elements of a thread
constexpr u32 EXPONENT = 0x7f800000u;  // of a float32
constexpr u32 LEAST = 0x38800000u;     // 2^-14, the least normal e5m6
constexpr u32 OVER = 0x47800000u;      // 2^16: the code of Inf follows that of 65024
constexpr u32 CODE_NAN = 0x7e0, CODE_INF = 0x7c0, CODE_SIGN = 0x800;

// A float by its bits, to a code and back.
template <class T>
struct Coded {
    template <bool KEEP>
    __device__ static u32 code(typename T::bits element) {
        const u32 bits = __float_as_uint(T::widen(element)), magnitude = min(bits & ~SIGN, OVER);
        const u32 power = max(magnitude & EXPONENT, LEAST), base = power + (17u << 23);
        const u32 sum = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(base)));
        u32 rounded = sum - base + ((power - LEAST) >> 17);
        if (KEEP) rounded = max(rounded, min(magnitude, 1u));
        return (bits & ~SIGN) > INF ? CODE_NAN : rounded | (bits >> 20 & CODE_SIGN);
    }
    __device__ static typename T::bits value(u32 code) {
        const u32 magnitude = code & ~CODE_SIGN, sign = (code & CODE_SIGN) << 20;
        if (magnitude > CODE_INF) return T::nan;
        const u32 bits = magnitude == CODE_INF ? sign | INF : __float_as_uint(F16::widen(u16(code << 4)));
        return typename T::bits(bits >> (32 - 8 * sizeof(typename T::bits)));  // exact in bfloat16, too
    }
};

template <>
struct Coded<F16> {
    template <bool KEEP>
    __device__ static u32 code(u16 element) {
        const u32 magnitude = element & 0x7fff;
        u32 rounded = (magnitude + 7 + (magnitude >> 4 & 1)) >> 4;
        if (KEEP) rounded = max(rounded, min(magnitude, 1u));
        return magnitude > 0x7c00 ? CODE_NAN : rounded | (element >> 4 & CODE_SIGN);
    }
    __device__ static u16 value(u32 code) { return (code & ~CODE_SIGN) > CODE_INF ? F16::nan : u16(code << 4); }
};

struct Part {
    i64 numel, at, low;
    bool full;

    // `count`, where it is not null, holds the number of elements, at most `most`.
    __device__ Part(i64 most, const i64* count) : numel(count ? *count : most) {
        at = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * RUN;
        low = round_up16(numel) + at / 2;
        full = at + RUN <= numel;
    }
};

template <class T, bool KEEP>
__device__ void e5m6_encode(const typename T::bits* __restrict__ src, u8* __restrict__ payload, const Part& part) {
    constexpr int PER_WORD = 4 / sizeof(typename T::bits);
    if (part.at >= part.numel) return;
    u32 high[RUN / 4] = {}, low[RUN / 8] = {};
    const bool whole = part.full && aligned16(src);
    u32 words[RUN / PER_WORD] = {};
    if (whole) {
        const uint4* vectors = reinterpret_cast<const uint4*>(src + part.at);
#pragma unroll
        for (int v = 0; v < RUN / PER_WORD / 4; ++v) {
            const uint4 loaded = vectors[v];
            words[4 * v] = loaded.x, words[4 * v + 1] = loaded.y;
            words[4 * v + 2] = loaded.z, words[4 * v + 3] = loaded.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (part.at + i < part.numel) words[i / PER_WORD] |= u32(src[part.at + i]) << (i % PER_WORD * 16);
    }
#pragma unroll
    for (int i = 0; i < RUN; ++i) {  // the zeros after the last element have code 0
        const u32 code = Coded<T>::template code<KEEP>(typename T::bits(words[i / PER_WORD] >> (i % PER_WORD * 16)));
        high[i / 4] |= code >> 4 << (i % 4 * 8);
        low[i / 8] |= (code & 15) << (i % 8 * 4);
    }
    *reinterpret_cast<uint4*>(payload + part.at) = make_uint4(high[0], high[1], high[2], high[3]);
    if (part.full) {
        *reinterpret_cast<uint2*>(payload + part.low) = make_uint2(low[0], low[1]);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i += 2)
            if (part.at + i < part.numel) payload[part.low + i / 2] = u8(low[i / 8] >> (i % 8 * 4));
    }
}

template <class T>
__device__ void e5m6_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, i64 numel) {
    with_vectors<T, RUN>(numel, numel, 0, dst, [&](auto vectors) {
        using V = decltype(vectors);
        VectorCodes<8, V::NUMEL> high[V::COUNT];
        VectorCodes<4, V::NUMEL> low[V::COUNT];
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k)
            high[k].load(payload, vectors, k), low[k].load(payload + round_up16(numel), vectors, k);
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) {
            u32 words[4] = {};
#pragma unroll
            for (int i = 0; i < V::NUMEL; ++i)
                words[i * 4 / V::NUMEL] |= u32(Coded<T>::value(high[k].get(i) << 4 | low[k].get(i))) << V::shift(i);
            vectors.store(dst, k, words);
        }
    });
}

#define E5M6_ENCODE(name, T, KEEP)                                                                                \
    extern "C" __global__ void e5m6_encode_##name(const T::bits* src, u8* payload, i64 numel, const i64* count) { \
        e5m6_encode<T, KEEP>(src, payload, Part(numel, count));                                                   \
    }
#define E5M6_KERNELS(name, T)                                                                                     \
    E5M6_ENCODE(name, T, false)                                                                                   \
    E5M6_ENCODE(name##_keep, T, true)                                                                             \
    extern "C" __global__ void e5m6_decode_##name(const u8* payload, T::bits* dst, i64 numel, const i64* count) { \
        e5m6_decode<T>(payload, dst, count ? *count : numel);                                                     \
    }

E5M6_KERNELS(f32, F32)
E5M6_KERNELS(f16, F16)
E5M6_KERNELS(bf16, BF16)
