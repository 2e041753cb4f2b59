// Fibers: a stack each, and a switch between two of them that costs a few nanoseconds.
// ucontext would do everywhere, but saves the signal mask by a system call in each switch; x86-64 has a switch of its
// own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulate {

constexpr size_t kStack = 64 * 1024 + 5 * 64;
constexpr uint64_t kStackEnd = 0x5eed0fa57ac4e4d0ull;

// The lowest word of a stack: an overflow is a message, not another fiber's variables.
inline void mark_end(char* stack) { memcpy(stack, &kStackEnd, sizeof kStackEnd); }
inline bool overflowed(const char* stack) { return memcmp(stack, &kStackEnd, sizeof kStackEnd) != 0; }

}  // namespace emulate

#if defined(__x86_64__)

// emulate_switch(&from, to): push what a call preserves, leave the stack pointer in `from`, continue on the stack `to`.
asm(R"(
.text
.type emulate_switch, @function
emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulate_switch, .-emulate_switch
)");
extern "C" void emulate_switch(void** from, void* to);

namespace emulate {

struct Context {
  void* top = nullptr;
  // Start at `entry`, which never returns.
  void start(char* stack, void (*entry)()) {
    void** frame = reinterpret_cast<void**>(stack + kStack) - 8;  // 6 registers, the entry, its (null) return address
    for (int i = 0; i < 8; ++i) frame[i] = nullptr;
    frame[6] = reinterpret_cast<void*>(entry);
    top = frame;
  }
};
inline void switch_to(Context& from, Context& to) { emulate_switch(&from.top, to.top); }

}  // namespace emulate

#else
#include <ucontext.h>

namespace emulate {

struct Context {
  ucontext_t at{};
  void start(char* stack, void (*entry)()) {
    getcontext(&at);
    at.uc_stack.ss_sp = stack;
    at.uc_stack.ss_size = kStack;
    at.uc_link = nullptr;
    makecontext(&at, entry, 0);
  }
};
inline void switch_to(Context& from, Context& to) { swapcontext(&from.at, &to.at); }

}  // namespace emulate
#endif
