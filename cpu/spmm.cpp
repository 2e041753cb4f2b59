// spmm: out[v, :] (+)= sum over e in row v of values[e] * dense[indices[e], :], then the row epilogue if one is given.
// in    indptr int64 [V+1], indices int32 [nnz], values R [nnz] or null (ones), dense S [N, D] row-major, leading ld
// out   O [V, D]; accumulate != 0 adds to it. S, O, R: float, float or bf16, float; double; bf16, bf16 or float, float.
//       O is rounded once, after the epilogue. Where O is R, columns of a row up to the next whole vector, if within
//       its ld, may be overwritten: they are padding.
// work  nnz D multiply-adds; moves nnz (4 + D sizeof S) + V D (sizeof O) bytes when dense misses the caches.
// Three ways, the same bits, since a column's sum is taken in the order of the row in each (docs/notes/0012):
// rows    all columns of a row at once
// panels  a few columns of dense are packed to consecutive memory that the cache holds, then multiplied; then the next
// blocks  all rows times the first N / blocks rows of dense, then the next (DistGNN, Algorithms 2 and 3). Entries of a
//         row ascend, the last one apart; O is R
// Rows of more than `hub` entries are cut into parts, which all threads share and which are added in order. chunks are
// row ranges of about equal work, handed out dynamically: no sum depends on who computes it. Twin: cuda/spmm.cu.
#include "spmm_rows.h"

namespace {

// How far ahead of the entries before `end` rows are fetched: 0 where there are not so many behind it.
template <class S, class O>
int64_t ahead_of(const Product<S, O>& a, int64_t end) {
  return end + a.ahead <= a.indptr[a.chunks[a.num_chunks]] ? a.ahead : 0;
}

template <class S, class O>
void sum_part(const Product<S, O>& a, const Part& part, Real<S>* sums) {
  const Entries<S> entries = entries_of(a, part.begin, part.end, ahead_of(a, part.end));
  const bool padded = a.ld_dense >= up(a.cols, Group<S>::width);
  add_row(entries, a.dense, a.ld_dense, sums, a.cols, padded, false);
}

template <class S, class O>
void run_chunk(const Product<S, O>& a, const Pass<S>& p, int64_t begin, int64_t end) {
  const int64_t ahead = ahead_of(a, a.indptr[end]);
  with_tile<S>(p.tiles.size, [&](auto n) { run_rows<n()>(a, p, begin, end, ahead); });
}

template <class S, class O>
void spmm(const Product<S, O>& a) {
  constexpr int width = Group<S>::width;
  const int64_t partial = a.cols % width;
  Real<S> tail[width] = {};
  if (a.epilogue && a.epilogue->bias) memcpy(tail, a.epilogue->bias + a.cols - partial, partial * sizeof(Real<S>));
#pragma omp parallel num_threads(a.threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < a.num_parts; ++part) sum_part(a, a.parts[part], a.sums + part * a.ld_sums);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t hub = 0; hub < a.num_hubs; ++hub) store_hub(a, a.hubs[hub]);
    for (int64_t first = 0; first < a.cols; first += a.panel) {
      Pass<S> pass = pass_of(a, first, tail);
      if (a.packed) {
#pragma omp for schedule(static)
        for (int64_t u = 0; u < a.inner; ++u)
          memcpy(a.packed + u * a.panel, a.dense + u * a.ld_dense + first, pass.cols * sizeof(S));
      }
      for (; pass.block < a.blocks; ++pass.block) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t c = 0; c < a.num_chunks; ++c) run_chunk(a, pass, a.chunks[c], a.chunks[c + 1]);
      }
    }
  }
}

}  // namespace

#define MGGCN_SPMM(name, S, O) \
  MGGCN_EXPORT(name)(const Product<S, O>* product) { spmm(*product); }
MGGCN_SPMM(mggcn_spmm_f32, float, float)
MGGCN_SPMM(mggcn_spmm_f64, double, double)
MGGCN_SPMM(mggcn_spmm_bf16, bf16, bf16)
MGGCN_SPMM(mggcn_spmm_bf16_f32, bf16, float)
MGGCN_SPMM(mggcn_spmm_f32_bf16, float, bf16)
