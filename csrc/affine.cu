// Affine blocks whose codes are one plane: 8, 4 and 2 bits.
#include "affine.cuh"

#define AFFINE_KERNELS(name, T)                  \
    ENCODE(8, name, T, false, false)             \
    ENCODE(4, name, T, false, false)             \
    ENCODE(8, name##_noise, T, true, false)      \
    ENCODE(4, name##_noise, T, true, false)      \
    ENCODE(2, name##_noise, T, true, false)      \
    DECODE(8, name, T, false, false)             \
    DECODE(4, name, T, false, false)             \
    DECODE(2, name, T, false, false)             \
    DECODE(8, name##_dither, T, true, false)     \
    DECODE(4, name##_dither, T, true, false)     \
    DECODE(2, name##_dither, T, true, false)     \
    ENCODE(8, name##_keep, T, false, true)       \
    ENCODE(4, name##_keep, T, false, true)       \
    ENCODE(8, name##_noise_keep, T, true, true)  \
    ENCODE(4, name##_noise_keep, T, true, true)  \
    ENCODE(2, name##_noise_keep, T, true, true)  \
    DECODE(8, name##_dither_keep, T, true, true) \
    DECODE(4, name##_dither_keep, T, true, true) \
    DECODE(2, name##_dither_keep, T, true, true)

AFFINE_KERNELS(f32, F32)
AFFINE_KERNELS(f16, F16)
AFFINE_KERNELS(bf16, BF16)
