// hadamard128 with affine blocks inside, in one pass. Format: hadamard128.md.
#define ROTATED
#include "affine.cu"
