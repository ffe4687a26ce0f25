// Gradient and momentum -> moved momentum and ballot, in one pass.
#pragma once

#include "lanes.h"
#include "path.h"

namespace {

using dlion::Betas;
using dlion::BallotSpan;

constexpr uint64_t MOMENTUM_KEYS = uint64_t{1} << 62;  // plus the rank; see ops/reference.py

struct NoGradient {
    typedef uint16_t Raw;
    static DLION_INLINE F load(const Raw*) { return F{}; }
};

// Momenta: `moved` is written where `fine`, the others keep their value. FETCHED: whether it pays to ask for what comes;
// four bytes of each keep the memory busy by themselves, and asking then costs 4 to 7 % (measured).

struct WideMomentum {
    typedef float Raw;
    static constexpr bool FETCHED = false;

    explicit DLION_INLINE WideMomentum(const BallotSpan&) {}
    DLION_INLINE void begin(const BallotSpan&, int64_t) {}
    static DLION_INLINE F load(const Raw* from) { return read<F>(from); }
    DLION_INLINE void store(Raw* to, M fine, F moved, F before, int) const { write(to, select(fine, moved, before)); }
};

struct NarrowMomentum {  // bfloat16, rounded up or down with the odds of the distance
    typedef uint16_t Raw;
    static constexpr bool FETCHED = true;
    Dither dither;

    explicit DLION_INLINE NarrowMomentum(const BallotSpan& span)
        : dither(span.half, span.odd, MOMENTUM_KEYS + span.rank) {}
    DLION_INLINE void begin(const BallotSpan& span, int64_t word) { dither.draw(span.word + word); }
    static DLION_INLINE F load(const Raw* from) { return Bfloat16::load(from); }
    DLION_INLINE void store(Raw* to, M fine, F moved, F before, int j) const {
        const U rounded = (U)moved + dither.at(j);
        const U kept = select(fine & is_finite((F)rounded), rounded, (U)before);  // rounding up may reach infinity
        write(to, narrow(kept >> 16));
    }
};

struct Said {
    uint64_t positive = 0, zero = 0, finite = 0;  // a bit for each element of one word
};

struct Scalars {
    F keep1, take1, keep2, take2;

    explicit DLION_INLINE Scalars(const Betas& betas)
        : keep1(splat(betas.keep1)), take1(splat(betas.take1)), keep2(splat(betas.keep2)), take2(splat(betas.take2)) {}
    DLION_INLINE F message(F g, F m) const { return m * keep1 + g * take1; }
    DLION_INLINE F moved(F g, F m) const { return m * keep2 + g * take2; }
};

constexpr int AT_ONCE = 4;  // vectors; what is computed of so many stays in registers
constexpr uint32_t MAGNITUDE = 0x7fffffffu, INFINITE = 0x7f800000u, NORMAL = 0x00800000u;

// Vectors from element `from`, if all their numbers are ordinary: messages that are finite and have a sign, momenta that
// need no flush to zero. Almost all are, and nothing but the sign then needs a mask for each lane, which is most of the
// work. Else false, and nothing is written.
template <class Kind, class Momentum>
DLION_INLINE bool ordinary(const typename Kind::Raw* grad, typename Momentum::Raw* momentum, const Scalars& scalars,
                           const Momentum& format, int from, Said& said) {
    F before[AT_ONCE], moved[AT_ONCE];
    U largest{}, smallest = splat(MAGNITUDE), least = splat(MAGNITUDE);
    uint64_t positive = 0;
    for (int k = 0; k < AT_ONCE; ++k) {
        const int j = from + k * LANES;
        const F g = Kind::load(grad ? grad + j : grad);
        before[k] = format.load(momentum + j);
        const F message = scalars.message(g, before[k]);
        moved[k] = scalars.moved(g, before[k]);
        const U magnitude = (U)message & MAGNITUDE;
        largest = larger(largest, magnitude);
        smallest = smaller(smallest, magnitude);
        least = smaller(least, (U)moved[k] & MAGNITUDE);
        positive |= bits_of(above(message, F{})) << j;
    }
    const M all = less(largest, splat(INFINITE)) & less(U{}, smallest) & less(splat(NORMAL - 1), least);
    if (bits_of(all) != ALL_LANES) return false;
    for (int k = 0; k < AT_ONCE; ++k) format.store(momentum + from + k * LANES, all, moved[k], before[k], from + k * LANES);
    said.positive |= positive;
    said.finite |= ~uint64_t{0} >> (WORD - AT_ONCE * LANES) << from;
    return true;
}

// One vector of any numbers.
template <class Kind, class Momentum>
DLION_INLINE void any(const typename Kind::Raw* grad, typename Momentum::Raw* momentum, const Scalars& scalars,
                      const Momentum& format, int j, Said& said) {
    const F g = Kind::load(grad ? grad + j : grad);
    const F m = format.load(momentum + j);
    const F message = scalars.message(g, m);
    const M finite = is_finite(message);  // neither a gradient nor a loaded momentum that is not may become a vote
    F moved = scalars.moved(g, m);
    moved = select(less((U)moved & MAGNITUDE, splat(NORMAL)), F{}, moved);  // below 2**-126
    format.store(momentum + j, finite, moved, m, j);
    said.positive |= bits_of(above(message, F{})) << j;
    said.zero |= bits_of(equal(message, F{})) << j;
    said.finite |= bits_of(finite) << j;
}

template <class Kind, class Momentum>
DLION_INLINE Said one_word(const typename Kind::Raw* grad, typename Momentum::Raw* momentum, const BallotSpan& span,
                           const Scalars& scalars, Momentum& format, int64_t word) {
    format.begin(span, word);
    Said said;
    for (int from = 0; from < WORD; from += AT_ONCE * LANES)
        if (!ordinary<Kind>(grad, momentum, scalars, format, from, said))
            for (int j = from; j < from + AT_ONCE * LANES; j += LANES) any<Kind>(grad, momentum, scalars, format, j, said);
    said.positive &= said.finite;
    said.zero |= ~said.finite;
    return said;
}

DLION_INLINE void put(const BallotSpan& span, int64_t word, const Said& said, uint64_t real) {
    if (span.nonzero) {
        span.positive[word] = said.positive & real;
        span.nonzero[word] = ~said.zero & real;
        return;
    }
    uint64_t bits = said.positive;
    if (said.zero) {
        const uint64_t noise = mix64(span.half, span.word + word, span.rank);
        bits |= said.zero & (span.odd ? ~noise : noise);
    }
    span.positive[word] = bits & real;
}

template <class Kind, class Momentum>
bool ballot_of(const BallotSpan& span) {
    typedef typename Kind::Raw Raw;
    typedef typename Momentum::Raw Kept;
    const Raw* grad = (const Raw*)span.grad;
    Kept* momentum = (Kept*)span.momentum;
    const Scalars scalars(span.betas);
    Momentum format(span);
    const int64_t whole = span.numel / WORD;
    uint64_t finite = ~uint64_t{0};
    for (int64_t word = 0; word < whole; ++word) {
        if (Momentum::FETCHED) {
            if (grad) ahead(grad + word * WORD, WORD * sizeof(Raw));
            ahead(momentum + word * WORD, WORD * sizeof(Kept));
        }
        const Said said = one_word<Kind>(grad ? grad + word * WORD : grad, momentum + word * WORD, span, scalars,
                                          format, word);
        put(span, word, said, ~uint64_t{0});
        finite &= said.finite;
    }
    const int64_t rest = span.numel - whole * WORD;
    if (rest) {
        Raw last_grad[WORD] = {};
        Kept last_momentum[WORD] = {};
        momentum += whole * WORD;
        if (grad) std::memcpy(last_grad, grad + whole * WORD, rest * sizeof(Raw));
        std::memcpy(last_momentum, momentum, rest * sizeof(Kept));
        const Said said = one_word<Kind>(last_grad, last_momentum, span, scalars, format, whole);
        std::memcpy(momentum, last_momentum, rest * sizeof(Kept));
        put(span, whole, said, (uint64_t{1} << rest) - 1);
        finite &= said.finite;
    }
    return finite == ~uint64_t{0};
}

template <class Momentum>
bool ballot_with(const BallotSpan& span) {
    if (!span.grad) return ballot_of<NoGradient, Momentum>(span);
    switch (span.dtype) {
        case dlion::BFLOAT16: return ballot_of<Bfloat16, Momentum>(span);
        case dlion::FLOAT16: return ballot_of<Float16, Momentum>(span);
        default: return ballot_of<Float32, Momentum>(span);
    }
}

bool ballot(const BallotSpan& span) {
    return span.momentum_dtype == dlion::BFLOAT16 ? ballot_with<NarrowMomentum>(span) : ballot_with<WideMomentum>(span);
}

}  // namespace
