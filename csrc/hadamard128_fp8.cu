// hadamard128 with fp8 inside, in one pass. Format: hadamard128.md.
#define ROTATED
#include "fp8.cu"
