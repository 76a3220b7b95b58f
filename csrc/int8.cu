// int8: symmetric 8-bit blocks with a bfloat16 scale. Format: int8.md.
#include "int8.cuh"
#include "vectors.cuh"

template <class T, bool NOISE, bool KEEP>
__device__ void int8_encode(const typename T::bits* __restrict__ src, u8* __restrict__ payload, const Part& part,
                            u64 key) {
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

    const Int8Scale<KEEP> scale(top);
    if (part.lane == 0 && part.first < part.numel)
        reinterpret_cast<u16*>(payload + round_up16(part.numel))[part.group] = u16(scale.stored);

#pragma unroll
    for (int u = 0; u < RUNS; ++u) {
        u32 words[RUN / 4];
        const Noise noise(NOISE ? u64(part.run(u)) / RUN : 0, key);
#pragma unroll
        for (int word = 0; word < RUN / 4; ++word) {
            u32 bits[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float value = values[u * RUN + word * 4 + i];
                float steps = __fmul_rn(value, scale.reciprocal);
                if (NOISE) steps = __fadd_rn(steps, noise.offset(word * 4 + i));
                bits[i] = int8_nearest<KEEP>(value, steps);
                if (!all_finite && !is_finite(value)) bits[i] = NOT_FINITE;
            }
            words[word] = low_bytes(bits[0], bits[1], bits[2], bits[3]);
        }
        store_codes(payload, part, u, words);
    }
}

template <class T, bool DITHER, bool KEEP>
__device__ void int8_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, const Part& part,
                            u64 key) {
    with_vectors<T, OWNED>(part.given, part.numel, part.key, dst, [&](auto vectors) {
        using V = decltype(vectors);
        VectorCodes<8, V::NUMEL> codes[V::COUNT];
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) codes[k].load(payload, vectors, k);
        u32 own = 0;
        if (part.first < part.numel) own = reinterpret_cast<const u16*>(payload + round_up16(part.numel))[part.group];
        VectorNoise<V> noise;
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) {
            const float scale = BF16::widen(u16(__shfl_sync(ALL_LANES, own, vectors.owner(k))));
            if (DITHER && k % noise.PIECES == 0) noise.draw(vectors, k, key);
            float values[V::NUMEL];
            u32 missing = 0;
#pragma unroll
            for (int i = 0; i < V::NUMEL; ++i) {
                const u32 word = codes[k].words[i / 4];
                float code = int8_code(word, i % 4);
                if (DITHER && !(KEEP && code == 0.0f)) code = __fsub_rn(code, noise.offset(k, i));
                values[i] = __fmul_rn(code, scale);
                if (i % 4 == 0) missing |= int8_missing(word) << i;
            }
            if (!(scale <= __fmul_rn(V::largest(), 0x1p-7f))) {  // else no product is larger
#pragma unroll
                for (int i = 0; i < V::NUMEL; ++i) values[i] = clamp(values[i], V::largest());
            }
            vectors.store(dst, k, values, missing);
        }
    });
}

#define INT8_ENCODE(name, T, NOISE, KEEP)                                                                       \
    extern "C" __global__ void int8_encode_##name(const T::bits* src, u8* payload, i64 numel, const i64* count, \
                                                  u64 key, i64 log2_lanes) {                                    \
        int8_encode<T, NOISE, KEEP>(src, payload, Part(numel, count, log2_lanes, key), key);                    \
    }
#define INT8_DECODE(name, T, DITHER, KEEP)                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 3)                                                            \
        int8_decode_##name(const u8* payload, T::bits* dst, i64 numel, const i64* count, u64 key, i64 log2_lanes) { \
        int8_decode<T, DITHER, KEEP>(payload, dst, Part(numel, count, log2_lanes, key), key);                       \
    }
#define INT8_KERNELS(name, T)                     \
    INT8_ENCODE(name, T, false, false)            \
    INT8_ENCODE(name##_noise, T, true, false)     \
    INT8_ENCODE(name##_keep, T, false, true)      \
    INT8_ENCODE(name##_noise_keep, T, true, true) \
    INT8_DECODE(name, T, false, false)            \
    INT8_DECODE(name##_dither, T, true, false)    \
    INT8_DECODE(name##_dither_keep, T, true, true)

INT8_KERNELS(f32, F32)
INT8_KERNELS(f16, F16)
INT8_KERNELS(bf16, BF16)
