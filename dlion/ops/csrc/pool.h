// Threads that share the work of one call. They start at the first call that needs them, and again in a child after fork.
#pragma once

#include <cstdint>

namespace dlion {

// Call `work(context, begin, end)` for disjoint parts of [0, count), `chunk` long but for the last, on up to `threads`
// threads of which the caller is one; returns when all is done. Calls from several threads at once are allowed: one gets
// the pool, the others work alone. Floating point is in its default mode while `work` runs.
void share(int64_t count, int64_t chunk, int threads, void (*work)(void*, int64_t, int64_t), void* context);

}  // namespace dlion
