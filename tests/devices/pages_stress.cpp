// Blocks of pages from many threads, under a sanitizer: each block keeps its bytes, no two overlap, idle ones are
// bounded.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "pages.hpp"

namespace {

constexpr int kThreads = 6, kRounds = 3000, kMost = 12;

struct Held {
    unsigned char* data;
    size_t nbytes;
    unsigned char mark;
};

void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}

void check(const Held& held) {
    for (size_t at : {size_t{0}, held.nbytes / 2, held.nbytes - 1}) {
        if (held.data[at] != held.mark) fail("a block was changed by another one");
    }
}

void work(unsigned seed) {
    auto& pages = actstore::Pages::get();
    std::mt19937 random(seed);
    std::vector<Held> mine;
    for (int round = 0; round < kRounds; ++round) {
        if (mine.size() < kMost && random() % 5 < 3) {
            const size_t nbytes = (size_t{1} << (14 + random() % 9)) + random() % 5000;
            size_t room = 0;
            auto* data = static_cast<unsigned char*>(pages.take(nbytes, room));
            if (data == nullptr || room < nbytes) fail("no room");
            if (reinterpret_cast<uintptr_t>(data) % 64) fail("not on a cache line");
            const Held held{data, nbytes, static_cast<unsigned char>(random() % 255 + 1)};
            for (size_t at : {size_t{0}, nbytes / 2, nbytes - 1}) data[at] = held.mark;
            mine.push_back(held);
        } else if (!mine.empty()) {
            const size_t at = random() % mine.size();
            check(mine[at]);
            if (pages.give(mine[at].data) < mine[at].nbytes) fail("a block is smaller than it was");
            mine.erase(mine.begin() + at);
        }
        if (round % 500 == 0) pages.trim(random() % (size_t{8} << 20));
    }
    for (const Held& held : mine) {
        check(held);
        pages.give(held.data);
    }
}

void run_threads(unsigned seed) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, seed + i);
    for (auto& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** words) {
    auto& pages = actstore::Pages::get();
    if (count > 1 && std::strcmp(words[1], "fork") == 0) {
        std::thread busy([] { work(99); });
        for (int i = 0; i < 10; ++i) {
            const pid_t child = fork();
            if (child == 0) {
                work(i);
                _exit(0);
            }
            int status = 0;
            waitpid(child, &status, 0);
            if (status) fail("a child failed");
        }
        busy.join();
    } else {
        run_threads(1);
    }
    if (pages.live()) fail("blocks are left");
    pages.trim(0);
    if (pages.idle()) fail("idle blocks are left");
    int outside = 0;
    if (pages.give(&outside)) fail("memory of others was taken");
    std::puts("right");
}
