// intpack: integers as their distance to the least of their tile. Format: intpack.md.
#include "planes.cuh"

struct Payload {
    u8* start;
    i64 numel;

    // Two words for each tile: the least element; width, and from bit 8 on the offset.
    __device__ u64* descriptors() const { return reinterpret_cast<u64*>(start + HEADER_NBYTES); }
    __device__ i64 parts() const { return HEADER_NBYTES + 16 * tiles_of(numel); }
    __device__ u8* part(u64 place) const { return start + parts() + 16 * (place >> 8); }

    __device__ u64* sums() const { return reinterpret_cast<u64*>(start + parts()); }
    __device__ u64 units(i64 tile) const { return (descriptors()[2 * tile + 1] & 0xff) * PLANE_UNITS; }
    __device__ void place(i64 tile, u64 offset) const { descriptors()[2 * tile + 1] |= offset << 8; }
    __device__ void end(u64 units) const {
        u64* header = reinterpret_cast<u64*>(start);
        header[0] = numel ? u64(parts()) + 16 * units : 0;
        header[1] = u64(numel);
    }
};

struct Int8 {
    using value = i8;
    using bits = u8;
};
struct Int16 {
    using value = short;
    using bits = u16;
};
struct Int32 {
    using value = int;
    using bits = u32;
};
struct Int64 {
    using value = i64;
    using bits = u64;
};
struct UInt8 {
    using value = u8;
    using bits = u8;
};

// The lane's elements; after the last one the first element of the tile.
template <class T>
__device__ void load_owned(const typename T::bits* __restrict__ src, const Tile& tile, typename T::bits* elements) {
    using Bits = typename T::bits;
    constexpr int PER_WORD = sizeof(Bits) < 4 ? 4 / sizeof(Bits) : 1, WORDS = OWNED * sizeof(Bits) / 4;
    if (tile.owned == OWNED && aligned16(src)) {
        const uint4* vectors = reinterpret_cast<const uint4*>(src + tile.first);
        u32 words[WORDS];
#pragma unroll
        for (int v = 0; v < WORDS / 4; ++v) {
            const uint4 loaded = vectors[v];
            words[4 * v] = loaded.x, words[4 * v + 1] = loaded.y;
            words[4 * v + 2] = loaded.z, words[4 * v + 3] = loaded.w;
        }
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            if (sizeof(Bits) == 8)
                elements[i] = Bits(words[2 * i % WORDS] | u64(words[(2 * i + 1) % WORDS]) << 32);
            else
                elements[i] = Bits(words[i / PER_WORD % WORDS] >> (i % PER_WORD * 8 * sizeof(Bits) % 32));
        }
    } else {
#pragma unroll
        for (int i = 0; i < OWNED; ++i) elements[i] = src[i < tile.owned ? tile.first + i : tile.index * TILE];
    }
}

template <class T>
__device__ void store_owned(typename T::bits* __restrict__ dst, const Tile& tile, const typename T::bits* elements) {
    using Bits = typename T::bits;
    constexpr int PER_WORD = sizeof(Bits) < 4 ? 4 / sizeof(Bits) : 1, WORDS = OWNED * sizeof(Bits) / 4;
    if (tile.whole() && aligned16(dst)) {
        u32 words[WORDS] = {};
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            if (sizeof(Bits) == 8) {
                words[2 * i % WORDS] = u32(elements[i]);
                words[(2 * i + 1) % WORDS] = u32(u64(elements[i]) >> 32);
            } else {
                words[i / PER_WORD % WORDS] |= u32(elements[i]) << (i % PER_WORD * 8 * sizeof(Bits) % 32);
            }
        }
        store_tile<WORDS>(dst + tile.index * TILE, words, tile.lane);
    } else {
#pragma unroll
        for (int i = 0; i < OWNED; ++i)
            if (i < tile.owned) dst[tile.first + i] = elements[i];
    }
}

template <class T>
__device__ void intpack_measure(const typename T::bits* __restrict__ src, const Payload& payload, const Tile& tile) {
    using Value = typename T::value;
    if (!tile.exists()) return;
    typename T::bits elements[OWNED];
    load_owned<T>(src, tile, elements);
    Value lowest = Value(elements[0]), highest = lowest;
#pragma unroll
    for (int i = 1; i < OWNED; ++i) {
        lowest = min(lowest, Value(elements[i]));
        highest = max(highest, Value(elements[i]));
    }
    i64 least = lowest, most = highest;
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) {
        least = min(least, __shfl_xor_sync(ALL_LANES, least, other));
        most = max(most, __shfl_xor_sync(ALL_LANES, most, other));
    }
    if (tile.lane != 0) return;
    const u64 span = u64(most) - u64(least);
    int width = 0;
    while (width < 64 && span >> width) ++width;
    payload.descriptors()[2 * tile.index] = u64(least);
    payload.descriptors()[2 * tile.index + 1] = u64(width);
}

template <class T>
__device__ void intpack_write(const typename T::bits* __restrict__ src, const Payload& payload, const Tile& tile) {
    using Bits = typename T::bits;
    if (!tile.exists()) return;
    const Bits base = Bits(payload.descriptors()[2 * tile.index]);
    const u64 place = payload.descriptors()[2 * tile.index + 1];
    const int width = int(place & 0xff);
    u8* part = payload.part(place);
    Bits elements[OWNED];
    load_owned<T>(src, tile, elements);
#pragma unroll
    for (int i = 0; i < OWNED; ++i) elements[i] = Bits(elements[i] - base);
#pragma unroll
    for (int byte = 0; byte < int(sizeof(Bits)); ++byte) {
        if (8 * byte >= width) break;
        u32 words[8], planes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const Bits* four = elements + 4 * i;
            words[i] = low_bytes(u32(four[0] >> 8 * byte), u32(four[1] >> 8 * byte), u32(four[2] >> 8 * byte),
                                 u32(four[3] >> 8 * byte));
        }
        to_planes(words, planes);
#pragma unroll
        for (int b = 0; b < 8; ++b)
            if (8 * byte + b < width) plane_word(part, 8 * byte + b, tile.lane) = planes[b] & tile.valid;
    }
}

template <class T>
__device__ void intpack_decode(const Payload& payload, typename T::bits* __restrict__ dst, const Tile& tile) {
    using Bits = typename T::bits;
    if (!tile.exists()) return;
    const Bits base = Bits(payload.descriptors()[2 * tile.index]);
    const u64 place = payload.descriptors()[2 * tile.index + 1];
    const int width = int(place & 0xff);
    const u8* part = payload.part(place);
    Bits elements[OWNED];
#pragma unroll
    for (int i = 0; i < OWNED; ++i) elements[i] = base;
#pragma unroll
    for (int byte = 0; byte < int(sizeof(Bits)); ++byte) {
        if (8 * byte >= width) break;
        u32 planes[8], words[8];
#pragma unroll
        for (int b = 0; b < 8; ++b) planes[b] = 8 * byte + b < width ? plane_word(part, 8 * byte + b, tile.lane) : 0;
        from_planes(planes, words);
#pragma unroll
        for (int i = 0; i < OWNED; ++i) elements[i] = Bits(elements[i] + (Bits(byte_of(words, i)) << 8 * byte));
    }
    store_owned<T>(dst, tile, elements);
}

#define INTPACK_KERNELS(name, T)                                                                                      \
    extern "C" __global__ void intpack_measure_##name(const T::bits* src, u8* payload, i64 numel, const i64* count) { \
        const Tile tile(numel, count);                                                                                \
        intpack_measure<T>(src, {payload, tile.numel}, tile);                                                         \
    }                                                                                                                 \
    extern "C" __global__ void intpack_add_##name(u8* payload, i64 numel, const i64* count) {                         \
        add_chunk(Payload{payload, count ? *count : numel});                                                          \
    }                                                                                                                 \
    extern "C" __global__ void intpack_place_##name(u8* payload, i64 numel, const i64* count) {                       \
        place_chunk(Payload{payload, count ? *count : numel});                                                        \
    }                                                                                                                 \
    extern "C" __global__ void intpack_write_##name(const T::bits* src, u8* payload, i64 numel, const i64* count) {   \
        const Tile tile(numel, count);                                                                                \
        intpack_write<T>(src, {payload, tile.numel}, tile);                                                           \
    }                                                                                                                 \
    extern "C" __global__ void intpack_decode_##name(u8* payload, T::bits* dst, i64 numel, const i64* count) {        \
        const Tile tile(numel, count);                                                                                \
        intpack_decode<T>({payload, tile.numel}, dst, tile);                                                          \
    }

INTPACK_KERNELS(i8, Int8)
INTPACK_KERNELS(i16, Int16)
INTPACK_KERNELS(i32, Int32)
INTPACK_KERNELS(i64, Int64)
INTPACK_KERNELS(u8, UInt8)
