// What the required rows of a matrix read (Sweep::required_rows), for aggregations that compute no others.
// wanted_reads  reads[u] = 1 for every column u of a required row; uint8 [N], set bits stay.
// wanted_tiles  counts the tiles (i, j) of rows of rank i and columns of rank j, inserted diagonals included:
//               nnz[i ranks + j] += entries; needed_t[j ranks + i] += rows that have any;
//               bit i % 64 of readers[u words + i / 64] is set if a row of rank i reads column u, words = ceil(ranks /
//               64). Cost: one pass over the edges; 16 ranks^2 bytes per thread. The same result for any number of
//               threads.
#include <vector>

#include "sweep.h"

MGGCN_EXPORT(mggcn_required_reads)(const Sweep* s, uint8_t* reads, int32_t threads) {
#pragma omp parallel for schedule(dynamic, 1024) num_threads(threads)
  for (int64_t i = 0; i < s->num_rows; ++i) {
    if (!keeps_row(*s, s->first_row + i)) continue;
    for (int64_t e = s->indptr[i]; e < s->indptr[i + 1]; ++e) {
      uint8_t* read = reads + s->indices[e];
      // Most columns are known soon: a line that nobody writes is shared by all cores.
      if (!__atomic_load_n(read, __ATOMIC_RELAXED)) __atomic_store_n(read, (uint8_t)1, __ATOMIC_RELAXED);
    }
  }
}

MGGCN_EXPORT(mggcn_required_tiles)(const Sweep* s, int32_t ranks, int64_t* nnz, int64_t* needed_t, uint64_t* readers,
                                   int32_t threads) {
  const int64_t words = (ranks + 63) / 64, tiles = (int64_t)ranks * ranks;
#pragma omp parallel num_threads(threads)
  {
    std::vector<int64_t> entries(tiles, 0), rows(tiles, 0), of_row(ranks, 0);
    std::vector<int32_t> touched;
#pragma omp for schedule(dynamic, 1024)
    for (int64_t i = 0; i < s->num_rows; ++i) {
      const int64_t v = s->first_row + i;
      if (!keeps_row(*s, v)) continue;
      const int32_t me = s->owners.rank_of(v);
      const uint64_t bit = (uint64_t)1 << (me % 64);
      const auto read = [&](int64_t u) {
        const int32_t q = s->owners.rank_of(u);
        if (!of_row[q]++) touched.push_back(q);
        uint64_t* word = readers + u * words + me / 64;
        if (!(__atomic_load_n(word, __ATOMIC_RELAXED) & bit)) __atomic_fetch_or(word, bit, __ATOMIC_RELAXED);
      };
      for (int64_t e = s->indptr[i]; e < s->indptr[i + 1]; ++e) read(s->indices[e]);
      if (lacks_diagonal(*s, i)) read(v);
      for (const int32_t q : touched) {
        entries[(int64_t)me * ranks + q] += of_row[q];
        rows[(int64_t)q * ranks + me] += 1;
        of_row[q] = 0;
      }
      touched.clear();
    }
#pragma omp critical
    for (int64_t t = 0; t < tiles; ++t) {
      nnz[t] += entries[t];
      needed_t[t] += rows[t];
    }
  }
}
