#pragma once
// Random bits by position and key: Philox4x32-10. The numbers: philox.md.
#include "common.cuh"

struct Words {
    u32 a, b, c, d;
};

// Four random words for counter (`block`, `purpose`) under a 63-bit key.
__device__ inline Words philox(u64 block, u32 purpose, u64 key) {
    u32 a = u32(block), b = u32(block >> 32), c = purpose, d = 0;
    u32 low = u32(key), high = u32(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 first = u64(a) * 0xd2511f53u, second = u64(c) * 0xcd9e8d57u;
        a = u32(second >> 32) ^ b ^ low, b = u32(second);
        c = u32(first >> 32) ^ d ^ high, d = u32(first);
        low += 0x9e3779b9u, high += 0xbb67ae85u;
    }
    return {a, b, c, d};
}

// Random byte `i` of a word as a number of (-1/2, 1/2): (byte + 1/2) / 256 - 1/2, exact in float32.
__device__ inline float noise_offset(u32 word, int i) {
    const u32 sum = __byte_perm(word, 0x43000000u, 0x7604 | i << 4);  // 128 + byte / 256
    return __fsub_rn(__uint_as_float(sum), 128.498046875f);
}

// The random bytes of elements 16 * block to 16 * block + 15.
struct Noise {
    u32 words[4];
    __device__ Noise(u64 block, u64 key) {
        const Words drawn = philox(block, 0, key);
        words[0] = drawn.a, words[1] = drawn.b, words[2] = drawn.c, words[3] = drawn.d;
    }
    __device__ float offset(int index) const { return noise_offset(words[index / 4], index % 4); }
};
