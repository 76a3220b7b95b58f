// int8: symmetric 8-bit blocks with a bfloat16 scale. Format: int8.md.
//
// A thread owns 32 elements of one group, so a group of 32 << shift elements is a team of 1 << shift neighbouring
// lanes. The elements come in units of 32 bytes, one memory sector: unit `u` of lane `l` is unit `u << shift | l` of
// the group, so that a team reads and writes consecutive sectors. All threads stay to the end: the shuffles name all
// lanes.
#include "common.cuh"

constexpr int OWNED = 32;
constexpr u32 FLUSH = 0x08800000u;     // 2^-110
constexpr float MAGIC = 12582912.0f;   // 1.5 * 2^23: the sum holds the nearest integer, ties to even, in its low byte
constexpr u32 UNSIGNED = 0x4b000000u;  // 2^23: the low byte of such a float is an integer to add
constexpr int NOT_FINITE = 0x80;

// Where the elements of a thread are.
template <class T>
struct Part {
    static constexpr int UNIT = 32 / sizeof(typename T::bits);
    static constexpr int UNITS = OWNED / UNIT;
    i64 group, first;
    int lane, shift;
    bool full;  // the whole group exists

    __device__ Part(i64 numel, i64 log2_lanes) : shift(int(log2_lanes)) {
        const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x;
        group = thread >> shift;
        lane = int(thread) & ((1 << shift) - 1);
        const i64 size = i64(OWNED) << shift;
        first = group * size;
        full = first + size <= numel;
    }
    __device__ i64 unit(int index) const { return first + (i64(index) << shift | lane) * UNIT; }
};

__device__ inline i64 scales_start(i64 numel) { return (numel + 15) & ~i64(15); }

template <class T>
__device__ void load_unit(const typename T::bits* src, float* values) {
    constexpr int PER_WORD = 4 / sizeof(typename T::bits);
    const uint4* vectors = reinterpret_cast<const uint4*>(src);
    const uint4 a = vectors[0], b = vectors[1];
    const u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8 * PER_WORD; ++i)
        values[i] = T::widen(typename T::bits(words[i / PER_WORD] >> (i % PER_WORD * 16)));
}

template <class T>
__device__ void store_unit(typename T::bits* dst, const float* values, const u32* codes) {
    constexpr int PER_WORD = 4 / sizeof(typename T::bits);
    u32 words[8] = {};
#pragma unroll
    for (int i = 0; i < 8 * PER_WORD; ++i) {
        const u32 code = codes[i / 4] >> (i % 4 * 8) & 0xff;
        const typename T::bits element = code == NOT_FINITE ? T::nan : T::narrow(values[i]);
        words[i / PER_WORD] |= u32(element) << (i % PER_WORD * 16);
    }
    uint4* vectors = reinterpret_cast<uint4*>(dst);
    vectors[0] = make_uint4(words[0], words[1], words[2], words[3]);
    vectors[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

__device__ inline u32 team_max(u32 value, int shift) {
    for (int lane = 1; lane < 1 << shift; lane <<= 1) value = max(value, __shfl_xor_sync(ALL_LANES, value, lane));
    return value;
}

template <class T>
__device__ void int8_encode(const typename T::bits* __restrict__ src, u8* __restrict__ payload, i64 numel, i64 shift) {
    constexpr int UNIT = Part<T>::UNIT;
    const Part<T> part(numel, shift);
    float values[OWNED];
    const bool vectors = part.full && aligned16(src);
    if (vectors) {
#pragma unroll
        for (int u = 0; u < Part<T>::UNITS; ++u) load_unit<T>(src + part.unit(u), values + u * UNIT);
    } else {
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const i64 at = part.unit(i / UNIT) + i % UNIT;
            values[i] = at < numel ? T::widen(src[at]) : 0.0f;
        }
    }

    u32 top = 0;
#pragma unroll
    for (int i = 0; i < OWNED; ++i) top = max(top, __float_as_uint(values[i]) & ~SIGN);
    top = team_max(top, part.shift);
    const bool all_finite = !__any_sync(ALL_LANES, top >= INF);  // of the warp: lanes leave the shuffles together
    if (!all_finite) {
        top = 0;
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const u32 magnitude = __float_as_uint(values[i]) & ~SIGN;
            if (magnitude < INF) top = max(top, magnitude);
        }
        top = team_max(top, part.shift);
    }

    u32 scale = 0;
    float reciprocal = 0.0f;
    if (top >= FLUSH) {
        scale = (__float_as_uint(__fdiv_rn(__uint_as_float(top), 127.0f)) + 0xffffu) >> 16;
        reciprocal = __frcp_rn(__uint_as_float(scale << 16));
    }
    if (part.lane == 0 && part.first < numel)
        reinterpret_cast<u16*>(payload + scales_start(numel))[part.group] = u16(scale);

    u32 codes[OWNED / 4];
#pragma unroll
    for (int word = 0; word < OWNED / 4; ++word) {
        u32 bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value = values[word * 4 + i];
            bits[i] = __float_as_uint(__fadd_rn(__fmul_rn(value, reciprocal), MAGIC));
            if (!all_finite && (__float_as_uint(value) & ~SIGN) >= INF) bits[i] = NOT_FINITE;
        }
        codes[word] = low_bytes(bits[0], bits[1], bits[2], bits[3]);
    }

#pragma unroll
    for (int u = 0; u < Part<T>::UNITS; ++u) {
        const u32* unit = codes + u * UNIT / 4;
        const i64 at = part.unit(u);
        if (!part.full) {  // elements that do not exist have code 0, which is what the padding must be
#pragma unroll
            for (int i = 0; i < UNIT; ++i)
                if (at + i < scales_start(numel)) payload[at + i] = u8(unit[i / 4] >> (i % 4 * 8));
        } else if constexpr (UNIT == 16) {
            *reinterpret_cast<uint4*>(payload + at) = make_uint4(unit[0], unit[1], unit[2], unit[3]);
        } else {
            *reinterpret_cast<uint2*>(payload + at) = make_uint2(unit[0], unit[1]);
        }
    }
}

template <class T>
__device__ void int8_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, i64 numel, i64 shift) {
    constexpr int UNIT = Part<T>::UNIT;
    const Part<T> part(numel, shift);
    if (part.first >= numel) return;
    const float scale = BF16::widen(reinterpret_cast<const u16*>(payload + scales_start(numel))[part.group]);
    const bool vectors = part.full && aligned16(dst);
#pragma unroll
    for (int u = 0; u < Part<T>::UNITS; ++u) {
        const i64 at = part.unit(u);
        u32 codes[UNIT / 4] = {};
        if (!part.full) {
#pragma unroll
            for (int i = 0; i < UNIT; ++i)
                if (at + i < numel) codes[i / 4] |= u32(payload[at + i]) << (i % 4 * 8);
        } else if constexpr (UNIT == 16) {
            const uint4 loaded = *reinterpret_cast<const uint4*>(payload + at);
            codes[0] = loaded.x, codes[1] = loaded.y, codes[2] = loaded.z, codes[3] = loaded.w;
        } else {
            const uint2 loaded = *reinterpret_cast<const uint2*>(payload + at);
            codes[0] = loaded.x, codes[1] = loaded.y;
        }

        float values[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            // code + 128 as the low byte of 2^23 + code + 128: conversions from integers run at a quarter of this rate
            const u32 biased = __byte_perm(codes[i / 4] ^ 0x80808080u, UNSIGNED, 0x7650 | i % 4);
            const float code = __fsub_rn(__uint_as_float(biased), 8388736.0f);
            values[i] = fminf(fmaxf(__fmul_rn(code, scale), -T::largest()), T::largest());
        }
        if (vectors) {
            store_unit<T>(dst + at, values, codes);
        } else {
#pragma unroll
            for (int i = 0; i < UNIT; ++i) {
                const bool missing = (codes[i / 4] >> (i % 4 * 8) & 0xff) == NOT_FINITE;
                if (at + i < numel) dst[at + i] = missing ? T::nan : T::narrow(values[i]);
            }
        }
    }
}

#define INT8_KERNELS(name, T)                                                                                   \
    extern "C" __global__ void int8_encode_##name(const T::bits* src, u8* payload, i64 numel, i64 log2_lanes) { \
        int8_encode<T>(src, payload, numel, log2_lanes);                                                        \
    }                                                                                                           \
    extern "C" __global__ void int8_decode_##name(const u8* payload, T::bits* dst, i64 numel, i64 log2_lanes) { \
        int8_decode<T>(payload, dst, numel, log2_lanes);                                                        \
    }

INT8_KERNELS(f32, F32)
INT8_KERNELS(f16, F16)
INT8_KERNELS(bf16, BF16)
