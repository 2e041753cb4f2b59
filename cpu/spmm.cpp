// spmm: out[v, :] (+)= sum over e in row v of values[e] * dense[indices[e], :], then the row epilogue if one is given.
// in    indptr int64 [V+1], indices int32 [nnz], values R [nnz] or null (ones), dense S [N, D] row-major, leading ld
// out   O [V, D]; accumulate != 0 adds to it. S, O, R: float, float, float; double; bf16, bf16 or float, float. O is
//       rounded once, after the epilogue. Where O is R, columns of a row up to the next whole vector, if within its ld,
//       may be overwritten: they are padding.
// work  nnz D multiply-adds; moves nnz (4 + D sizeof S) + V D (sizeof O) bytes when dense misses the caches.
// Three ways, the same bits, since a column's sum is taken in the order of the row in each (docs/notes/0012):
// rows    all columns of a row at once
// panels  a few columns of dense are packed to consecutive memory that the cache holds, then multiplied; then the next
// blocks  all rows times the first N / blocks rows of dense, then the next (DistGNN, Algorithms 2 and 3). Entries of a
//         row ascend, the last one apart; O is R
// Rows of more than `hub` entries are cut into parts, which all threads share and which are added in order. chunks are
// row ranges of about equal work, handed out dynamically: no sum depends on who computes it. Twin: cuda/spmm.cu.
#include "epilogue.h"
#include "pieces.h"
#include "spmm_row.h"

namespace {

struct Part {
  int64_t begin, end;
};

struct Hub {
  int64_t row, first_part, num_parts;
};

template <class S, class O>
struct Product {  // `ProductArgs` of mggcn/backend/cpu_spmm.py
  int64_t num_chunks, num_parts, num_hubs;
  const int64_t* chunks;  // [num_chunks + 1]
  const Part* parts;
  const Hub* hubs;  // by row
  const int64_t* indptr;
  const int32_t* indices;
  const Real<S>* values;
  const S* dense;
  O* out;
  const Epilogue<Real<S>>* epilogue;  // or null
  S* packed;                          // [N, panel] or null
  int64_t* next;                      // [V] where the next block of a row begins, if blocks > 1
  Real<S>* sums;                      // [num_parts, ld_sums]
  int64_t ld_dense, ld_out, ld_sums, inner, cols, hub, panel, blocks, ahead;
  int32_t accumulate, threads;
};

// Columns [first, first + cols) of out from those of dense, and which block of its rows.
template <class S>
struct Pass {
  const S* dense;
  int64_t ld, first, cols, block;
  bool padded;          // rows of dense go on to the end of a group
  const Real<S>* tail;  // the bias of a last group that goes on behind the last column
};

// Dropout draws for whole pieces of a row.
template <class S, class O>
inline bool drops(const Product<S, O>& a) {
  return a.epilogue && a.epilogue->dropout.threshold;
}

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class S, class O>
inline Entries<S> entries_of(const Product<S, O>& a, int64_t begin, int64_t end) {
  return {a.indices, a.values, begin, end, a.ahead};
}

// Row v where it goes, the epilogue on its way.
template <class S, class O>
inline Result<S, O> result_of(const Product<S, O>& a, const Pass<S>& p, int64_t v, bool accumulate, bool last) {
  typedef Real<S> R;
  O* z = a.out + v * a.ld_out + p.first;
  const Epilogue<R>* e = a.epilogue;
  if (!last || !e) return {z, p.cols, accumulate, nullptr, nullptr, 1, 1, false};
  return {z,
          p.cols,
          accumulate,
          e->bias ? e->bias + p.first : nullptr,
          p.tail,
          e->row_scale ? e->row_scale[v] : (R)1,
          e->out_scale ? e->out_scale[v] : (R)1,
          e->relu != 0};
}

template <bool Weighted, bool Ahead, class S, class O>
void sum_part(const Product<S, O>& a, int64_t part) {
  const Entries<S> entries = entries_of(a, a.parts[part].begin, a.parts[part].end);
  const bool padded = a.ld_dense >= up(a.cols, Group<S>::width);
  add_row<Weighted, Ahead>(entries, a.dense, a.ld_dense, a.sums + part * a.ld_sums, a.cols, padded, false);
}

template <class S, class O>
inline void add_parts(const Product<S, O>& a, int64_t row, int64_t first, Real<S>* z, int64_t cols) {
  const Hub* hub = a.hubs;
  for (int64_t count = a.num_hubs; count > 1 && hub->row != row;) {
    const int64_t half = count / 2;
    if (hub[half].row <= row) hub += half;
    count -= half;
  }
  for (int64_t part = hub->first_part; part < hub->first_part + hub->num_parts; ++part) {
    const Real<S>* sums = a.sums + part * a.ld_sums + first;
    for (int64_t d = 0; d < cols; ++d) z[d] += sums[d];
  }
}

// Columns [at, cols) of the whole row by way of memory: hubs, dropout, columns that no group holds.
template <bool Weighted, bool Ahead, class S, class O>
inline void store_pieces(const Product<S, O>& a, const Pass<S>& p, int64_t v, bool hub, int64_t at) {
  Real<S> sums[kPiece];
  for (; at < p.cols; at += kPiece) {
    const int64_t cols = p.cols - at < kPiece ? p.cols - at : kPiece, first = p.first + at;
    O* z = a.out + v * a.ld_out + first;
    if (a.accumulate) widen_row(z, sums, cols);
    if (hub) {
      if (!a.accumulate) memset(sums, 0, sizeof sums);
      add_parts(a, v, first, sums, cols);
    } else {
      add_row<Weighted, Ahead>(entries_of(a, a.indptr[v], a.indptr[v + 1]), p.dense + at, p.ld, sums, cols,
                               p.padded || cols == kPiece, a.accumulate != 0);
    }
    if (a.epilogue) finish_row(sums, first, cols, v, *a.epilogue);
    narrow_row(sums, z, cols);
  }
}

template <bool Weighted, bool Ahead, class S, class O>
inline void store_row(const Product<S, O>& a, const Pass<S>& p, int64_t v, bool hub) {
  if (hub || drops(a)) return store_pieces<Weighted, Ahead>(a, p, v, hub, 0);
  constexpr int width = Group<S>::width;
  const int64_t groups = p.padded ? (p.cols + width - 1) / width : p.cols / width;
  row_groups<Weighted, Ahead>(entries_of(a, a.indptr[v], a.indptr[v + 1]), p.dense, p.ld,
                              result_of(a, p, v, a.accumulate != 0, true), groups);
  store_pieces<Weighted, Ahead>(a, p, v, hub, groups * width);
}

// The end of the entries of row v in this block.
template <class S, class O>
inline int64_t block_end(const Product<S, O>& a, const Pass<S>& p, int64_t begin, int64_t stop, int64_t v) {
  int64_t end = stop;
  if (p.block + 1 < a.blocks) {
    const int64_t limit = a.inner * (p.block + 1) / a.blocks;
    for (end = begin; end + 1 < stop && a.indices[end] < limit;) ++end;
    a.next[v] = end;
  }
  return end;
}

// Sums are kept where the result goes, block after block.
template <bool Weighted, bool Ahead, class S>
inline void add_block(const Product<S, Real<S>>& a, const Pass<S>& p, int64_t v, bool hub) {
  const bool last = p.block + 1 == a.blocks, fresh = p.block == 0 && !a.accumulate;
  Real<S>* z = a.out + v * a.ld_out + p.first;
  int64_t finished = 0;
  if (hub) {
    if (!last) return;
    if (!a.accumulate) memset(z, 0, p.cols * sizeof(Real<S>));
    add_parts(a, v, p.first, z, p.cols);
  } else {
    const int64_t begin = p.block ? a.next[v] : a.indptr[v], end = block_end(a, p, begin, a.indptr[v + 1], v);
    const bool direct = last && a.epilogue && !drops(a);
    if (begin < end || fresh || direct) {
      constexpr int width = Group<S>::width;
      // Rows padded to whole vectors run without a scalar tail: the padding holds numbers that nobody reads.
      const bool padded = p.padded && p.first + up(p.cols, width) <= a.ld_out;
      const int64_t groups = padded ? (p.cols + width - 1) / width : p.cols / width, done = groups * width;
      const Entries<S> entries = entries_of(a, begin, end);
      row_groups<Weighted, Ahead>(entries, p.dense, p.ld, result_of(a, p, v, !fresh, direct), groups);
      if (done < p.cols) row_tail<Weighted>(entries, p.dense + done, p.ld, z + done, p.cols - done, !fresh);
      if (direct) finished = done;
    }
  }
  if (last && a.epilogue && finished < p.cols)
    finish_row(z + finished, p.first + finished, p.cols - finished, v, *a.epilogue);
}

// Whether nothing is left to do for row v because it has no entries: then it costs its store, if that.
template <class S, class O>
inline bool skip_row(const Product<S, O>& a, const Pass<S>& p, int64_t v) {
  if (a.indptr[v + 1] > a.indptr[v] || a.epilogue) return false;
  if (!a.accumulate && p.block == 0) memset(a.out + v * a.ld_out + p.first, 0, p.cols * sizeof(O));
  return true;
}

template <bool Weighted, bool Ahead, class S, class O>
void run_chunk(const Product<S, O>& a, const Pass<S>& p, int64_t chunk) {
  for (int64_t v = a.chunks[chunk]; v < a.chunks[chunk + 1]; ++v) {
    if (skip_row(a, p, v)) continue;
    const bool hub = a.indptr[v + 1] - a.indptr[v] > a.hub;
    if constexpr (std::is_same_v<O, Real<S>>)
      add_block<Weighted, Ahead>(a, p, v, hub);
    else
      store_row<Weighted, Ahead>(a, p, v, hub);
  }
}

// A chunk of rows, or a part of a hub: f<Weighted, Ahead>. No entries are fetched ahead of the last ones.
#define MGGCN_RUN(f, a, end, ...)              \
  if ((a).ahead && (end) + (a).ahead <= nnz) { \
    if ((a).values)                            \
      f<true, true>(a, __VA_ARGS__);           \
    else                                       \
      f<false, true>(a, __VA_ARGS__);          \
  } else {                                     \
    if ((a).values)                            \
      f<true, false>(a, __VA_ARGS__);          \
    else                                       \
      f<false, false>(a, __VA_ARGS__);         \
  }

template <class S, class O>
void spmm(const Product<S, O>& a) {
  constexpr int width = Group<S>::width;
  const int64_t nnz = a.indptr[a.chunks[a.num_chunks]], partial = a.cols % width;
  Real<S> tail[width] = {};
  if (a.epilogue && a.epilogue->bias) memcpy(tail, a.epilogue->bias + a.cols - partial, partial * sizeof(Real<S>));
#pragma omp parallel num_threads(a.threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < a.num_parts; ++part) MGGCN_RUN(sum_part, a, a.parts[part].end, part);
    for (int64_t first = 0; first < a.cols; first += a.panel) {
      const int64_t cols = a.cols - first < a.panel ? a.cols - first : a.panel, whole = up(cols, width);
      Pass<S> pass = {a.dense + first, a.ld_dense, first, cols, 0, first + whole <= a.ld_dense, tail};
      if (a.packed) {
        const int64_t copied = pass.padded ? whole : cols;
#pragma omp for schedule(static)
        for (int64_t u = 0; u < a.inner; ++u)
          memcpy(a.packed + u * a.panel, pass.dense + u * a.ld_dense, copied * sizeof(S));
        pass.dense = a.packed;
        pass.ld = a.panel;
        pass.padded = true;
      }
      for (; pass.block < a.blocks; ++pass.block) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t c = 0; c < a.num_chunks; ++c) MGGCN_RUN(run_chunk, a, a.indptr[a.chunks[c + 1]], pass, c);
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
