// What the kernels must do, one element at a time and without a thought for speed; written apart from the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace plain {

using std::size_t;
typedef std::vector<uint64_t> Words;

inline bool bit(const uint64_t* words, int64_t element) { return words[element / 64] >> (element % 64) & 1; }

inline uint64_t mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9u;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

inline uint64_t hash(uint64_t a, uint64_t word, uint64_t r) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    return mix((mix((mix(a + golden) ^ word) + golden) ^ r) + golden);
}

// The 16 bits that element `element` of the layout is rounded by.
inline uint32_t random16(uint64_t t, uint64_t element, uint64_t key) {
    const uint64_t noise = hash(t / 2, key, element / 4);
    return (uint32_t)((t % 2 ? ~noise : noise) >> (16 * (element % 4)) & 0xffff);
}

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// A 16-bit format by its numbers: bits of the fraction, and the exponent of the smallest normal number.
struct Format {
    int fraction, smallest;
};
constexpr Format BF16{7, -126}, FP16{10, -14};

inline double value(Format f, uint32_t half) {
    const uint32_t magnitude = half & 0x7fff, exponent = magnitude >> f.fraction;
    const uint32_t top = 0x7fffu >> f.fraction;
    const double fraction = magnitude & ((1u << f.fraction) - 1), one = 1u << f.fraction;
    double x = exponent ? std::ldexp(one + fraction, (int)exponent - 1 + f.smallest - f.fraction)
                        : std::ldexp(fraction, f.smallest - f.fraction);
    if (exponent == top) x = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    return half & 0x8000 ? -x : x;
}

inline bool is_nan(Format f, uint16_t half) { return std::isnan(value(f, half)); }

// The largest number of the format that is not above |x|, as bits without a sign; the one after the last is infinity.
inline uint32_t below(Format f, double x) {
    const uint32_t infinity = 0x7fffu >> f.fraction << f.fraction;
    uint32_t low = 0, high = infinity;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        (value(f, middle) <= x ? low : high) = middle;
    }
    return low;
}

// The step after `half`; what would come after the largest number counts as if the format went on.
inline double step(Format f, uint32_t half) {
    const uint32_t infinity = 0x7fffu >> f.fraction << f.fraction;
    return half + 1 == infinity ? value(f, half) - value(f, half - 1) : value(f, half + 1) - value(f, half);
}

inline uint16_t nearest(Format f, float x) {
    const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
    const uint32_t infinity = 0x7fffu >> f.fraction << f.fraction;
    if (std::isnan(x)) return (uint16_t)(sign | (infinity + 1));
    if (std::isinf(x)) return (uint16_t)(sign | infinity);
    const double magnitude = std::fabs((double)x);
    uint32_t half = below(f, magnitude);
    const double over = (magnitude - value(f, half)) / step(f, half);
    if (over > 0.5 || (over == 0.5 && half % 2)) ++half;
    return (uint16_t)(sign | half);
}

inline uint16_t stochastic(Format f, float x, uint32_t random) {
    const bool too_large = f.fraction == 10 && std::fabs(x) >= 65536;
    if (!std::isfinite(x) || too_large) return nearest(f, x);
    const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
    const double magnitude = std::fabs((double)x);
    uint32_t half = below(f, magnitude);
    double over = (magnitude - value(f, half)) / step(f, half);
    const bool coarse = f.fraction == 10 && half >= 0x400;  // 13 bits are dropped
    if (coarse) random >>= 3;
    const double whole = coarse ? 8192 : 65536;
    if (std::floor(over * whole) + random >= whole) ++half;
    return (uint16_t)(sign | half);
}

struct Lion {
    float keep1, take1, keep2, take2;
};

// One element: moves the momentum, says +1, 0 or -1; `finite` becomes false where the message is not.
inline int vote(float g, float& m, const Lion& lion, bool& finite) {
    volatile float kept = m * lion.keep1, taken = g * lion.take1;  // volatile: rounded apart from each other
    const float message = kept + taken;
    if (!std::isfinite(message)) {
        finite = false;
        return 0;
    }
    kept = m * lion.keep2;
    taken = g * lion.take2;
    m = kept + taken;
    if (std::fabs(m) < 0x1p-126f) m = 0;
    return message > 0 ? 1 : message == 0 ? 0 : -1;
}

// A moved momentum as bfloat16; `old` where it did not move, or would become infinite.
inline float kept_narrow(float moved, float old, uint32_t random) {
    if (!std::isfinite(moved)) return old;
    const double rounded = value(BF16, stochastic(BF16, moved, random));
    return std::isfinite(rounded) ? (float)rounded : old;
}

// The decision of one element: +1, 0 or -1 of each voter; ties 0 rotate, 1 alternate, 2 zero.
inline int majority(const std::vector<int>& votes, uint64_t word, uint64_t t, int ties) {
    int sum = 0, somebody = 0;
    for (int vote : votes) {
        sum += vote;
        somebody |= vote;
    }
    if (sum || !somebody || ties == 2) return sum > 0 ? 1 : sum < 0 ? -1 : 0;
    if (ties == 1) return (word + t) % 2 ? -1 : 1;
    size_t turn = (t / 2 + word) % votes.size();
    while (!votes[turn]) turn = (turn + 1) % votes.size();
    return votes[turn];
}

}  // namespace plain
