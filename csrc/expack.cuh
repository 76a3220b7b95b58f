#pragma once
// The split of elements in expack, and the sections of its payload. Format: expack.md.
#include "planes.cuh"

constexpr int PAIRS = OWNED / 2;

// A descriptor: from the lowest bit on, offset (40 bits), base (8), width (4), zero (1), escapes (11).
struct Descriptor {
    u64 word;
    __device__ u64 offset() const { return word & ((1ull << 40) - 1); }
    __device__ u32 base() const { return u32(word >> 40) & 0xff; }
    __device__ int width() const { return int(word >> 48 & 15); }
    __device__ bool zero() const { return word >> 52 & 1; }
    __device__ int escapes() const { return int(word >> 53); }
    __device__ u64 units(int planes) const { return u64(width() + planes) * PLANE_UNITS + (escapes() + 15) / 16; }
    __device__ static Descriptor of(u32 base, int width, bool zero, int escapes) {
        return {u64(base & 0xff) << 40 | u64(width) << 48 | u64(zero) << 52 | u64(escapes) << 53};
    }
};

// The sections of a payload: HALVES for float32, PLANES for the bits of an element that are not in its byte.
template <bool HALVES, int PLANES>
struct Payload {
    u8* start;
    i64 numel;

    __device__ u64* descriptors() const { return reinterpret_cast<u64*>(start + HEADER_NBYTES); }
    __device__ i64 halves() const { return HEADER_NBYTES + round_up16(8 * tiles_of(numel)); }
    __device__ i64 low() const { return halves() + (HALVES ? round_up16(2 * numel) : 0); }
    __device__ i64 parts() const { return low() + round_up16(numel); }
    __device__ u8* part(Descriptor descriptor) const { return start + parts() + 16 * descriptor.offset(); }

    __device__ u64* sums() const { return reinterpret_cast<u64*>(start + parts()); }
    __device__ u64 units(i64 tile) const { return Descriptor{descriptors()[tile]}.units(PLANES); }
    __device__ void place(i64 tile, u64 offset) const { descriptors()[tile] |= offset; }
    __device__ void end(u64 units) const {
        u64* header = reinterpret_cast<u64*>(start);
        header[0] = numel ? u64(parts()) + 16 * units : 0;
        header[1] = u64(numel);
        if (tiles_of(numel) & 1) descriptors()[tiles_of(numel)] = 0;
    }
};

// An element pair is a word: the upper 16 bits of two elements. `exponents` and `low` are of four elements, as bytes.
struct Wide {
    static constexpr int BITS = 8, PLANES = 0;
    __device__ static u32 exponents(u32 p, u32 q) {
        return __byte_perm(p >> 7 & 0x00ff00ffu, q >> 7 & 0x00ff00ffu, 0x6420);
    }
    __device__ static u32 low(u32 p, u32 q) {
        return __byte_perm((p & 0x007f007fu) | (p >> 8 & 0x00800080u), (q & 0x007f007fu) | (q >> 8 & 0x00800080u),
                           0x6420);
    }
    __device__ static u32 rest(u32, u32) { return 0; }
    __device__ static u32 pair(u32 exponents, u32 low, u32) {
        return exponents << 7 | (low & 0x007f007fu) | (low & 0x00800080u) << 8;
    }
};
struct Bf16 : Wide {
    using bits = u16;
};
struct Float32 : Wide {
    using bits = u32;
};
struct Half {
    using bits = u16;
    static constexpr int BITS = 5, PLANES = 3;
    __device__ static u32 exponents(u32 p, u32 q) {
        return __byte_perm(p >> 10 & 0x001f001fu, q >> 10 & 0x001f001fu, 0x6420);
    }
    __device__ static u32 low(u32 p, u32 q) { return __byte_perm(p, q, 0x6420); }
    __device__ static u32 rest(u32 p, u32 q) {
        return __byte_perm((p >> 8 & 0x00030003u) | (p >> 13 & 0x00040004u),
                           (q >> 8 & 0x00030003u) | (q >> 13 & 0x00040004u), 0x6420);
    }
    __device__ static u32 pair(u32 exponents, u32 low, u32 rest) {
        return (exponents & 0x001f001fu) << 10 | low | (rest & 0x00030003u) << 8 | (rest & 0x00040004u) << 13;
    }
};

template <class T>
using PayloadOf = Payload<sizeof(typename T::bits) == 4, T::PLANES>;

// The upper halves of a lane's elements, in pairs, and for float32 the lower ones; 0 after the last element.
template <class T>
__device__ void load_pairs(const typename T::bits* __restrict__ src, const Tile& tile, u32* upper, u32* lower) {
    constexpr int WORDS = sizeof(typename T::bits) * OWNED / 4;
    u32 words[WORDS] = {};
    if (tile.owned == OWNED && aligned16(src)) {
        const uint4* vectors = reinterpret_cast<const uint4*>(src + tile.first);
#pragma unroll
        for (int v = 0; v < WORDS / 4; ++v) {
            const uint4 loaded = vectors[v];
            words[4 * v] = loaded.x, words[4 * v + 1] = loaded.y;
            words[4 * v + 2] = loaded.z, words[4 * v + 3] = loaded.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < OWNED; ++i)
            if (i < tile.owned)
                words[i * WORDS / OWNED] |= u32(src[tile.first + i]) << (WORDS == OWNED ? 0 : i % 2 * 16);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        if (WORDS == OWNED) {
            upper[i] = __byte_perm(words[2 * i % WORDS], words[(2 * i + 1) % WORDS], 0x7632);
            lower[i] = __byte_perm(words[2 * i % WORDS], words[(2 * i + 1) % WORDS], 0x5410);
        } else {
            upper[i] = words[i];
        }
    }
}

template <class T>
__device__ void store_pairs(typename T::bits* __restrict__ dst, const Tile& tile, const u32* upper, const u32* lower) {
    constexpr int WORDS = sizeof(typename T::bits) * OWNED / 4;
    u32 words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        words[i] = WORDS == PAIRS ? upper[i % PAIRS] : __byte_perm(lower[i / 2], upper[i / 2], i % 2 ? 0x7632 : 0x5410);
    if (tile.whole() && aligned16(dst)) {
        store_tile<WORDS>(dst + tile.index * TILE, words, tile.lane);
    } else {
#pragma unroll
        for (int i = 0; i < OWNED; ++i)
            if (i < tile.owned)
                dst[tile.first + i] = typename T::bits(words[i * WORDS / OWNED] >> (WORDS == OWNED ? 0 : i % 2 * 16));
    }
}

// Writes a lane's words of a section of one or two bytes per element: up to the last element, and the padding, whose
// words are 0.
template <int WORDS>
__device__ void store_section(u8* section, i64 first, i64 numel, const u32* words) {
    constexpr int NBYTES = 4 * WORDS;
    const i64 start = first / OWNED * NBYTES, end = round_up16(numel * (NBYTES / OWNED));
#pragma unroll
    for (int v = 0; v < WORDS / 4; ++v)
        if (start + 16 * v < end)
            reinterpret_cast<uint4*>(section + start)[v] =
                make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
}

// Reads the words of a section, as `store_section` wrote them, up to the last element.
template <int WORDS>
__device__ void load_section(const u8* section, i64 first, i64 numel, u32* words) {
    constexpr int NBYTES = 4 * WORDS;
    const i64 start = first / OWNED * NBYTES, end = numel * (NBYTES / OWNED);
#pragma unroll
    for (int v = 0; v < WORDS / 4; ++v) {
        uint4 loaded = make_uint4(0, 0, 0, 0);
        if (start + 16 * v < end) loaded = reinterpret_cast<const uint4*>(section + start)[v];
        words[4 * v] = loaded.x, words[4 * v + 1] = loaded.y, words[4 * v + 2] = loaded.z, words[4 * v + 3] = loaded.w;
    }
}
