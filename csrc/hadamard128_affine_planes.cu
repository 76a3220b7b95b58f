// hadamard128 with affine blocks of two planes inside, in one pass. Format: hadamard128.md.
#define ROTATED
#include "affine_planes.cu"
