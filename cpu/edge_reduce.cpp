// edge_reduce: out[v, :] = reduction over the edges u -> v of op(lhs, rhs), the operands of source, destination or
// edge; reduction a sum, maximum or minimum; op add, sub, mul, div, or copy of lhs alone. Source: DistGNN, Algorithm 1.
// in    EdgeRows by destination, operands T [N or E, D or 1]
// out   T [V, D]; winners int32 [V, D] or null: place in its row of the edge whose value a maximum or minimum is, the
//       first of equal ones. A vertex without in-edges gets 0 and -1. NaN: the first one of a column is its extremum.
// work  E D operations; moves, per edge, 4 bytes of index, D sizeof T (sizeof T if narrow) for each operand of source
// or
//       edge, 4 of edge_ids for one of edges; per vertex D sizeof T, and 4 D of winners; operands of the destination
//       stay cached. Rows of a chunk run in order in one thread: bitwise repeatable. Twin: cuda/edge_reduce.cu.
#include "edges.h"

namespace {

enum Op : int32_t { kAdd = 0, kSub = 1, kMul = 2, kDiv = 3, kCopy = 4 };
enum Reducer : int32_t { kSum = 0, kMax = 1, kMin = 2 };

template <class T>
struct Reduce {
  EdgeRows rows;
  Operand<T> lhs, rhs;
  T* out;
  int64_t ld_out, cols;
  int32_t* winners;
  int32_t op, reducer, threads;
};

// What is compiled for each reduction: a copy, and a product that is summed, which is then rounded once. Other
// operations are chosen at each edge, so that loads and stores are not compiled for every one of them.
enum Form : int32_t { kCopied, kSummedProduct, kChosen };

// m[0 .. K) = l op r.
template <int F, int K, class X>
MGGCN_INLINE void combine(int32_t op, const X (&l)[K], const X (&r)[K], X (&m)[K]) {
#define MGGCN_EACH(result) _Pragma("GCC unroll 8") for (int i = 0; i < K; ++i) m[i] = result
  if (F == kCopied)
    MGGCN_EACH(l[i]);
  else if (F == kSummedProduct || op == kMul)
    MGGCN_EACH(l[i] * r[i]);
  else if (op == kAdd)
    MGGCN_EACH(l[i] + r[i]);
  else if (op == kSub)
    MGGCN_EACH(l[i] - r[i]);
  else
    MGGCN_EACH(l[i] / r[i]);
#undef MGGCN_EACH
}

// Whether m takes the place of what is held: NaN does, unless NaN is held.
template <int R, class X>
MGGCN_INLINE auto takes(X m, X held) {
  const auto stays = R == kMax ? m <= held : m >= held;
  return (stays == 0) & (held == held);
}

template <int F, int R, class T>
struct ReduceRow {
  const Reduce<T>& a;
  int64_t row;

  template <class L, int K>
  MGGCN_INLINE void load(int64_t k, int64_t column, typename L::type (&m)[K]) const {
    typename L::type l[K], r[K];
    load_tile<L, K>(operand_row(a.lhs, a.rows, row, k), a.lhs.narrow, column, l);
    if (F != kCopied) load_tile<L, K>(operand_row(a.rhs, a.rows, row, k), a.rhs.narrow, column, r);
    combine<F>(a.op, l, r, m);
  }

  template <class L, int K>
  MGGCN_INLINE void run(int64_t column) const {
    const int64_t begin = a.rows.indptr[row], end = a.rows.indptr[row + 1];
    typename L::type held[K], m[K];
    typename L::flags place[K];
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) held[i] = typename L::type{}, place[i] = L::spread(begin < end ? 0 : -1);
    if (R != kSum && begin < end) load<L, K>(begin, column, held);
    for (int64_t k = begin + (R != kSum); k < end; ++k) {
      load<L, K>(k, column, m);
      const typename L::flags here = L::spread((int32_t)(k - begin));
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) {
        if (R == kSum) {
          held[i] += m[i];
        } else {
          const auto taken = takes<R>(m[i], held[i]);
          held[i] = taken ? m[i] : held[i];
          place[i] = taken ? here : place[i];
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) L::store(a.out + row * a.ld_out + column + i * L::width, held[i]);
    if (R == kSum || !a.winners) return;
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) L::store_places(a.winners + row * a.cols + column + i * L::width, place[i]);
  }
};

template <int F, int R, class T>
void reduce(const Reduce<T>& a) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads)
  for (int64_t c = 0; c < a.rows.num_chunks; ++c)
    for (int64_t v = a.rows.chunks[c]; v < a.rows.chunks[c + 1]; ++v) for_tiles<T>(a.cols, ReduceRow<F, R, T>{a, v});
}

template <class T>
void reduce(const Reduce<T>& a) {
  const bool copied = a.op == kCopy;
  if (a.reducer == kMax) return copied ? reduce<kCopied, kMax>(a) : reduce<kChosen, kMax>(a);
  if (a.reducer == kMin) return copied ? reduce<kCopied, kMin>(a) : reduce<kChosen, kMin>(a);
  if (a.op == kMul) return reduce<kSummedProduct, kSum>(a);
  return copied ? reduce<kCopied, kSum>(a) : reduce<kChosen, kSum>(a);
}

}  // namespace

MGGCN_EXPORT(mggcn_edge_reduce_f32)(const Reduce<float>* a) { reduce(*a); }
MGGCN_EXPORT(mggcn_edge_reduce_f64)(const Reduce<double>* a) { reduce(*a); }
