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

template <int O, class X>
MGGCN_INLINE X message(X l, X r) {
  if (O == kAdd) return l + r;
  if (O == kSub) return l - r;
  if (O == kMul) return l * r;
  if (O == kDiv) return l / r;
  return l;
}

// Whether m takes the place of what is held: NaN does, unless NaN is held.
template <int R, class X>
MGGCN_INLINE auto takes(X m, X held) {
  const auto stays = R == kMax ? m <= held : m >= held;
  return (stays == 0) & (held == held);
}

template <int O, int R, class T>
struct ReduceRow {
  const Reduce<T>& a;
  int64_t row;

  template <class L, int K>
  MGGCN_INLINE void load(int64_t k, int64_t column, typename L::type (&m)[K]) const {
    typename L::type l[K], r[K];
    load_tile<L, K>(operand_row(a.lhs, a.rows, row, k), a.lhs.narrow, column, l);
    if (O != kCopy) load_tile<L, K>(operand_row(a.rhs, a.rows, row, k), a.rhs.narrow, column, r);
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) m[i] = O == kCopy ? l[i] : message<O>(l[i], r[i]);
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

template <int O, int R, class T>
void reduce(const Reduce<T>& a) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads)
  for (int64_t c = 0; c < a.rows.num_chunks; ++c)
    for (int64_t v = a.rows.chunks[c]; v < a.rows.chunks[c + 1]; ++v) for_tiles<T>(a.cols, ReduceRow<O, R, T>{a, v});
}

template <int O, class T>
void reduce(const Reduce<T>& a) {
  if (a.reducer == kSum) return reduce<O, kSum>(a);
  if (a.reducer == kMax) return reduce<O, kMax>(a);
  reduce<O, kMin>(a);
}

template <class T>
void reduce(const Reduce<T>& a) {
  if (a.op == kAdd) return reduce<kAdd>(a);
  if (a.op == kSub) return reduce<kSub>(a);
  if (a.op == kMul) return reduce<kMul>(a);
  if (a.op == kDiv) return reduce<kDiv>(a);
  reduce<kCopy>(a);
}

}  // namespace

MGGCN_EXPORT(mggcn_edge_reduce_f32)(const Reduce<float>* a) { reduce(*a); }
MGGCN_EXPORT(mggcn_edge_reduce_f64)(const Reduce<double>* a) { reduce(*a); }
