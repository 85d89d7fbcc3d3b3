// OCTAVO_HD marks functions that nvcc compiles for host and device; elsewhere it is empty.
#pragma once

#if defined(__CUDACC__)
#define OCTAVO_HD __host__ __device__
#else
#define OCTAVO_HD
#endif

// Small format functions must melt into the vector loops that call them, also into loops compiled
// for a newer instruction set than the rest of the file (kernels/cpu/simd.h).
#if defined(__GNUC__) || defined(__clang__)
#define OCTAVO_INLINE inline __attribute__((always_inline))
#else
#define OCTAVO_INLINE inline
#endif
