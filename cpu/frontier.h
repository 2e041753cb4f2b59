// The vertices of a batch, numbered in order of first occurrence.
#pragma once
#include "common.h"

namespace {

// What ended a batch; `Status` of mggcn/blocks/sampler.py.
enum Status : int32_t { kDone, kSources, kEdges, kSeed, kTwice, kPointers, kColumn, kWeightValue, kType };

// The vertices of a batch in order of first occurrence, and a table that finds them: direct [num_vertices], or hashed
// [2^hash_bits], at least twice `capacity`. An entry holds base + number; base rises from batch to batch above all that
// older ones left, so that nothing is cleared until it would pass 2^32.
struct Frontier {
  int64_t* ids;
  uint32_t* direct;
  uint64_t* hashed;
  int64_t num_vertices, capacity, rows, at;
  uint32_t base;
  int32_t hash_bits, status;
};

// claim: the number of a vertex, or `next`, which then is its number. find: its number, or -1.
struct Direct {
  uint32_t* entries;
  uint32_t base;

  explicit Direct(const Frontier& f) : entries(f.direct), base(f.base) {}
  inline void prefetch(uint32_t id) const { __builtin_prefetch(entries + id, 1); }
  inline int64_t claim(uint32_t id, int64_t next) const {
    const uint32_t old = entries[id];
    const int64_t number = old >= base ? old - base : next;
    entries[id] = base + (uint32_t)number;
    return number;
  }
  inline int64_t find(uint32_t id) const { return entries[id] >= base ? (int64_t)(entries[id] - base) : -1; }
};

struct Hashed {  // base + number in the upper half of an entry, the id in the lower
  uint64_t* entries;
  uint32_t base, mask;
  int shift;

  explicit Hashed(const Frontier& f)
      : entries(f.hashed), base(f.base), mask((uint32_t)(((uint64_t)1 << f.hash_bits) - 1)), shift(32 - f.hash_bits) {}
  inline uint32_t home(uint32_t id) const { return (id * 0x9E3779B1u) >> shift; }
  inline void prefetch(uint32_t id) const { __builtin_prefetch(entries + home(id), 1); }
  // Its entry, or the one that it takes: what older batches left is free.
  inline uint64_t& entry(uint32_t id) const {
    for (uint32_t i = home(id);; i = (i + 1) & mask)
      if (entries[i] >> 32 < base || (uint32_t)entries[i] == id) return entries[i];
  }
  inline int64_t claim(uint32_t id, int64_t next) const {
    uint64_t& e = entry(id);
    const int64_t number = e >> 32 >= base ? (int64_t)(e >> 32) - base : next;
    e = (uint64_t)(base + number) << 32 | id;
    return number;
  }
  inline int64_t find(uint32_t id) const {
    const uint64_t e = entry(id);
    return e >> 32 >= base ? (int64_t)(e >> 32) - base : -1;
  }
};

// Numbers the ids of `count` edges, in place; new vertices are appended as long as there are fewer than max_sources.
// False for an id out of range or a vertex too many: then status and `at` say which.
template <class Table>
inline bool number(Frontier& f, const Table& table, int32_t* columns, int64_t count, int64_t max_sources) {
  constexpr int64_t kAhead = 24;
  int64_t *const ids = f.ids, rows = f.rows;
  const uint64_t num_vertices = (uint64_t)f.num_vertices;
  for (int64_t i = 0; i < count && f.status == kDone; ++i) {
    if (i + kAhead < count) table.prefetch((uint32_t)columns[i + kAhead]);
    const uint32_t id = (uint32_t)columns[i];
    f.at = id;
    if (id >= num_vertices) {
      f.status = kColumn;
    } else if (rows < max_sources) {
      const int64_t n = table.claim(id, rows);
      ids[rows] = id;
      rows += n == rows;
      columns[i] = (int32_t)n;
    } else {
      const int64_t n = table.find(id);
      if (n < 0) f.status = kSources;
      columns[i] = (int32_t)n;
    }
  }
  f.rows = rows;
  return f.status == kDone;
}

}  // namespace
