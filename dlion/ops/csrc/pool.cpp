#include "pool.h"

#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace dlion {
namespace {

// A caller may have asked for flushed denormals or another rounding; replicas must not depend on that.
class DefaultArithmetic {
public:
    DefaultArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&before_); }

private:
    std::fenv_t before_;
};

struct Job {
    int64_t count, chunk;
    void (*work)(void*, int64_t, int64_t);
    void* context;
    std::atomic<int64_t> next{0};

    void help() {
        const DefaultArithmetic arithmetic;
        for (;;) {
            const int64_t begin = next.fetch_add(chunk);
            if (begin >= count) return;
            work(context, begin, begin + chunk < count ? begin + chunk : count);
        }
    }
};

class Pool {
public:
    const pid_t owner = getpid();

    // False when another thread has the pool.
    bool run(Job& job, int helpers) {
        std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
        if (!mine) return false;
        {
            std::lock_guard<std::mutex> lock(state_);
            while (started_ < helpers && start_one()) ++started_;
            job_ = &job;
            seats_ = helpers < started_ ? helpers : started_;
        }
        wake_.notify_all();
        job.help();
        std::unique_lock<std::mutex> lock(state_);
        seats_ = 0;  // who has not come yet need not
        done_.wait(lock, [this] { return helping_ == 0; });
        return true;
    }

private:
    bool start_one() {
        try {
            std::thread([this] { serve(); }).detach();
            return true;
        } catch (const std::system_error&) {
            return false;  // fewer threads do the same work
        }
    }

    void serve() {
        std::unique_lock<std::mutex> lock(state_);
        for (;;) {
            wake_.wait(lock, [this] { return seats_ > 0; });
            --seats_;
            ++helping_;
            Job* job = job_;
            lock.unlock();
            job->help();
            lock.lock();
            if (--helping_ == 0) done_.notify_one();
        }
    }

    std::mutex busy_, state_;
    std::condition_variable wake_, done_;
    int started_ = 0, seats_ = 0, helping_ = 0;
    Job* job_ = nullptr;
};

// Never freed: its threads wait in it until the process ends. A child of fork has the memory but not the threads, and
// perhaps a lock that nobody will open, so it makes its own.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
    Pool* found = current.load();
    while (!found || found->owner != getpid()) {
        Pool* fresh = new Pool;
        if (current.compare_exchange_strong(found, fresh)) return *fresh;
        delete fresh;
    }
    return *found;
}

}  // namespace

void share(int64_t count, int64_t chunk, int threads, void (*work)(void*, int64_t, int64_t), void* context) {
    if (count <= 0) return;
    Job job{count, chunk, work, context};
    const int64_t parts = (count + chunk - 1) / chunk;
    const int helpers = (int)(parts < threads ? parts : threads) - 1;
    if (helpers < 1 || !pool().run(job, helpers)) job.help();
}

}  // namespace dlion
