#pragma once
// Decoded elements as vectors of 16 bytes. A warp owns 32 * OWNED consecutive elements; vector `k` of lane `l` is its
// vector 32 * k + l: a store of the warp fills 512 consecutive bytes, and none only a part of a sector. All lanes stay
// to the end: the shuffles name all of them.
#include "rotation.cuh"

// With FULL all elements of the warp exist, and their memory starts at a multiple of 16.
template <class T, int OWNED, bool FULL>
struct Vectors {
    static constexpr int NUMEL = 16 / sizeof(typename T::bits);  // elements of a vector
    static constexpr int COUNT = OWNED / NUMEL;                  // vectors of a lane
    static constexpr bool full = FULL;
    i64 given, numel, first;
    int lane;
    u32 signs;  // where elements are rotated

    __device__ static float largest() { return ROTATION_NUMEL > 1 ? F32::largest() : T::largest(); }
    __device__ i64 at(int k) const { return first + (k * 32 + lane) * NUMEL; }

    // The lane that owns vector `k` where each owns OWNED consecutive elements.
    __device__ int owner(int k) const { return k * (32 * NUMEL / OWNED) + lane * NUMEL / OWNED; }

    // Writes vector `k`: values, finite and at most `largest`, or NaN where a bit of `missing` is set.
    __device__ void store(typename T::bits* __restrict__ dst, int k, float* values, u32 missing) const {
        u32 words[4];
        if (ROTATION_NUMEL > 1) {
            if (missing) values[0] = __uint_as_float(F32::nan);  // it spreads
            missing = rotate_back<NUMEL>(values, lane, signs) ? 0 : ALL_LANES;
#pragma unroll
            for (int i = 0; i < NUMEL; ++i) values[i] = clamp(values[i], T::largest());
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = T::pack(values + i * NUMEL / 4);
        if (missing) {
#pragma unroll
            for (int i = 0; i < NUMEL; ++i)
                if (missing >> i & 1) put(words, i, T::nan);
        }
        store(dst, k, words);
    }
    __device__ void store(typename T::bits* __restrict__ dst, int k, const u32* words) const {
        if (FULL) {
            *reinterpret_cast<uint4*>(dst + at(k)) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
            for (int i = 0; i < NUMEL; ++i)
                if (at(k) + i < given) dst[at(k) + i] = typename T::bits(words[i * 4 / NUMEL] >> shift(i));
        }
    }

    __device__ static constexpr int shift(int i) { return i * 128 / NUMEL % 32; }
    __device__ static void put(u32* words, int i, typename T::bits element) {
        u32& word = words[i * 4 / NUMEL];
        word = NUMEL == 4 ? element : (word & ~(0xffffu << shift(i))) | u32(element) << shift(i);
    }
};

// Calls `body` with the vectors of `given` elements at `dst`, which have `numel` codes.
template <class T, int OWNED, class F>
__device__ void with_vectors(i64 given, i64 numel, u64 key, const typename T::bits* dst, const F& body) {
    const int lane = int(threadIdx.x) & 31;
    const i64 first = (i64(blockIdx.x) * blockDim.x + threadIdx.x - lane) * OWNED;
    const u32 signs = ROTATION_NUMEL > 1 ? signs_from(lane * int(16 / sizeof(typename T::bits)), key) : 0;
    if (first + 32 * OWNED <= given && aligned16(dst))
        body(Vectors<T, OWNED, true>{given, numel, first, lane, signs});
    else
        body(Vectors<T, OWNED, false>{given, numel, first, lane, signs});
}

// The codes of a vector, `WIDTH` bits each, side by side; 0 after the last element.
template <int WIDTH, int NUMEL>
struct VectorCodes {
    static constexpr int BITS = WIDTH * NUMEL;
    static constexpr u32 MASK = WIDTH == 8 ? 0xff : (1u << WIDTH) - 1;
    u32 words[(BITS + 31) / 32] = {};

    __device__ u32 get(int i) const { return words[i * WIDTH / 32] >> (i * WIDTH % 32) & MASK; }

    template <class V>
    __device__ void load(const u8* __restrict__ section, const V& vectors, int k) {
        const i64 at = vectors.at(k);
        const u8* source = section + u64(vectors.at(0)) * WIDTH / 8 + k * (4 * BITS);
        if constexpr (!V::full) {
            u64 bits = 0;
#pragma unroll 1
            for (int i = 0; i < BITS && at + i / WIDTH < vectors.numel; i += 8) bits |= u64(source[i / 8]) << i;
            words[0] = u32(bits);
            if constexpr (BITS == 64) words[1] = u32(bits >> 32);
        } else if constexpr (BITS == 64) {
            const uint2 loaded = *reinterpret_cast<const uint2*>(source);
            words[0] = loaded.x, words[1] = loaded.y;
        } else if constexpr (BITS == 32) {
            words[0] = *reinterpret_cast<const u32*>(source);
        } else if constexpr (BITS == 16) {
            words[0] = *reinterpret_cast<const u16*>(source);
        } else {
            words[0] = *source;
        }
        if (BITS == 4) words[0] >>= at & 4;
    }
};

template <int NUMEL>
struct VectorCodes<0, NUMEL> {
    __device__ u32 get(int) const { return 0; }
    template <class V>
    __device__ void load(const u8*, const V&, int) {}
};

// The random bytes of the vectors of a lane. A block of Philox has those of `PIECES` vectors, which neighboring lanes
// have at the same `k`: each lane draws that of another `k`, and they exchange the words.
template <class V>
struct VectorNoise {
    static constexpr int PIECES = 16 / V::NUMEL, WORDS = 4 / PIECES;
    u32 words[4] = {};

    // For vectors `k` to `k + PIECES - 1`.
    __device__ void draw(const V& vectors, int k, u64 key) {
        const Noise own(u64(vectors.at(k + vectors.lane % PIECES)) / 16, key);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = own.words[i];
#pragma unroll
        for (int step = 1; step < PIECES; step *= 2) {
            const bool upper = vectors.lane & step;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & step * WORDS) continue;
                const u32 sent = upper ? words[i] : words[i + step * WORDS];
                const u32 got = __shfl_xor_sync(ALL_LANES, sent, step);
                (upper ? words[i] : words[i + step * WORDS]) = got;
            }
        }
    }
    __device__ float offset(int k, int i) const { return noise_offset(words[k % PIECES * WORDS + i / 4], i % 4); }
};
