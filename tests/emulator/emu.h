#pragma once
// Runs CUDA kernels on the CPU: each thread of a block is a fiber, blocks run one after another.
//
// A fiber runs until it meets a warp operation or a barrier. A warp operation is done when every lane in its mask has
// arrived at the same operation with the same mask; anything else that cannot go on (a lane that left, a source outside
// the mask, diverged masks, a barrier that some threads never reach) ends the process with a message. Threads run in
// rising order in even blocks and in falling order in odd ones, so that an order that a kernel relies on shows.
//
// Not here: dynamic shared memory, atomics across blocks, cooperative groups, tensor cores.
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct Dim3 {
    unsigned x, y, z;
};
inline Dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emu {

constexpr size_t STACK = 64 << 10;

enum class State { READY, WARP, BARRIER, DONE };
enum class Op { NONE, SHUFFLE, VOTE, SYNC };

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    State state = State::READY;
    Op op = Op::NONE;
    uint32_t mask = 0;
    uint64_t posted = 0;     // what this lane brings to the warp operation
    uint64_t seen[32] = {};  // what all lanes brought
};

inline std::vector<Lane> lanes;
inline unsigned current;
inline ucontext_t scheduler;
inline const void* scheduler_stack;
inline size_t scheduler_size;
inline std::function<void()> body;

[[noreturn]] inline void fail(const char* what, unsigned thread) {
    fprintf(stderr, "emulator: block %u thread %u: %s\n", blockIdx.x, thread, what);
    exit(3);
}

inline void yield(State state) {
    Lane& lane = lanes[current];
    lane.state = state;
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(state == State::DONE ? nullptr : &fake, scheduler_stack, scheduler_size);
    swapcontext(&lane.context, &scheduler);
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_size);
}

inline void enter() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
    body();
    yield(State::DONE);
}

inline void resume(unsigned thread) {
    current = thread;
    threadIdx = {thread, 0, 0};
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, lanes[thread].stack.get(), STACK);
    swapcontext(&scheduler, &lanes[thread].context);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

// Lets the lanes of one warp go on whose operation is complete.
inline bool release(unsigned warp) {
    bool released = false;
    for (unsigned i = 0; i < 32; ++i) {
        const Lane& first = lanes[warp + i];
        if (first.state != State::WARP) continue;
        const uint32_t mask = first.mask;
        const Op op = first.op;
        bool complete = true;
        for (unsigned j = 0; j < 32; ++j) {
            const Lane& other = lanes[warp + j];
            if (!(mask >> j & 1)) continue;
            if (other.state == State::DONE) fail("a warp operation names a lane that has left", warp + i);
            if (other.state == State::WARP && (other.mask != mask || other.op != op))
                fail("lanes of one mask are at different warp operations", warp + i);
            complete &= other.state == State::WARP;
        }
        if (!complete) continue;
        for (unsigned j = 0; j < 32; ++j) {
            if (!(mask >> j & 1)) continue;
            for (unsigned k = 0; k < 32; ++k) lanes[warp + j].seen[k] = lanes[warp + k].posted;
            lanes[warp + j].state = State::READY;
        }
        released = true;
    }
    return released;
}

inline void run_block(unsigned threads) {
    for (Lane& lane : lanes) {
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.get();
        lane.context.uc_stack.ss_size = STACK;
        lane.context.uc_link = nullptr;
        makecontext(&lane.context, enter, 0);
        lane.state = State::READY;
    }
    for (;;) {
        bool progress = false, all_done = true, at_barrier = true;
        for (unsigned i = 0; i < threads; ++i) {
            const unsigned thread = blockIdx.x % 2 ? threads - 1 - i : i;
            if (lanes[thread].state != State::READY) continue;
            resume(thread);
            progress = true;
        }
        for (unsigned warp = 0; warp < threads; warp += 32) progress |= release(warp);
        for (const Lane& lane : lanes) {
            all_done &= lane.state == State::DONE;
            at_barrier &= lane.state == State::DONE || lane.state == State::BARRIER;
        }
        if (all_done) return;
        if (at_barrier) {
            for (Lane& lane : lanes)
                if (lane.state == State::BARRIER) lane.state = State::READY;
        } else if (!progress) {
            fail("the block waits for ever", 0);
        }
    }
}

inline void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
    if (threads == 0 || threads % 32) fail("blocks must be whole warps", 0);
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    body = std::move(kernel);
    if (lanes.size() != threads) lanes = std::vector<Lane>(threads);
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx = {block, 0, 0};
        run_block(threads);
    }
}

// Brings `value` to a warp operation and returns what each lane brought.
inline const uint64_t* exchange(Op op, uint32_t mask, uint64_t value) {
    if (!(mask >> (current % 32) & 1)) fail("a lane is not in its own mask", current);
    Lane& lane = lanes[current];
    lane.op = op;
    lane.mask = mask;
    lane.posted = value;
    yield(State::WARP);
    return lane.seen;
}

template <class T>
T shuffle(uint32_t mask, T value, unsigned source) {
    uint64_t posted = 0;
    memcpy(&posted, &value, sizeof value);
    const uint64_t* seen = exchange(Op::SHUFFLE, mask, posted);
    if (!(mask >> source & 1)) fail("a shuffle reads a lane outside its mask", current);
    memcpy(&value, &seen[source], sizeof value);
    return value;
}

inline uint32_t ballot(uint32_t mask, bool predicate) {
    const uint64_t* seen = exchange(Op::VOTE, mask, predicate);
    uint32_t votes = 0;
    for (unsigned i = 0; i < 32; ++i) votes |= uint32_t(mask >> i & 1 && seen[i]) << i;
    return votes;
}

template <class To, class From>
To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// What a GPU computes: its only NaN has all bits set but the sign.
inline float computed(float value) { return value == value ? value : bit_cast<float>(0x7fffffffu); }

}  // namespace emu

// The CUDA words that kernels use. The `_rn` intrinsics are calls, so that this compiler, too, may contract only what
// is written with operators.
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using std::max;
using std::min;

#define EMU_CALL [[gnu::noinline, gnu::noipa]] inline
EMU_CALL float __fadd_rn(float a, float b) { return emu::computed(a + b); }
EMU_CALL float __fsub_rn(float a, float b) { return emu::computed(a - b); }
EMU_CALL float __fmul_rn(float a, float b) { return emu::computed(a * b); }
EMU_CALL float __fdiv_rn(float a, float b) { return emu::computed(a / b); }
EMU_CALL float __fmaf_rn(float a, float b, float c) { return emu::computed(__builtin_fmaf(a, b, c)); }
EMU_CALL float __frcp_rn(float a) { return emu::computed(1.0f / a); }

inline unsigned __float_as_uint(float value) { return emu::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return emu::bit_cast<float>(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> (4 * i) & 15;
        const unsigned byte = both >> (8 * (choice & 7)) & 255;
        result |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return result;
}

inline void __syncthreads() { emu::yield(emu::State::BARRIER); }
inline void __syncwarp(unsigned mask = ~0u) { emu::exchange(emu::Op::SYNC, mask, 0); }
inline unsigned __ballot_sync(unsigned mask, int predicate) { return emu::ballot(mask, predicate); }
inline int __any_sync(unsigned mask, int predicate) { return emu::ballot(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return emu::ballot(mask, predicate) == mask; }
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
    return emu::shuffle(mask, value, source & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip) {
    return emu::shuffle(mask, value, (emu::current ^ flip) & 31);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
    const unsigned lane = emu::current & 31;
    return emu::shuffle(mask, value, lane < delta ? lane : lane - delta);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
    const unsigned lane = emu::current & 31;
    return emu::shuffle(mask, value, lane + delta > 31 ? lane : lane + delta);
}
