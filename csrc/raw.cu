// raw: the bytes of a tensor. Format: raw.md.
#include "common.cuh"

constexpr int RAW_THREAD_NBYTES = 64;

// A block copies blockDim.x * 64 consecutive bytes, in units of V, neighboring threads neighboring units.
template <class V>
__device__ void copy_units(const u8* __restrict__ src, u8* __restrict__ dst, i64 nbytes) {
    constexpr int UNITS = RAW_THREAD_NBYTES / sizeof(V);
    const i64 start = i64(blockIdx.x) * blockDim.x * RAW_THREAD_NBYTES;
#pragma unroll 4
    for (int unit = 0; unit < UNITS; ++unit) {
        const i64 at = start + (i64(unit) * blockDim.x + threadIdx.x) * i64(sizeof(V));
        if (at + i64(sizeof(V)) <= nbytes) {
            *reinterpret_cast<V*>(dst + at) = *reinterpret_cast<const V*>(src + at);
        } else {
            for (i64 byte = at; byte < nbytes; ++byte) dst[byte] = src[byte];
        }
    }
}

__device__ inline void copy_bytes(const u8* src, u8* dst, i64 nbytes) {
    const u64 both = reinterpret_cast<u64>(src) | reinterpret_cast<u64>(dst);
    if (both % 16 == 0)
        copy_units<uint4>(src, dst, nbytes);
    else if (both % 4 == 0)
        copy_units<u32>(src, dst, nbytes);
    else
        copy_units<u8>(src, dst, nbytes);
}

extern "C" __global__ void raw_encode(const u8* src, u8* payload, i64 nbytes) { copy_bytes(src, payload, nbytes); }

extern "C" __global__ void raw_decode(const u8* payload, u8* dst, i64 nbytes) { copy_bytes(payload, dst, nbytes); }
