// bit1: one bit per bool. Format: bit1.md.
#include "common.cuh"

constexpr int OWNED = 32;  // elements of a thread: one word of the payload

__device__ inline i64 first_owned() { return (i64(blockIdx.x) * blockDim.x + threadIdx.x) * OWNED; }

// Bit i says whether byte i of a word is not 0.
__device__ inline u32 pack(u32 word) {
    const u32 ones = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7 & 0x01010101u;
    return ones * 0x01020408u >> 24 & 15;  // no carries: each of the 16 partial products has a bit of its own
}

// Unpack the low 4 bits into the bytes of a word.
__device__ inline u32 unpack(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// `count`, where it is not null, holds the number of elements, at most `most`.
extern "C" __global__ void bit1_encode(const u8* src, u8* payload, i64 most, const i64* count) {
    const i64 numel = count ? *count : most, first = first_owned();
    if (first >= numel) return;
    u32 bits = 0;
    if (first + OWNED <= numel && aligned16(src)) {
        const uint4* vectors = reinterpret_cast<const uint4*>(src + first);
#pragma unroll
        for (int v = 0; v < OWNED / 16; ++v) {
            const uint4 loaded = vectors[v];
            const u32 half = pack(loaded.x) | pack(loaded.y) << 4 | pack(loaded.z) << 8 | pack(loaded.w) << 12;
            bits |= half << (16 * v);
        }
    } else {
        for (int i = 0; i < OWNED; ++i)
            if (first + i < numel) bits |= u32(src[first + i] != 0) << i;
    }
    if (first + OWNED <= numel) {
        *reinterpret_cast<u32*>(payload + first / 8) = bits;
    } else {
        for (int i = 0; first + 8 * i < numel; ++i) payload[first / 8 + i] = u8(bits >> (8 * i));
    }
}

extern "C" __global__ void bit1_decode(const u8* payload, u8* dst, i64 most, const i64* count) {
    const i64 numel = count ? *count : most, first = first_owned();
    if (first >= numel) return;
    if (first + OWNED <= numel && aligned16(dst)) {
        const u32 bits = *reinterpret_cast<const u32*>(payload + first / 8);
        uint4* vectors = reinterpret_cast<uint4*>(dst + first);
#pragma unroll
        for (int v = 0; v < OWNED / 16; ++v) {
            const u32 half = bits >> (16 * v);
            vectors[v] = make_uint4(unpack(half), unpack(half >> 4), unpack(half >> 8), unpack(half >> 12));
        }
    } else {
        for (int i = 0; i < OWNED; ++i)
            if (first + i < numel) dst[first + i] = payload[(first + i) / 8] >> (i % 8) & 1;
    }
}
