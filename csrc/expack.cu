// expack: sign and mantissa as they are, exponents in windows. Format: expack.md.
#include "expack.cuh"

constexpr int FAR = 31;  // exponents this much below the largest of their tile are in no window

// `a - b` modulo 256, for 32 bytes as planes.
__device__ inline void subtract(const u32* a, const u32* b, u32* difference) {
    u32 borrow = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 bit = a[i] ^ b[i] ^ borrow;
        borrow = (~a[i] & (b[i] | borrow)) | (b[i] & borrow);
        difference[i] = bit;
    }
}

// 32 times the same byte as planes.
__device__ inline void repeat(u32 byte, u32* planes) {
#pragma unroll
    for (int i = 0; i < 8; ++i) planes[i] = 0u - (byte >> i & 1);
}

// The largest of the exponents that exist in a tile.
template <int BITS>
__device__ u32 find_top(const u32* planes, u32 valid) {
    u32 top = 0;
#pragma unroll
    for (int b = BITS - 1; b >= 0; --b) {
        const bool any = __any_sync(ALL_LANES, (planes[b] & valid) != 0);
        if (any) valid &= planes[b], top |= 1u << b;
    }
    return top;
}

// The number of the tile's exponents that are `lane` below the top, for the lanes below FAR.
__device__ inline int histogram(const u32* below, u32 valid, int lane) {
    u32 bins[32];
    bins[0] = valid & ~(below[5] | below[6] | below[7]);
#pragma unroll
    for (int b = 0; b < 5; ++b) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i >= 1 << b) continue;
            bins[i | 1 << b] = bins[i] & below[b];
            bins[i] &= ~below[b];
        }
    }
    u32 counts[16];  // of bins `i` and, in the upper half, `i + 16`
#pragma unroll
    for (int i = 0; i < 16; ++i) counts[i] = u32(__popc(bins[i])) | u32(__popc(bins[i + 16])) << 16;
#pragma unroll
    for (int log2_step = 3; log2_step >= 0; --log2_step) {
        const int step = 1 << log2_step;
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= step) continue;
            const u32 sent = __shfl_xor_sync(ALL_LANES, upper ? counts[i] : counts[i + step], step);
            counts[i] = (upper ? counts[i + step] : counts[i]) + sent;
        }
    }
    const u32 both = counts[0] + __shfl_xor_sync(ALL_LANES, counts[0], 16);
    return int(lane & 16 ? both >> 16 : both & 0xffff);
}

// The cheapest window: bytes << 16 | zero << 15 | width << 8 | the distance of its end to the top, which is the lane.
template <int BITS>
__device__ u32 best_window(int found, int zeros, int top, int count, int lane) {
    constexpr int WIDEST = BITS - 1 < 5 ? BITS - 1 : 5;
    const int up_to = warp_scan(found, lane);
    u32 best = u32(BITS * PLANE_NBYTES) << 16;
#pragma unroll
    for (int zero = 0; zero < 2; ++zero) {
#pragma unroll
        for (int width = 1; width <= WIDEST; ++width) {
            const int size = (1 << width) - 1 - zero;
            const int end = __shfl_sync(ALL_LANES, up_to, (lane + size - 1) & 31);
            const int inside = size ? end - up_to + found : 0;
            const int cost = width * PLANE_NBYTES + count - inside - (zero ? zeros : 0);
            if (lane + size <= FAR && (!zero || (zeros && lane + size <= top)))
                best = min(best, u32(cost) << 16 | u32(zero << 15 | width << 8 | lane));
        }
    }
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) best = min(best, __shfl_xor_sync(ALL_LANES, best, other));
    return best;
}

template <class T>
__device__ void expack_measure(const typename T::bits* __restrict__ src, const PayloadOf<T>& payload,
                               const Tile& tile) {
    if (!tile.exists()) return;
    u32 upper[PAIRS], lower[PAIRS], words[8], planes[8], tops[8], below[8];
    load_pairs<T>(src, tile, upper, lower);
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = T::exponents(upper[2 * i], upper[2 * i + 1]);
    to_planes(words, planes);
    const u32 top = find_top<T::BITS>(planes, tile.valid);
    repeat(top, tops);
    subtract(tops, planes, below);
    u32 set = 0;
#pragma unroll
    for (int b = 0; b < T::BITS; ++b) set |= planes[b];
    const int zeros = warp_sum(__popc(~set & tile.valid)), count = tile.count();
    const int found = histogram(below, tile.valid, tile.lane);
    const u32 best = best_window<T::BITS>(found, zeros, int(top), count, tile.lane);
    const int at_top = __shfl_sync(ALL_LANES, found, 0);
    if (tile.lane != 0) return;
    const int cost = int(best >> 16), width = int(best >> 8 & 127);
    Descriptor descriptor =
        Descriptor::of(top - (best & 255) - (1u << width) + 2, width, best >> 15 & 1, cost - width * PLANE_NBYTES);
    if (cost == T::BITS * PLANE_NBYTES) descriptor = Descriptor::of(0, T::BITS, false, 0);
    if (at_top == count) descriptor = Descriptor::of(top, 0, false, 0);
    payload.descriptors()[tile.index] = descriptor.word;
}

// Writes the exponents that are in no window after the planes, with zeros up to a multiple of 16 bytes.
__device__ inline void write_escapes(u8* escapes, const u32* words, u32 escaped, int lane) {
    const int mine = __popc(escaped), up_to = warp_scan(mine, lane);
    u8* next = escapes + up_to - mine;
    if (escaped) {
#pragma unroll
        for (int i = 0; i < OWNED; ++i)
            if (escaped >> i & 1) *next++ = u8(byte_of(words, i));
    }
    const int total = __shfl_sync(ALL_LANES, up_to, LANES - 1);
    if (total + lane < round_up16(total)) escapes[total + lane] = 0;
}

template <class T>
__device__ void expack_write(const typename T::bits* __restrict__ src, const PayloadOf<T>& payload, const Tile& tile) {
    if (!tile.exists()) return;
    u32 upper[PAIRS], lower[PAIRS], words[8], planes[8], bases[8], codes[8];
    load_pairs<T>(src, tile, upper, lower);
    if (sizeof(typename T::bits) == 4)
        store_section<PAIRS>(payload.start + payload.halves(), tile.first, tile.numel, lower);
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = T::low(upper[2 * i], upper[2 * i + 1]);
    store_section<8>(payload.start + payload.low(), tile.first, tile.numel, words);

    const Descriptor descriptor{payload.descriptors()[tile.index]};
    u8* part = payload.part(descriptor);
    if (T::PLANES) {
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i] = T::rest(upper[2 * i], upper[2 * i + 1]);
        to_planes(words, planes);
#pragma unroll
        for (int b = 0; b < T::PLANES; ++b) plane_word(part, b, tile.lane) = planes[b];
        part += T::PLANES * PLANE_NBYTES;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = T::exponents(upper[2 * i], upper[2 * i + 1]);
    to_planes(words, planes);
    repeat(descriptor.base(), bases);
    subtract(planes, bases, codes);

    const int width = descriptor.width();
    u32 set = 0, code_set = 0, high = 0, full = ~0u;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        set |= planes[b];
        code_set |= codes[b];
        if (b < width) full &= codes[b];
        if (b >= width) high |= codes[b];
    }
    const u32 coded = descriptor.zero() ? ~0u : 0u, zeros = ~set & coded;
    u32 escaped = descriptor.escapes() ? (high | full | (~code_set & coded)) & ~zeros & tile.valid : 0;
#pragma unroll
    for (int b = 0; b < T::BITS; ++b)
        if (b < width) plane_word(part, b, tile.lane) = ((codes[b] & ~zeros) | escaped) & tile.valid;
    if (descriptor.escapes()) write_escapes(part + width * PLANE_NBYTES, words, escaped, tile.lane);
}

__device__ inline void read_escapes(const u8* escapes, u32* words, u32 escaped, int lane) {
    const int mine = __popc(escaped);
    const u8* next = escapes + warp_scan(mine, lane) - mine;
    if (!escaped) return;
#pragma unroll
    for (int i = 0; i < OWNED; ++i)
        if (escaped >> i & 1) words[i / 4] = (words[i / 4] & ~(0xffu << (i % 4 * 8))) | u32(*next++) << (i % 4 * 8);
}

template <class T>
__device__ void expack_decode(const PayloadOf<T>& payload, typename T::bits* __restrict__ dst, const Tile& tile) {
    if (!tile.exists()) return;
    const Descriptor descriptor{payload.descriptors()[tile.index]};
    const int width = descriptor.width();
    const u8* part = payload.part(descriptor);
    u32 planes[8] = {}, rest[8] = {}, codes[8] = {}, words[8], low[8], upper[PAIRS], lower[PAIRS] = {};
    if (T::PLANES) {
#pragma unroll
        for (int b = 0; b < T::PLANES; ++b) planes[b] = plane_word(part, b, tile.lane);
        from_planes(planes, rest);
        part += T::PLANES * PLANE_NBYTES;
    }
    u32 escaped = descriptor.escapes() ? ~0u : 0, set = 0;
#pragma unroll
    for (int b = 0; b < T::BITS; ++b) {
        if (b >= width) continue;
        codes[b] = plane_word(part, b, tile.lane);
        escaped &= codes[b];
        set |= codes[b];
    }
    const u32 zeros = descriptor.zero() ? ~set : 0;
    u32 carry = 0;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        const u32 base = 0u - (descriptor.base() >> b & 1);
        planes[b] = (codes[b] ^ base ^ carry) & ~zeros;
        carry = (codes[b] & base) | (carry & (codes[b] | base));
    }
    from_planes(planes, words);
    if (descriptor.escapes()) read_escapes(part + width * PLANE_NBYTES, words, escaped, tile.lane);

    load_section<8>(payload.start + payload.low(), tile.first, tile.numel, low);
    if (sizeof(typename T::bits) == 4)
        load_section<PAIRS>(payload.start + payload.halves(), tile.first, tile.numel, lower);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int selector = i % 2 ? 0x4342 : 0x4140;
        upper[i] = T::pair(__byte_perm(words[i / 2], 0, selector), __byte_perm(low[i / 2], 0, selector),
                           __byte_perm(rest[i / 2], 0, selector));
    }
    store_pairs<T>(dst, tile, upper, lower);
}

#define EXPACK_KERNELS(name, T)                                                                                      \
    extern "C" __global__ void expack_measure_##name(const T::bits* src, u8* payload, i64 numel, const i64* count) { \
        const Tile tile(numel, count);                                                                               \
        expack_measure<T>(src, {payload, tile.numel}, tile);                                                         \
    }                                                                                                                \
    extern "C" __global__ void expack_add_##name(u8* payload, i64 numel, const i64* count) {                         \
        add_chunk(PayloadOf<T>{payload, count ? *count : numel});                                                    \
    }                                                                                                                \
    extern "C" __global__ void expack_place_##name(u8* payload, i64 numel, const i64* count) {                       \
        place_chunk(PayloadOf<T>{payload, count ? *count : numel});                                                  \
    }                                                                                                                \
    extern "C" __global__ void expack_write_##name(const T::bits* src, u8* payload, i64 numel, const i64* count) {   \
        const Tile tile(numel, count);                                                                               \
        expack_write<T>(src, {payload, tile.numel}, tile);                                                           \
    }                                                                                                                \
    extern "C" __global__ void expack_decode_##name(u8* payload, T::bits* dst, i64 numel, const i64* count) {        \
        const Tile tile(numel, count);                                                                               \
        expack_decode<T>({payload, tile.numel}, dst, tile);                                                          \
    }

EXPACK_KERNELS(f32, Float32)
EXPACK_KERNELS(f16, Half)
EXPACK_KERNELS(bf16, Bf16)
