// Reads launches from stdin, runs them, writes their buffers to stdout; tests/emulator/emulator.py is the other end.
// Compiled with -DEMU_SOURCE="<a .cu>" and -DEMU_KERNELS=K(name)K(name)...
#include "emu.h"
// the emulator's words come first
#include EMU_SOURCE

#include <map>
#include <string>
#include <tuple>
#include <type_traits>
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

template <class A>
A convert(Argument& argument) {
    if constexpr (std::is_pointer_v<A>) {
        return reinterpret_cast<A>(argument.data.data() + argument.offset);
    } else {
        static_assert(sizeof(A) == 8, "arguments of kernels are 64 bits wide");
        return static_cast<A>(argument.value);
    }
}

using Call = std::function<void(std::vector<Argument>&, unsigned, unsigned)>;

template <class... A>
Call callable(void (*kernel)(A...)) {
    return [kernel](std::vector<Argument>& arguments, unsigned blocks, unsigned threads) {
        if (arguments.size() != sizeof...(A)) emu::fail("wrong number of arguments", 0);
        auto next = arguments.begin();
        std::tuple<A...> values{convert<A>(*next++)...};
        emu::launch(blocks, threads, [&] { std::apply(kernel, values); });
    };
}

#define K(name) {#name, callable(name)},
const std::map<std::string, Call> kernels = {EMU_KERNELS};

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
        kernels.at(name)(arguments, blocks, threads);
        flush_denormals(false);
        for (const Argument& argument : arguments)
            if (argument.is_buffer) fwrite(argument.data.data() + argument.offset, 1, argument.value, stdout);
    }
}
