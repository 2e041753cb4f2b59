// Clusters for a locality order: Louvain's local moves (Blondel et al. 2008) in batches, the same for any number of
// threads. N vertices.
// locality_move  every active vertex v of a chunk joins the cluster c with the most of
//                  entries between v and c - volume(v) volume(c) / total     (its gain in modularity)
//                or stays. It is in one of kBatches batches, drawn by `key`; those of a batch see the same clusters and
//                move together. Equal gains are drawn. Of a row of more than kSample entries, evenly spaced ones count.
// Cost: one pass over the active rows; what is read at random is 4 N bytes of clusters, mostly in the caches.
#include "locality.h"

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "shuffle.h"

namespace {

constexpr int kBatches = 16, kSample = 1024, kSlots = 4096;

struct Clusters {
  int32_t* cluster;    // [N]
  int64_t* volume;     // [N] entries of the rows of each cluster's vertices
  const int64_t* own;  // [N] volume of each vertex; null: the entries of its rows
  uint8_t* active;     // [N] whether a neighbour has moved since the vertex looked
  int32_t* wanted;     // [num_rows] scratch: where a vertex goes
  uint8_t* batch;      // [num_rows] scratch: when it looks, kBatches if it does not
  int64_t total;       // volume of all vertices
  int64_t scale;       // entries that each entry stands for
  uint64_t key;
  int64_t moved;  // so far
};

// How often a vertex meets each cluster: open addressing, at most kSample entries of each of two rows.
struct Counts {
  int32_t key[kSlots], count[kSlots], used[2 * kSample + 1];
  int num = 0;

  Counts() { std::fill(key, key + kSlots, -1); }
  static uint32_t first(int32_t c) { return (uint32_t)c * 2654435761u >> 20; }
  bool add(int32_t c) {  // whether it is new
    uint32_t slot = first(c);
    while (key[slot] >= 0 && key[slot] != c) slot = (slot + 1) % kSlots;
    const bool added = key[slot] < 0;
    key[slot] = c;
    count[slot] = added ? 1 : count[slot] + 1;
    used[num] = (int32_t)slot;
    num += added;
    return added;
  }
  int32_t of(int32_t c) const {
    uint32_t slot = first(c);
    while (key[slot] >= 0 && key[slot] != c) slot = (slot + 1) % kSlots;
    return key[slot] == c ? count[slot] : 0;
  }
  void clear() {
    for (int k = 0; k < num; ++k) key[used[k]] = -1;
    num = 0;
  }
};

// Whole numbers: every compiler and instruction set gives the same clusters.
typedef __int128 Gain;

inline Gain gain(int64_t entries, int64_t own, int64_t volume, int64_t total) {
  return (Gain)entries * total - (Gain)own * volume;
}

int32_t best(const Chunk& chunk, const Clusters& s, int64_t i, Counts& counts) {
  const int64_t v = chunk.first_row + i, own = s.own ? s.own[v] : chunk.entries(i);
  const int64_t step = std::max<int64_t>((chunk.longest(i) + kSample - 1) / kSample, 1);
  int32_t met[2 * kSample + 1];
  int num = 0;
  // Apart from the counting, whose branches cannot be foreseen: so many reads are on their way at once.
  chunk.each(i, step, [&](int32_t u) {
    met[num] = s.cluster[u];
    num += u != v;
  });
  for (int k = 0; k < num; ++k)
    if (counts.add(met[k])) __builtin_prefetch(s.volume + met[k]);
  const int64_t each = s.scale * step;
  const uint64_t draw = hash64(s.key + v);
  const int32_t mine = s.cluster[v];
  int32_t pick = mine;
  Gain most = gain(each * counts.of(mine), own, s.volume[mine] - own, s.total);
  for (int k = 0; k < counts.num; ++k) {
    const int32_t c = counts.key[counts.used[k]];
    if (c == mine) continue;
    const Gain here = gain(each * counts.count[counts.used[k]], own, s.volume[c], s.total);
    const bool drawn = here == most && pick != mine && hash64(draw + c) > hash64(draw + pick);
    if (here > most || drawn) {
      most = here;
      pick = c;
    }
  }
  counts.clear();
  return pick;
}

}  // namespace

MGGCN_EXPORT(mggcn_locality_move)(const Chunk* chunk, Clusters* s) {
  const int64_t rows = chunk->num_rows;
  int64_t moved = 0;
#pragma omp parallel num_threads(chunk->threads)
  {
    Counts counts;
#pragma omp for
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t v = chunk->first_row + i;
      s->batch[i] = s->active[v] ? (uint8_t)(hash64(s->key + v) % kBatches) : kBatches;
      s->active[v] = 0;
    }
    for (int batch = 0; batch < kBatches; ++batch) {
#pragma omp for schedule(dynamic, 256)
      for (int64_t i = 0; i < rows; ++i)
        if (s->batch[i] == batch) s->wanted[i] = best(*chunk, *s, i, counts);
      // Sums of whole numbers, and flags that are only set: the order in which threads come does not matter.
#pragma omp for schedule(dynamic, 256) reduction(+ : moved)
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t v = chunk->first_row + i;
        if (s->batch[i] != batch || s->wanted[i] == s->cluster[v]) continue;
        const int64_t own = s->own ? s->own[v] : chunk->entries(i);
        __atomic_fetch_sub(s->volume + s->cluster[v], own, __ATOMIC_RELAXED);
        __atomic_fetch_add(s->volume + s->wanted[i], own, __ATOMIC_RELAXED);
        s->cluster[v] = s->wanted[i];
        chunk->each(i, 1, [&](int32_t u) { __atomic_store_n(s->active + u, (uint8_t)1, __ATOMIC_RELAXED); });
        moved += 1;
      }
    }
  }
  s->moved += moved;
}
