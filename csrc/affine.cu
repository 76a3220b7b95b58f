// Affine blocks whose codes are one plane: 8, 4 and 2 bits.
#include "affine.cuh"

#define AFFINE_KERNELS(name, T)       \
    ENCODE(8, name, T, false)         \
    ENCODE(4, name, T, false)         \
    ENCODE(8, name##_noise, T, true)  \
    ENCODE(4, name##_noise, T, true)  \
    ENCODE(2, name##_noise, T, true)  \
    DECODE(8, name, T, false)         \
    DECODE(4, name, T, false)         \
    DECODE(2, name, T, false)         \
    DECODE(8, name##_dither, T, true) \
    DECODE(4, name##_dither, T, true) \
    DECODE(2, name##_dither, T, true)

AFFINE_KERNELS(f32, F32)
AFFINE_KERNELS(f16, F16)
AFFINE_KERNELS(bf16, BF16)
