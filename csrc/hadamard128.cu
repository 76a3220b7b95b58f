// hadamard128: random signs and the Walsh-Hadamard transform of 128 elements. Format: hadamard128.md.
#include "groups.cuh"
#include "vectors.cuh"

constexpr int LOG2_LANES = 2;  // 4 lanes own the 128 elements of a group

template <class T>
__device__ void forward(const typename T::bits* __restrict__ src, u32* __restrict__ scratch, Part part) {
    float values[OWNED];
    load_part<T>(src, part, values);
    rotate<RUN>(values, part.shift, part.key);
    part.numel = part.groups() * (OWNED << LOG2_LANES);  // the scratch has whole groups
    part.full = part.first < part.numel;
#pragma unroll
    for (int u = 0; u < RUNS; ++u) store_run<F32>(scratch, part, u, values + u * RUN, 0);
}

template <class T>
__device__ void inverse(const u32* __restrict__ scratch, typename T::bits* __restrict__ dst, const Part& part) {
    const i64 numel = part.groups() * (OWNED << LOG2_LANES);
    with_vectors<T, OWNED>(part.given, part.numel, part.key, dst, [&](auto vectors) {
        using V = decltype(vectors);
        const u32 signs = signs_from(vectors.lane * V::NUMEL, part.key);
#pragma unroll
        for (int k = 0; k < V::COUNT; ++k) {
            float values[V::NUMEL];
#pragma unroll
            for (int i = 0; i < V::NUMEL; i += 4) {
                uint4 four = make_uint4(0, 0, 0, 0);
                if (vectors.at(k) < numel) four = *reinterpret_cast<const uint4*>(scratch + vectors.at(k) + i);
                values[i] = F32::widen(four.x), values[i + 1] = F32::widen(four.y);
                values[i + 2] = F32::widen(four.z), values[i + 3] = F32::widen(four.w);
            }
            const bool finite = rotate_back<V::NUMEL>(values, vectors.lane, signs);
#pragma unroll
            for (int i = 0; i < V::NUMEL; ++i) values[i] = clamp(values[i], T::largest());
            vectors.store(dst, k, values, finite ? 0 : ALL_LANES);
        }
    });
}

#define HADAMARD128_KERNELS(name, T)                                                                              \
    extern "C" __global__ void hadamard128_forward_##name(const T::bits* src, u32* scratch, i64 numel, u64 key) { \
        forward<T>(src, scratch, Part(numel, nullptr, LOG2_LANES, key));                                          \
    }                                                                                                             \
    extern "C" __global__ void hadamard128_inverse_##name(const u32* scratch, T::bits* dst, i64 numel, u64 key) { \
        inverse<T>(scratch, dst, Part(numel, nullptr, LOG2_LANES, key));                                          \
    }

HADAMARD128_KERNELS(f32, F32)
HADAMARD128_KERNELS(f16, F16)
HADAMARD128_KERNELS(bf16, BF16)
