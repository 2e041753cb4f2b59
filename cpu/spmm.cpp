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

template <bool Weighted, bool Ahead, class S, class O>
void sum_part(const Product<S, O>& a, int64_t part) {
  const Entries<S> entries = entries_of(a, a.parts[part].begin, a.parts[part].end);
  const bool padded = a.ld_dense >= up(a.cols, Group<S>::width);
  add_row<Weighted, Ahead>(entries, a.dense, a.ld_dense, a.sums + part * a.ld_sums, a.cols, padded, false);
}

template <bool Weighted, bool Ahead, class S, class O>
void run_chunk(const Product<S, O>& a, const Pass<S>& p, int64_t chunk) {
  with_tile<S>(p.tiles.size,
               [&](auto n) { run_rows<n(), Weighted, Ahead>(a, p, a.chunks[chunk], a.chunks[chunk + 1]); });
}

// A chunk of rows, or a part of a hub: f<Weighted, Ahead>; `far`: the entries `ahead` of its last one exist.
#define MGGCN_RUN(f, a, far, ...)      \
  if ((a).ahead && (far)) {            \
    if ((a).values)                    \
      f<true, true>(a, __VA_ARGS__);   \
    else                               \
      f<false, true>(a, __VA_ARGS__);  \
  } else {                             \
    if ((a).values)                    \
      f<true, false>(a, __VA_ARGS__);  \
    else                               \
      f<false, false>(a, __VA_ARGS__); \
  }

template <class S, class O>
void spmm(const Product<S, O>& a) {
  constexpr int width = Group<S>::width;
  const int64_t furthest = a.indptr[a.chunks[a.num_chunks]] - a.ahead, partial = a.cols % width;
  Real<S> tail[width] = {};
  if (a.epilogue && a.epilogue->bias) memcpy(tail, a.epilogue->bias + a.cols - partial, partial * sizeof(Real<S>));
#pragma omp parallel num_threads(a.threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < a.num_parts; ++part) MGGCN_RUN(sum_part, a, a.parts[part].end <= furthest, part);
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
        for (int64_t c = 0; c < a.num_chunks; ++c)
          MGGCN_RUN(run_chunk, a, a.indptr[a.chunks[c + 1]] <= furthest, pass, c);
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
