// edge_gradient: the gradient of edge_reduce by one operand x; of a vertex, out[i, :] = scale * sum over the edges that
// read row i of d, or of an edge, out[e, :] = scale * d, where d is, by `partial`,
//   one  g[v]      times  g[v] * a      over  g[v] / a      ratio  g[v] * (a / b) / b
// with v the edge's destination and a, b its rows of operands; d is 0 where `winners` (if given) names another edge of
// v. narrow: x has one column, which gets the sum over the columns. in    EdgeRows by destination (x of the destination
// or edges) or by source (x of the source), g T [N, D],
//       winners int32 [N, D] or null, operands T [N or E, D or 1]
// out   T [rows or E, D or 1]; vertices without such edges get 0
// work  E D; moves, per edge, 4 bytes of index (8 by source), 4 of edge_ids and 8 of starts where an operand of edges
//       needs them, D sizeof T for g (by source) and for each operand that is not of the row's vertex, 4 D for winners
//       by source; per row D sizeof T of out, by destination also D sizeof T of g and 4 D of winners. Rows of a chunk
//       run in order in one thread, no atomics: bitwise repeatable. Twin: cuda/edge_gradient.cu.
#include "edges.h"

namespace {

enum Partial : int32_t { kOne = 0, kTimes = 1, kOver = 2, kRatio = 3 };

template <class T>
struct Gradient {
  EdgeRows rows;
  Operand<T> a, b;
  const T* g;
  int64_t ld_g;
  const int32_t* winners;
  T* out;
  int64_t ld_out, cols;
  double scale;
  int32_t partial, per_edge, narrow, threads;
};

template <int P, class T>
struct GradientRow {
  const Gradient<T>& x;
  int64_t row;

  template <class L, int K>
  MGGCN_INLINE void derive(int64_t k, int64_t column, typename L::type (&d)[K]) const {
    const int64_t v = destination_of(x.rows, row, k);
    typename L::type a[K], b[K];
    load_tile<L, K>(x.g + v * x.ld_g, false, column, d);
    if (P != kOne) load_tile<L, K>(operand_row(x.a, x.rows, row, k), x.a.narrow, column, a);
    if (P == kRatio) load_tile<L, K>(operand_row(x.b, x.rows, row, k), x.b.narrow, column, b);
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i)
      d[i] = P == kOne ? d[i] : P == kRatio ? d[i] * (a[i] / b[i]) / b[i] : P == kTimes ? d[i] * a[i] : d[i] / a[i];
    if (!x.winners) return;
    const auto place = L::spread((int32_t)place_of(x.rows, row, k));
    const int32_t* winner = x.winners + v * x.cols + column;
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) d[i] = L::load_places(winner + i * L::width) == place ? d[i] : typename L::type{};
  }

  // A narrow operand gathers its one column tile after tile.
  template <class L, int K>
  MGGCN_INLINE void store(int64_t i, int64_t column, const typename L::type (&d)[K]) const {
    T* out = x.out + i * x.ld_out;
    const T scale = (T)x.scale;
    if (x.narrow) {
      T sum = 0;
#pragma GCC unroll 8
      for (int j = 0; j < K; ++j) sum += L::sum(d[j]);
      *out = column ? *out + scale * sum : scale * sum;
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < K; ++j) L::store(out + column + j * L::width, L::fill(scale) * d[j]);
    }
  }

  template <class L, int K>
  MGGCN_INLINE void run(int64_t column) const {
    const int64_t begin = x.rows.indptr[row], end = x.rows.indptr[row + 1];
    typename L::type sum[K] = {}, d[K];
    for (int64_t k = begin; k < end; ++k) {
      derive<L, K>(k, column, d);
      if (x.per_edge) store<L, K>(edge_id_of(x.rows, k), column, d);
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) sum[i] += d[i];
    }
    if (!x.per_edge) store<L, K>(row, column, sum);
  }
};

template <int P, class T>
void gradient(const Gradient<T>& x) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(x.threads)
  for (int64_t c = 0; c < x.rows.num_chunks; ++c)
    for (int64_t v = x.rows.chunks[c]; v < x.rows.chunks[c + 1]; ++v) for_tiles<T>(x.cols, GradientRow<P, T>{x, v});
}

template <class T>
void gradient(const Gradient<T>& x) {
  if (x.partial == kOne) return gradient<kOne>(x);
  if (x.partial == kTimes) return gradient<kTimes>(x);
  if (x.partial == kOver) return gradient<kOver>(x);
  gradient<kRatio>(x);
}

}  // namespace

MGGCN_EXPORT(mggcn_edge_gradient_f32)(const Gradient<float>* x) { gradient(*x); }
MGGCN_EXPORT(mggcn_edge_gradient_f64)(const Gradient<double>* x) { gradient(*x); }
