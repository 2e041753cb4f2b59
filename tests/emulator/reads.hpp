// Counts reads of a range of memory, in builds with -fsanitize=thread whose hooks are these in place of those of
// races.hpp
// (-U__SANITIZE_THREAD__): of all threads, and the most of one.
#pragma once
#include "schedule.hpp"

namespace emulate {
struct Reads {
  const char *begin, *end;
  unsigned long long all, most;
};
static Reads reads;
static unsigned of_thread[kMaxThreads];
static uint3 block_of_reads;

__attribute__((no_sanitize("thread"), noinline)) static void note_read(const void* at) {
  const char* p = (const char*)at;
  if (p < reads.begin || p >= reads.end) return;
  const uint3 block = blockIdx;
  if (block.x != block_of_reads.x || block.y != block_of_reads.y || threadIdx.x >= kMaxThreads) {
    for (unsigned& count : of_thread) count = 0;
    block_of_reads = block;
  }
  ++reads.all;
  if (++of_thread[current] > reads.most) reads.most = of_thread[current];
}
}  // namespace emulate

#define HOOK __attribute__((no_sanitize("thread"), visibility("hidden"))) void
extern "C" {
__attribute__((visibility("default"), no_sanitize("thread"))) emulate::Reads* emulate_reads(const char* begin,
                                                                                            const char* end) {
  for (unsigned& count : emulate::of_thread) count = 0;
  emulate::reads = {begin, end, 0, 0};
  return &emulate::reads;
}
#define ACCESS(size)                                                   \
  HOOK __tsan_read##size(void* p) { emulate::note_read(p); }           \
  HOOK __tsan_unaligned_read##size(void* p) { emulate::note_read(p); } \
  HOOK __tsan_write##size(void*) {}                                    \
  HOOK __tsan_unaligned_write##size(void*) {}
// clang-format off
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
// clang-format on
#undef ACCESS
    HOOK __tsan_read_range(void* p, size_t) {
  emulate::note_read(p);
}
HOOK __tsan_write_range(void*, size_t) {}
HOOK __tsan_vptr_update(void**, void*) {}
HOOK __tsan_vptr_read(void**) {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_init() {}
}
#undef HOOK
