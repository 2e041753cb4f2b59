// From clusters to a locality order: the graph between clusters, and vertices sorted by cluster. N vertices.
// locality_cut    entries between clusters, drawn with probability (threshold + 1) / 2^64; of an undirected edge one:
//                 counted, and written as pairs of clusters if asked for, in the order of the rows.
// locality_csr    pairs int32 [L, 2] -> both ends' rows: indptr int64 [K + 1], indices int32 [2 L].
// locality_group  ids 0 .. n - 1 by key int32 [n] < K, equal keys in order; next int64 [K + 1]: the ends of the keys.
// locality_gaps   gaps[0] += the sum of |position[u] - position[v]| over the entries of A, gaps[1] += that of |u - v|,
//                 gaps[2] += self-loops.
// Cost: one pass over the entries of the chunk (cut: two if written), the pairs (csr: two) or the ids (group: two).
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "common.h"
#include "locality.h"
#include "shuffle.h"

MGGCN_EXPORT(mggcn_locality_cut)(const Chunk* chunk, const int32_t* cluster, int32_t once, uint64_t threshold,
                                 uint64_t key, int64_t* filled, int32_t* pairs) {
  const auto walk = [&](int64_t low, int64_t high, auto f) {
    for (int64_t i = low; i < high; ++i) {
      const int64_t v = chunk->first_row + i;
      for (int64_t e = chunk->indptr[i]; e < chunk->indptr[i + 1]; ++e) {
        const int64_t u = chunk->indices[e];
        if (cluster[u] == cluster[v] || (once && u > v)) continue;
        if (hash64(key ^ ((uint64_t)v << 32 | (uint64_t)u)) <= threshold) f(cluster[v], cluster[u]);
      }
    }
  };
  fill_in_order(chunk->num_rows, chunk->threads, filled, walk, pairs == nullptr, [&](int64_t at, int32_t a, int32_t b) {
    pairs[2 * at] = a;
    pairs[2 * at + 1] = b;
  });
}

MGGCN_EXPORT(mggcn_locality_csr)(const int32_t* pairs, int64_t num_pairs, int64_t num_rows, int64_t* indptr,
                                 int32_t* indices) {
  std::fill(indptr, indptr + num_rows + 1, 0);
  for (int64_t k = 0; k < 2 * num_pairs; ++k) indptr[pairs[k] + 1] += 1;
  for (int64_t v = 0; v < num_rows; ++v) indptr[v + 1] += indptr[v];
  // Filled from the end of each row on: what were ends become starts.
  for (int64_t k = 2 * num_pairs - 1; k >= 0; --k) indices[--indptr[pairs[k] + 1]] = pairs[k ^ 1];
  for (int64_t v = 0; v < num_rows; ++v) indptr[v] = indptr[v + 1];
  indptr[num_rows] = 2 * num_pairs;
}

MGGCN_EXPORT(mggcn_locality_group)(const int32_t* key, int64_t num_ids, int64_t num_keys, int64_t* next,
                                   int32_t* order) {
  std::fill(next, next + num_keys + 1, 0);
  for (int64_t i = 0; i < num_ids; ++i) next[key[i] + 1] += 1;
  for (int64_t k = 0; k < num_keys; ++k) next[k + 1] += next[k];
  for (int64_t i = 0; i < num_ids; ++i) order[next[key[i]]++] = (int32_t)i;
}

MGGCN_EXPORT(mggcn_locality_gaps)(const Chunk* chunk, const int32_t* position, int64_t* gaps) {
  int64_t after = 0, before = 0, loops = 0;
#pragma omp parallel for schedule(dynamic, 1024) reduction(+ : after, before, loops) num_threads(chunk->threads)
  for (int64_t i = 0; i < chunk->num_rows; ++i) {
    const int64_t v = chunk->first_row + i;
    for (int64_t e = chunk->indptr[i]; e < chunk->indptr[i + 1]; ++e) {
      const int64_t u = chunk->indices[e];
      after += std::abs((int64_t)position[u] - position[v]);
      before += std::abs(u - v);
      loops += u == v;
    }
  }
  gaps[0] += after;
  gaps[1] += before;
  gaps[2] += loops;
}
