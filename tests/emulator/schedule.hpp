// The emulated device: threads of a block are fibers, resumed in an order drawn from a seed; blocks run one after
// another. A fiber runs until it meets a barrier or a warp operation. Whatever goes wrong ends the launch with a
// message. One launch at a time per library: its state, and the kernels' static shared memory, are guarded by a lock.
#pragma once
#include <pthread.h>

#include <cstdio>
#include <cstring>

#include "switch.hpp"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

// Static shared variables lie in this section of the library, so that they can be poisoned.
extern "C" char __start_emulate_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulate_shared[] __attribute__((weak, visibility("hidden")));

namespace emulate {

constexpr unsigned kMaxThreads = 1024;
constexpr size_t kCanary = 64;
constexpr const char* kOverflow = "a thread needs more stack than the emulator gives it";
enum class State : unsigned char { ready, waiting, done };
enum class Operation : unsigned char { none, sync, shuffle, ballot };

struct Fiber {
  Context context;
  uint3 index{};
  State state = State::done;
};
// What the lanes of a warp left on arrival at an operation, and what they take away from it.
struct Warp {
  unsigned alive = 0, arrived = 0;
  bool mixed = false;  // the lanes that arrived and still wait do so in more than one group
  unsigned last_mask = 0;
  Operation last_operation{};
  unsigned mask[32], source[32];
  Operation operation[32];
  uint64_t value[32], result[32];
};

static Fiber fibers[kMaxThreads];
static Warp warps[kMaxThreads / 32];
static unsigned order[kMaxThreads];
static Context scheduler;
static unsigned count, current, alive, at_barrier;
static unsigned phase_now;  // grows at each barrier and with each block
static bool running;        // a thread of the kernel, not the scheduler
static int votes, last_votes, last_count;
static char* stacks;
static char* dynamic_shared;
static size_t dynamic_size, dynamic_capacity;
static char message[512];
static bool failed;
static uint64_t random_state;
static void (*kernel)(const void*);
static const void* kernel_arguments;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// End the launch: called on the stack of a fiber, which is left behind, or of the scheduler.
inline void fail(const char* what, unsigned line = 0) {
  char where[32] = "";
  if (line) snprintf(where, sizeof where, "line %u: ", line);
  snprintf(message, sizeof message, "block (%u,%u,%u) thread (%u,%u,%u): %s%s", blockIdx.x, blockIdx.y, blockIdx.z,
           threadIdx.x, threadIdx.y, threadIdx.z, where, what);
  failed = true;
}
// A frame may leap over the mark at a stack's end. Not inlined: its own frame lies below that of its caller.
static __attribute__((noinline)) bool off_stack() {
  return static_cast<char*>(__builtin_frame_address(0)) < stacks + current * kStack;
}
[[noreturn]] inline void die(const char* what, unsigned line = 0) {
  fail(off_stack() ? kOverflow : what, line);
  Context abandoned;
  switch_to(abandoned, scheduler);
  abort();
}

inline uint64_t draw(uint64_t below) {  // SplitMix64, reduced by multiplication
  uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return (z >> 32) * below >> 32;
}
inline void shuffle(unsigned* items, unsigned length) {
  for (unsigned i = length; i > 1; --i) {
    const unsigned j = (unsigned)draw(i), item = items[i - 1];
    items[i - 1] = items[j];
    items[j] = item;
  }
}

inline void wait_here() {
  if (off_stack()) die(kOverflow);
  Fiber& f = fibers[current];
  f.state = State::waiting;
  switch_to(f.context, scheduler);
}

// What races.hpp notes, in builds that look for races: lanes that met in __syncwarp, a block that starts, a grid's end.
#if defined(__SANITIZE_THREAD__)
void note_sync(unsigned warp_id, unsigned lanes);
void note_block(unsigned block);
void note_end();
#else
inline void note_sync(unsigned, unsigned) {}
inline void note_block(unsigned) {}
inline void note_end() {}
#endif

// Lanes of `mask` that are still alive have all arrived: give each its result and let it go on.
inline bool finish_operation(unsigned warp_id, unsigned mask) {
  Warp& w = warps[warp_id];
  const unsigned needed = mask & w.alive, lanes = w.arrived & mask;
  if ((lanes & needed) != needed) return false;
  uint64_t ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (lanes >> lane & 1u) ballot |= (uint64_t)(w.value[lane] != 0) << lane;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1u)) continue;
    const unsigned from = w.source[lane] % 32;
    // A lane that is not there leaves nothing defined: all ones, a NaN.
    if (w.operation[lane] == Operation::shuffle) w.result[lane] = lanes >> from & 1u ? w.value[from] : ~0ull;
    if (w.operation[lane] == Operation::ballot) w.result[lane] = ballot;
    fibers[warp_id * 32 + lane].state = State::ready;
  }
  if (w.operation[__builtin_ctz(lanes)] == Operation::sync) note_sync(warp_id, lanes);
  w.arrived &= ~lanes;
  if (!w.arrived) w.mixed = false;
  return true;
}

// Lanes that meet must agree on who they are and on what they do.
inline void check_agreement(const Warp& w, Operation operation, unsigned mask) {
  for (unsigned rest = w.arrived; rest; rest &= rest - 1) {
    const unsigned other = (unsigned)__builtin_ctz(rest);
    if ((mask & w.mask[other]) == 0) continue;
    if (w.mask[other] != mask) die("lanes of a warp meet with different masks that overlap");
    if (w.operation[other] != operation) die("lanes of a warp meet in different operations");
  }
}
inline uint64_t meet(Operation operation, unsigned mask, uint64_t value, unsigned source) {
  const unsigned warp_id = current / 32, lane = current % 32;
  Warp& w = warps[warp_id];
  if (!(mask >> lane & 1u)) die("calls a warp operation whose mask leaves it out");
  if (w.arrived && (w.last_mask != mask || w.last_operation != operation || w.mixed)) {
    check_agreement(w, operation, mask);
    w.mixed = true;
  }
  w.last_mask = mask, w.last_operation = operation;
  w.mask[lane] = mask, w.source[lane] = source, w.value[lane] = value, w.operation[lane] = operation;
  w.arrived |= 1u << lane;
  if (!finish_operation(warp_id, mask)) wait_here();
  return w.result[lane];
}

inline void open_barrier_if_complete() {
  if (alive == 0 || at_barrier < alive) return;
  last_votes = votes, last_count = (int)at_barrier;
  votes = 0, at_barrier = 0, ++phase_now;
  // Nobody waits in a warp: all that live are at the barrier.
  for (unsigned t = 0; t < count; ++t)
    if (fibers[t].state == State::waiting) fibers[t].state = State::ready;
}
inline int meet_block(int predicate) {
  ++at_barrier;
  votes += predicate != 0;
  fibers[current].state = State::waiting;
  open_barrier_if_complete();
  if (fibers[current].state == State::waiting) wait_here();
  return last_votes;
}

inline void leave() {
  const unsigned warp_id = current / 32;
  Warp& w = warps[warp_id];
  fibers[current].state = State::done;
  w.alive &= ~(1u << current % 32);
  --alive;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (w.arrived >> lane & 1u) finish_operation(warp_id, w.mask[lane]);
  open_barrier_if_complete();
}
inline void entry() {
  kernel(kernel_arguments);
  leave();
  switch_to(fibers[current].context, scheduler);
  abort();
}

inline void start_block() {
  // NaN where nobody wrote; a canary behind the dynamic part.
  memset(dynamic_shared, 0xff, dynamic_size);
  memset(dynamic_shared + dynamic_size, 0x5a, kCanary);
  if (__start_emulate_shared)
    memset(__start_emulate_shared, 0xff, (size_t)(__stop_emulate_shared - __start_emulate_shared));
  alive = count, at_barrier = 0, votes = 0, ++phase_now;
  for (unsigned t = 0; t < count; ++t) {
    Fiber& f = fibers[t];
    mark_end(stacks + t * kStack);
    f.context.start(stacks + t * kStack, entry);
    f.state = State::ready;
    f.index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    order[t] = t;
    if (t % 32 == 0) warps[t / 32].alive = 0, warps[t / 32].arrived = 0, warps[t / 32].mixed = false;
    warps[t / 32].alive |= 1u << t % 32;
  }
}
// Resume each of these fibers once if it is ready; whether any was.
inline bool resume(const unsigned* threads, unsigned length) {
  bool moved = false;
  for (unsigned i = 0; i < length && !failed; ++i) {
    if (fibers[threads[i]].state != State::ready) continue;
    moved = true;
    current = threads[i];
    threadIdx = fibers[current].index;
    running = true;
    switch_to(scheduler, fibers[current].context);
    running = false;
  }
  return moved;
}
// One warp after another, each as far as it gets: what a warp needs from another must be behind a barrier.
inline bool resume_warps() {
  const unsigned total = (count + 31) / 32;
  unsigned chosen[kMaxThreads / 32];
  bool moved = false;
  for (unsigned w = 0; w < total; ++w) chosen[w] = w;
  shuffle(chosen, total);
  for (unsigned w = 0; w < total; ++w) {
    unsigned lanes[32], live = 0;
    for (unsigned t = chosen[w] * 32; t < count && t < chosen[w] * 32 + 32; ++t) lanes[live++] = t;
    do {
      shuffle(lanes, live);
    } while (resume(lanes, live) && (moved = true));
  }
  return moved;
}
inline void run_block(bool shuffled) {
  start_block();
  // Either all threads of the block advance side by side, or its warps drift apart as far as barriers let them.
  const bool apart = shuffled && draw(2);
  while (alive && !failed) {
    if (shuffled) shuffle(order, count);
    const bool moved = apart ? resume_warps() : resume(order, count);
    if (!moved && !failed) fail("deadlock: this block's threads wait at barriers that the others never reach");
  }
  for (size_t i = 0; i < kCanary && !failed; ++i)
    if (dynamic_shared[dynamic_size + i] != 0x5a) fail("the block wrote behind its dynamic shared memory");
  for (unsigned t = 0; t < count; ++t) {
    if (!failed && overflowed(stacks + t * kStack)) fail(kOverflow);
    fibers[t].state = State::done;
  }
}

inline void run_grid(unsigned seed) {
  count = blockDim.x * blockDim.y * blockDim.z;
  const uint64_t blocks = (uint64_t)gridDim.x * gridDim.y * gridDim.z;
  random_state = seed;
  // A seed also draws where to begin and in which direction to go: blocks must not rely on their order.
  const uint64_t first = seed ? draw(blocks) : 0;
  const bool backwards = seed && draw(2);
  for (uint64_t i = 0; i < blocks && !failed; ++i) {
    const uint64_t at = (first + (backwards ? blocks - i : i)) % blocks;
    blockIdx = {(unsigned)(at % gridDim.x), (unsigned)(at / gridDim.x % gridDim.y),
                (unsigned)(at / gridDim.x / gridDim.y)};
    note_block((unsigned)at);
    run_block(seed != 0);
  }
  note_end();
}

// One launch. dims: grid x y z, block x y z; stacks: kMaxThreads of kStack bytes, this caller's own, with room below
// for the frame of a thread that overflows the lowest.
struct Launch {
  unsigned dims[6];
  unsigned seed;
  size_t shared_bytes;
  char* stacks;
  const char* arguments;
  char error[512];  // empty if all went well
};
inline void launch(Launch& l, void (*body)(const void*), const void* arguments) {
  pthread_mutex_lock(&lock);
  gridDim = {l.dims[0], l.dims[1], l.dims[2]};
  blockDim = {l.dims[3], l.dims[4], l.dims[5]};
  kernel = body, kernel_arguments = arguments, stacks = l.stacks, failed = false;
  if (l.shared_bytes + kCanary > dynamic_capacity) {
    free(dynamic_shared);
    dynamic_capacity = (2 * (l.shared_bytes + kCanary) + 63) / 64 * 64;
    dynamic_shared = static_cast<char*>(aligned_alloc(64, dynamic_capacity));
  }
  dynamic_size = l.shared_bytes;
  run_grid(l.seed);
  snprintf(l.error, sizeof l.error, "%s", failed ? message : "");
  pthread_mutex_unlock(&lock);
}

}  // namespace emulate
