// Gradient and momentum -> moved momentum and ballot, in one pass.
#pragma once

#include "lanes.h"
#include "path.h"

namespace {

using dlion::Betas;
using dlion::BallotSpan;

struct NoGradient {
    typedef uint16_t Raw;
    static DLION_INLINE F load(const Raw*) { return F{}; }
};

struct Said {
    uint64_t positive = 0, zero = 0, finite = 0;  // a bit for each element of one word
};

template <class Kind>
DLION_INLINE Said one_word(const typename Kind::Raw* grad, float* momentum, const Betas& betas) {
    const F keep1 = splat(betas.keep1), take1 = splat(betas.take1);
    const F keep2 = splat(betas.keep2), take2 = splat(betas.take2);
    Said said;
    for (int j = 0; j < WORD; j += LANES) {
        const F g = Kind::load(grad ? grad + j : grad);
        const F m = read<F>(momentum + j);
        const F message = m * keep1 + g * take1;
        const I finite = is_finite(message);  // neither a gradient nor a loaded momentum that is not may become a vote
        F moved = m * keep2 + g * take2;
        moved = select(((U)moved & 0x7fffffffu) < 0x00800000u, F{}, moved);  // below 2**-126
        write(momentum + j, select(finite, moved, m));
        said.positive |= bits_of((message > 0.0f) & finite) << j;
        said.zero |= bits_of((message == 0.0f) | ~finite) << j;
        said.finite |= bits_of(finite) << j;
    }
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

template <class Kind>
bool ballot_of(const BallotSpan& span) {
    typedef typename Kind::Raw Raw;
    const Raw* grad = (const Raw*)span.grad;
    const int64_t whole = span.numel / WORD;
    uint64_t finite = ~uint64_t{0};
    for (int64_t word = 0; word < whole; ++word) {
        if (grad) ahead(grad + word * WORD, WORD * sizeof(Raw));
        ahead(span.momentum + word * WORD, WORD * sizeof(float));
        const Said said = one_word<Kind>(grad ? grad + word * WORD : grad, span.momentum + word * WORD, span.betas);
        put(span, word, said, ~uint64_t{0});
        finite &= said.finite;
    }
    const int64_t rest = span.numel - whole * WORD;
    if (rest) {
        Raw last_grad[WORD] = {};
        float last_momentum[WORD] = {};
        float* momentum = span.momentum + whole * WORD;
        if (grad) std::memcpy(last_grad, grad + whole * WORD, rest * sizeof(Raw));
        std::memcpy(last_momentum, momentum, rest * sizeof(float));
        const Said said = one_word<Kind>(last_grad, last_momentum, span.betas);
        std::memcpy(momentum, last_momentum, rest * sizeof(float));
        put(span, whole, said, (uint64_t{1} << rest) - 1);
        finite &= said.finite;
    }
    return finite == ~uint64_t{0};
}

bool ballot(const BallotSpan& span) {
    if (!span.grad) return ballot_of<NoGradient>(span);
    switch (span.dtype) {
        case dlion::BFLOAT16: return ballot_of<Bfloat16>(span);
        case dlion::FLOAT16: return ballot_of<Float16>(span);
        default: return ballot_of<Float32>(span);
    }
}

}  // namespace
