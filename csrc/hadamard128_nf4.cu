// hadamard128 with nf4 inside, in one pass. Format: hadamard128.md.
#define ROTATED
#include "nf4.cu"
