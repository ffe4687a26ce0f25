// What one instruction set provides. `path.cpp` is compiled once for each of them; all give the same bits.
//
// Words are 64 bits: bit j of a word is element 64*word + j. Only plain types cross this border, and nothing of the
// standard library is instantiated behind it: code compiled for a newer processor must never be linked into the rest.
#pragma once

#include <cstdint>

namespace dlion {

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Ties : int32_t { ROTATE = 0, ALTERNATE = 1, ZERO = 2 };

// Lion's scalars, each rounded once from float64; the weights of the gradient are negative where the group maximizes.
struct Betas {
    float keep1, take1;  // message = keep1*m + take1*g
    float keep2, take2;  // m = keep2*m + take2*g
};

// A run of elements of one tensor that begins on a word.
struct BallotSpan {
    const void* grad;  // null: all zero
    Dtype dtype;       // of grad
    void* momentum;
    Dtype momentum_dtype;  // FLOAT32 or BFLOAT16
    int64_t numel;
    Betas betas;
    uint64_t* positive;  // words to write
    uint64_t* nonzero;   // words to write, or null: one-bit ballots, a zero takes its bit from a hash
    uint64_t word;       // number of the first word in the whole layout
    uint64_t half;       // t // 2
    bool odd;            // t is odd
    uint64_t rank;
};

struct ApplySpan {
    void* param;
    Dtype dtype;
    int64_t numel;
    const uint64_t* planes;  // of the first word
    int64_t plane_stride;    // in words
    int32_t plane_count;
    const float* table;  // 2**plane_count steps
    float decay;
    bool stochastic;
    uint64_t word, half, seed;
    bool odd;
};

struct TallySpan {
    const uint64_t* ballots;  // of the first word
    int64_t row_stride;       // from voter to voter, in words
    int64_t plane_stride;     // ternary: from plane "nonzero" to plane "positive"
    int64_t voters;
    bool ternary;
    int32_t counted;   // planes of the count to write; 0: the majority
    Ties ties;         // of the majority
    uint64_t* verdict;
    int64_t verdict_stride;  // from plane to plane
    int64_t words;
    uint64_t word;
    uint64_t t;
};

// Bytes of one tensor, from a whole 64-bit word on.
struct HashSpan {
    const unsigned char* bytes;
    int64_t nbytes;
    uint64_t word;   // number of the first word in the tensor
    uint64_t number;  // of the tensor
};

struct Path {
    const char* name;
    bool (*ballot)(const BallotSpan&);  // whether all gradients were finite
    void (*apply)(const ApplySpan&);
    void (*tally)(const TallySpan&);
    uint64_t (*hash)(const HashSpan&);
};

constexpr int COUNT_PLANES = 21;  // for counts below 2**20, and one for a sum; they lie on the stack of a thread

extern const Path portable;
#if defined(__x86_64__)
extern const Path avx2;
extern const Path avx512;
#endif

}  // namespace dlion
