// Races, in builds with -fsanitize=thread: each access of a kernel calls a hook, ours instead of the sanitizer's
// library. Two accesses of the same memory, one of them a write, must be ordered, whatever order they had here: threads
// of a block by a barrier, lanes of a warp by one of the warp's, blocks by atomics at one address, the first block with
// a fence before its own. Lanes that meet in a shuffle are not ordered by it. Atomics do not race with each other.
#pragma once
#include "schedule.hpp"

#if !defined(__SANITIZE_THREAD__)
#define EMULATE_QUIET
namespace emulate {
inline void meet_atomically(const void*, unsigned) {}
inline void fence() {}
inline void read_from_l2(const void*, unsigned) {}
}  // namespace emulate
#else
#define EMULATE_QUIET __attribute__((no_sanitize("thread"), noinline))

// Where this library lies: its own variables are the emulator's, but for the shared ones.
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" const char _end[] __attribute__((visibility("hidden")));

namespace emulate {

constexpr size_t kUnit = 2;  // bytes that are watched together: kernels write no single ones
constexpr size_t kPage = 4096, kBuckets = 1 << 16;

// lanes: of the warp, several if they read in one phase. syncs: of the warp until then. time: of the grid.
struct Access {
  unsigned block, warp, lanes, phase, syncs, time;
  bool warps;  // also other warps, in this phase
};
struct Reader {
  Access access;
  Reader* next;  // of a block that ran earlier
};
struct Unit {
  bool written, changed;
  Access writer, changer;  // the last that wrote, and that changed it atomically since then
  Reader* readers;
};
struct Page {
  uintptr_t number;
  Page* next;
  Unit units[kPage / kUnit];
};
// What blocks that met at an atomic have released there.
struct Meeting {
  const void* at;
  Meeting* next;
  unsigned* released;  // by block: accesses up to this time
};

// How often lanes of a warp met in __syncwarp, and when each two did last.
struct Met {
  unsigned syncs, at[32][32];
};
static Met met[kMaxThreads / 32];
static char race[128];
static Page* pages[kBuckets];
static Page* last_page;
static Meeting* meetings;
// By block: accesses up to this time come before the running one's, from its next fence on, and already; null: none.
static unsigned *arrived, *known;
static bool from_l2;                          // the access at hand
static unsigned block_now, time_now, fenced;  // time grows at each fence

EMULATE_QUIET static unsigned blocks_of_grid() { return gridDim.x * gridDim.y * gridDim.z; }

EMULATE_QUIET void note_block(unsigned block) {
  block_now = block, fenced = 0, from_l2 = false;
  if (known) memset(known, 0, blocks_of_grid() * sizeof *known), memset(arrived, 0, blocks_of_grid() * sizeof *known);
  if (!time_now) time_now = 1;
}
EMULATE_QUIET static void free_readers(Unit& unit) {
  for (Reader* r = unit.readers; r;) {
    Reader* next = r->next;
    free(r);
    r = next;
  }
  unit.readers = nullptr;
}
EMULATE_QUIET void note_end() {
  for (Page*& bucket : pages)
    for (Page* page = bucket; page;) {
      Page* next = page->next;
      for (Unit& unit : page->units) free_readers(unit);
      free(page);
      bucket = page = next;
    }
  while (meetings) {
    Meeting* next = meetings->next;
    free(meetings->released);
    free(meetings);
    meetings = next;
  }
  free(known), free(arrived);
  known = arrived = nullptr, last_page = nullptr, time_now = 0;
}

EMULATE_QUIET static Unit& unit_of(uintptr_t address) {
  const uintptr_t number = address / kPage;
  if (!last_page || last_page->number != number) {
    Page*& bucket = pages[number % kBuckets];
    for (last_page = bucket; last_page && last_page->number != number;) last_page = last_page->next;
    if (!last_page) {
      last_page = static_cast<Page*>(calloc(1, sizeof(Page)));
      last_page->number = number, last_page->next = bucket;
      bucket = last_page;
    }
  }
  return last_page->units[address % kPage / kUnit];
}

EMULATE_QUIET void note_sync(unsigned warp_id, unsigned lanes) {
  Met& m = met[warp_id];
  ++m.syncs;
  for (unsigned i = 0; i < 32; ++i)
    for (unsigned j = 0; j < 32; ++j)
      if (lanes >> i & lanes >> j & 1u) m.at[i][j] = m.syncs;
}

EMULATE_QUIET static Access this_access() {
  const unsigned warp = current / 32;
  return {block_now, warp, 1u << current % 32, phase_now, met[warp].syncs, time_now, false};
}
// Whether an access comes before what the running thread does now.
EMULATE_QUIET static bool ordered(const Access& a) {
  if (a.block != block_now) return known && (from_l2 ? arrived : known)[a.block] >= a.time;
  if (a.phase != phase_now) return true;
  if (a.warps || a.warp != current / 32) return false;
  const unsigned me = current % 32;
  for (unsigned lanes = a.lanes & ~(1u << me); lanes; lanes &= lanes - 1)
    if (met[a.warp].at[__builtin_ctz(lanes)][me] <= a.syncs) return false;
  return true;
}

EMULATE_QUIET static void read(Unit& unit) {
  const Access now = this_access();
  if (!unit.readers || unit.readers->access.block != block_now) {
    Reader* added = static_cast<Reader*>(malloc(sizeof(Reader)));
    *added = {now, unit.readers};
    unit.readers = added;
    return;
  }
  Access& a = unit.readers->access;
  const Access before = a;
  const bool follows = ordered(before);
  a = now;
  if (follows) return;
  a.warps = before.warps || before.warp != now.warp;
  a.lanes |= before.lanes;
}

enum class Kind { read, write, atomic };
// Stop if what the running thread does is not ordered after `before`, by which memory was `done` (read or written).
EMULATE_QUIET static void follow(const Access& before, const char* done, Kind kind) {
  if (ordered(before)) return;
  const bool same = before.block == block_now;
  snprintf(race, sizeof race, "a race: %s what another %s %s, without a %s between",
           kind == Kind::read ? "reads" : "writes", same ? "thread" : "block", done,
           same ? "barrier" : "fence and an atomic");
  die(race);
}
EMULATE_QUIET static void touch_unit(Unit& unit, Kind kind, bool shared) {
  if (shared) {  // another block's is other memory
    if (unit.written && unit.writer.block != block_now) unit.written = false;
    if (unit.changed && unit.changer.block != block_now) unit.changed = false;
    if (unit.readers && unit.readers->access.block != block_now) free_readers(unit);
  }
  if (unit.written) follow(unit.writer, "wrote", kind);
  if (unit.changed && kind != Kind::atomic) follow(unit.changer, "wrote", kind);
  if (kind == Kind::read) return read(unit);
  for (const Reader* r = unit.readers; r; r = r->next) follow(r->access, "read", kind);
  free_readers(unit);
  if (kind == Kind::atomic)
    unit.changed = true, unit.changer = this_access();
  else
    unit.written = true, unit.changed = false, unit.writer = this_access();
}
EMULATE_QUIET static void touch(const void* p, size_t size, Kind kind) {
  if (!running || !size) return;
  const char* at = static_cast<const char*>(p);
  if (at >= stacks && at < stacks + kMaxThreads * kStack) return;
  bool shared = __start_emulate_shared && at >= __start_emulate_shared && at < __stop_emulate_shared;
  if (!shared && at >= __ehdr_start && at < _end) return;
  if (at >= dynamic_shared && at < dynamic_shared + dynamic_size + kCanary) {
    if (at + size > dynamic_shared + dynamic_size) die("an access behind its dynamic shared memory");
    shared = true;
  }
  const uintptr_t first = reinterpret_cast<uintptr_t>(at) / kUnit,
                  last = (reinterpret_cast<uintptr_t>(at) + size - 1) / kUnit;
  for (uintptr_t i = first; i <= last; ++i) touch_unit(unit_of(i * kUnit), kind, shared);
}

// What the block did so far is ordered before its later atomics, and what it learnt by atomics before what it does from
// now on. The whole block's: a barrier may lie between.
EMULATE_QUIET void fence() {
  fenced = time_now++;
  if (known) memcpy(known, arrived, blocks_of_grid() * sizeof *known);
}
EMULATE_QUIET void meet_atomically(const void* p, unsigned size) {
  touch(p, size, Kind::atomic);
  const unsigned blocks = blocks_of_grid();
  Meeting* m = meetings;
  while (m && m->at != p) m = m->next;
  if (!m) {
    m = static_cast<Meeting*>(malloc(sizeof(Meeting)));
    *m = {p, meetings, static_cast<unsigned*>(calloc(blocks, sizeof(unsigned)))};
    meetings = m;
  }
  if (!known) {
    known = static_cast<unsigned*>(calloc(blocks, sizeof(unsigned)));
    arrived = static_cast<unsigned*>(calloc(blocks, sizeof(unsigned)));
  }
  arrived[block_now] = fenced;
  for (unsigned b = 0; b < blocks; ++b) {
    if (arrived[b] < m->released[b]) arrived[b] = m->released[b];
    m->released[b] = arrived[b];
  }
}
EMULATE_QUIET void read_from_l2(const void* p, unsigned size) {
  from_l2 = true;
  touch(p, size, Kind::read);
  from_l2 = false;
}

}  // namespace emulate

#define HOOK __attribute__((no_sanitize("thread"), visibility("hidden"), used)) void
#define HOOKS(n)                                                                        \
  HOOK __tsan_read##n(void* p) { emulate::touch(p, n, emulate::Kind::read); }           \
  HOOK __tsan_write##n(void* p) { emulate::touch(p, n, emulate::Kind::write); }         \
  HOOK __tsan_unaligned_read##n(void* p) { emulate::touch(p, n, emulate::Kind::read); } \
  HOOK __tsan_unaligned_write##n(void* p) { emulate::touch(p, n, emulate::Kind::write); }
extern "C" {
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16) HOOK __tsan_read_range(void* p, unsigned long n) {
  emulate::touch(p, n, emulate::Kind::read);
}
HOOK __tsan_write_range(void* p, unsigned long n) { emulate::touch(p, n, emulate::Kind::write); }
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_init() {}
HOOK __tsan_vptr_update(void*, void*) {}
}
#undef HOOKS
#undef HOOK
#endif
