// Blocks of pages for large tensors in CPU memory, used again by size. No dependency on PyTorch.
//
// A freed block stays mapped, so that the next tensor of about its size costs no page faults. The bytes in use bound
// the mapped bytes: `live + idle` never exceeds the high-water of `live` over the last two windows of time, plus a
// slack. So the process needs no more pages than its tensors have needed at once.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace actstore {

class Pages {
   public:
    static constexpr size_t kPage = 4096, kHuge = size_t{2} << 20, kLine = 64;
    static constexpr size_t kSlack = size_t{32} << 20;  // bytes that may be idle beyond the high-water

    // The one instance: never destroyed, because tensors outlive static objects.
    static Pages& get() {
        static Pages* pages = [] {
            auto* made = new Pages;
            pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
            return made;
        }();
        return *pages;
    }

    // Take memory for `nbytes`, aligned to a cache line, with its actual size; nullptr where the system refuses.
    void* take(size_t nbytes, size_t& room) {
        std::vector<Block> gone;
        void* data = nullptr;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            turn(gone);
            auto found = by_room_.lower_bound(nbytes);
            Block block;
            if (found != by_room_.end() && found->first <= nbytes + nbytes / 8) {
                block = *found->second;
                idle_ -= block.mapped;
                order_.erase(found->second);
                by_room_.erase(found);
            } else {
                block = shape(nbytes);
                const size_t most = std::max(ceiling(), live_ + block.mapped) + slack();
                shrink(most - live_ - std::min(most - live_, block.mapped), gone);
                unmap(gone);
                if (!map(block)) {
                    shrink(0, gone);
                    unmap(gone);
                    if (!map(block)) return nullptr;
                }
            }
            block.asked = nbytes;
            asked_ += nbytes;
            live_ += block.mapped;
            highest_ = std::max(highest_, live_);
            data = block.data;
            room = block.room;
            used_.emplace(data, block);
        }
        unmap(gone);
        return data;
    }

    // Give back memory of `take`. Returns its size; 0 for memory of another allocator.
    size_t give(void* data) {
        std::vector<Block> gone;
        size_t nbytes = 0;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            auto found = used_.find(data);
            if (found == used_.end()) return 0;
            const Block block = found->second;
            used_.erase(found);
            nbytes = block.room;
            asked_ -= block.asked;
            live_ -= block.mapped;
            idle_ += block.mapped;
            order_.push_back(block);
            by_room_.emplace(block.room, std::prev(order_.end()));
            turn(gone);
            const size_t most = ceiling() + slack();
            shrink(most - std::min(most, live_), gone);
        }
        unmap(gone);
        return nbytes;
    }

    // Return idle blocks to the system until at most `most` bytes are idle.
    void trim(size_t most) {
        std::vector<Block> gone;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            highest_ = before_ = live_;
            shrink(most, gone);
        }
        unmap(gone);
    }

    // The length of a window of time, in nanoseconds.
    void set_window(int64_t ns) {
        std::lock_guard<std::mutex> guard(mutex_);
        window_ns_ = ns;
    }

    // Bytes that were asked for and not given back; `live` counts the whole blocks, which are larger.
    size_t asked() {
        std::lock_guard<std::mutex> guard(mutex_);
        return asked_;
    }

    size_t live() {
        std::lock_guard<std::mutex> guard(mutex_);
        return live_;
    }

    size_t idle() {
        std::lock_guard<std::mutex> guard(mutex_);
        return idle_;
    }

   private:
    struct Block {
        char* base = nullptr;
        char* data = nullptr;
        size_t mapped = 0;  // bytes from `base` on
        size_t room = 0;    // bytes from `data` on
        size_t asked = 0;   // bytes of these that the caller asked for
    };

    static size_t round_up(size_t nbytes, size_t grain) { return (nbytes + grain - 1) / grain * grain; }

    // Sizes of a new block. Blocks begin at different offsets in their first pages: tensors that all begin at one page
    // offset compete for the same cache lines.
    Block shape(size_t nbytes) {
        const size_t line = kLine * (21 * drawn_ % 64), page = kPage * (5 * drawn_ % 8);
        const size_t offset = line + (nbytes >= kHuge ? page : 0);
        ++drawn_;
        Block block;
        block.mapped = round_up(nbytes + offset, nbytes >= kHuge ? kPage * 16 : kPage);
        block.room = block.mapped - offset;
        return block;
    }

    // Map the pages of a block; large ones on a boundary of huge pages.
    static bool map(Block& block) {
        const size_t room = block.room, mapped = block.mapped, more = mapped >= kHuge ? kHuge : 0;
        void* found = mmap(nullptr, mapped + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) return false;
        char* begin = static_cast<char*>(found);
        block.base = begin;
        if (more) {
            block.base = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(begin), kHuge));
            if (block.base > begin) munmap(begin, block.base - begin);
            const size_t tail = begin + mapped + more - (block.base + mapped);
            if (tail) munmap(block.base + mapped, tail);
            madvise(block.base, mapped / kHuge * kHuge, MADV_HUGEPAGE);
        }
        block.data = block.base + (mapped - room);
        return true;
    }

    static void unmap(std::vector<Block>& gone) {
        for (const Block& block : gone) munmap(block.base, block.mapped);
        gone.clear();
    }

    // Take blocks out of the idle ones, least recently used first; the caller unmaps them.
    void shrink(size_t most, std::vector<Block>& gone) {
        while (idle_ > most && !order_.empty()) {
            const auto first = order_.begin();
            const auto range = by_room_.equal_range(first->room);
            for (auto it = range.first; it != range.second; ++it) {
                if (it->second == first) {
                    by_room_.erase(it);
                    break;
                }
            }
            idle_ -= first->mapped;
            gone.push_back(*first);
            order_.erase(first);
        }
    }

    size_t ceiling() const { return std::max(highest_, before_); }
    size_t slack() const { return kSlack + ceiling() / 16; }

    // Begin another window of time when this one is over.
    void turn(std::vector<Block>& gone) {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
        const int64_t ns = int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
        if (ns - began_ns_ < window_ns_) return;
        before_ = began_ns_ && ns - began_ns_ < 2 * window_ns_ ? highest_ : live_;
        highest_ = live_;
        began_ns_ = ns;
        const size_t most = ceiling() + slack();
        shrink(most - std::min(most, live_), gone);
    }

    std::mutex mutex_;
    std::unordered_map<void*, Block> used_;
    std::list<Block> order_;  // idle, least recently used first
    std::multimap<size_t, std::list<Block>::iterator> by_room_;
    size_t live_ = 0, idle_ = 0;       // bytes mapped
    size_t asked_ = 0;                 // of live_, the bytes that callers asked for
    size_t highest_ = 0, before_ = 0;  // high-water of live_ in this window and in the one before
    int64_t began_ns_ = 0, window_ns_ = int64_t{30} * 1000000000;
    size_t drawn_ = 0;
};

}  // namespace actstore
