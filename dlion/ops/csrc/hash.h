// The words of a tensor, each hashed with its place, and summed: a comparison of replicas in one pass.
#pragma once

#include "lanes.h"
#include "path.h"

namespace {

// T: one word, or a vector of them. `start` is the finalised number of the tensor, with which `mix64` begins.
template <class T>
DLION_INLINE T hashed(T words, T places, uint64_t start) {
    return finalise(words) * (finalise(finalise((places ^ start) + GOLDEN) + GOLDEN) | 1);
}

uint64_t hash(const dlion::HashSpan& span) {
    constexpr int64_t SIZE = sizeof(uint64_t), AT_ONCE = sizeof(Q) / SIZE;
    const uint64_t start = finalise(span.number + GOLDEN);
    const int64_t whole = span.nbytes / SIZE;
    Q places, sums{};
    for (int i = 0; i < AT_ONCE; ++i) places[i] = span.word + i;
    int64_t w = 0;
    for (; w + AT_ONCE <= whole; w += AT_ONCE, places += AT_ONCE)
        sums += hashed(read<Q>(span.bytes + SIZE * w), places, start);
    uint64_t total = 0;
    for (int i = 0; i < AT_ONCE; ++i) total += sums[i];
    for (; SIZE * w < span.nbytes; ++w) {
        uint64_t word = 0;
        std::memcpy(&word, span.bytes + SIZE * w, w < whole ? SIZE : span.nbytes % SIZE);
        total += hashed(word, span.word + w, start);
    }
    return total;
}

}  // namespace
