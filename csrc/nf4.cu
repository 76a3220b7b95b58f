// nf4: blocks of 4-bit NormalFloat with their largest magnitude, and the same in the layout of bitsandbytes. Format:
// nf4.md.
#include "groups.cuh"

constexpr u32 FLUSH = 0x08800000u;  // 2^-110
constexpr u32 LARGEST_BF16 = 0x7f7f;
constexpr u32 ZEROS = 0x77777777u;        // eight codes of 0.0
constexpr u32 BNB_LEAST = 0x006ce3eeu;    // 1e-38
constexpr u32 BNB_INVERSE = 0x7e800000u;  // 2^126: above, 1 / absmax is denormal

// The code of t / SCALE: the number of boundaries below it, by bisection.
template <int SCALE>
__device__ inline u32 code_of(float t) {
    constexpr float S = SCALE;  // a power of two
    const bool d = t > S * 0.03979014977812767f;
    const bool c = t > (d ? S * 0.3893125355243683f : S * -0.33967941999435425f);
    const bool b = t > (d   ? c ? S * 0.6427869200706482f : S * 0.2035212516784668f
                        : c ? S * -0.13791173696517944f
                            : S * -0.6106328964233398f);
    const float upper = c   ? b ? S * 0.8614784479141235f : S * 0.5016634464263916f
                        : b ? S * 0.2920137643814087f
                            : S * 0.120255246758461f;
    const float lower = c   ? b ? S * -0.045525018125772476f : S * -0.23460739850997925f
                        : b ? S * -0.4599952697753906f
                            : S * -0.8480963706970215f;
    const bool a = t > (d ? upper : lower);
    return u32(d) << 3 | u32(c) << 2 | u32(b) << 1 | u32(a);
}

// The same, where signs are kept: only zero has the code of zero.
template <int SCALE, bool KEEP>
__device__ inline u32 code_of(float t, float element) {
    const u32 code = code_of<SCALE>(t), word = __float_as_uint(element);
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

// The position of a code in the word of its eight neighbours.
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
    return code_of<1, KEEP>(float(full ? value * rounded : value / absmax), __uint_as_float(element));
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
    if (part.first >= part.numel) return;
    const bool finite = top < INF;

    u8* absmaxes = payload + codes_nbytes(part.numel);
    float factor = 0.0f;
    if (BNB) {
        const bool ordinary = finite && top >= FLUSH && top <= BNB_INVERSE;
        if (ordinary && part.full) factor = __frcp_rn(__uint_as_float(top));
        if (part.lane == 0)
            reinterpret_cast<u32*>(absmaxes)[part.group] = !finite ? F32::nan : part.full ? top : max(top, BNB_LEAST);
    } else {
        const u32 absmax = min(bf16_up(__uint_as_float(top)), LARGEST_BF16);
        const bool ordinary = finite && top >= FLUSH;
        if (ordinary) factor = __fdiv_rn(float(SCALE), BF16::widen(u16(absmax)));
        if (part.lane == 0)
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
            words[i / 8] |= code_of<SCALE, KEEP>(__fmul_rn(values[u * RUN + i], factor), values[u * RUN + i])
                            << place<BNB>(i);
        if (!finite) words[0] = words[1] = ZEROS;
        if (part.full) {
            *reinterpret_cast<uint2*>(payload + at / 2) = make_uint2(words[0], words[1]);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i += 2) {
                const u8 both = at + i < part.numel ? u8(words[i / 8] >> (i % 8 * 4)) : u8(0);
                if ((at + i) / 2 < codes_nbytes(part.numel)) payload[(at + i) / 2] = both;
            }
        }
    }
    if (BNB && finite && (!part.full || top < FLUSH || top > BNB_INVERSE))
        encode_extreme<T, KEEP>(src, payload, part, top);
}

template <class T, bool BNB>
__device__ void nf4_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, const Part& part) {
    if (part.first >= part.numel) return;
    const u8* absmaxes = payload + codes_nbytes(part.numel);
    const u32 bits = BNB ? reinterpret_cast<const u32*>(absmaxes)[part.group]
                         : u32(reinterpret_cast<const u16*>(absmaxes)[part.group]) << 16;
    const float absmax = bits < FLUSH ? 0.0f : __uint_as_float(bits);
    const u32 missing = bits > INF ? 0xffff : 0;
#pragma unroll
    for (int u = 0; u < RUNS; ++u) {
        const i64 at = part.run(u);
        u32 words[RUN / 8] = {};
        if (part.full) {
            const uint2 loaded = *reinterpret_cast<const uint2*>(payload + at / 2);
            words[0] = loaded.x, words[1] = loaded.y;
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i += 2)
                if (at + i < part.numel) words[i / 8] |= u32(payload[(at + i) / 2]) << (i % 8 * 4);
        }
        float values[RUN];
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            values[i] = clamp(__fmul_rn(value_of(words[i / 8] >> place<BNB>(i)), absmax), T::largest());
        store_run<T>(dst, part, u, values, missing);
    }
}

#define NF4_ENCODE(name, T, BNB, KEEP)                                                                         \
    extern "C" __global__ void nf4_encode_##name(const T::bits* src, u8* payload, i64 numel, const i64* count, \
                                                 i64 log2_lanes) {                                             \
        nf4_encode<T, BNB, KEEP>(src, payload, Part(numel, count, log2_lanes));                                \
    }
#define NF4_KERNELS(name, T, BNB)                                                                              \
    NF4_ENCODE(name, T, BNB, false)                                                                            \
    NF4_ENCODE(name##_keep, T, BNB, true)                                                                      \
    extern "C" __global__ void nf4_decode_##name(const u8* payload, T::bits* dst, i64 numel, const i64* count, \
                                                 i64 log2_lanes) {                                             \
        nf4_decode<T, BNB>(payload, dst, Part(numel, count, log2_lanes));                                      \
    }

NF4_KERNELS(f32, F32, false)
NF4_KERNELS(f16, F16, false)
NF4_KERNELS(bf16, BF16, false)
NF4_KERNELS(f32_bnb, F32, true)
NF4_KERNELS(f16_bnb, F16, true)
NF4_KERNELS(bf16_bnb, BF16, true)
