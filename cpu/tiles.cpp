// Set-up of a shard's tiles from a sweep over the rows of a CSR: count, then fill. local[v]: row of v on its rank.
// tile_count   counts[q (V + 1) + local[v] + 1] += neighbours of v that rank q owns, for rows v that `rank` owns
// tile_fill    writes their local ids (and values) in the order of the row, at indptr[q (V + 1) + local[v]];
//              self_loops: a missing diagonal is counted and filled as the last entry of its row in the own tile.
//              Both take the entries of required rows and columns alone, in the same order, where such are given.
//              Rows of which other entries come than were counted set the int32 behind the P pointers of `indices`
//              to 1: nothing is written outside of a tile, whatever has become of the matrix between two sweeps.
// tile_sort    sorts each row of a tile by column, values along: products of long rows are up to 1.26 times faster if
//              they go through the operand in order (docs/notes/0011-locality.md).
// tile_degree  degree[local[v]] = sum of values (or count) of row v, diagonal inserted alike.
// balance      chunks[0..num_chunks]: row ranges of about equal work: entries, and 8 for a row's begin and end, or 2
//              for a row without entries. Cost: two passes over the rows.
#include <algorithm>
#include <utility>
#include <vector>

#include "sweep.h"

namespace {

template <class T>
void sort_rows(const int64_t* indptr, int64_t rows, int32_t* indices, T* values, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<std::pair<int32_t, T>> row;
#pragma omp for schedule(dynamic, 1024)
    for (int64_t v = 0; v < rows; ++v) {
      int32_t *begin = indices + indptr[v], *end = indices + indptr[v + 1];
      if (std::is_sorted(begin, end)) continue;
      if (!values) {
        std::sort(begin, end);
        continue;
      }
      T* weights = values + indptr[v];
      row.resize(end - begin);
      for (int64_t k = 0; k < end - begin; ++k) row[k] = {begin[k], weights[k]};
      std::sort(row.begin(), row.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      for (int64_t k = 0; k < end - begin; ++k) {
        begin[k] = row[k].first;
        weights[k] = row[k].second;
      }
    }
  }
}

}  // namespace

MGGCN_EXPORT(mggcn_tile_count)(const Sweep* s, int64_t* counts, int32_t threads) {
#pragma omp parallel for schedule(dynamic, 1024) num_threads(threads)
  for (int64_t i = 0; i < s->num_rows; ++i) {
    const int64_t v = s->first_row + i;
    if (s->owners.rank_of(v) != s->rank || !keeps_row(*s, v)) continue;
    int64_t* mine = counts + s->owners.row_of(v, s->rank) + 1;
    for (int64_t e = s->indptr[i]; e < s->indptr[i + 1]; ++e) {
      const int64_t u = s->indices[e];
      if (keeps_column(*s, u)) mine[s->owners.rank_of(u) * (s->rows + 1)] += 1;
    }
    if (lacks_diagonal(*s, i)) mine[s->rank * (s->rows + 1)] += 1;
  }
}

MGGCN_EXPORT(mggcn_tile_fill)(const Sweep* s, const int64_t* indptr, int32_t* const* indices, void* const* values,
                              int32_t wide, int32_t num_ranks, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t stride = s->rows + 1;
    int64_t* next = new int64_t[num_ranks];
    bool differs = false;
#pragma omp for schedule(dynamic, 1024)
    for (int64_t i = 0; i < s->num_rows; ++i) {
      const int64_t v = s->first_row + i;
      if (s->owners.rank_of(v) != s->rank || !keeps_row(*s, v)) continue;
      const int64_t* row = indptr + s->owners.row_of(v, s->rank);
      const int64_t most = s->indptr[i + 1] - s->indptr[i] + 1;  // entries, and a diagonal
      bool fits = true;
      for (int32_t q = 0; q < num_ranks; ++q) {
        next[q] = row[q * stride];
        fits &= next[q] + most <= indptr[q * stride + s->rows];
      }
      const auto fill = [&](auto checked) {
        const auto put = [&](int64_t u, float w) {
          const int32_t q = s->owners.rank_of(u);
          const int64_t at = next[q]++;
          if (checked && at >= row[q * stride + 1]) return;
          indices[q][at] = (int32_t)s->owners.row_of(u, q);
          if (!s->values) return;
          if (wide)
            static_cast<double*>(values[q])[at] = w;
          else
            static_cast<float*>(values[q])[at] = w;
        };
        for (int64_t e = s->indptr[i]; e < s->indptr[i + 1]; ++e)
          if (keeps_column(*s, s->indices[e])) put(s->indices[e], s->values ? s->values[e] : 1.0f);
        if (lacks_diagonal(*s, i)) put(v, 1.0f);
      };
      // A check of each entry takes a fourth of the sweep's time on one rank: only a tile's last rows need it.
      if (fits)
        fill(std::false_type());
      else
        fill(std::true_type());
      for (int32_t q = 0; q < num_ranks; ++q) differs |= next[q] != row[q * stride + 1];
    }
    if (differs) {
#pragma omp atomic write
      *indices[num_ranks] = 1;
    }
    delete[] next;
  }
}

MGGCN_EXPORT(mggcn_tile_sort)(const int64_t* indptr, int64_t rows, int32_t* indices, void* values, int32_t wide,
                              int32_t threads) {
  if (wide)
    sort_rows(indptr, rows, indices, static_cast<double*>(values), threads);
  else
    sort_rows(indptr, rows, indices, static_cast<float*>(values), threads);
}

MGGCN_EXPORT(mggcn_tile_degree)(const Sweep* s, double* degree, int32_t threads) {
#pragma omp parallel for schedule(dynamic, 1024) num_threads(threads)
  for (int64_t i = 0; i < s->num_rows; ++i) {
    const int64_t v = s->first_row + i;
    if (s->owners.rank_of(v) != s->rank) continue;
    double sum = lacks_diagonal(*s, i) ? 1.0 : 0.0;
    for (int64_t e = s->indptr[i]; e < s->indptr[i + 1]; ++e) sum += s->values ? (double)s->values[e] : 1.0;
    degree[s->owners.row_of(v, s->rank)] = sum;
  }
}

MGGCN_EXPORT(mggcn_balance)(const int64_t* indptr, int64_t rows, int64_t num_chunks, int64_t* chunks) {
  const auto work_of = [=](int64_t v) { return indptr[v + 1] > indptr[v] ? indptr[v + 1] - indptr[v] + 8 : 2; };
  int64_t work = 0, done = 0, v = 0;
  for (int64_t u = 0; u < rows; ++u) work += work_of(u);
  for (int64_t c = 0; c < num_chunks; ++c) {
    const int64_t target = (int64_t)((__int128)work * c / num_chunks);
    while (v < rows && done < target) done += work_of(v++);
    chunks[c] = v;
  }
  chunks[num_chunks] = rows;
}
