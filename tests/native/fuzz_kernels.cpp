// Random calls of the C interface against plain loops, on every instruction set of this processor; `make sanitize` runs
// it under AddressSanitizer and UBSan. Arguments: seconds to run, seed. Every buffer has exactly its length.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "plain.h"

extern "C" {
int dlion_use_path(const char* name);
const char* dlion_path();
int dlion_ballot(const int64_t*, const int64_t*, const int64_t*, const int64_t*, const int64_t*, const int64_t*,
                 int64_t, const int64_t*, const float*, int64_t, uint64_t*, int64_t, int64_t, uint64_t, uint64_t,
                 uint64_t, int);
int dlion_apply(const int64_t*, const int64_t*, const int64_t*, const int64_t*, const int64_t*, int64_t,
                const uint64_t*, int64_t, int64_t, int64_t, const float*, const float*, int64_t, int, uint64_t,
                uint64_t, uint64_t, int);
void dlion_tally(const uint64_t*, int64_t, int64_t, int64_t, int64_t, int, int, int, uint64_t*, uint64_t, uint64_t,
                 int);
uint64_t dlion_hash(const unsigned char*, int64_t, uint64_t, int);
}

namespace {

using plain::bit;
using plain::Words;

std::mt19937_64 engine;

uint64_t word() { return engine(); }
int64_t upto(int64_t most) { return (int64_t)(engine() % (uint64_t)(most + 1)); }
uint64_t somewhere() { return upto(1) ? (uint64_t)upto(5) : word() >> 20; }

void require(bool right, const char* what) {
    if (right) return;
    std::fprintf(stderr, "fuzz_kernels: %s differs on path %s\n", what, dlion_path());
    std::exit(1);
}

float number() {
    switch (upto(9)) {
        case 0: return upto(1) ? 0.0f : -0.0f;
        case 1: return plain::as_float((uint32_t)word());  // anything, also infinities, NaN and denormals
        case 2: return std::ldexp(1.0f, (int)upto(40) - 30);
        case 3: return upto(1) ? 65520.0f : 3.39e38f;
        default: return std::ldexp((float)(upto(2000000) - 1000000), (int)upto(60) - 50);
    }
}

// Elements of one dtype in memory of their own, aligned to nothing more than an element.
struct Buffer {
    int64_t dtype, numel;
    std::unique_ptr<char[]> memory;

    Buffer(int64_t kind, int64_t count) : dtype(kind), numel(count), memory(new char[count * size() + size()]) {
        for (int64_t k = 0; k < count; ++k) set(k, number());
    }
    int64_t size() const { return dtype == 0 ? 4 : 2; }
    char* data() const { return memory.get() + size(); }
    int64_t address() const { return (int64_t)data(); }
    plain::Format format() const { return dtype == 1 ? plain::BF16 : plain::FP16; }
    uint16_t half(int64_t k) const {
        uint16_t bits;
        std::memcpy(&bits, data() + 2 * k, 2);
        return bits;
    }
    float get(int64_t k) const {
        if (dtype) return (float)plain::value(format(), half(k));
        float x;
        std::memcpy(&x, data() + 4 * k, 4);
        return x;
    }
    void set(int64_t k, float x) {
        const uint16_t bits = dtype ? plain::nearest(format(), x) : 0;
        std::memcpy(data() + size() * k, dtype ? (const void*)&bits : (const void*)&x, size());
    }
};

bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

struct Pieces {
    std::vector<int64_t> numels, offsets, groups;
    int64_t words = 0;

    Pieces() {
        for (int64_t left = upto(6); left > 0; --left) {
            words += upto(2);
            numels.push_back(upto(upto(9) ? 300 : 90000));
            offsets.push_back(64 * words);
            groups.push_back(upto(1));
            words += (numels.back() + 63) / 64;
        }
        words += upto(1);
    }
    int64_t count() const { return (int64_t)numels.size(); }
};

void try_ballot() {
    const Pieces pieces;
    const int planes = 1 + (int)upto(1), threads = 1 + (int)upto(2);
    const uint64_t first = somewhere(), t = somewhere(), rank = somewhere();
    const std::vector<plain::Lion> groups{{0.9f, 0.1f, 0.99f, 0.01f}, {0.95f, -0.05f, 0.98f, -0.02f}};
    std::vector<Buffer> grads, momenta, before;
    std::vector<int64_t> grad_at, momentum_at, dtypes, narrow;
    for (int64_t k = 0; k < pieces.count(); ++k) {
        grads.emplace_back(upto(2), pieces.numels[k]);
        narrow.push_back(upto(1));
        momenta.emplace_back(narrow[k] ? 1 : 0, pieces.numels[k]);
        if (!upto(3))
            for (int64_t e = 0; e < pieces.numels[k]; ++e)
                if (upto(1)) momenta[k].set(e, 0), grads[k].set(e, upto(9) ? 0 : INFINITY);
        before.emplace_back(momenta[k].dtype, pieces.numels[k]);
        std::memcpy(before[k].data(), momenta[k].data(), pieces.numels[k] * momenta[k].size());
        grad_at.push_back(upto(5) ? grads[k].address() : 0);
        momentum_at.push_back(momenta[k].address());
        dtypes.push_back(grads[k].dtype);
    }
    Words words(planes * pieces.words);
    const int result = dlion_ballot(grad_at.data(), momentum_at.data(), pieces.numels.data(), pieces.offsets.data(),
                                    dtypes.data(), pieces.groups.data(), pieces.count(), narrow.data(),
                                    &groups[0].keep1, 2, words.data(), planes, pieces.words, first, t, rank, threads);
    Words wanted(planes * pieces.words);
    bool finite = true;
    for (int64_t k = 0; k < pieces.count(); ++k)
        for (int64_t e = 0; e < pieces.numels[k]; ++e) {
            float m = before[k].get(e);
            const int64_t at = pieces.offsets[k] + e;
            const float g = grad_at[k] ? grads[k].get(e) : 0.0f;
            const float old = m;
            const int said = plain::vote(g, m, groups[pieces.groups[k]], finite);
            if (narrow[k]) m = plain::kept_narrow(m, old, plain::random16(t, first * 64 + (uint64_t)at, rank + (1ull << 62)));
            require(same(m, momenta[k].get(e)), "momentum");
            const uint64_t noise = plain::hash(t / 2, first + at / 64, rank);
            const bool drawn = (t % 2 ? ~noise : noise) >> (at % 64) & 1;
            const bool positive = said > 0 || (planes == 1 && said == 0 && drawn);
            wanted[(planes - 1) * pieces.words + at / 64] |= (uint64_t)positive << (at % 64);
            if (planes == 2) wanted[at / 64] |= (uint64_t)(said != 0) << (at % 64);
        }
    require(result == (finite ? 0 : 1), "finite");
    require(words == wanted, "ballot");
}

void try_apply() {
    const Pieces pieces;
    const int64_t planes = 1 + upto(6), stride = pieces.words + upto(3);
    const int stochastic = (int)upto(1), threads = 1 + (int)upto(2);
    const uint64_t first = somewhere(), t = somewhere(), seed = somewhere();
    Words verdict(planes * stride);
    for (uint64_t& w : verdict) w = word();
    std::vector<float> tables(2 << planes);
    for (float& x : tables) x = std::ldexp((float)upto(1000) - 500, (int)upto(20) - 20);
    const std::vector<float> decays{0.999f, 1.0f};
    std::vector<Buffer> params, before;
    std::vector<int64_t> at, dtypes;
    for (int64_t k = 0; k < pieces.count(); ++k) {
        params.emplace_back(upto(2), pieces.numels[k]);
        before.emplace_back(params[k].dtype, pieces.numels[k]);
        std::memcpy(before[k].data(), params[k].data(), pieces.numels[k] * params[k].size());
        at.push_back(params[k].address());
        dtypes.push_back(params[k].dtype);
    }
    require(dlion_apply(at.data(), pieces.numels.data(), pieces.offsets.data(), dtypes.data(), pieces.groups.data(),
                        pieces.count(), verdict.data(), planes, stride, pieces.words, tables.data(), decays.data(), 2,
                        stochastic, first, t, seed, threads) == 0, "result of apply");
    for (int64_t k = 0; k < pieces.count(); ++k)
        for (int64_t e = 0; e < pieces.numels[k]; ++e) {
            const int64_t here = pieces.offsets[k] + e, group = pieces.groups[k];
            int64_t level = 0;
            for (int64_t p = 0; p < planes; ++p) level |= (int64_t)bit(&verdict[p * stride], here) << p;
            volatile float decayed = before[k].get(e) * decays[group];
            const float moved = decayed - tables[(group << planes) + level];
            if (!params[k].dtype) {
                require(same(params[k].get(e), moved), "float32 parameter");
                continue;
            }
            const plain::Format format = params[k].format();
            const uint32_t random = plain::random16(t, first * 64 + (uint64_t)here, ~seed);
            const uint16_t wanted = stochastic ? plain::stochastic(format, moved, random) : plain::nearest(format, moved);
            const uint16_t found = params[k].half(e);
            require(found == wanted || (plain::is_nan(format, found) && plain::is_nan(format, wanted)), "half parameter");
        }
}

void try_tally() {
    const int64_t voters = 1 + upto(upto(3) ? 12 : 70), words = upto(upto(5) ? 40 : 3000);
    const int ternary = (int)upto(1), ties = (int)upto(ternary ? 2 : 1), threads = 1 + (int)upto(2);
    const int most = ternary ? 2 * (int)voters : (int)voters;
    int counted = 0;
    if (upto(1))
        for (counted = (int)upto(2); most >> counted; ++counted) continue;
    const int64_t plane = words + upto(2), row = (ternary + 1) * plane + upto(3);
    const uint64_t first = somewhere(), t = somewhere();
    Words ballots(voters * row);
    const int kind = (int)upto(2);
    for (uint64_t& w : ballots) w = kind == 0 ? word() : kind == 1 ? word() & word() & word() : word() | word() | word();
    for (int64_t k = 0; ternary && k < voters; ++k)  // what is zero is not positive
        for (int64_t w = 0; w < words; ++w) ballots[k * row + plane + w] &= ballots[k * row + w];
    const int planes = counted ? counted : 1 + ternary;
    Words verdict(planes * words), wanted(planes * words);
    dlion_tally(ballots.data(), row, plane, voters, words, ternary, counted, ties, verdict.data(), first, t, threads);
    std::vector<int> votes(voters);
    for (int64_t e = 0; e < 64 * words; ++e) {
        int sum = 0;
        for (int64_t k = 0; k < voters; ++k) {
            const bool one = bit(&ballots[k * row], e);
            votes[k] = !ternary ? (one ? 1 : -1) : !one ? 0 : bit(&ballots[k * row + plane], e) ? 1 : -1;
            sum += ternary ? votes[k] + 1 : one;
        }
        uint64_t level = (uint64_t)sum;
        if (!counted) {
            const int decided = plain::majority(votes, first + e / 64, t, ties);
            level = ternary ? (decided ? 1 : 0) | (decided > 0 ? 2 : 0) : decided > 0;
        }
        for (int p = 0; p < planes; ++p) wanted[p * words + e / 64] |= (level >> p & 1) << (e % 64);
    }
    require(verdict == wanted, counted ? "count" : "majority");
}

void try_hash() {
    const int64_t nbytes = upto(upto(5) ? 300 : 400000);
    const uint64_t number = somewhere();
    const int threads = 1 + (int)upto(2);
    std::unique_ptr<unsigned char[]> bytes(new unsigned char[nbytes]);
    for (int64_t k = 0; k < nbytes; ++k) bytes[k] = (unsigned char)(upto(3) ? word() : 0);
    uint64_t wanted = 0;
    for (int64_t w = 0; 8 * w < nbytes; ++w) {
        uint64_t value = 0;
        for (int64_t k = 8 * w; k < 8 * w + 8 && k < nbytes; ++k) value |= (uint64_t)bytes[k] << (8 * (k % 8));
        wanted += plain::mix(value) * (plain::hash(number, (uint64_t)w, 0) | 1);
    }
    require(dlion_hash(bytes.get(), nbytes, number, threads) == wanted, "hash");
}

}  // namespace

int main(int count, char** given) {
    const double seconds = count > 1 ? std::atof(given[1]) : 45;
    engine.seed(count > 2 ? std::strtoull(given[2], nullptr, 10) : std::random_device()());
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    int64_t rounds = 0;
    std::vector<const char*> paths;
    for (const char* path : {"portable", "avx2", "avx512"})
        if (dlion_use_path(path)) paths.push_back(path);
    for (; std::chrono::steady_clock::now() < end; ++rounds) {
        dlion_use_path(paths[rounds % paths.size()]);
        try_ballot();
        try_apply();
        try_tally();
        try_hash();
    }
    std::printf("fuzz_kernels: %lld rounds of every kernel, paths", (long long)rounds);
    for (const char* path : paths) std::printf(" %s", path);
    std::printf(", all equal\n");
}
