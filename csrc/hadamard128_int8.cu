// hadamard128 with int8 inside, in one pass. Format: hadamard128.md.
#define ROTATED
#include "int8.cu"
