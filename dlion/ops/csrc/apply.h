// Verdict and parameter -> parameter, decayed and moved, in one pass: p = p*decay - table[level].
#pragma once

#include "lanes.h"
#include "path.h"

namespace {

using dlion::ApplySpan;

constexpr int CHOOSING = 4;  // up to so many planes a step is chosen by comparing bits, above it is looked up

template <int PLANES>
struct Steps {
    F step[1 << PLANES];

    explicit DLION_INLINE Steps(const ApplySpan& span) {
        for (int level = 0; level < 1 << PLANES; ++level) step[level] = splat(span.table[level]);
    }

    DLION_INLINE F at(const ApplySpan& span, int64_t word, int j) const {
        F left[1 << PLANES];
        for (int level = 0; level < 1 << PLANES; ++level) left[level] = step[level];
        for (int plane = 0; plane < PLANES; ++plane) {
            const M set = mask_of(span.planes[plane * span.plane_stride + word], j);
            for (int level = 0; level < 1 << (PLANES - plane - 1); ++level)
                left[level] = select(set, left[2 * level + 1], left[2 * level]);
        }
        return left[0];
    }
};

template <>
struct Steps<0> {  // any number of planes
    explicit DLION_INLINE Steps(const ApplySpan&) {}

    DLION_INLINE F at(const ApplySpan& span, int64_t word, int j) const {
        U level{};
        for (int plane = 0; plane < span.plane_count; ++plane) {
            const M set = mask_of(span.planes[plane * span.plane_stride + word], j);
            level |= select(set, splat(1u << plane), U{});
        }
        F step;
        for (int i = 0; i < LANES; ++i) step[i] = span.table[level[i]];
        return step;
    }
};

struct Nearest {
    explicit DLION_INLINE Nearest(const ApplySpan&) {}
    DLION_INLINE void begin(const ApplySpan&, int64_t) {}
    template <class Kind>
    DLION_INLINE void store(typename Kind::Raw* to, F x, int) const { Kind::store(to, x); }
};

struct Stochastic {
    Dither dither;

    explicit DLION_INLINE Stochastic(const ApplySpan& span) : dither(span.half, span.odd, ~span.seed) {}
    DLION_INLINE void begin(const ApplySpan& span, int64_t word) { dither.draw(span.word + word); }
    template <class Kind>
    DLION_INLINE void store(typename Kind::Raw* to, F x, int j) const { Kind::store(to, x, dither.at(j)); }
};

template <class Kind, class Rounding, int PLANES>
DLION_INLINE void move_word(typename Kind::Raw* param, const ApplySpan& span, const Steps<PLANES>& steps,
                            Rounding& rounding, int64_t word) {
    rounding.begin(span, word);
    for (int j = 0; j < WORD; j += LANES) {
        const F moved = Kind::load(param + j) * splat(span.decay) - steps.at(span, word, j);
        rounding.template store<Kind>(param + j, moved, j);
    }
}

template <class Kind, class Rounding, int PLANES>
void apply_planes(const ApplySpan& span) {
    typedef typename Kind::Raw Raw;
    Raw* param = (Raw*)span.param;
    const Steps<PLANES> steps(span);
    Rounding rounding(span);
    const int64_t whole = span.numel / WORD;
    for (int64_t word = 0; word < whole; ++word) {
        ahead(param + word * WORD, WORD * sizeof(Raw));
        move_word<Kind>(param + word * WORD, span, steps, rounding, word);
    }
    const int64_t rest = span.numel - whole * WORD;
    if (rest) {
        Raw last[WORD] = {};
        std::memcpy(last, param + whole * WORD, rest * sizeof(Raw));
        move_word<Kind>(last, span, steps, rounding, whole);
        std::memcpy(param + whole * WORD, last, rest * sizeof(Raw));
    }
}

template <class Kind, class Rounding>
void apply_kind(const ApplySpan& span) {
    static_assert(CHOOSING == 4, "one case for each");
    switch (span.plane_count) {
        case 1: return apply_planes<Kind, Rounding, 1>(span);
        case 2: return apply_planes<Kind, Rounding, 2>(span);
        case 3: return apply_planes<Kind, Rounding, 3>(span);
        case 4: return apply_planes<Kind, Rounding, 4>(span);
        default: return apply_planes<Kind, Rounding, 0>(span);
    }
}

void apply(const ApplySpan& span) {
    switch (span.dtype) {
        case dlion::BFLOAT16:
            return span.stochastic ? apply_kind<Bfloat16, Stochastic>(span) : apply_kind<Bfloat16, Nearest>(span);
        case dlion::FLOAT16:
            return span.stochastic ? apply_kind<Float16, Stochastic>(span) : apply_kind<Float16, Nearest>(span);
        default: return apply_kind<Float32, Nearest>(span);
    }
}

}  // namespace
