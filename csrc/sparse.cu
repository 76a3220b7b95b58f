// Sparse payloads: a mask bit per element and the kept elements, side by side. A warp owns a tile of 1024 elements, and
// lane `l` word `l` of its masks: elements 32 * l to 32 * l + 31. Format: sparse.md.
#include "common.cuh"

constexpr int TILE = 1024;
constexpr int WORDS = TILE / 32;
constexpr int WARPS = 8;       // of a block
constexpr int SCANNED = 2048;  // numbers that a block of 256 scans at once, 8 a thread

template <int NBYTES>
struct UnsignedOf {
    using type = u32;
};
template <>
struct UnsignedOf<8> {
    using type = u64;
};
template <int NBYTES>
using Unsigned = typename UnsignedOf<NBYTES>::type;

struct Tile {
    i64 numel, index, first;
    int lane;

    __device__ explicit Tile(i64 numel) : numel(numel), lane(int(threadIdx.x) & 31) {
        index = (i64(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
        first = index * TILE;
    }
    __device__ bool exists() const { return first < numel; }
    __device__ bool last() const { return first + TILE >= numel; }
};

// The sum of `value` over the lanes below, and over all lanes.
__device__ inline u32 sum_below(u32 value, int lane, u32* all) {
    u32 sum = value;
    for (int step = 1; step < 32; step <<= 1) {
        const u32 below = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += below;
    }
    *all = __shfl_sync(ALL_LANES, sum, 31);
    return sum - value;
}

// The 32 elements of a lane; 0 after the last element.
template <class T>
__device__ void load_word(const T* __restrict__ src, const Tile& tile, T* elements) {
    constexpr int PER_VECTOR = 16 / sizeof(T), BITS = 8 * sizeof(T);
    const i64 first = tile.first + tile.lane * 32;
    if (tile.first + TILE <= tile.numel && aligned16(src)) {
        const uint4* vectors = reinterpret_cast<const uint4*>(src + first);
#pragma unroll
        for (int v = 0; v < 32 / PER_VECTOR; ++v) {
            const uint4 loaded = vectors[v];
            const u64 halves[2] = {u64(loaded.y) << 32 | loaded.x, u64(loaded.w) << 32 | loaded.z};
#pragma unroll
            for (int i = 0; i < PER_VECTOR; ++i)
                elements[v * PER_VECTOR + i] = T(halves[i * BITS / 64] >> (i * BITS % 64));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) elements[i] = first + i < tile.numel ? src[first + i] : T(0);
    }
}

__device__ inline void store_mask(u32* __restrict__ masks, const Tile& tile, u32 mask) {
    const i64 words = ((tile.numel + 31) / 32 + 3) & ~i64(3), word = tile.index * WORDS + tile.lane;
    if (word < words) masks[word] = mask;
}

__device__ inline void store_start(u64* __restrict__ starts, const Tile& tile, u64 start) {
    if (tile.lane == 0) starts[tile.index] = start;
    if (tile.lane == 1 && tile.last() && tile.index % 2 == 0) starts[tile.index + 1] = 0;  // padding
}

// Writes the elements of a tile whose bits are set from values[start] on: word by word into shared memory, and from
// there whole vectors. Elements of 8 bytes go word by word, neighboring lanes to neighboring places.
template <class T>
__device__ void store_kept(const T* __restrict__ src, T* __restrict__ values, const Tile& tile, u32 mask, u64 start) {
    constexpr int PER_VECTOR = 16 / sizeof(T), ROOM = sizeof(T) < 8 ? TILE + PER_VECTOR : 1;
    __shared__ uint4 memory[WARPS][(ROOM + PER_VECTOR - 1) / PER_VECTOR];
    const u32 below = (1u << tile.lane) - 1;
    T *target = values + start, *kept = target;
    const int before = sizeof(T) < 8 ? int((reinterpret_cast<u64>(target) & 15) / sizeof(T)) : 0;
    T* staged = reinterpret_cast<T*>(memory[threadIdx.x / 32]);
    if (sizeof(T) < 8) kept = staged + before;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const u32 word = __shfl_sync(ALL_LANES, mask, w);
        if (word >> tile.lane & 1) kept[__popc(word & below)] = src[tile.first + w * 32 + tile.lane];
        kept += __popc(word);
    }
    if (sizeof(T) == 8) return;
    __syncwarp();
    const int end = int(kept - staged);
    target -= before;
    for (int at = tile.lane * PER_VECTOR; at < end; at += 32 * PER_VECTOR) {
        if (at >= before && at + PER_VECTOR <= end) {
            *reinterpret_cast<uint4*>(target + at) = *reinterpret_cast<const uint4*>(staged + at);
        } else {
            for (int i = max(at, before); i < min(at + PER_VECTOR, end); ++i) target[i] = staged[i];
        }
    }
}

// Masks of the elements that are not zero, and in the place of each start the number of bits that are set in its tile.
template <class T>
__device__ void mark(const T* __restrict__ src, u32* __restrict__ masks, u64* __restrict__ starts, i64 numel) {
    const Tile tile(numel);
    if (!tile.exists()) return;
    T elements[32];
    load_word(src, tile, elements);
    u32 mask = 0, count;
#pragma unroll
    for (int i = 0; i < 32; ++i) mask |= u32(elements[i] != 0) << i;
    store_mask(masks, tile, mask);
    sum_below(u32(__popc(mask)), tile.lane, &count);
    store_start(starts, tile, count);
}

// Block `b` turns `per_block` numbers into the sums of those before each in the block, and stores the sum of all.
extern "C" __global__ void sparse_scan(u64* numbers, u64* totals, i64 count, i64 per_block) {
    __shared__ u64 warp_sums[32];
    const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5, warps = int(blockDim.x) >> 5;
    constexpr int ROUNDS = SCANNED / 256;
    const i64 begin = i64(blockIdx.x) * per_block, end = min(begin + per_block, count);
    u64 total = 0;
    for (i64 base = begin; base < end; base += i64(ROUNDS) * blockDim.x) {
        const i64 first = base + i64(warp) * ROUNDS * 32 + lane;
        u64 loaded[ROUNDS], sums[ROUNDS], carried = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) loaded[i] = first + i * 32 < end ? numbers[first + i * 32] : 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            u64 sum = loaded[i];
            for (int step = 1; step < 32; step <<= 1) {
                const u64 below = __shfl_up_sync(ALL_LANES, sum, step);
                if (lane >= step) sum += below;
            }
            sums[i] = carried + sum - loaded[i];
            carried += __shfl_sync(ALL_LANES, sum, 31);
        }
        if (lane == 0) warp_sums[warp] = carried;
        __syncthreads();
        u64 before = total;
        for (int i = 0; i < warps; ++i) {
            if (i < warp) before += warp_sums[i];
            total += warp_sums[i];
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            if (first + i * 32 < end) numbers[first + i * 32] = before + sums[i];
        __syncthreads();  // before the next round writes the sums of the warps
    }
    if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// Adds to each start the number of kept elements before its `SCANNED` tiles, and writes the kept elements.
template <class T>
__device__ void compact(const T* __restrict__ src, const u32* __restrict__ masks, u64* __restrict__ starts,
                        const u64* __restrict__ before, T* __restrict__ values, i64 numel) {
    const Tile tile(numel);
    if (!tile.exists()) return;
    const i64 word = tile.index * WORDS + tile.lane;
    const u32 mask = word * 32 < numel ? masks[word] : 0;
    const u64 start = starts[tile.index] + before[tile.index / SCANNED];
    __syncwarp();  // all lanes have read the start
    store_start(starts, tile, start);
    store_kept(src, values, tile, mask, start);
}

// A lane writes a word of neighboring elements at once, and reads those of several before.
template <class T, bool FULL>
__device__ void expand_tile(const T* __restrict__ values, T* __restrict__ dst, const Tile& tile, u32 mask) {
    constexpr int PER_WORD = sizeof(T) < 4 ? 4 / sizeof(T) : 1, AHEAD = 8 / PER_WORD;
    using Word = Unsigned<PER_WORD * sizeof(T)>;
    u32 all;
    const u32 sum = sum_below(u32(__popc(mask)), tile.lane, &all);
#pragma unroll
    for (int first = 0; first < WORDS / PER_WORD; first += AHEAD) {
        Word words[AHEAD];
#pragma unroll
        for (int w = 0; w < AHEAD; ++w) {
            const int at = ((first + w) * 32 + tile.lane) * PER_WORD, bit = at % 32;
            const u32 word = __shfl_sync(ALL_LANES, mask, at / 32);
            const T* kept = values + __shfl_sync(ALL_LANES, sum, at / 32) + __popc(word & ((1u << bit) - 1));
            words[w] = 0;
#pragma unroll
            for (int i = 0; i < PER_WORD; ++i)
                if (word >> (bit + i) & 1) words[w] |= Word(*kept++) << (i * 8 * sizeof(T) % 64);
        }
#pragma unroll
        for (int w = 0; w < AHEAD; ++w) {
            const i64 at = tile.first + ((first + w) * 32 + tile.lane) * PER_WORD;
            if (FULL) {
                *reinterpret_cast<Word*>(dst + at) = words[w];
            } else {
#pragma unroll
                for (int i = 0; i < PER_WORD; ++i)
                    if (at + i < tile.numel) dst[at + i] = T(words[w] >> (i * 8 * sizeof(T) % 64));
            }
        }
    }
}

template <class T>
__device__ void expand(const u32* __restrict__ masks, const u64* __restrict__ starts, const T* __restrict__ values,
                       T* __restrict__ dst, i64 numel) {
    const Tile tile(numel);
    if (!tile.exists()) return;
    const i64 own = tile.index * WORDS + tile.lane;
    const u32 mask = own * 32 < numel ? masks[own] : 0;
    const T* kept = values + starts[tile.index];
    if (tile.first + TILE <= numel && (reinterpret_cast<u64>(dst) & 3) == 0)
        expand_tile<T, true>(kept, dst, tile, mask);
    else
        expand_tile<T, false>(kept, dst, tile, mask);
}

// Writes a tile of a payload whose number of elements is known: `keep` of a full tile, `keep_last` of a short one.
template <class T>
__device__ void store_tile(const T* __restrict__ src, u64* __restrict__ header, u32* __restrict__ masks,
                           u64* __restrict__ starts, T* __restrict__ values, const Tile& tile, u32 mask, i64 keep,
                           i64 keep_last, i64 length) {
    const i64 left = tile.numel - tile.first - tile.lane * 32;
    if (left < 32) mask &= left > 0 ? (1u << left) - 1 : 0;
    const u64 start = u64(tile.index * keep);
    store_mask(masks, tile, mask);
    store_start(starts, tile, start);
    store_kept(src, values, tile, mask, start);
    if (tile.index == 0 && tile.lane == 0) {
        header[0] = u64(length);
        header[1] = u64(tile.numel / TILE * keep + keep_last);
    }
}

// The magnitudes of a lane's elements, as bits.
template <class T>
__device__ void load_magnitudes(const T* __restrict__ src, const Tile& tile, T* magnitudes) {
    load_word(src, tile, magnitudes);
#pragma unroll
    for (int i = 0; i < 32; ++i) magnitudes[i] &= T(T(~T(0)) >> 1);
}

// Keeps the largest magnitudes of each tile: above a threshold found bit by bit, and of those at it the first.
template <class T>
__device__ void top(const T* __restrict__ src, u64* __restrict__ header, u32* __restrict__ masks,
                    u64* __restrict__ starts, T* __restrict__ values, i64 numel, i64 keep, i64 keep_last, i64 length) {
    const Tile tile(numel);
    if (!tile.exists()) return;
    T magnitudes[32];
    load_magnitudes(src, tile, magnitudes);
    u32 missing = u32(tile.first + TILE > numel ? keep_last : keep), threshold = 0;
    for (u32 bit = 1u << (8 * sizeof(T) - 2); bit; bit >>= 1) {
        u32 count = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) count += magnitudes[i] >= (threshold | bit);
        for (int lane = 1; lane < 32; lane <<= 1) count += __shfl_xor_sync(ALL_LANES, count, lane);
        if (count >= missing) threshold |= bit;
    }
    u32 mask = 0, ties = 0, above, all;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        mask |= u32(magnitudes[i] > threshold) << i;
        ties |= u32(magnitudes[i] == threshold) << i;
    }
    sum_below(u32(__popc(mask)), tile.lane, &above);
    missing -= above;
    for (u32 taken = sum_below(u32(__popc(ties)), tile.lane, &all); ties && taken < missing; ++taken) {
        mask |= ties & (0u - ties);
        ties &= ties - 1;
    }
    store_tile(src, header, masks, starts, values, tile, mask, keep, keep_last, length);
}

// Keeps the `n` largest magnitudes of each M elements: those that fewer than `n` elements come before.
template <class T, int M>
__device__ void nm(const T* __restrict__ src, u64* __restrict__ header, u32* __restrict__ masks,
                   u64* __restrict__ starts, T* __restrict__ values, i64 numel, i64 n, i64 keep_last, i64 length) {
    const Tile tile(numel);
    if (!tile.exists()) return;
    T magnitudes[32];
    load_magnitudes(src, tile, magnitudes);
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        int larger = 0;
#pragma unroll
        for (int j = i / M * M; j < i; ++j) larger += magnitudes[j] >= magnitudes[i];
#pragma unroll
        for (int j = i + 1; j < (i / M + 1) * M; ++j) larger += magnitudes[j] > magnitudes[i];
        mask |= u32(larger < int(n)) << i;
    }
    store_tile(src, header, masks, starts, values, tile, mask, TILE / M * n, keep_last, length);
}

// The length of a payload with `head` bytes before the inner payload. The length of the inner payload is its own first
// word, or, by `table`, its codec's size for the number of kept elements, which the header holds.
extern "C" __global__ void sparse_length(u64* header, const u64* inner, const u32* table, i64 head, i64 period,
                                         i64 step) {
    if (blockIdx.x || threadIdx.x) return;
    const i64 count = i64(header[1]);
    u64 nbytes = 0;
    if (table)
        nbytes = u64(count / period * step) + table[count % period];
    else if (count)
        nbytes = inner[0];
    header[0] = u64(head) + nbytes;
}

#define SPARSE_KERNELS(name, T)                                                                                      \
    extern "C" __global__ void sparse_mark_##name(const T* src, u32* masks, u64* starts, i64 numel) {                \
        mark(src, masks, starts, numel);                                                                             \
    }                                                                                                                \
    extern "C" __global__ void sparse_compact_##name(const T* src, const u32* masks, u64* starts, const u64* before, \
                                                     T* values, i64 numel) {                                         \
        compact(src, masks, starts, before, values, numel);                                                          \
    }                                                                                                                \
    extern "C" __global__ void sparse_expand_##name(const u32* masks, const u64* starts, const T* values, T* dst,    \
                                                    i64 numel) {                                                     \
        expand(masks, starts, values, dst, numel);                                                                   \
    }
#define TOP_KERNEL(name, T)                                                                                     \
    extern "C" __global__ void sparse_top_##name(const T* src, u64* header, u32* masks, u64* starts, T* values, \
                                                 i64 numel, i64 keep, i64 keep_last, i64 length) {              \
        top(src, header, masks, starts, values, numel, keep, keep_last, length);                                \
    }
#define NM_KERNEL(name, T, M)                                                                                       \
    extern "C" __global__ void sparse_nm##M##_##name(const T* src, u64* header, u32* masks, u64* starts, T* values, \
                                                     i64 numel, i64 n, i64 keep_last, i64 length) {                 \
        nm<T, M>(src, header, masks, starts, values, numel, n, keep_last, length);                                  \
    }
#define LARGEST_KERNELS(name, T) \
    TOP_KERNEL(name, T)          \
    NM_KERNEL(name, T, 4)        \
    NM_KERNEL(name, T, 8)        \
    NM_KERNEL(name, T, 16)       \
    NM_KERNEL(name, T, 32)

SPARSE_KERNELS(1, u8)
SPARSE_KERNELS(2, u16)
SPARSE_KERNELS(4, u32)
SPARSE_KERNELS(8, u64)
LARGEST_KERNELS(2, u16)
LARGEST_KERNELS(4, u32)
