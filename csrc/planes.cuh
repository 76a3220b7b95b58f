#pragma once
// Tiles of 1024 elements as bit planes. A warp owns a tile, a lane 32 neighboring elements: 8 words of 4 bytes, or,
// transposed, 8 planes, whose bit `i` belongs to element `i`. All lanes of a tile that exists stay to the end.
#include "common.cuh"

constexpr int TILE = 1024;
constexpr int LANES = 32;
constexpr int OWNED = TILE / LANES;
constexpr int PLANE_NBYTES = TILE / 8;
constexpr int PLANE_UNITS = PLANE_NBYTES / 16;
constexpr int HEADER_NBYTES = 16;
constexpr int CHUNK = 1024;  // tiles whose lengths one block adds
constexpr int WARPS = 8;     // of a block

struct Tile {
    i64 numel, index, first;  // of the tensor, of the tile, of the lane
    int lane, owned;
    u32 valid;  // a bit for each of the lane's elements that exists

    // `count`, where it is not null, holds the number of elements, at most `most`.
    __device__ Tile(i64 most, const i64* count) : numel(count ? *count : most) {
        const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x;
        index = thread / LANES;
        lane = int(thread % LANES);
        first = thread * OWNED;
        const i64 rest = numel - first;
        owned = rest >= OWNED ? OWNED : rest > 0 ? int(rest) : 0;
        valid = owned == OWNED ? ~0u : (1u << owned) - 1;
    }
    __device__ bool exists() const { return index * TILE < numel; }
    __device__ bool whole() const { return (index + 1) * TILE <= numel; }
    __device__ int count() const { return int(min(i64(TILE), numel - index * TILE)); }
};

// Writes a whole tile of `WORDS` words a lane. They cross the warp in shared memory, so that neighboring lanes write
// neighboring vectors, 128 bytes and more.
template <int WORDS>
__device__ void store_tile(void* tile, const u32* words, int lane) {
    constexpr int VECTORS = WORDS / 4, AT_ONCE = VECTORS < 8 ? VECTORS : 8;  // of a lane
    __shared__ uint4 memory[WARPS][LANES * AT_ONCE];
    uint4* staged = memory[threadIdx.x / LANES];
#pragma unroll
    for (int first = 0; first < VECTORS; first += AT_ONCE) {
        if (first) __syncwarp();  // all lanes have read those before
#pragma unroll
        for (int v = 0; v < AT_ONCE; ++v) {
            const int at = lane * AT_ONCE + v;
            const u32* four = words + 4 * (first + v);
            staged[at ^ (at / 8 & 7)] = make_uint4(four[0], four[1], four[2], four[3]);  // no two lanes in one bank
        }
        __syncwarp();
#pragma unroll
        for (int v = 0; v < AT_ONCE; ++v) {
            const int at = v * LANES + lane;
            reinterpret_cast<uint4*>(tile)[at / AT_ONCE * VECTORS + first + at % AT_ONCE] = staged[at ^ (at / 8 & 7)];
        }
    }
}

__device__ inline i64 tiles_of(i64 numel) { return (numel + TILE - 1) / TILE; }

// 4x4 bytes: byte `j` of word `i` to byte `i` of word `j`.
__device__ inline void transpose4(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab = __byte_perm(a, b, 0x5140), ab2 = __byte_perm(a, b, 0x7362);
    const u32 cd = __byte_perm(c, d, 0x5140), cd2 = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab, cd, 0x5410), b = __byte_perm(ab, cd, 0x7632);
    c = __byte_perm(ab2, cd2, 0x5410), d = __byte_perm(ab2, cd2, 0x7632);
}

// Bit `j` of byte `m` of word `i` to bit `i` of byte `m` of word `j`.
__device__ inline void transpose8(u32* words) {
#pragma unroll
    for (int log2_step = 2; log2_step >= 0; --log2_step) {
        const int step = 1 << log2_step;
        const u32 mask = step == 4 ? 0x0f0f0f0fu : step == 2 ? 0x33333333u : 0x55555555u;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i & step) continue;
            const u32 swapped = (words[i] >> step ^ words[i + step]) & mask;
            words[i + step] ^= swapped;
            words[i] ^= swapped << step;
        }
    }
}

// Byte `i % 4` of word `i / 4` is number `i`; bit `i` of plane `b` is bit `b` of number `i`.
__device__ inline void to_planes(const u32* words, u32* planes) {
#pragma unroll
    for (int i = 0; i < 8; ++i) planes[i] = words[i % 4 * 2 + i / 4];
    transpose4(planes[0], planes[1], planes[2], planes[3]);
    transpose4(planes[4], planes[5], planes[6], planes[7]);
    transpose8(planes);
}

__device__ inline void from_planes(u32* planes, u32* words) {
    transpose8(planes);
    transpose4(planes[0], planes[1], planes[2], planes[3]);
    transpose4(planes[4], planes[5], planes[6], planes[7]);
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i % 4 * 2 + i / 4] = planes[i];
}

__device__ inline u32 byte_of(const u32* words, int index) { return words[index / 4] >> (index % 4 * 8) & 0xff; }

// The lane's word of plane `bit`, in the part of a tile.
__device__ inline u32& plane_word(u8* part, int bit, int lane) {
    return reinterpret_cast<u32*>(part + bit * PLANE_NBYTES)[lane];
}
__device__ inline u32 plane_word(const u8* part, int bit, int lane) {
    return reinterpret_cast<const u32*>(part + bit * PLANE_NBYTES)[lane];
}

template <class T>
__device__ T warp_sum(T value) {
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(ALL_LANES, value, lane);
    return value;
}

// The sum of the values of this lane and those before it.
template <class T>
__device__ T warp_scan(T value, int lane) {
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        const T before = __shfl_up_sync(ALL_LANES, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

// The sum of the values of the threads before this one; `total` is that of all. Synchronizes the block on both sides.
__device__ inline u64 block_scan(u64 value, u64& total) {
    __shared__ u64 sums[WARPS];
    const int warp = int(threadIdx.x) / LANES, lane = int(threadIdx.x) % LANES;
    const u64 scanned = warp_scan(value, lane);
    __syncthreads();
    if (lane == LANES - 1) sums[warp] = scanned;
    __syncthreads();
    u64 before = scanned - value;
    total = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before;
}

// The lengths of the tiles become offsets in three launches: each block adds those of its chunk; each block adds the
// sums of the chunks before its own and scans its chunk; then the tiles are written. The sums use the memory of the
// tiles' parts, which are written later. A format F has `units(tile)`, `place(tile, offset)`, `sums()`, `end(total)`.
template <class F>
__device__ void add_chunk(const F& format) {
    const i64 tiles = tiles_of(format.numel), first = i64(blockIdx.x) * CHUNK;
    if (first >= tiles) return;
    u64 sum = 0;
    for (i64 tile = first + threadIdx.x; tile < min(first + CHUNK, tiles); tile += blockDim.x)
        sum += format.units(tile);
    u64 total;
    block_scan(sum, total);
    if (threadIdx.x == 0) format.sums()[blockIdx.x] = total;
}

template <class F>
__device__ void place_chunk(const F& format) {
    const i64 tiles = tiles_of(format.numel), first = i64(blockIdx.x) * CHUNK;
    if (blockIdx.x == 0 && threadIdx.x == 0 && tiles == 0) format.end(0);
    if (first >= tiles) return;
    u64 sum = 0, offset;
    for (i64 chunk = threadIdx.x; chunk < blockIdx.x; chunk += blockDim.x) sum += format.sums()[chunk];
    block_scan(sum, offset);
    for (i64 start = first; start < min(first + CHUNK, tiles); start += blockDim.x) {
        const i64 tile = start + threadIdx.x;
        u64 total;
        const u64 before = block_scan(tile < tiles ? format.units(tile) : 0, total);
        if (tile < tiles) format.place(tile, offset + before);
        offset += total;
    }
    if (first + CHUNK >= tiles && threadIdx.x == 0) format.end(offset);
}
