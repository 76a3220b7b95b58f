// int8 whose groups run along the rows of a column. Format: int8_token.md.
#include "int8.cuh"
#include "philox.cuh"

constexpr int THREADS = 256;
constexpr int BLOCK_COLUMNS = 64;
constexpr int COLUMNS = 8;  // neighboring columns of a thread that encodes
constexpr int COLUMN_LANES = BLOCK_COLUMNS / COLUMNS;
constexpr int SLOTS = THREADS / COLUMN_LANES;
constexpr int ROWS = OWNED / COLUMNS;  // rows of a thread in registers
constexpr int WARPS = 8;
constexpr i64 CHUNK = i64(SLOTS) * ROWS;  // rows of a block in registers

// The work of a block of threads: 64 columns of one group of rows. Each thread owns COLUMNS neighboring columns of
// rows slot, slot + SLOTS, ...
template <int COLUMNS>
struct Tile {
    static constexpr int COLUMN_LANES = BLOCK_COLUMNS / COLUMNS;  // threads that share a row
    static constexpr int SLOTS = THREADS / COLUMN_LANES;          // rows of the block at once
    i64 columns, first, end, column, scale;
    int slot, count;  // `count` of the columns exist
    bool wide;        // all of them exist, at multiples of COLUMNS
    __device__ Tile(i64 numel, i64 group, i64 all_columns) : columns(all_columns) {
        const i64 parts = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
        const i64 index = i64(blockIdx.x) / parts;
        column = (i64(blockIdx.x) % parts) * BLOCK_COLUMNS + threadIdx.x % COLUMN_LANES * COLUMNS;
        slot = int(threadIdx.x) / COLUMN_LANES;
        first = index * group;
        end = min(first + group, numel / columns);
        scale = index * columns + column;
        count = int(max(min(columns - column, i64(COLUMNS)), i64(0)));
        wide = columns % COLUMNS == 0 && count == COLUMNS;
    }
    __device__ i64 row(i64 chunk, int index) const { return first + chunk * CHUNK + index * SLOTS + slot; }
};

// The random bytes of elements `at` to `at + 7`.
__device__ inline u64 noise_bytes(i64 at, u64 key) {
    const int shift = int(at % 8) * 8;
    const Noise near(u64(at) / 16, key);
    const u64 halves[2] = {u64(near.words[1]) << 32 | near.words[0], u64(near.words[3]) << 32 | near.words[2]};
    u64 low = halves[0], high = halves[1];
    if (at % 16 >= 8) {
        low = halves[1];
        if (shift) {
            const Noise next(u64(at) / 16 + 1, key);
            high = u64(next.words[1]) << 32 | next.words[0];
        }
    }
    return shift ? low >> shift | high << (64 - shift) : low;
}

__device__ inline float noise_at(u64 bytes, int i) { return noise_offset(u32(bytes >> (i / 4 * 32)), i % 4); }

// 8 elements of a row; 0 after the last element.
template <class T>
__device__ void load_columns(const typename T::bits* __restrict__ src, const Tile<COLUMNS>& tile, bool wide,
                             float* values) {
    constexpr int PER_WORD = 4 / sizeof(typename T::bits);
    if (wide) {
        const uint4* vectors = reinterpret_cast<const uint4*>(src);
#pragma unroll
        for (int v = 0; v < 2 / PER_WORD; ++v) {
            const uint4 loaded = vectors[v];
            const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
            for (int i = 0; i < 4 * PER_WORD; ++i)
                values[v * 4 + i] = T::widen(typename T::bits(words[i / PER_WORD] >> (i % PER_WORD * 16)));
        }
    } else {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) values[i] = i < tile.count ? T::widen(src[i]) : 0.0f;
    }
}

// The elements of a thread in `CHUNK` rows: 0 after the last row or column, and for elements that are not finite, with
// a bit for each of the latter.
template <class T>
__device__ u32 load_rows(const typename T::bits* __restrict__ src, const Tile<COLUMNS>& tile, i64 chunk, bool wide,
                         float* values) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        const i64 row = tile.row(chunk, k);
        if (row < tile.end) {
            load_columns<T>(src + row * tile.columns + tile.column, tile, wide, values + k * COLUMNS);
        } else {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) values[k * COLUMNS + i] = 0.0f;
        }
    }
    u32 missing = 0;
    if (top_magnitude(values) >= INF) {
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            missing |= u32(!is_finite(values[i])) << i;
            if (!is_finite(values[i])) values[i] = 0.0f;
        }
    }
    return missing;
}

template <class T, bool NOISE, bool KEEP>
__device__ void int8_token_encode(const typename T::bits* __restrict__ src, u8* __restrict__ payload, i64 numel,
                                  u64 key, i64 group, const Tile<COLUMNS>& tile) {
    __shared__ u32 maxima[WARPS][BLOCK_COLUMNS];
    __shared__ float reciprocals[BLOCK_COLUMNS];
    const bool wide_load = tile.wide && aligned16(src);
    const i64 chunks = (group + CHUNK - 1) / CHUNK;
    const int thread = int(threadIdx.x), lane = thread % COLUMN_LANES;

    float values[OWNED];
    u32 missing = 0, tops[COLUMNS] = {};
    for (i64 chunk = 0; chunk < chunks; ++chunk) {
        missing = load_rows<T>(src, tile, chunk, wide_load, values);
#pragma unroll
        for (int i = 0; i < OWNED; ++i) tops[i % COLUMNS] = max(tops[i % COLUMNS], __float_as_uint(values[i]) & ~SIGN);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        for (int flip = COLUMN_LANES; flip < 32; flip *= 2)
            tops[i] = max(tops[i], __shfl_xor_sync(ALL_LANES, tops[i], flip));
        if (thread % 32 < COLUMN_LANES) maxima[thread / 32][lane * COLUMNS + i] = tops[i];
    }
    __syncthreads();
    const i64 scales = round_up16(numel);
    if (thread < BLOCK_COLUMNS) {
        u32 top = 0;
        for (int warp = 0; warp < WARPS; ++warp) top = max(top, maxima[warp][thread]);
        const Int8Scale<KEEP> scale(top);
        reciprocals[thread] = scale.reciprocal;
        const i64 offset = thread - lane * COLUMNS;  // from the first column of this thread
        if (tile.column + offset < tile.columns)
            reinterpret_cast<u16*>(payload + scales)[tile.scale + offset] = u16(scale.stored);
    }
    if (blockIdx.x == 0 && thread < scales - numel) payload[numel + thread] = 0;
    __syncthreads();

    for (i64 chunk = chunks - 1; chunk >= 0; --chunk) {  // the last one is still in registers
        if (chunk < chunks - 1) missing = load_rows<T>(src, tile, chunk, wide_load, values);
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const i64 row = tile.row(chunk, k), at = row * tile.columns + tile.column;
            if (row >= tile.end || tile.count == 0) continue;
            const u64 noise = NOISE ? noise_bytes(at, key) : 0;
            u32 bits[COLUMNS];
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                const float value = values[k * COLUMNS + i];
                float steps = __fmul_rn(value, reciprocals[lane * COLUMNS + i]);
                if (NOISE) steps = __fadd_rn(steps, noise_at(noise, i));
                bits[i] = missing >> (k * COLUMNS + i) & 1 ? NOT_FINITE : int8_nearest<KEEP>(value, steps);
            }
            if (tile.wide) {
                *reinterpret_cast<uint2*>(payload + at) = make_uint2(low_bytes(bits[0], bits[1], bits[2], bits[3]),
                                                                     low_bytes(bits[4], bits[5], bits[6], bits[7]));
            } else {
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i)
                    if (i < tile.count) payload[at + i] = u8(bits[i]);
            }
        }
    }
}

// A row's elements of a thread are one vector of 16 bytes, with WIDE a whole one.
template <class T, bool DITHER, bool KEEP, bool WIDE, int COLUMNS>
__device__ void decode_rows(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, u64 key, i64 rows,
                            const Tile<COLUMNS>& tile, const float* scales) {
    constexpr int AHEAD = 4;  // rows that are read before the first is written
    for (i64 start = tile.slot; start < rows; start += AHEAD * tile.SLOTS) {
        u32 codes[AHEAD][COLUMNS / 4] = {};
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const i64 at = (tile.first + start + k * tile.SLOTS) * tile.columns + tile.column;
            if (start + k * tile.SLOTS >= rows) continue;
            if (WIDE) {
#pragma unroll
                for (int i = 0; i < COLUMNS / 4; ++i) codes[k][i] = reinterpret_cast<const u32*>(payload + at)[i];
            } else {
                u64 bytes = 0;
#pragma unroll 1
                for (int i = 0; i < tile.count; ++i) bytes |= u64(payload[at + i]) << (i * 8);
                codes[k][0] = u32(bytes);
                if constexpr (COLUMNS == 8) codes[k][1] = u32(bytes >> 32);
            }
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const i64 at = (tile.first + start + k * tile.SLOTS) * tile.columns + tile.column;
            if (start + k * tile.SLOTS >= rows) continue;
            const u64 noise = DITHER ? noise_bytes(at, key) : 0;
            u32 words[4] = {}, missing = 0;
#pragma unroll
            for (int i = 0; i < COLUMNS / 4; ++i) missing |= int8_missing(codes[k][i]) << (4 * i);
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                float code = int8_code(codes[k][i / 4], i % 4);
                if (DITHER && !(KEEP && code == 0.0f)) code = __fsub_rn(code, noise_at(noise, i));
                const float value = clamp(__fmul_rn(code, scales[i]), T::largest());
                const typename T::bits element = missing >> i & 1 ? T::nan : T::narrow(value);
                words[i * 4 / COLUMNS] |= u32(element) << (i * 128 / COLUMNS % 32);
                if (!WIDE && i < tile.count) dst[at + i] = element;
            }
            if (WIDE) *reinterpret_cast<uint4*>(dst + at) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

template <class T, bool DITHER, bool KEEP, int COLUMNS>
__device__ void int8_token_decode(const u8* __restrict__ payload, typename T::bits* __restrict__ dst, i64 numel,
                                  u64 key, i64 group, const Tile<COLUMNS>& tile) {
    if (tile.count == 0) return;
    const u16* stored = reinterpret_cast<const u16*>(payload + round_up16(numel)) + tile.scale;
    float scales[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) scales[i] = i < tile.count ? BF16::widen(stored[i]) : 0.0f;
    const i64 rows = min(group, tile.end - tile.first);
    if (tile.wide && aligned16(dst))
        decode_rows<T, DITHER, KEEP, true>(payload, dst, key, rows, tile, scales);
    else
        decode_rows<T, DITHER, KEEP, false>(payload, dst, key, rows, tile, scales);
}

#define INT8_TOKEN_ENCODE(name, T, NOISE, KEEP)                                                                   \
    extern "C" __global__ void int8_token_encode_##name(const T::bits* src, u8* payload, i64 numel, u64 key,      \
                                                        i64 group, i64 columns) {                                 \
        int8_token_encode<T, NOISE, KEEP>(src, payload, numel, key, group, Tile<COLUMNS>(numel, group, columns)); \
    }
#define INT8_TOKEN_DECODE(name, T, DITHER, KEEP)                                                             \
    extern "C" __global__ void int8_token_decode_##name(const u8* payload, T::bits* dst, i64 numel, u64 key, \
                                                        i64 group, i64 columns) {                            \
        using Columns = Tile<16 / sizeof(T::bits)>;                                                          \
        int8_token_decode<T, DITHER, KEEP>(payload, dst, numel, key, group, Columns(numel, group, columns)); \
    }
#define INT8_TOKEN_KERNELS(name, T)                     \
    INT8_TOKEN_ENCODE(name, T, false, false)            \
    INT8_TOKEN_ENCODE(name##_noise, T, true, false)     \
    INT8_TOKEN_ENCODE(name##_keep, T, false, true)      \
    INT8_TOKEN_ENCODE(name##_noise_keep, T, true, true) \
    INT8_TOKEN_DECODE(name, T, false, false)            \
    INT8_TOKEN_DECODE(name##_dither, T, true, false)    \
    INT8_TOKEN_DECODE(name##_dither_keep, T, true, true)

INT8_TOKEN_KERNELS(f32, F32)
INT8_TOKEN_KERNELS(f16, F16)
INT8_TOKEN_KERNELS(bf16, BF16)
