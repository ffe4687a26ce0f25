// Ballots -> verdict, never unpacked: a carry-save adder counts 64 elements in each word, seven ballots and a carry at
// a time.
#pragma once

#include "lanes.h"
#include "path.h"

namespace {

using dlion::COUNT_PLANES;
using dlion::TallySpan;

constexpr int BLOCK = 1024;  // words: long enough a run of each ballot, and the planes stay in the nearer caches

typedef uint64_t Plane[BLOCK + 8];  // not a power of two, so that planes do not compete for the same lines of it

// a + b + c = sum + 2*carry, in every bit of a word or of several.
template <class V>
struct Sum {
    V sum, carry;
};

template <class V>
DLION_INLINE Sum<V> add(V a, V b, V c) {
    const V half = a ^ b;
    return {half ^ c, (a & b) | (half & c)};
}

// Rows to count: `at<V>(k, w)` is word w, or as many as V holds from there, of row k.
struct Votes {
    const uint64_t* first;
    int64_t stride;
    template <class V = uint64_t>
    DLION_INLINE V at(int64_t k, int64_t w) const { return read<V>(first + k * stride + w); }
    DLION_INLINE void fetch(int64_t k, int64_t w) const { __builtin_prefetch(first + k * stride + w + BLOCK / 8); }
};

struct Against {  // nonzero and not positive
    Votes nonzero, positive;
    template <class V>
    DLION_INLINE V at(int64_t k, int64_t w) const { return nonzero.at<V>(k, w) & ~positive.at<V>(k, w); }
    DLION_INLINE void fetch(int64_t k, int64_t w) const { nonzero.fetch(k, w); positive.fetch(k, w); }
};

struct Zeros {
    Votes nonzero;
    template <class V>
    DLION_INLINE V at(int64_t k, int64_t w) const { return ~nonzero.at<V>(k, w); }
    DLION_INLINE void fetch(int64_t k, int64_t w) const { nonzero.fetch(k, w); }
};

// Adds ROWS (1 to 8) rows from row k, at word w, to the count in the planes.
template <int ROWS, class V, class Rows>
DLION_INLINE void add_rows_at(Plane* planes, int used, const Rows& rows, int64_t k, int64_t w) {
    V row[8];
    for (int i = 0; i < 8; ++i) row[i] = i < ROWS ? rows.template at<V>(k + i, w) : V{};
    const V ones = read<V>(&planes[0][w]), twos = read<V>(&planes[1][w]), fours = read<V>(&planes[2][w]);
    const Sum<V> a = add(ones, row[0], row[1]);
    const Sum<V> b = add(a.sum, row[2], row[3]);
    const Sum<V> c = add(b.sum, row[4], row[5]);
    const Sum<V> d = add(c.sum, row[6], row[7]);
    const Sum<V> e = add(twos, a.carry, b.carry);
    const Sum<V> f = add(e.sum, c.carry, d.carry);
    const Sum<V> g = add(fours, e.carry, f.carry);
    write(&planes[0][w], d.sum);
    write(&planes[1][w], f.sum);
    write(&planes[2][w], g.sum);
    V carry = g.carry;
    for (int plane = 3; plane < used; ++plane) {
        const V bits = read<V>(&planes[plane][w]);
        write(&planes[plane][w], bits ^ carry);
        carry &= bits;
    }
}

template <int ROWS, class Rows>
DLION_INLINE void add_rows(Plane* planes, int used, const Rows& rows, int64_t k, int64_t words) {
    constexpr int AT_ONCE = sizeof(Q) / sizeof(uint64_t);
    int64_t w = 0;
    for (; w + AT_ONCE <= words; w += AT_ONCE) {
        for (int i = 0; i < ROWS; ++i) rows.fetch(k + i, w);
        add_rows_at<ROWS, Q>(planes, used, rows, k, w);
    }
    for (; w < words; ++w) add_rows_at<ROWS, uint64_t>(planes, used, rows, k, w);
}

// In how many rows each bit is set, lowest plane first. Returns how many planes are used, at least 3.
template <class Rows>
int count(Plane* planes, const Rows& rows, int64_t voters, int64_t words) {
    int used = 3;
    while (voters >> used) ++used;
    std::memset(planes, 0, used * sizeof(Plane));
    int64_t k = 0;
    for (; k + 8 <= voters; k += 8) add_rows<8>(planes, used, rows, k, words);
    switch (voters - k) {
        case 1: add_rows<1>(planes, used, rows, k, words); break;
        case 2: add_rows<2>(planes, used, rows, k, words); break;
        case 3: add_rows<3>(planes, used, rows, k, words); break;
        case 4: add_rows<4>(planes, used, rows, k, words); break;
        case 5: add_rows<5>(planes, used, rows, k, words); break;
        case 6: add_rows<6>(planes, used, rows, k, words); break;
        case 7: add_rows<7>(planes, used, rows, k, words); break;
        default: break;
    }
    return used;
}

// Bits where the number in the planes is more than, and where it is, `value`.
void compare(const Plane* planes, int used, uint64_t value, Plane more, Plane equal, int64_t words) {
    std::memset(more, 0, sizeof(Plane));
    std::memset(equal, 0xff, sizeof(Plane));
    for (int plane = used - 1; plane >= 0; --plane) {
        const uint64_t wanted = value >> plane & 1 ? ~uint64_t{0} : 0;
        for (int64_t w = 0; w < words; ++w) {
            const uint64_t bits = planes[plane][w];
            more[w] |= equal[w] & bits & ~wanted;
            equal[w] &= ~(bits ^ wanted);
        }
    }
}

// Bits where the number in planes `a` is more than, and where it equals, the one in planes `b`.
void compare(const Plane* a, const Plane* b, int used, Plane more, Plane equal, int64_t words) {
    std::memset(more, 0, sizeof(Plane));
    std::memset(equal, 0xff, sizeof(Plane));
    for (int plane = used - 1; plane >= 0; --plane)
        for (int64_t w = 0; w < words; ++w) {
            more[w] |= equal[w] & a[plane][w] & ~b[plane][w];
            equal[w] &= ~(a[plane][w] ^ b[plane][w]);
        }
}

DLION_INLINE uint64_t alternating(uint64_t word, uint64_t t) { return (word + t) % 2 ? 0 : ~uint64_t{0}; }

void majority(const TallySpan& span, const Votes& votes, int64_t at, int64_t words, Plane* planes) {
    Plane more, equal;
    const int used = count(planes, votes, span.voters, words);
    compare(planes, used, (uint64_t)span.voters / 2, more, equal, words);
    uint64_t* verdict = span.verdict + at;
    if (span.voters % 2) {
        std::memcpy(verdict, more, words * sizeof(uint64_t));
    } else if (span.ties == dlion::ALTERNATE) {
        for (int64_t w = 0; w < words; ++w) verdict[w] = more[w] | (equal[w] & alternating(span.word + at + w, span.t));
    } else {
        uint64_t turn = (span.t / 2 + span.word + at) % span.voters;
        for (int64_t w = 0; w < words; ++w) {
            verdict[w] = more[w] | (equal[w] & votes.at(turn, w));
            if (++turn == (uint64_t)span.voters) turn = 0;
        }
    }
}

// Tied elements of one word that somebody voted on, and how they are decided: by the first who voted at or after `turn`.
struct Decided {
    uint64_t somebody = 0, positive = 0;
};

DLION_INLINE Decided decide(const Against& votes, int64_t voters, uint64_t turn, uint64_t tied, int64_t w) {
    Decided decided;
    for (int64_t k = 0; k < voters && tied & ~decided.somebody; ++k) {
        decided.positive |= votes.positive.at(turn, w) & ~decided.somebody & tied;
        decided.somebody |= votes.nonzero.at(turn, w) & tied;
        if (++turn == (uint64_t)voters) turn = 0;
    }
    return decided;
}

void ternary_majority(const TallySpan& span, const Against& votes, int64_t at, int64_t words, Plane* planes) {
    Plane more, tied;
    Plane* against = planes + COUNT_PLANES;
    const int used = count(planes, votes.positive, span.voters, words);
    count(against, votes, span.voters, words);
    compare(planes, against, used, more, tied, words);
    uint64_t* nonzero = span.verdict + at;
    uint64_t* positive = nonzero + span.verdict_stride;
    uint64_t turn = (span.t / 2 + span.word + at) % span.voters;
    for (int64_t w = 0; w < words; ++w) {
        Decided decided;
        if (span.ties != dlion::ZERO) decided = decide(votes, span.voters, turn, tied[w], w);
        if (span.ties == dlion::ALTERNATE) decided.positive = decided.somebody & alternating(span.word + at + w, span.t);
        nonzero[w] = ~tied[w] | decided.somebody;
        positive[w] = more[w] | decided.positive;
        if (++turn == (uint64_t)span.voters) turn = 0;
    }
}

void put_planes(const TallySpan& span, const Plane* planes, int used, int64_t at, int64_t words) {
    for (int plane = 0; plane < span.counted; ++plane) {
        uint64_t* verdict = span.verdict + plane * span.verdict_stride + at;
        if (plane < used)
            std::memcpy(verdict, planes[plane], words * sizeof(uint64_t));
        else
            std::memset(verdict, 0, words * sizeof(uint64_t));
    }
}

// The sum of the votes plus the number of voters: twice those in favour, and once the zeros.
void ternary_count(const TallySpan& span, const Against& votes, int64_t at, int64_t words, Plane* planes) {
    Plane* zeros = planes + COUNT_PLANES;
    int used = count(planes, votes.positive, span.voters, words);
    count(zeros, Zeros{votes.nonzero}, span.voters, words);
    std::memset(planes[used], 0, sizeof(Plane));
    std::memset(zeros[used], 0, sizeof(Plane));
    Plane carry = {};
    ++used;
    for (int plane = 1; plane < used; ++plane)
        for (int64_t w = 0; w < words; ++w) {
            const Sum<uint64_t> both = add(zeros[plane][w], planes[plane - 1][w], carry[w]);
            zeros[plane][w] = both.sum;
            carry[w] = both.carry;
        }
    put_planes(span, zeros, used, at, words);
}

void tally(const TallySpan& span) {
    Plane planes[2 * COUNT_PLANES];
    for (int64_t at = 0; at < span.words; at += BLOCK) {
        const int64_t words = span.words - at < BLOCK ? span.words - at : BLOCK;
        const Votes first{span.ballots + at, span.row_stride};
        const Votes second{first.first + span.plane_stride, span.row_stride};
        if (span.ternary && span.counted)
            ternary_count(span, Against{first, second}, at, words, planes);
        else if (span.ternary)
            ternary_majority(span, Against{first, second}, at, words, planes);
        else if (span.counted)
            put_planes(span, planes, count(planes, first, span.voters, words), at, words);
        else
            majority(span, first, at, words, planes);
    }
}

}  // namespace
