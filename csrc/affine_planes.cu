// Affine blocks whose codes are two planes: 6, 5 and 3 bits.
#include "affine.cuh"

#define AFFINE_BITS(BITS, name, T)                 \
    ENCODE(BITS, name, T, false, false)            \
    ENCODE(BITS, name##_noise, T, true, false)     \
    ENCODE(BITS, name##_keep, T, false, true)      \
    ENCODE(BITS, name##_noise_keep, T, true, true) \
    DECODE(BITS, name, T, false, false)            \
    DECODE(BITS, name##_dither, T, true, false)    \
    DECODE(BITS, name##_dither_keep, T, true, true)
#define AFFINE_KERNELS(name, T) \
    AFFINE_BITS(6, name, T)     \
    AFFINE_BITS(5, name, T)     \
    AFFINE_BITS(3, name, T)

AFFINE_KERNELS(f32, F32)
AFFINE_KERNELS(f16, F16)
AFFINE_KERNELS(bf16, BF16)
