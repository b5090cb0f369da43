// Whether the x86 kernels can be compiled, and how a function is made part of its caller.
#pragma once

// GCC takes instruction sets by pragma, and knows AMX from 11 on; other compilers build the
// portable kernels.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 11
#define FASTBERT_X86 1
#endif
#endif

#define FASTBERT_INLINE inline __attribute__((always_inline))
// Behind the parameters of a lambda: loops over packs are too much for the compiler's own taste.
#define FASTBERT_INLINE_BODY __attribute__((always_inline))
