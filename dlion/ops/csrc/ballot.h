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

// Momenta: `moved` is written where `fine`, the others keep their value.

struct WideMomentum {
    typedef float Raw;

    explicit DLION_INLINE WideMomentum(const BallotSpan&) {}
    DLION_INLINE void begin(const BallotSpan&, int64_t) {}
    static DLION_INLINE F load(const Raw* from) { return read<F>(from); }
    DLION_INLINE void store(Raw* to, M fine, F moved, F before, int) const { write(to, select(fine, moved, before)); }
};

struct NarrowMomentum {  // bfloat16, rounded up or down with the odds of the distance
    typedef uint16_t Raw;
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

template <class Kind, class Momentum>
DLION_INLINE Said one_word(const typename Kind::Raw* grad, typename Momentum::Raw* momentum, const BallotSpan& span,
                           Momentum& format, int64_t word) {
    const Betas& betas = span.betas;
    const F keep1 = splat(betas.keep1), take1 = splat(betas.take1);
    const F keep2 = splat(betas.keep2), take2 = splat(betas.take2);
    format.begin(span, word);
    Said said;
    for (int j = 0; j < WORD; j += LANES) {
        const F g = Kind::load(grad ? grad + j : grad);
        const F m = format.load(momentum + j);
        const F message = m * keep1 + g * take1;
        const M finite = is_finite(message);  // neither a gradient nor a loaded momentum that is not may become a vote
        F moved = m * keep2 + g * take2;
        moved = select(less((U)moved & 0x7fffffffu, splat(0x00800000u)), F{}, moved);  // below 2**-126
        format.store(momentum + j, finite, moved, m, j);
        said.positive |= bits_of(above(message, F{})) << j;
        said.zero |= bits_of(equal(message, F{})) << j;
        said.finite |= bits_of(finite) << j;
    }
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
    Momentum format(span);
    const int64_t whole = span.numel / WORD;
    uint64_t finite = ~uint64_t{0};
    for (int64_t word = 0; word < whole; ++word) {
        if (grad) ahead(grad + word * WORD, WORD * sizeof(Raw));
        ahead(momentum + word * WORD, WORD * sizeof(Kept));
        const Said said = one_word<Kind>(grad ? grad + word * WORD : grad, momentum + word * WORD, span, format, word);
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
        const Said said = one_word<Kind>(last_grad, last_momentum, span, format, whole);
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
