// PyTorch's allocator of CPU tensors, with large blocks from pages that are used again, and with counts.
//
// Built against the PyTorch that runs (actstore/devices/cpu_memory.py) and given to it by c10::SetCPUAllocator. Tensors
// of less than `least` bytes come from PyTorch's own allocator; all are counted.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pages.hpp"

namespace {

c10::Allocator* base = nullptr;
c10::DeleterFnPtr base_deleter = nullptr;
std::atomic<size_t> least{SIZE_MAX};  // from this size on, tensors come from pages
std::atomic<size_t> allocated{0}, most{0};

void count(size_t nbytes) {
    const size_t now = allocated.fetch_add(nbytes, std::memory_order_relaxed) + nbytes;
    size_t peak = most.load(std::memory_order_relaxed);
    while (now > peak && !most.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
}

void release_small(void* data) {
    if (data == nullptr) return;
    allocated.fetch_sub(malloc_usable_size(data), std::memory_order_relaxed);
    base_deleter(data);
}

void release(void* data) {
    if (data == nullptr) return;
    const size_t nbytes = actstore::Pages::get().give(data);
    if (nbytes == 0) {
        release_small(data);
    } else {
        allocated.fetch_sub(nbytes, std::memory_order_relaxed);
    }
}

struct CpuAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        const c10::Device cpu(c10::DeviceType::CPU);
        if (nbytes < least.load(std::memory_order_relaxed)) {
            void* data = base->allocate(nbytes).release_context();
            if (data != nullptr) count(malloc_usable_size(data));
            return {data, data, &release_small, cpu};
        }
        size_t room = 0;
        void* data = actstore::Pages::get().take(nbytes, room);
        TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr,  // the text of PyTorch's own error, which libraries match
                         "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", nbytes, " bytes");
        count(room);
        return {data, data, &release, cpu};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void copy_data(void* to, const void* from, std::size_t nbytes) const override {
        default_copy_data(to, from, nbytes);
    }
};

}  // namespace

extern "C" {

// Become PyTorch's allocator of CPU tensors. Returns 1; 0 where another one than PyTorch's own is in its place.
int actstore_install() {
    static CpuAllocator* ours = nullptr;
    if (ours != nullptr) return c10::GetCPUAllocator() == ours;
    if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return 0;
    base = c10::GetDefaultCPUAllocator();
    base_deleter = base->raw_deleter();
    actstore::Pages::get();
    ours = new CpuAllocator;
    c10::SetCPUAllocator(ours, UINT8_MAX);
    return c10::GetCPUAllocator() == ours;
}

void actstore_set_least(size_t nbytes) { least.store(nbytes); }
void actstore_add(size_t nbytes) { count(nbytes); }
// The second argument is the weak reference itself, which Python passes to its callback.
void actstore_subtract(size_t nbytes, void*) { allocated.fetch_sub(nbytes, std::memory_order_relaxed); }
size_t actstore_allocated() { return allocated.load(); }
size_t actstore_max_allocated() { return most.load(); }
void actstore_reset_max_allocated() { most.store(allocated.load()); }
size_t actstore_asked() { return actstore::Pages::get().asked(); }
size_t actstore_idle() { return actstore::Pages::get().idle(); }
void actstore_trim(size_t nbytes) { actstore::Pages::get().trim(nbytes); }
void actstore_set_window(int64_t ns) { actstore::Pages::get().set_window(ns); }
}
