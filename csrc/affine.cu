// Affine blocks of 8, 4 and 2 bits with a bfloat16 scale and minimum. Format: affine.md.
#include "groups.cuh"
#include "philox.cuh"

constexpr u32 SMALLEST_MINIMUM = 0x08800000u;  // 2^-110
constexpr u32 SMALLEST_QUARTER = 0x16800000u;  // 2^-82
constexpr u32 LARGEST_BF16 = 0x7f7f0000u;
constexpr u32 UNSIGNED = 0x4b000000u;  // 2^23: the low byte of such a float is an integer to add
constexpr u32 NOT_FINITE = 0x80;

template <int BITS>
struct Codes {
    static constexpr int LEVELS = BITS == 8 ? 254 : (1 << BITS) - 1;
    static constexpr int BIAS = BITS == 8 ? 129 : 0;  // what is added to a code to store it
    static constexpr u32 MASK = (1u << BITS) - 1;
    static constexpr int WORDS = RUN * BITS / 32;
    static constexpr int NBYTES = RUN * BITS / 8;  // of a run

    __device__ static void store(u8* payload, i64 run, const u32* words) {
        u8* target = payload + run * NBYTES;
        if (BITS == 8) *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
        if (BITS == 4) *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
        if (BITS == 2) *reinterpret_cast<u32*>(target) = words[0];
    }
    __device__ static void load(const u8* payload, i64 run, u32* words) {
        const u8* source = payload + run * NBYTES;
        if (BITS == 8) {
            const uint4 loaded = *reinterpret_cast<const uint4*>(source);
            words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
        } else if (BITS == 4) {
            const uint2 loaded = *reinterpret_cast<const uint2*>(source);
            words[0] = loaded.x, words[1] = loaded.y;
        } else {
            words[0] = *reinterpret_cast<const u32*>(source);
        }
    }
};

struct Sections {
    i64 packed, scales, minima;  // bytes of codes; where the others start
    __device__ Sections(const Part& part, int bits)
        : packed((part.numel * bits + 7) / 8),
          scales(round_up16(packed)),
          minima(scales + round_up16(2 * part.groups())) {}
};

// Floats as unsigned integers in the same order: -NaN < -Inf < finite < Inf < NaN.
__device__ inline u32 ordered(float value) {
    const u32 word = __float_as_uint(value);
    return word & SIGN ? ~word : word | SIGN;
}
__device__ inline float unordered(u32 key) { return __uint_as_float(key & SIGN ? key & ~SIGN : ~key); }

constexpr u32 BELOW = ~(INF | SIGN), ABOVE = INF | SIGN;  // -Inf and Inf, ordered

struct Range {
    u32 low = ALL_LANES, high = 0;
    __device__ void add(u32 key) { low = min(low, key), high = max(high, key); }
    __device__ void join(int shift) { low = ~team_max(~low, shift), high = team_max(high, shift); }
    __device__ bool finite() const { return low > BELOW && high < ABOVE; }
};

// Of the elements of a group, or of the finite ones only.
template <bool FINITE>
__device__ Range range_of(const float* values, const Part& part) {
    Range range;
    if (part.full && !FINITE) {
#pragma unroll
        for (int i = 0; i < OWNED; ++i) range.add(ordered(values[i]));
    } else {
#pragma unroll
        for (int i = 0; i < OWNED; ++i)
            if (part.run(i / RUN) + i % RUN < part.numel && (!FINITE || is_finite(values[i])))
                range.add(ordered(values[i]));
    }
    range.join(part.shift);
    return range;
}

struct Scale {
    u32 scale, minimum;  // bfloat16
    float quarter, reciprocal;
};

// Of a group from `low` to `high`, both finite.
template <int LEVELS>
__device__ Scale scale_of(float low, float high) {
    const u32 word = __float_as_uint(low), magnitude = word & ~SIGN;
    Scale found = {0, 0, 0.0f, 0.0f};
    if (magnitude >= SMALLEST_MINIMUM)
        found.minimum = (word & SIGN ? min(magnitude + 0xffffu, LARGEST_BF16) | SIGN : word) >> 16;
    found.quarter = __fmul_rn(BF16::widen(u16(found.minimum)), 0.25f);
    const float spread = __fsub_rn(__fmul_rn(high, 0.25f), found.quarter);
    if (spread >= __uint_as_float(SMALLEST_QUARTER)) {
        const float step = BF16::widen(u16(bf16_up(__fdiv_rn(spread, float(LEVELS)))));
        found.scale = __float_as_uint(__fmul_rn(step, 4.0f)) >> 16;
        found.reciprocal = __frcp_rn(step);
    }
    return found;
}

template <class T, int BITS, bool NOISE>
__device__ void affine_encode(const typename T::bits* __restrict__ src, u8* __restrict__ payload, const Part& part,
                              u64 key) {
    using C = Codes<BITS>;
    float values[OWNED];
    load_part<T>(src, part, values);
    Range range = range_of<false>(values, part);
    const bool finite = range.finite() || part.first >= part.numel;
    if (BITS == 8 && __any_sync(ALL_LANES, !finite))  // of the warp: lanes leave the shuffles together
        range = range_of<true>(values, part);
    if (range.low > range.high) range.low = range.high = SIGN;  // of no elements: 0
    Scale group = {0, BF16::nan, 0.0f, 0.0f};
    if (BITS == 8 || finite) group = scale_of<C::LEVELS>(unordered(range.low), unordered(range.high));

    const Sections at(part, BITS);
    if (part.lane == 0) {
        if (2 * part.group < at.minima - at.scales)
            reinterpret_cast<u16*>(payload + at.scales)[part.group] = u16(group.scale);
        if (part.first < part.numel) reinterpret_cast<u16*>(payload + at.minima)[part.group] = u16(group.minimum);
    }

#pragma unroll
    for (int u = 0; u < RUNS; ++u) {
        const i64 start = part.run(u);
        u32 words[C::WORDS] = {};
        const Noise noise(NOISE ? u64(start) / RUN : 0, key);
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const float value = values[u * RUN + i];
            const float above = fmaxf(__fsub_rn(__fmul_rn(value, 0.25f), group.quarter), 0.0f);
            float steps = __fmul_rn(above, group.reciprocal);
            if (NOISE) steps = __fadd_rn(steps, noise.offset(i));
            u32 code = __float_as_uint(__fadd_rn(steps, MAGIC)) + C::BIAS;
            if (BITS == 8 && !finite && !is_finite(value)) code = NOT_FINITE;
            words[i * BITS / 32] |= (code & C::MASK) << (i * BITS % 32);
        }
        if (BITS < 8 && !finite)
            for (u32& word : words) word = 0;
        if (part.full) {
            C::store(payload, start / RUN, words);
        } else {
#pragma unroll
            for (int i = 0; i < C::NBYTES; ++i) {
                const i64 byte = start / RUN * C::NBYTES + i;
                const i64 known = (part.numel - start) * BITS - 8 * i;  // bits of codes from this byte on
                const u32 kept = known >= 8 ? 0xff : known > 0 ? (1u << known) - 1 : 0;
                if (byte < at.scales) payload[byte] = u8(words[i / 4] >> (i % 4 * 8) & kept);
            }
        }
    }
}

template <class T, int BITS, bool DITHER>
__device__ void affine_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, const Part& part,
                              u64 key) {
    using C = Codes<BITS>;
    if (part.first >= part.numel) return;
    const Sections at(part, BITS);
    const u32 minimum = reinterpret_cast<const u16*>(payload + at.minima)[part.group];
    const float quarter = __fmul_rn(BF16::widen(u16(minimum)), 0.25f);
    const float scale = BF16::widen(reinterpret_cast<const u16*>(payload + at.scales)[part.group]);
    const float step = __fmul_rn(scale, 0.25f);
    const bool unknown = (minimum & 0x7fff) >= INF >> 16;
#pragma unroll
    for (int u = 0; u < RUNS; ++u) {
        const i64 start = part.run(u);
        u32 words[C::WORDS] = {};
        if (part.full) {
            C::load(payload, start / RUN, words);
        } else {
#pragma unroll
            for (int i = 0; i < C::NBYTES; ++i) {
                const i64 byte = start / RUN * C::NBYTES + i;
                if (byte < at.packed) words[i / 4] |= u32(payload[byte]) << (i % 4 * 8);
            }
        }
        const Noise noise(DITHER ? u64(start) / RUN : 0, key);
        float values[RUN];
        u32 missing = unknown ? ALL_LANES : 0;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const u32 code = words[i * BITS / 32] >> (i * BITS % 32) & C::MASK;
            // conversions from integers run at a quarter of this rate
            const u32 biased = UNSIGNED | (BITS == 8 ? code ^ 0x80 : code);
            float steps = __fsub_rn(__uint_as_float(biased), BITS == 8 ? 8388609.0f : 8388608.0f);
            if (DITHER) steps = __fsub_rn(steps, noise.offset(i));
            values[i] = clamp(__fmul_rn(__fadd_rn(quarter, __fmul_rn(steps, step)), 4.0f), T::largest());
            if (BITS == 8) missing |= u32(code == NOT_FINITE) << i;
        }
        store_run<T>(dst, part, u, values, missing);
    }
}

#define ENCODE(BITS, name, T, NOISE)                                                             \
    extern "C" __global__ void __launch_bounds__(256, 3) affine##BITS##_encode_##name(           \
        const T::bits* src, u8* payload, i64 numel, const i64* count, u64 key, i64 log2_lanes) { \
        affine_encode<T, BITS, NOISE>(src, payload, Part(numel, count, log2_lanes), key);        \
    }
#define DECODE(BITS, name, T, DITHER)                                                                    \
    extern "C" __global__ void affine##BITS##_decode_##name(const u8* payload, T::bits* dst, i64 numel,  \
                                                            const i64* count, u64 key, i64 log2_lanes) { \
        affine_decode<T, BITS, DITHER>(payload, dst, Part(numel, count, log2_lanes), key);               \
    }
#define AFFINE_KERNELS(name, T)       \
    ENCODE(8, name, T, false)         \
    ENCODE(4, name, T, false)         \
    ENCODE(8, name##_noise, T, true)  \
    ENCODE(4, name##_noise, T, true)  \
    ENCODE(2, name##_noise, T, true)  \
    DECODE(8, name, T, false)         \
    DECODE(4, name, T, false)         \
    DECODE(2, name, T, false)         \
    DECODE(8, name##_dither, T, true) \
    DECODE(4, name##_dither, T, true) \
    DECODE(2, name##_dither, T, true)

AFFINE_KERNELS(f32, F32)
AFFINE_KERNELS(f16, F16)
AFFINE_KERNELS(bf16, BF16)
