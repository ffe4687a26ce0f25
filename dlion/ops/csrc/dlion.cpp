// The C interface, called from ops/native.py: checks what memory safety rests on, cuts the work into parts, and hands
// them to the instruction set in use.
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "path.h"
#include "pool.h"

#define DLION_PUBLIC extern "C" __attribute__((visibility("default")))

namespace dlion {
namespace {

constexpr int64_t WORD = 64;
constexpr int64_t CHUNK = 512;         // words, 32,768 elements: microseconds, far more than starting a part costs
constexpr int64_t HASH_CHUNK = 16384;   // words, 128 KiB
constexpr int64_t TALLY_CHUNK = 1024;  // words: a tally passes each word of a ballot quicker

enum Result : int { FINE = 0, NOT_FINITE = 1, BAD_PIECE = -1, NO_MEMORY = -2 };

#if defined(__x86_64__)
// Asked of the processor itself: __builtin_cpu_supports says no to everything under runtimes that fill no table for it,
// such as zig's. `needed`: bits of register B of leaf 7; `kept`: registers that the system keeps for each thread.
bool supports(uint32_t needed, uint32_t kept) {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    uint32_t low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & kept) != kept) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & needed) == needed;
}

bool supports_avx512() { return supports(bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL, 0xe6); }
bool supports_avx2() { return supports(bit_AVX2, 0x6); }
#endif

const Path* fastest() {
#if defined(__x86_64__)
    if (supports_avx512()) return &avx512;
    if (supports_avx2()) return &avx2;
#endif
    return &portable;
}

const Path* named(const char* name) {
    if (!std::strcmp(name, "auto")) return fastest();
    if (!std::strcmp(name, "portable")) return &portable;
#if defined(__x86_64__)
    if (!std::strcmp(name, "avx2") && supports_avx2()) return &avx2;
    if (!std::strcmp(name, "avx512") && supports_avx512()) return &avx512;
#endif
    return nullptr;
}

std::atomic<const Path*> path{nullptr};

const Path& in_use() {
    const Path* chosen = path.load();
    if (!chosen) path.store(chosen = fastest());
    return *chosen;
}

int64_t words_of(int64_t numel) { return (numel + WORD - 1) / WORD; }

// Pieces as parallel arrays: addresses, lengths in elements, where each starts in the bucket, its dtype and group.
struct Pieces {
    const int64_t *addresses, *numels, *offsets, *dtypes, *groups;
    int64_t count;
    std::vector<int64_t> before;  // words of all pieces before each, and of all

    // False when a piece does not lie inside a bucket of `words`, on a word, in one of `groups`.
    bool fit(int64_t words, int64_t group_count) {
        before.resize(count + 1);
        before[0] = 0;
        for (int64_t k = 0; k < count; ++k) {
            const int64_t first = offsets[k] / WORD;
            if (offsets[k] < 0 || offsets[k] % WORD || numels[k] < 0 || first > words ||
                words_of(numels[k]) > words - first)
                return false;
            if (groups[k] < 0 || groups[k] >= group_count || dtypes[k] < FLOAT32 || dtypes[k] > FLOAT16) return false;
            before[k + 1] = before[k] + words_of(numels[k]);
        }
        return true;
    }

    // Calls `run(piece, first element, elements)` for each piece that has words in [begin, end) of all pieces' words.
    template <class Run>
    void each(int64_t begin, int64_t end, Run run) const {
        int64_t low = 0, high = count;  // the last piece that starts at or before `begin`
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (before[middle] <= begin ? low : high) = middle;
        }
        for (int64_t k = low; k < count && before[k] < end; ++k) {
            const int64_t from = (begin > before[k] ? begin - before[k] : 0) * WORD;
            const int64_t to = end < before[k + 1] ? (end - before[k]) * WORD : numels[k];
            if (from < to) run(k, from, to - from);
        }
    }
};

template <class Work>
void share_out(int64_t count, int64_t chunk, int threads, Work& work) {
    share(
        count, chunk, threads,
        [](void* context, int64_t begin, int64_t end) { (*static_cast<Work*>(context))(begin, end); }, &work);
}

char* at(int64_t address, int64_t element, int64_t dtype) {
    return reinterpret_cast<char*>(address) + element * (dtype == FLOAT32 ? 4 : 2);
}

}  // namespace
}  // namespace dlion

using namespace dlion;

// Raised with every change of this interface, so that a library left over from another version is not called.
DLION_PUBLIC int dlion_interface() { return 3; }

// The instruction set in use.
DLION_PUBLIC const char* dlion_path() { return in_use().name; }

// Use another: "auto", "portable", "avx2", "avx512". 0 when this processor cannot.
DLION_PUBLIC int dlion_use_path(const char* name) {
    const Path* chosen = named(name);
    if (chosen) path.store(chosen);
    return chosen != nullptr;
}

// `betas` holds keep1, take1, keep2, take2 of each group; `words` is u64[planes, bucket_words], planes "positive" alone,
// or "nonzero" and "positive". `dtypes` are those of the gradients, one that is missing has address 0; `narrow` is 1
// where the momentum is bfloat16, 0 where it is float32.
DLION_PUBLIC int dlion_ballot(const int64_t* grads, const int64_t* momenta, const int64_t* numels,
                              const int64_t* offsets, const int64_t* dtypes, const int64_t* groups, int64_t count,
                              const int64_t* narrow, const float* betas, int64_t group_count, uint64_t* words,
                              int64_t planes, int64_t bucket_words, uint64_t first_word, uint64_t t, uint64_t rank,
                              int threads) try {
    Pieces pieces{grads, numels, offsets, dtypes, groups, count, {}};
    if (!pieces.fit(bucket_words, group_count)) return BAD_PIECE;
    if (pieces.before[count] < bucket_words) std::memset(words, 0, planes * bucket_words * sizeof(uint64_t));  // gaps
    const Path& chosen = in_use();
    std::atomic<bool> finite{true};
    auto work = [&](int64_t begin, int64_t end) {
        pieces.each(begin, end, [&](int64_t k, int64_t from, int64_t numel) {
            const int64_t word = (offsets[k] + from) / WORD;
            const float* scalars = betas + 4 * groups[k];
            BallotSpan span{};
            span.grad = grads[k] ? at(grads[k], from, dtypes[k]) : nullptr;
            span.dtype = (Dtype)dtypes[k];
            span.momentum_dtype = narrow[k] ? BFLOAT16 : FLOAT32;
            span.momentum = at(momenta[k], from, span.momentum_dtype);
            span.numel = numel;
            span.betas = {scalars[0], scalars[1], scalars[2], scalars[3]};
            span.nonzero = planes == 2 ? words + word : nullptr;
            span.positive = words + word + (planes == 2 ? bucket_words : 0);
            span.word = first_word + word;
            span.half = t / 2;
            span.odd = t % 2;
            span.rank = rank;
            if (!chosen.ballot(span)) finite.store(false, std::memory_order_relaxed);
        });
    };
    share_out(pieces.before[count], CHUNK, threads, work);
    return finite.load() ? FINE : NOT_FINITE;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// `planes` is u64[plane_count, ...] with rows `plane_stride` apart, `tables` f32[groups, 2**plane_count].
DLION_PUBLIC int dlion_apply(const int64_t* params, const int64_t* numels, const int64_t* offsets,
                             const int64_t* dtypes, const int64_t* groups, int64_t count, const uint64_t* planes,
                             int64_t plane_count, int64_t plane_stride, int64_t bucket_words, const float* tables,
                             const float* decays, int64_t group_count, int stochastic, uint64_t first_word, uint64_t t,
                             uint64_t seed, int threads) try {
    Pieces pieces{params, numels, offsets, dtypes, groups, count, {}};
    if (!pieces.fit(bucket_words, group_count)) return BAD_PIECE;
    const Path& chosen = in_use();
    auto work = [&](int64_t begin, int64_t end) {
        pieces.each(begin, end, [&](int64_t k, int64_t from, int64_t numel) {
            const int64_t word = (offsets[k] + from) / WORD;
            ApplySpan span{};
            span.param = at(params[k], from, dtypes[k]);
            span.dtype = (Dtype)dtypes[k];
            span.numel = numel;
            span.planes = planes + word;
            span.plane_stride = plane_stride;
            span.plane_count = (int32_t)plane_count;
            span.table = tables + (groups[k] << plane_count);
            span.decay = decays[groups[k]];
            span.stochastic = stochastic;
            span.word = first_word + word;
            span.half = t / 2;
            span.odd = t % 2;
            span.seed = seed;
            chosen.apply(span);
        });
    };
    share_out(pieces.before[count], CHUNK, threads, work);
    return FINE;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// `ballots` is u64[voters, words], or u64[voters, 2, words] where `ternary`, with strides in words. `counted` planes of
// the count go to `verdict`; 0: the majority does, one plane, or two where `ternary`. `verdict` is contiguous.
DLION_PUBLIC void dlion_tally(const uint64_t* ballots, int64_t row_stride, int64_t plane_stride, int64_t voters,
                              int64_t words, int ternary, int counted, int ties, uint64_t* verdict, uint64_t first_word,
                              uint64_t t, int threads) {
    const Path& chosen = in_use();
    auto work = [&](int64_t begin, int64_t end) {
        TallySpan span{};
        span.ballots = ballots + begin;
        span.row_stride = row_stride;
        span.plane_stride = plane_stride;
        span.voters = voters;
        span.ternary = ternary;
        span.counted = counted;
        span.ties = (Ties)ties;
        span.verdict = verdict + begin;
        span.verdict_stride = words;
        span.words = end - begin;
        span.word = first_word + begin;
        span.t = t;
        chosen.tally(span);
    };
    share_out(words, TALLY_CHUNK, threads, work);
}

// The sum of the words of one tensor's bytes, each hashed with its place; see `hashed` in ops/bits.py.
DLION_PUBLIC uint64_t dlion_hash(const unsigned char* bytes, int64_t nbytes, uint64_t number, int threads) {
    const Path& chosen = in_use();
    std::atomic<uint64_t> total{0};
    auto work = [&](int64_t begin, int64_t end) {
        const int64_t from = 8 * begin, to = 8 * end < nbytes ? 8 * end : nbytes;
        total.fetch_add(chosen.hash({bytes + from, to - from, (uint64_t)begin, number}), std::memory_order_relaxed);
    };
    share_out((nbytes + 7) / 8, HASH_CHUNK, threads, work);
    return total.load();
}
