#pragma once
// Affine blocks with a bfloat16 scale and minimum. Format: affine.md.
#include "groups.cuh"
#include "vectors.cuh"

constexpr u32 SMALLEST_MINIMUM = 0x08800000u;  // 2^-110
constexpr u32 SMALLEST_QUARTER = 0x16800000u;  // 2^-82
constexpr u32 LARGEST_BF16 = 0x7f7f0000u;
constexpr u32 LARGEST_QUARTER = 0x7e7f0000u;  // of the largest bfloat16
constexpr u32 UNSIGNED = 0x4b000000u;         // 2^23: the low byte of such a float is an integer to add
constexpr u32 NOT_FINITE = 0x80;

// `WIDTH` bits of each code of a run, side by side: 2 to 16 bytes of a plane.
template <int WIDTH>
struct Plane {
    static constexpr int NBYTES = RUN * WIDTH / 8;
    static constexpr u32 MASK = (1u << WIDTH) - 1;
    u32 words[(NBYTES + 3) / 4] = {};

    __device__ void put(int i, u32 code) { words[i * WIDTH / 32] |= (code & MASK) << (i * WIDTH % 32); }

    // Writes run `u` of the plane from `payload + start` to `payload + end`, whose padding becomes 0.
    __device__ void store(u8* payload, i64 start, i64 end, const Part& part, int u) const {
        const i64 first = part.run(u), at = start + first / RUN * NBYTES;
        u8* target = payload + at;
        if (!part.full) {
#pragma unroll
            for (int i = 0; i < NBYTES; ++i) {
                const i64 known = (part.numel - first) * WIDTH - 8 * i;  // bits of codes from this byte on
                const u32 kept = known >= 8 ? 0xff : known > 0 ? (1u << known) - 1 : 0;
                if (at + i < end) target[i] = u8(words[i / 4] >> (i % 4 * 8) & kept);
            }
        } else if constexpr (NBYTES == 16) {
            *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
        } else if constexpr (NBYTES == 8) {
            *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
        } else if constexpr (NBYTES == 4) {
            *reinterpret_cast<u32*>(target) = words[0];
        } else {
            *reinterpret_cast<u16*>(target) = u16(words[0]);
        }
    }
};

template <>
struct Plane<0> {
    __device__ void put(int, u32) {}
    __device__ void store(u8*, i64, i64, const Part&, int) const {}
};

template <int BITS>
struct Codes {
    static constexpr int LEVELS = BITS == 8 ? 254 : (1 << BITS) - 1;
    static constexpr int BIAS = BITS == 8 ? 129 : 0;  // the addend of a code in the payload
    static constexpr int LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH = BITS - LOW;  // bits in each plane
};

template <int BITS>
struct Sections {
    i64 upper, scales, minima;  // where they start
    __device__ Sections(const Part& part)
        : upper(round_up16((part.numel * Codes<BITS>::LOW + 7) / 8)),
          scales(upper + round_up16((part.numel * Codes<BITS>::HIGH + 7) / 8)),
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

// The range of the elements of a group, or of the finite ones only.
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
    int zero;  // the code of zero, -1 where zero is below all elements; only where signs are kept
};

// The scale of a group from `low` to `high`, both finite.
template <int LEVELS>
__device__ Scale scale_of(float low, float high) {
    const u32 word = __float_as_uint(low), magnitude = word & ~SIGN;
    Scale found = {0, 0, 0.0f, 0.0f, -1};
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

// The same, where signs are kept.
template <int BITS>
__device__ Scale keeping_scale_of(float low, float high) {
    constexpr int LEVELS = Codes<BITS>::LEVELS;
    const float most = __fmul_rn(high, 0.25f), least = __uint_as_float(SMALLEST_QUARTER);
    Scale found = scale_of<LEVELS>(low, high);
    float step;
    if (__float_as_uint(low) > SIGN) {
        const float below = fminf(__fmul_rn(low, -0.25f), __uint_as_float(LARGEST_QUARTER));
        step = __uint_as_float(INF);
#pragma unroll
        for (int power = 0; power < BITS; ++power) {
            const float code = float(1 << power);
            const float exact = fmaxf(__fmul_rn(below, 1.0f / code), __fdiv_rn(most, float(LEVELS - (1 << power))));
            const float up = fmaxf(BF16::widen(u16(bf16_up(exact))), least);
            if (up < step && up <= __fmul_rn(__uint_as_float(LARGEST_QUARTER), 1.0f / code))
                step = up, found.zero = 1 << power;
        }
        found.quarter = __fmul_rn(-float(found.zero), step);
        found.minimum = __float_as_uint(__fmul_rn(found.quarter, 4.0f)) >> 16;
    } else if (!found.minimum || found.quarter < __fmul_rn(BF16::widen(u16(found.scale)), 0.25f)) {
        found = {0, 0, 0.0f, 0.0f, 0};
        if (!(__float_as_uint(high) & ~SIGN)) return found;
        step = most < least ? least : BF16::widen(u16(bf16_up(__fdiv_rn(most, float(LEVELS)))));
    } else {
        return found;
    }
    found.scale = __float_as_uint(__fmul_rn(step, 4.0f)) >> 16;
    found.reciprocal = __frcp_rn(step);
    return found;
}

template <class T, int BITS, bool NOISE, bool KEEP>
__device__ void affine_encode(const typename T::bits* __restrict__ src, u8* __restrict__ payload, const Part& part,
                              u64 key) {
    using C = Codes<BITS>;
    float values[OWNED];
    load_part<T>(src, part, values);
    Range range = range_of<false>(values, part);
    const bool finite = range.finite() || part.first >= part.numel;
    if (BITS == 8 && __any_sync(ALL_LANES, !finite))  // warp-wide: lanes leave the shuffles together
        range = range_of<true>(values, part);
    if (range.low > range.high) range.low = range.high = SIGN;  // of no elements: 0
    Scale group = {0, BF16::nan, 0.0f, 0.0f, -1};
    if (BITS == 8 || finite) {
        const float least = unordered(range.low), most = unordered(range.high);
        group = KEEP ? keeping_scale_of<BITS>(least, most) : scale_of<C::LEVELS>(least, most);
    }

    const Sections<BITS> at(part);
    if (part.lane == 0) {
        if (2 * part.group < at.minima - at.scales)
            reinterpret_cast<u16*>(payload + at.scales)[part.group] = u16(group.scale);
        if (part.first < part.numel) reinterpret_cast<u16*>(payload + at.minima)[part.group] = u16(group.minimum);
    }

#pragma unroll
    for (int u = 0; u < RUNS; ++u) {
        const i64 start = part.run(u);
        Plane<C::LOW> low;
        Plane<C::HIGH> high;
        const Noise noise(NOISE ? u64(start) / RUN : 0, key);
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const float value = values[u * RUN + i];
            const float above = fmaxf(__fmaf_rn(value, 0.25f, -group.quarter), 0.0f);
            float steps = __fmul_rn(above, group.reciprocal);
            if (NOISE) steps = __fadd_rn(steps, noise.offset(i));
            u32 code = __float_as_uint(__fadd_rn(steps, MAGIC));
            if (KEEP) {
                const u32 word = __float_as_uint(value), zero = __float_as_uint(MAGIC) + u32(group.zero);
                if (word & ~SIGN) code = word & SIGN ? min(code, zero - 1) : max(code, zero + 1);
            }
            code += C::BIAS;
            if (BITS == 8 && !finite && !is_finite(value)) code = NOT_FINITE;
            low.put(i, code), high.put(i, code >> C::LOW);
        }
        if (BITS < 8 && !finite) low = {}, high = {};
        low.store(payload, 0, at.upper, part, u);
        high.store(payload, at.upper, at.scales, part, u);
    }
}

template <class T, int BITS, bool DITHER, bool KEEP>
__device__ void affine_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, const Part& part,
                              u64 key) {
    using C = Codes<BITS>;
    with_vectors<T, OWNED>(part.given, part.numel, part.key, dst, [&](auto vectors) {
        using V = decltype(vectors);
        const Sections<BITS> at(part);
        VectorCodes<C::LOW, V::NUMEL> low[V::COUNT];
        VectorCodes<C::HIGH, V::NUMEL> high[V::COUNT];
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k)
            low[k].load(payload, vectors, k), high[k].load(payload + at.upper, vectors, k);
        u32 own = 0;  // minimum, scale
        if (part.first < part.numel)
            own = u32(reinterpret_cast<const u16*>(payload + at.minima)[part.group]) << 16 |
                  reinterpret_cast<const u16*>(payload + at.scales)[part.group];
        VectorNoise<V> noise;
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) {
            const u32 both = __shfl_sync(ALL_LANES, own, vectors.owner(k));
            const float quarter = __fmul_rn(__uint_as_float(both & 0xffff0000u), 0.25f);
            const float step = __fmul_rn(BF16::widen(u16(both)), 0.25f);
            if (DITHER && k % noise.PIECES == 0) noise.draw(vectors, k, key);
            float values[V::NUMEL];
            u32 missing = (both & ~SIGN) >= INF ? ALL_LANES : 0;
#pragma unroll
            for (int i = 0; i < V::NUMEL; ++i) {
                const u32 code = low[k].get(i) | high[k].get(i) << C::LOW;
                // conversions from integers run at a quarter of this rate
                const u32 biased = UNSIGNED | (BITS == 8 ? code ^ 0x80 : code);
                float steps = __fsub_rn(__uint_as_float(biased), BITS == 8 ? 8388609.0f : 8388608.0f);
                if (DITHER && !(KEEP && __fadd_rn(quarter, __fmul_rn(steps, step)) == 0.0f))
                    steps = __fsub_rn(steps, noise.offset(k, i));
                values[i] = clamp(__fmul_rn(__fadd_rn(quarter, __fmul_rn(steps, step)), 4.0f), V::largest());
                if (BITS == 8) missing |= u32(code == NOT_FINITE) << i;
            }
            vectors.store(dst, k, values, missing);
        }
    });
}

constexpr int BLOCKS = ROTATION_NUMEL > 1 ? 2 : 3;  // of a multiprocessor: as many as registers allow

#define ENCODE(BITS, name, T, NOISE, KEEP)                                                           \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) affine##BITS##_encode_##name(          \
        const T::bits* src, u8* payload, i64 numel, const i64* count, u64 key, i64 log2_lanes) {     \
        affine_encode<T, BITS, NOISE, KEEP>(src, payload, Part(numel, count, log2_lanes, key), key); \
    }
#define DECODE(BITS, name, T, DITHER, KEEP)                                                           \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) affine##BITS##_decode_##name(           \
        const u8* payload, T::bits* dst, i64 numel, const i64* count, u64 key, i64 log2_lanes) {      \
        affine_decode<T, BITS, DITHER, KEEP>(payload, dst, Part(numel, count, log2_lanes, key), key); \
    }
