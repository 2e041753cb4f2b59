// Preloaded into a process: remembers the largest block that anyone asks for since watch_reset, and how many bytes are held
// more than at watch_hold, now and at most since watch_hold or watch_again.
// Seen: malloc, calloc, realloc, the aligned ones and mmap, from every thread and library. Not seen: stacks of new
// threads and the heap's own growth, which the C library maps without a symbol (their blocks are seen as malloc).
#define _GNU_SOURCE
#include <errno.h>
#include <execinfo.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

static _Atomic size_t largest, count, bound = (size_t)-1;

void watch_reset(size_t report_above) {
  atomic_store(&largest, 0);
  atomic_store(&count, 0);
  atomic_store(&bound, report_above);
}
size_t watch_largest(void) { return atomic_load(&largest); }
size_t watch_count(void) { return atomic_load(&count); }

static _Atomic long long held, most;

void watch_hold(void) {
  atomic_store(&held, 0);
  atomic_store(&most, 0);
}
void watch_again(void) { atomic_store(&most, atomic_load(&held)); }
long long watch_held(void) { return atomic_load(&held); }
long long watch_most(void) { return atomic_load(&most); }

static void hold(long long bytes) {
  long long now = atomic_fetch_add(&held, bytes) + bytes, seen = atomic_load(&most);
  while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now)) {
  }
}
static void* holding(void* block) {
  if (block) hold((long long)malloc_usable_size(block));
  return block;
}

// Maps without a file, so that their end is known from that of a file's map. One that finds no place is not counted.
enum { MAPS = 4096 };
static struct {
  void* address;
  size_t size;
} maps[MAPS];
static atomic_flag maps_in_use = ATOMIC_FLAG_INIT;

static void mapped(void* address, size_t size) {
  while (atomic_flag_test_and_set(&maps_in_use)) {
  }
  for (int k = 0; k < MAPS; ++k) {
    if (maps[k].size) continue;
    maps[k].address = address;
    maps[k].size = size;
    hold((long long)size);
    break;
  }
  atomic_flag_clear(&maps_in_use);
}
static void unmapped(void* address, size_t size) {
  while (atomic_flag_test_and_set(&maps_in_use)) {
  }
  for (int k = 0; k < MAPS; ++k) {
    if (maps[k].address != address || maps[k].size != size) continue;
    hold(-(long long)size);
    maps[k].size = 0;
    break;
  }
  atomic_flag_clear(&maps_in_use);
}

static void note(const char* how, size_t size) {
  static __thread int inside;
  atomic_fetch_add(&count, 1);
  size_t seen = atomic_load(&largest);
  while (size > seen && !atomic_compare_exchange_weak(&largest, &seen, size)) {
  }
  // Only a new largest block is told, so that a loop that allocates fills no log.
  if (size <= seen || size <= atomic_load(&bound) || inside) return;
  inside = 1;
  char line[64];
  void* frames[16];
  int length = snprintf(line, sizeof line, "%s of %zu bytes, called from\n", how, size);
  if (write(2, line, length) == length) backtrace_symbols_fd(frames, backtrace(frames, 16), 2);
  inside = 0;
}

__attribute__((constructor)) static void load_unwinder(void) {
  void* frame;
  backtrace(&frame, 1);  // its first call allocates
}

void* malloc(size_t size) {
  note("malloc", size);
  return holding(__libc_malloc(size));
}
void* calloc(size_t number, size_t size) {
  note("calloc", number * size);
  return holding(__libc_calloc(number, size));
}
void* realloc(void* block, size_t size) {
  note("realloc", size);
  long long before = block ? (long long)malloc_usable_size(block) : 0;
  void* grown = __libc_realloc(block, size);
  if (grown || !size) hold(-before);
  return holding(grown);
}
void* reallocarray(void* block, size_t number, size_t size) {
  size_t total;
  if (__builtin_mul_overflow(number, size, &total)) {
    errno = ENOMEM;
    return NULL;
  }
  return realloc(block, total);
}
void* memalign(size_t alignment, size_t size) {
  note("memalign", size);
  return holding(__libc_memalign(alignment, size));
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** out, size_t alignment, size_t size) {
  void* block = memalign(alignment, size);
  if (!block) return ENOMEM;
  *out = block;
  return 0;
}
void* mmap(void* address, size_t size, int protection, int flags, int file, long offset) {
  note("mmap", size);
  void* got = (void*)syscall(SYS_mmap, address, size, protection, flags, file, offset);
  if (got != MAP_FAILED && flags & MAP_ANONYMOUS && !(flags & MAP_FIXED)) mapped(got, size);
  return got;
}
int munmap(void* address, size_t size) {
  unmapped(address, size);
  return (int)syscall(SYS_munmap, address, size);
}
void free(void* block) {
  if (block) hold(-(long long)malloc_usable_size(block));
  __libc_free(block);
}
void* mmap64(void* address, size_t size, int protection, int flags, int file, long offset) {
  return mmap(address, size, protection, flags, file, offset);
}
