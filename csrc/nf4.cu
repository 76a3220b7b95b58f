// nf4: blocks of 4-bit NormalFloat with their largest magnitude, and the same in the layout of bitsandbytes. Format:
// nf4.md.
#include "groups.cuh"
#include "vectors.cuh"

constexpr u32 FLUSH = 0x08800000u;  // 2^-110
constexpr u32 LARGEST_BF16 = 0x7f7f;
constexpr u32 ZEROS = 0x77777777u;        // eight codes of 0.0
constexpr u32 BNB_LEAST = 0x006ce3eeu;    // 1e-38
constexpr u32 BNB_INVERSE = 0x7e800000u;  // 2^126: above, 1 / absmax is denormal

// A code is the number of these that are below a number.
__device__ constexpr float boundary(int index) {
    constexpr float all[15] = {-0.8480963706970215f,   -0.6106328964233398f,  -0.4599952697753906f,
                               -0.33967941999435425f,  -0.23460739850997925f, -0.13791173696517944f,
                               -0.045525018125772476f, 0.03979014977812767f,  0.120255246758461f,
                               0.2035212516784668f,    0.2920137643814087f,   0.3893125355243683f,
                               0.5016634464263916f,    0.6427869200706482f,   0.8614784479141235f};
    return all[index];
}

// Finds codes by intervals of a length that no two boundaries share: lane `l` knows those around (l - 16) / STEPS.
template <int SCALE>
struct Intervals {
    static constexpr float STEPS = 14.6f;
    u32 below = 0;  // boundaries below the interval
    float inside = __uint_as_float(INF);

    __device__ explicit Intervals(int lane) {
        const float center = float(lane - 16) / STEPS;
#pragma unroll
        for (int i = 0; i < 15; ++i) {
            const float above = boundary(i) - center;
            if (above < -0.5f / STEPS)
                ++below;
            else if (above < 0.5f / STEPS)
                inside = SCALE * boundary(i);
        }
    }
    // The code of t / SCALE. All lanes call it together.
    __device__ u32 code(float t) const {
        const int interval = int(__float_as_uint(t * (STEPS / SCALE) + (MAGIC + 16.0f)));  // in the lowest 5 bits
        return __shfl_sync(ALL_LANES, below, interval) + (t > __shfl_sync(ALL_LANES, inside, interval));
    }
};

// The code of an element, whose nearest is `code`: where signs are kept, only zero has the code of zero.
template <bool KEEP>
__device__ inline u32 kept_code(u32 code, float element) {
    const u32 word = __float_as_uint(element);
    if (!KEEP || !(word & ~SIGN)) return code;
    return word & SIGN ? min(code, 6u) : max(code, 8u);
}

__device__ inline float value_of(u32 code) {
    const bool a = code & 1, b = code & 2, c = code & 4, d = code & 8;
    const float upper = c   ? b   ? a ? 1.0f : 0.7229568362236023f
                              : a ? 0.5626170039176941f
                                  : 0.44070982933044434f
                        : b ? a ? 0.33791524171829224f : 0.24611230194568634f
                        : a ? 0.16093020141124725f
                            : 0.07958029955625534f;
    const float lower = c   ? b   ? a ? 0.0f : -0.09105003625154495f
                              : a ? -0.18477343022823334f
                                  : -0.28444138169288635f
                        : b ? a ? -0.39491748809814453f : -0.5250730514526367f
                        : a ? -0.6961928009986877f
                            : -1.0f;
    return d ? upper : lower;
}

// The position of a code in the word of its eight neighbors.
template <bool BNB>
__device__ constexpr int place(int index) {
    return index % 8 * 4 ^ (BNB ? 4 : 0);
}

// A finite float32 as a double, also where denormals are flushed.
__device__ inline double widen(u32 bits) {
    const u32 magnitude = bits & ~SIGN;
    const double value = magnitude < 0x00800000u ? magnitude * 0x1p-149 : double(__uint_as_float(magnitude));
    return bits & SIGN ? -value : value;
}

// The code of an element of a group whose `absmax`, or 1 / absmax, may be denormal, as float32 arithmetic with
// denormals would find it. Rounding the double once more is the same as rounding once: it has more than twice the bits.
template <bool KEEP>
__device__ inline u32 extreme_code(u32 element, double absmax, bool full) {
    const double value = widen(element), inverse = 1.0 / absmax;
    const double rounded = absmax > 0x1p126 ? (inverse + 0x1.8p-97) - 0x1.8p-97 : double(float(inverse));
    const float t = float(full ? value * rounded : value / absmax);
    u32 code = 0;
    for (int i = 0; i < 15; ++i) code += t > boundary(i);
    return kept_code<KEEP>(code, __uint_as_float(element));
}

// Writes the codes of a thread's elements, in a group whose largest magnitude is `top`.
template <class T, bool KEEP>
__device__ void encode_extreme(const typename T::bits* __restrict__ src, u8* __restrict__ payload, const Part& part,
                               u32 top) {
    const double absmax = widen(max(top, BNB_LEAST));
#pragma unroll 1
    for (int i = 0; i < OWNED; ++i) {
        const i64 at = part.run(i / RUN) + i % RUN;
        if (at >= part.numel) return;
        const u32 code = extreme_code<KEEP>(__float_as_uint(T::widen(src[at])), absmax, part.full);
        const int shift = place<true>(int(at & 1));
        payload[at / 2] = u8((payload[at / 2] & ~(15u << shift)) | code << shift);
    }
}

__device__ inline i64 codes_nbytes(i64 numel) { return round_up16((numel + 1) / 2); }

template <class T, bool BNB, bool KEEP>
__device__ void nf4_encode(const typename T::bits* __restrict__ src, u8* __restrict__ payload, const Part& part) {
    constexpr int SCALE = BNB ? 1 : 4;
    float values[OWNED];
    load_part<T>(src, part, values);
    const u32 top = team_max(top_magnitude(values), part.shift);
    const bool finite = top < INF, exists = part.first < part.numel;
    const Intervals<SCALE> intervals(int(threadIdx.x) & 31);

    u8* absmaxes = payload + codes_nbytes(part.numel);
    float factor = 0.0f;
    if (BNB) {
        const bool ordinary = finite && top >= FLUSH && top <= BNB_INVERSE;
        if (ordinary && part.full) factor = __frcp_rn(__uint_as_float(top));
        if (part.lane == 0 && exists)
            reinterpret_cast<u32*>(absmaxes)[part.group] = !finite ? F32::nan : part.full ? top : max(top, BNB_LEAST);
    } else {
        const u32 absmax = min(bf16_up(__uint_as_float(top)), LARGEST_BF16);
        const bool ordinary = finite && top >= FLUSH;
        if (ordinary) factor = __fdiv_rn(float(SCALE), BF16::widen(u16(absmax)));
        if (part.lane == 0 && exists)
            reinterpret_cast<u16*>(absmaxes)[part.group] = !finite    ? BF16::nan
                                                           : ordinary ? u16(absmax)
                                                                      : u16(KEEP && top ? FLUSH >> 16 : 0);
    }

#pragma unroll
    for (int u = 0; u < RUNS; ++u) {
        const i64 at = part.run(u);
        u32 words[RUN / 8] = {};
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            words[i / 8] |= kept_code<KEEP>(intervals.code(__fmul_rn(values[u * RUN + i], factor)), values[u * RUN + i])
                            << place<BNB>(i);
        if (!finite) words[0] = words[1] = ZEROS;
        if (part.full) {
            *reinterpret_cast<uint2*>(payload + at / 2) = make_uint2(words[0], words[1]);
        } else if (exists) {
#pragma unroll
            for (int i = 0; i < RUN; i += 2) {
                const u8 both = at + i < part.numel ? u8(words[i / 8] >> (i % 8 * 4)) : u8(0);
                if ((at + i) / 2 < codes_nbytes(part.numel)) payload[(at + i) / 2] = both;
            }
        }
    }
    if (BNB && finite && exists && (!part.full || top < FLUSH || top > BNB_INVERSE))
        encode_extreme<T, KEEP>(src, payload, part, top);
}

template <class T, bool BNB>
__device__ void nf4_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, const Part& part) {
    with_vectors<T, OWNED>(part.given, part.numel, part.key, dst, [&](auto vectors) {
        using V = decltype(vectors);
        VectorCodes<4, V::NUMEL> codes[V::COUNT];
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) codes[k].load(payload, vectors, k);
        const u8* absmaxes = payload + codes_nbytes(part.numel);
        u32 own = 0;
        if (part.first < part.numel)
            own = BNB ? reinterpret_cast<const u32*>(absmaxes)[part.group]
                      : u32(reinterpret_cast<const u16*>(absmaxes)[part.group]) << 16;
        const float table = value_of(u32(vectors.lane));  // that of code `c` in lanes `c` and `c + 16`
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) {
            const u32 bits = __shfl_sync(ALL_LANES, own, vectors.owner(k));
            const float absmax = bits < FLUSH ? 0.0f : __uint_as_float(bits);
            float values[V::NUMEL];
#pragma unroll
            for (int i = 0; i < V::NUMEL; ++i) {
                const float value = __shfl_sync(ALL_LANES, table, int(codes[k].words[0] >> place<BNB>(i)));
                values[i] = clamp(__fmul_rn(value, absmax), V::largest());
            }
            vectors.store(dst, k, values, bits > INF ? ALL_LANES : 0);
        }
    });
}

#define NF4_ENCODE(name, T, BNB, KEEP)                                                                         \
    extern "C" __global__ void nf4_encode_##name(const T::bits* src, u8* payload, i64 numel, const i64* count, \
                                                 u64 key, i64 log2_lanes) {                                    \
        nf4_encode<T, BNB, KEEP>(src, payload, Part(numel, count, log2_lanes, key));                           \
    }
#define NF4_KERNELS(name, T, BNB)                                                                              \
    NF4_ENCODE(name, T, BNB, false)                                                                            \
    NF4_ENCODE(name##_keep, T, BNB, true)                                                                      \
    extern "C" __global__ void nf4_decode_##name(const u8* payload, T::bits* dst, i64 numel, const i64* count, \
                                                 u64 key, i64 log2_lanes) {                                    \
        nf4_decode<T, BNB>(payload, dst, Part(numel, count, log2_lanes, key));                                 \
    }

NF4_KERNELS(f32, F32, false)
NF4_KERNELS(f16, F16, false)
NF4_KERNELS(bf16, BF16, false)
#ifndef ROTATED
NF4_KERNELS(f32_bnb, F32, true)
NF4_KERNELS(f16_bnb, F16, true)
NF4_KERNELS(bf16_bnb, BF16, true)
#endif
