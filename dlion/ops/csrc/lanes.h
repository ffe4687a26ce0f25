// Vectors of LANES 32-bit lanes, in the vector extension of GCC and Clang: the same operations, hence the same bits,
// for every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bit j of a word is element j");

#define DLION_INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = DLION_LANES;
constexpr int WORD = 64;

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));
typedef uint64_t Q __attribute__((vector_size(4 * LANES)));

DLION_INLINE F splat(float x) { return x - F{}; }
DLION_INLINE U splat(uint32_t x) { return x - U{}; }
DLION_INLINE Q splat(uint64_t x) { return x - Q{}; }

template <class V, class T>
DLION_INLINE V read(const T* from) {
    V x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

template <class V, class T>
DLION_INLINE void write(T* to, V x) {
    std::memcpy(to, &x, sizeof x);
}

constexpr int AHEAD = 4096;  // bytes

// Ask for what comes AHEAD bytes after a place: what processors fetch by themselves ends with a page.
DLION_INLINE void ahead(const void* place, int nbytes) {
    for (int line = 0; line < nbytes; line += 64) __builtin_prefetch((const char*)place + AHEAD + line);
}

DLION_INLINE U lane_numbers() {
    U n;
    for (int i = 0; i < LANES; ++i) n[i] = i;
    return n;
}

DLION_INLINE U select(I mask, U yes, U no) { return ((U)mask & yes) | (~(U)mask & no); }
DLION_INLINE F select(I mask, F yes, F no) { return (F)select(mask, (U)yes, (U)no); }

// One bit from each lane of a comparison's result.
DLION_INLINE uint64_t bits_of(I mask) {
#if defined(__AVX512DQ__) && DLION_LANES == 16
    return _cvtmask16_u32(_mm512_movepi32_mask((__m512i)mask));
#elif defined(__AVX2__) && DLION_LANES == 8
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__) && DLION_LANES == 4
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint64_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits |= (uint64_t)(mask[i] & 1) << i;
    return bits;
#endif
}

// The inverse, from bits `at` and on of a word.
DLION_INLINE I mask_of(uint64_t word, int at) {
    const U bit = splat(uint32_t{1}) << lane_numbers();
    return (splat((uint32_t)(word >> at)) & bit) != 0;
}

DLION_INLINE I is_finite(F x) { return ((U)x & 0x7f800000u) != 0x7f800000u; }

// How numbers lie in memory. `pack` rounds to nearest, ties to even; `dither` rounds up with the probability of the
// fraction that is dropped, given 16 random bits for each lane.

struct Float32 {
    typedef float Raw;
    static DLION_INLINE F load(const Raw* from) { return read<F>(from); }
    static DLION_INLINE void store(Raw* to, F x) { write(to, x); }
};

struct Bfloat16 {
    typedef uint16_t Raw;
    static DLION_INLINE F load(const Raw* from) { return (F)(__builtin_convertvector(read<H>(from), U) << 16); }
    static DLION_INLINE void store(Raw* to, F x) { write(to, __builtin_convertvector(pack(x), H)); }
    static DLION_INLINE void store(Raw* to, F x, U random) { write(to, __builtin_convertvector(dither(x, random), H)); }

    static DLION_INLINE U pack(F x) {
        const U bits = (U)x;
        const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return select((bits & 0x7fffffffu) > 0x7f800000u, splat(0x7fc0u), rounded);
    }

    static DLION_INLINE U dither(F x, U random) {
        return select(is_finite(x), ((U)x + random) >> 16, pack(x));
    }
};

struct Float16 {
    typedef uint16_t Raw;
    static constexpr uint32_t NORMAL = 113u << 23;    // 2**-14, the smallest normal number, as a float32
    static constexpr uint32_t REBIAS = 112u << 23;    // between the exponents of float32 and float16
    static constexpr uint32_t TOO_LARGE = 143u << 23;  // 2**16

    static DLION_INLINE F load(const Raw* from) {
        const U half = __builtin_convertvector(read<H>(from), U);
        const U magnitude = half & 0x7fffu;
        U bits = (magnitude << 13) + REBIAS;
        bits += (U)(magnitude >= 0x7c00u) & REBIAS;  // infinity and NaN
        const F small = (F)(magnitude + (126u << 23)) - 0.5f;  // magnitude * 2**-24, without a denormal on the way
        return (F)(select(magnitude < 0x400u, (U)small, bits) | ((half & 0x8000u) << 16));
    }

    static DLION_INLINE void store(Raw* to, F x) { write(to, __builtin_convertvector(pack(x), H)); }
    static DLION_INLINE void store(Raw* to, F x, U random) { write(to, __builtin_convertvector(dither(x, random), H)); }

    static DLION_INLINE U pack(F x) {
        const U sign = ((U)x >> 16) & 0x8000u;
        const U bits = (U)x & 0x7fffffffu;
        U half = (bits + 0xfffu + ((bits >> 13) & 1u) - REBIAS) >> 13;
        half = select(bits < NORMAL, (U)((F)bits + 0.5f) - (126u << 23), half);  // the sum has steps of 2**-24
        half = select(bits >= TOO_LARGE, splat(0x7c00u), half);
        half = select(bits > 0x7f800000u, 0x7e00u | ((bits >> 13) & 0x3ffu), half);
        return half | sign;
    }

    static DLION_INLINE U dither(F x, U random) {
        const U sign = ((U)x >> 16) & 0x8000u;
        const U bits = (U)x & 0x7fffffffu;
        const U normal = (bits + (random >> 3) - REBIAS) >> 13;
        const F steps = select(bits < NORMAL, (F)bits, F{}) * 0x1p40f;  // of 2**-24, with 16 bits of fraction
        const U small = ((U)__builtin_convertvector(steps, I) + random) >> 16;
        const U half = select(bits < NORMAL, small, normal);
        return select(bits < TOO_LARGE, half | sign, pack(x));
    }
};

// Hashing, see mix64 in ops/bits.py.

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

template <class T>
DLION_INLINE T finalise(T x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

DLION_INLINE uint64_t mix64(uint64_t a, uint64_t word, uint64_t r) {
    return finalise((finalise((finalise(a + GOLDEN) ^ word) + GOLDEN) ^ r) + GOLDEN);
}

// 16 random bits for each element of a word: lane e % 4 of the hash of (t // 2, e // 4, key), element e of the layout,
// complemented when t is odd.
struct Dither {
    uint16_t random[WORD];

    DLION_INLINE Dither(uint64_t half, bool odd, uint64_t word, uint64_t key) {
        constexpr int AT_ONCE = sizeof(Q) / sizeof(uint64_t);
        Q number;
        for (int i = 0; i < AT_ONCE; ++i) number[i] = i;
        number += word * (WORD / 4);
        const Q start = splat(finalise(half + GOLDEN));
        for (int k = 0; k < WORD / 4; k += AT_ONCE) {
            Q hash = finalise((finalise((start ^ (number + k)) + GOLDEN) ^ key) + GOLDEN);
            if (odd) hash = ~hash;
            write(random + 4 * k, hash);
        }
    }

    DLION_INLINE U at(int j) const { return __builtin_convertvector(read<H>(random + j), U); }
};

}  // namespace
