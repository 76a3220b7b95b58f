// fp8: blocks of 8-bit floats, e4m3, with a bfloat16 scale. Format: fp8.md.
#include "groups.cuh"
#include "vectors.cuh"

constexpr u32 FLUSH = 0x0e800000u;        // 2^-98
constexpr u32 EXPONENT = 0x7f800000u;     // of a float32
constexpr u32 LEAST = 0x3c800000u;        // 2^-6, the least normal e4m3
constexpr u32 LEAST_SCALE = 0x0a000000u;  // 2^-107, of a group below FLUSH where signs are kept
constexpr u32 NOT_FINITE = 0x7f, TOP = 0x7e;

// The codes' distance at a magnitude is 2^-3 of this power of two.
__device__ inline u32 binade(u32 magnitude) { return max(magnitude & EXPONENT, LEAST); }

// The e4m3 code nearest to a float32 of magnitude up to 448.001, in the low byte.
__device__ inline u32 nearest(float value) {
    const u32 bits = __float_as_uint(value), magnitude = bits & ~SIGN, power = binade(magnitude);
    const u32 sum = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(power + (20u << 23))));
    return (sum + ((power - LEAST) >> 20)) | (bits >> 24 & 0x80);
}

// One of the two e4m3 codes next to a float32, by a random byte.
__device__ inline u32 stochastic(float value, u32 byte) {
    const u32 bits = __float_as_uint(value), magnitude = bits & ~SIGN, power = binade(magnitude);
    const u32 base = power + (4u << 23);
    const u32 sum = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(base)));
    const u32 code = ((sum - base + (byte << 8 | 0x80)) >> 16) + ((power - LEAST) >> 20);
    return min(code, TOP) | (bits >> 24 & 0x80);
}

template <class T, bool NOISE, bool KEEP>
__device__ void fp8_encode(const typename T::bits* __restrict__ src, u8* __restrict__ payload, const Part& part,
                           u64 key, u32 below) {
    float values[OWNED];
    load_part<T>(src, part, values);
    u32 top = team_max(top_magnitude(values), part.shift);
    const bool all_finite = !__any_sync(ALL_LANES, top >= INF);  // warp-wide: lanes leave the shuffles together
    if (!all_finite) {
        top = 0;
#pragma unroll
        for (int i = 0; i < OWNED; ++i)
            if (is_finite(values[i])) top = max(top, __float_as_uint(values[i]) & ~SIGN);
        top = team_max(top, part.shift);
    }

    u32 scale = KEEP && top ? LEAST_SCALE : 0;
    float reciprocal = 0.0f;
    if (top >= FLUSH) {
        scale = (__float_as_uint(__fdiv_rn(__uint_as_float(top), 448.0f)) + below) & ~below;
        reciprocal = __frcp_rn(__uint_as_float(scale));
    }
    if (part.lane == 0 && part.first < part.numel)
        reinterpret_cast<u16*>(payload + round_up16(part.numel))[part.group] = u16(scale >> 16);

#pragma unroll
    for (int u = 0; u < RUNS; ++u) {
        u32 words[RUN / 4];
        const Noise noise(NOISE ? u64(part.run(u)) / RUN : 0, key);
#pragma unroll
        for (int word = 0; word < RUN / 4; ++word) {
            u32 codes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float value = values[u * RUN + word * 4 + i], scaled = __fmul_rn(value, reciprocal);
                codes[i] = NOISE ? stochastic(scaled, noise.words[word] >> (i * 8) & 0xff) : nearest(scaled);
                if (KEEP && !(codes[i] & 0x7f) && __float_as_uint(value) & ~SIGN)
                    codes[i] = (__float_as_uint(value) >> 24 & 0x80) | 1;
                if (!all_finite && !is_finite(value)) codes[i] = NOT_FINITE;
            }
            words[word] = low_bytes(codes[0], codes[1], codes[2], codes[3]);
        }
        store_codes(payload, part, u, words);
    }
}

template <class T>
__device__ void fp8_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, const Part& part) {
    with_vectors<T, OWNED>(part.given, part.numel, part.key, dst, [&](auto vectors) {
        using V = decltype(vectors);
        VectorCodes<8, V::NUMEL> codes[V::COUNT];
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) codes[k].load(payload, vectors, k);
        u32 own = 0;
        if (part.first < part.numel) own = reinterpret_cast<const u16*>(payload + round_up16(part.numel))[part.group];
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) {
            const float scale = BF16::widen(u16(__shfl_sync(ALL_LANES, own, vectors.owner(k))));
            float values[V::NUMEL];
            u32 missing = 0;
#pragma unroll
            for (int i = 0; i < V::NUMEL; ++i) {
                const u32 code = codes[k].get(i), magnitude = code & 0x7f;
                // the same bits as a float16 are 2^-8 of the value, denormals too
                const float small = F16::widen(u16((code & 0x80) << 8 | magnitude << 7));
                values[i] = clamp(__fmul_rn(__fmul_rn(small, 256.0f), scale), V::largest());
                missing |= u32(magnitude == NOT_FINITE) << i;
            }
            vectors.store(dst, k, values, missing);
        }
    });
}

// `below`: the bits of a float32 below the last bit of a scale.
#define FP8_ENCODE(name, T, NOISE, KEEP)                                                                       \
    extern "C" __global__ void fp8_encode_##name(const T::bits* src, u8* payload, i64 numel, const i64* count, \
                                                 u64 key, i64 log2_lanes, i64 below) {                         \
        fp8_encode<T, NOISE, KEEP>(src, payload, Part(numel, count, log2_lanes, key), key, u32(below));        \
    }
#define FP8_KERNELS(name, T)                                                                                   \
    FP8_ENCODE(name, T, false, false)                                                                          \
    FP8_ENCODE(name##_keep, T, false, true)                                                                    \
    FP8_ENCODE(name##_noise_keep, T, true, true)                                                               \
    FP8_ENCODE(name##_noise, T, true, false)                                                                   \
    extern "C" __global__ void fp8_decode_##name(const u8* payload, T::bits* dst, i64 numel, const i64* count, \
                                                 u64 key, i64 log2_lanes) {                                    \
        fp8_decode<T>(payload, dst, Part(numel, count, log2_lanes, key));                                      \
    }

FP8_KERNELS(f32, F32)
FP8_KERNELS(f16, F16)
FP8_KERNELS(bf16, BF16)
