// Reads launches from stdin, runs them, writes their buffers to stdout; tests/emulator/emulator.py is the other end.
// Compiled with -DEMU_SOURCE="<a .cu>" and -rdynamic: kernels are found by name.
#include "emu.h"
// the emulator's words come first
#include EMU_SOURCE

#include <dlfcn.h>

#include <string>
#include <utility>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

struct Argument {
    bool is_buffer;
    int64_t value;
    std::vector<char> data;  // its end is the end of the allocation: the sanitizer sees the first byte behind
    size_t offset;
};

// Every parameter of a kernel is 64 bits wide and passed in the same way, whether pointer or integer.
template <size_t... I>
void call(void* kernel, const std::vector<int64_t>& words, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(decltype(int64_t(I))...)>(kernel)(words[I]...);
}

void call(void* kernel, const std::vector<int64_t>& words) {
    switch (words.size()) {
#define N(n) \
    case n: return call(kernel, words, std::make_index_sequence<n>());
        N(1) N(2) N(3) N(4) N(5) N(6) N(7) N(8) N(9) N(10) N(11) N(12) N(13) N(14)
    }
    emu::fail("too many arguments", 0);
}

void run(const std::string& name, std::vector<Argument>& arguments, unsigned blocks, unsigned threads) {
    void* kernel = dlsym(RTLD_DEFAULT, name.c_str());
    if (!kernel) emu::fail(("no kernel is called " + name).c_str(), 0);
    std::vector<int64_t> words;
    for (Argument& argument : arguments)
        words.push_back(argument.is_buffer ? reinterpret_cast<int64_t>(argument.data.data() + argument.offset)
                                           : argument.value);
    emu::launch(blocks, threads, [&] { call(kernel, words); });
}

template <class T>
bool read(T* into, size_t count) {
    return fread(into, sizeof(T), count, stdin) == count;
}

template <class T>
T read() {
    T value;
    if (!read(&value, 1)) emu::fail("the input ends early", 0);
    return value;
}

void flush_denormals(bool on) {
#if defined(__SSE2__)
    _mm_setcsr(on ? _mm_getcsr() | 0x8040u : _mm_getcsr() & ~0x8040u);
#else
    (void)on;
#endif
}

}  // namespace

int main() {
    uint32_t length;
    while (read(&length, 1)) {
        std::string name(length, ' ');
        read(name.data(), length);
        const auto blocks = read<uint32_t>(), threads = read<uint32_t>(), flush = read<uint32_t>();
        std::vector<Argument> arguments(read<uint32_t>());
        for (Argument& argument : arguments) {
            argument.is_buffer = read<uint32_t>();
            argument.offset = read<uint32_t>();
            argument.value = read<int64_t>();
            if (!argument.is_buffer) continue;
            argument.data = std::vector<char>(argument.offset + argument.value);
            if (argument.value && !read(argument.data.data() + argument.offset, argument.value))
                emu::fail("the input ends early", 0);
        }
        flush_denormals(flush);
        run(name, arguments, blocks, threads);
        flush_denormals(false);
        for (const Argument& argument : arguments)
            if (argument.is_buffer && argument.value) fwrite(argument.data.data() + argument.offset, 1, argument.value, stdout);
        fflush(stdout);
    }
}
