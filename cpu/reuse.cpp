// How far apart the uses of a row lie when a rank multiplies tile after tile: reuse distances of a sample of the
// columns (SHARDS: Waldspurger et al., FAST 2015). N vertices, M sampled entries. reuse_trace      entries (v, u) of a
// chunk of rows of A^T whose column's hash ends in `shift` zeros, a share 2^-shift of
//                  all columns: place = owner of v, owner of u (16 bits each), row of v; and the column. Buffers hold
//                  as many as the chunk has entries.
// reuse_distances  columns int32 [M] in the order of use, tile by tile: histogram[kind][b] += uses whose row was last
// used
//                  before at most kFirst 4^b other rows (the last b: any number). First uses lie all rows of the tile
//                  back. last int64 [N] zeros, tree int32 [M + 1] zeros: scratch.
// Cost: one pass over the entries; M log M steps.
#include <algorithm>
#include <cstdint>

#include "common.h"
#include "locality.h"
#include "owners.h"
#include "shuffle.h"

namespace {

constexpr int64_t kFirst = 256;
constexpr int kBuckets = 12;

inline int bucket_of(int64_t distance) {
  int b = 0;
  for (int64_t most = kFirst; b < kBuckets - 1 && distance > most; most *= 4) ++b;
  return b;
}

// Whole numbers at places 1 .. M, of which sums of the first k are wanted (Fenwick 1994).
struct Sums {
  int32_t* tree;
  int64_t size;

  void add(int64_t k, int32_t x) {
    for (; k <= size; k += k & -k) tree[k] += x;
  }
  int64_t until(int64_t k) const {
    int64_t sum = 0;
    for (; k > 0; k &= k - 1) sum += tree[k];
    return sum;
  }
};

}  // namespace

MGGCN_EXPORT(mggcn_reuse_trace)(const Chunk* chunk, const Owners* owners, int32_t shift, uint64_t key, int64_t* filled,
                                uint64_t* places, int32_t* columns) {
  const uint64_t mask = ((uint64_t)1 << shift) - 1;
  const int64_t rows = chunk->num_rows;
  const auto walk = [&](int64_t low, int64_t high, auto f) {
    for (int64_t i = low; i < high; ++i)
      for (int64_t e = chunk->indptr[i]; e < chunk->indptr[i + 1]; ++e)
        if (!(hash64(key + chunk->indices[e]) & mask)) f(chunk->first_row + i, chunk->indices[e]);
  };
  fill_in_order(rows, chunk->threads, filled, walk, false, [&](int64_t at, int64_t v, int32_t u) {
    const int32_t rank = owners->rank_of(v);
    const uint64_t tile = (uint64_t)rank << 16 | (uint64_t)owners->rank_of(u);
    places[at] = tile << 32 | (uint32_t)owners->row_of(v, rank);
    columns[at] = u;
  });
}

MGGCN_EXPORT(mggcn_reuse_distances)(const int32_t* columns, const int64_t* starts, const uint8_t* kinds,
                                    int64_t num_tiles, int32_t shift, int64_t* last, int32_t* tree,
                                    int64_t* histogram) {
  Sums used{tree, starts[num_tiles]};  // 1 at the latest use of each row
  for (int64_t t = 0; t < num_tiles; ++t) {
    int64_t* mine = histogram + kinds[t] * kBuckets;
    int64_t distinct = 0;
    for (int64_t k = starts[t] + 1; k <= starts[t + 1]; ++k) {
      int64_t& before = last[columns[k - 1]];
      if (before > starts[t]) {
        // A sampled row stands for 2^shift rows; the one in question lies somewhere among them.
        const int64_t between = used.until(k - 1) - used.until(before);
        mine[bucket_of(((2 * between + 1) << shift) / 2)] += 1;
        used.add(before, -1);
      } else {
        ++distinct;
      }
      used.add(k, 1);
      before = k;
    }
    mine[bucket_of(distinct << shift)] += distinct;
  }
}
