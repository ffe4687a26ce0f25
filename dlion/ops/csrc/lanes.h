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

DLION_INLINE U select(I mask, U yes, U no) { return ((U)mask & yes) | (~(U)mask & no); }

// A truth for each lane, M. AVX-512 keeps it in a register of bits, and compilers that see vectors of whole lanes go
// there and back again.
#if defined(__AVX512DQ__) && DLION_LANES == 16

typedef __mmask16 M;

DLION_INLINE M above(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
DLION_INLINE M equal(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
DLION_INLINE M less(U a, U b) { return _mm512_cmplt_epu32_mask((__m512i)a, (__m512i)b); }
DLION_INLINE U select(M mask, U yes, U no) { return (U)_mm512_mask_blend_epi32(mask, (__m512i)no, (__m512i)yes); }
DLION_INLINE uint64_t bits_of(M mask) { return mask; }
DLION_INLINE M mask_of(uint64_t word, int at) { return (M)(word >> at); }

DLION_INLINE U widen(H x) { return (U)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x); }
DLION_INLINE H narrow(U x) { return (H)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x); }

#else

typedef I M;

DLION_INLINE M above(F a, F b) { return a > b; }
DLION_INLINE M equal(F a, F b) { return a == b; }
DLION_INLINE M less(U a, U b) { return a < b; }

// One bit from each lane.
DLION_INLINE uint64_t bits_of(M mask) {
#if defined(__AVX2__) && DLION_LANES == 8
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
DLION_INLINE M mask_of(uint64_t word, int at) {
    U bit;
    for (int i = 0; i < LANES; ++i) bit[i] = uint32_t{1} << i;
    return (splat((uint32_t)(word >> at)) & bit) != 0;
}

DLION_INLINE U widen(H x) { return __builtin_convertvector(x, U); }
DLION_INLINE H narrow(U x) { return __builtin_convertvector(x, H); }

#endif

constexpr uint64_t ALL_LANES = ~uint64_t{0} >> (64 - LANES);

DLION_INLINE U larger(U a, U b) { return a > b ? a : b; }
DLION_INLINE U smaller(U a, U b) { return a < b ? a : b; }

DLION_INLINE F select(M mask, F yes, F no) { return (F)select(mask, (U)yes, (U)no); }
DLION_INLINE M is_finite(F x) { return less((U)x & 0x7fffffffu, splat(0x7f800000u)); }

// How numbers lie in memory. `pack` rounds to nearest, ties to even; `dither` rounds up with the probability of the
// fraction that is dropped, given 16 random bits for each lane.

struct Float32 {
    typedef float Raw;
    static DLION_INLINE F load(const Raw* from) { return read<F>(from); }
    static DLION_INLINE void store(Raw* to, F x) { write(to, x); }
};

struct Bfloat16 {
    typedef uint16_t Raw;
    static DLION_INLINE F load(const Raw* from) { return (F)(widen(read<H>(from)) << 16); }
    static DLION_INLINE void store(Raw* to, F x) { write(to, narrow(pack(x))); }
    static DLION_INLINE void store(Raw* to, F x, U random) { write(to, narrow(dither(x, random))); }

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
        const U half = widen(read<H>(from));
        const U magnitude = half & 0x7fffu;
        U bits = (magnitude << 13) + REBIAS;
        bits += (U)(magnitude >= 0x7c00u) & REBIAS;  // infinity and NaN
        const F small = (F)(magnitude + (126u << 23)) - 0.5f;  // magnitude * 2**-24, without a denormal on the way
        return (F)(select(magnitude < 0x400u, (U)small, bits) | ((half & 0x8000u) << 16));
    }

    static DLION_INLINE void store(Raw* to, F x) { write(to, narrow(pack(x))); }
    static DLION_INLINE void store(Raw* to, F x, U random) { write(to, narrow(dither(x, random))); }

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
        const F steps = (F)select(bits < NORMAL, bits, U{}) * 0x1p40f;  // of 2**-24, with 16 bits of fraction
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

// 16 random bits for each element: lane e % 4 of mix64(t // 2, key, e // 4), element e of the layout, complemented when t
// is odd. The element comes last: all that is hashed before it is hashed once.
class Dither {
public:
    DLION_INLINE Dither(uint64_t half, bool odd, uint64_t key)
        : start_(finalise((finalise(half + GOLDEN) ^ key) + GOLDEN)), flip_(odd ? ~uint64_t{0} : 0) {}

    // Draw for the elements of a word.
    DLION_INLINE void draw(uint64_t word) {
        constexpr int AT_ONCE = sizeof(Q) / sizeof(uint64_t);
        Q number;
        for (int i = 0; i < AT_ONCE; ++i) number[i] = i;
        number += word * (WORD / 4);
        for (int k = 0; k < WORD / 4; k += AT_ONCE)
            write(random_ + 4 * k, finalise(((number + k) ^ start_) + GOLDEN) ^ flip_);
    }

    // For elements j and on of that word.
    DLION_INLINE U at(int j) const { return widen(read<H>(random_ + j)); }

private:
    uint64_t start_, flip_;
    uint16_t random_[WORD];
};

}  // namespace
