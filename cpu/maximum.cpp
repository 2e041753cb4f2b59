// maximum: out[v, :] = the maximum over the edges u -> v of rows[u, :], and winners[v, :] = whose it is: of equal ones
// the vertex of the lowest number. Tiles come in any order: a call goes on from what it finds, unless it is the first.
// in    indptr int64 [V+1] or null (no entries), indices int32 [nnz], rows T [N, D + 1], the last column the vertex's
// number
//       as an integer of T's size
// out   T [V, D]; winners [V, D], integers of T's size, kNobody without entries. After the last tile such a row is 0.
//       NaN: the first vertex's is the maximum.
// work  D comparisons per entry; moves, per entry, 4 bytes of index and (D + 1) sizeof T, per row 2 D sizeof T. Rows of
// a
//       chunk run in order in one thread: bitwise repeatable. Twins: cuda/maximum.cu, cuda/maximum_grad.cu.
// maximum_combine: the same of whole rows with their winners, one for each of `index`.
// maximum_grad: out[u, :] (+)= g[v, :] of the edges u -> v where winners[v, :] is u; rows T [N, 2 D] are [g | winners].
//               Parallel edges, which lie side by side, count once.
#include <algorithm>
#include <limits>

#include "edges.h"

namespace {

template <class T>
struct Maximum {
  int64_t num_chunks;
  const int64_t *chunks, *indptr;
  const int32_t* indices;
  const T* rows;
  int64_t ld;
  T* out;
  int64_t ld_out;
  T* winners;
  int64_t ld_winners;
  const int64_t* ids;    // [V] numbers of the rows, for the gradient
  const int32_t* index;  // rows that a message is for, for combine
  int64_t num_rows, cols;
  int32_t fresh, last, threads;
};

template <class T>
using Id = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <class T>
constexpr Id<T> kNobody = std::numeric_limits<Id<T>>::max();

template <class T>
MGGCN_INLINE Id<T> id_at(const T* p) {
  Id<T> id;
  memcpy(&id, p, sizeof id);
  return id;
}

// Numbers of vertices in the lanes of columns.
template <class L>
struct Ids;
template <class T>
struct Ids<VectorLanes<T>> {
  typedef typename VectorLanes<T>::flags type;
  static MGGCN_INLINE type load(const T* p) { return (type)VectorLanes<T>::load(p); }
  static MGGCN_INLINE void store(T* p, type v) { VectorLanes<T>::store(p, (typename VectorLanes<T>::type)v); }
  static MGGCN_INLINE type spread(Id<T> id) { return type{} + id; }
};
template <class T>
struct Ids<OneLane<T>> {
  typedef Id<T> type;
  static MGGCN_INLINE type load(const T* p) { return id_at(p); }
  static MGGCN_INLINE void store(T* p, type v) { memcpy(p, &v, sizeof v); }
  static MGGCN_INLINE type spread(Id<T> id) { return id; }
};

template <class X, class I>
MGGCN_INLINE void take(X x, I id, X& held, I& winner) {
  const auto first = id < winner;
  const auto taken = (x > held) | ((x == held) & first) | ((x != x) & ((held == held) | first));
  held = taken ? x : held;
  winner = taken ? id : winner;
}

// Edges of a row whose columns are read tile by tile while the rows of as many edges behind them are fetched.
constexpr int64_t kBlock = 16;

template <class T>
struct MaximumRow {
  const Maximum<T>& a;
  int64_t row, begin, end;
  bool fresh, last;  // whether nothing, or no more, is there of this row
  const T* message;  // one row with winners of its own, or null

  template <class L, int K>
  MGGCN_INLINE void run(int64_t column) const {
    typename L::type held[K];
    typename Ids<L>::type winner[K];
    T *out = a.out + row * a.ld_out + column, *winners = a.winners + row * a.ld_winners + column;
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) {
      held[i] = fresh ? L::fill(-std::numeric_limits<T>::infinity()) : L::load(out + i * L::width);
      winner[i] = fresh ? Ids<L>::spread(kNobody<T>) : Ids<L>::load(winners + i * L::width);
    }
    // Of the edges behind this block the lines that begin in this tile: rows do so themselves.
    constexpr int64_t line = 64 / (int64_t)sizeof(T);
    const int64_t fetched = (column + line - 1) / line * line, stop = column + K * L::width;
    const int64_t behind = begin < end ? a.indptr[a.num_rows] - 1 : 0;
    for (int64_t k = begin; k < end; ++k) {
      const T* x = a.rows + a.indices[k] * a.ld;
      const T* next = a.rows + a.indices[std::min(k + kBlock, behind)] * a.ld;
      for (int64_t c = fetched; c < stop; c += line) __builtin_prefetch(next + c);
      if (stop == a.cols) __builtin_prefetch(next + a.cols);
      const typename Ids<L>::type id = Ids<L>::spread(id_at(x + a.cols));
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) take(L::load(x + column + i * L::width), id, held[i], winner[i]);
    }
    if (message)
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) {
        const T* x = message + column + i * L::width;
        take(L::load(x), Ids<L>::load(x + a.cols), held[i], winner[i]);
      }
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) {
      const auto nobody = winner[i] == kNobody<T>;
      L::store(out + i * L::width, last && !message ? nobody ? typename L::type{} : held[i] : held[i]);
      Ids<L>::store(winners + i * L::width, winner[i]);
    }
  }
};

template <int N>
struct Words {
  typedef int64_t type __attribute__((vector_size(N)));
};

// Whether any lane of a comparison holds.
template <class F>
MGGCN_INLINE bool any_of(F flags) {
  if constexpr (sizeof(F) <= 8) {
    return flags != 0;
  } else {
    const auto words = (typename Words<sizeof(F)>::type)flags;
    int64_t found = 0;
    for (size_t i = 0; i < sizeof(F) / 8; ++i) found |= words[i];
    return found != 0;
  }
}

template <class T>
struct GradientRow {
  const Maximum<T>& a;
  int64_t row;

  template <class L, int K>
  MGGCN_INLINE void run(int64_t column) const {
    typename L::type sum[K];
    T* out = a.out + row * a.ld_out + column;
    const typename Ids<L>::type mine = Ids<L>::spread((Id<T>)a.ids[row]);
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) sum[i] = a.fresh ? typename L::type{} : L::load(out + i * L::width);
    // Lines of winners that begin in this tile, or in which the first one does.
    constexpr int64_t line = 64 / (int64_t)sizeof(T);
    const int64_t fetched = (a.cols + column + (column ? line - 1 : 0)) / line * line;
    const int64_t begin = a.indptr[row], end = a.indptr[row + 1], behind = begin < end ? a.indptr[a.num_rows] - 1 : 0;
    for (int64_t k = begin; k < end; ++k) {
      const T* next = a.rows + a.indices[std::min(k + kBlock, behind)] * a.ld;
      for (int64_t c = fetched; c < a.cols + column + K * L::width; c += line) __builtin_prefetch(next + c);
      if (k > begin && a.indices[k] == a.indices[k - 1]) continue;
      const T* x = a.rows + a.indices[k] * a.ld + column;
      decltype(Ids<L>::load(x) == mine) won[K], any = {};
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) any |= won[i] = Ids<L>::load(x + a.cols + i * L::width) == mine;
      if (!any_of(any)) continue;  // g is not read then, most often where rows are long
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) sum[i] += won[i] ? L::load(x + i * L::width) : typename L::type{};
    }
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) L::store(out + i * L::width, sum[i]);
  }
};

// Calls block(row, begin, end, first, last) for blocks of the edges of each row of a chunk, once for a row without any
// if `all`.
template <class T, class Call>
MGGCN_INLINE void for_blocks(const Maximum<T>& a, int64_t chunk, bool all, const Call& block) {
  for (int64_t v = a.chunks[chunk]; v < a.chunks[chunk + 1]; ++v) {
    const int64_t begin = a.indptr[v], end = a.indptr[v + 1];
    if (begin == end && !all) continue;
    int64_t k = begin;
    do {
      const int64_t next = std::min(k + kBlock, end);
      block(v, k, next, k == begin, next == end);
      k = next;
    } while (k < end);
  }
}

template <class T>
void maximum(const Maximum<T>& a) {
  if (!a.indptr) {
#pragma omp parallel for num_threads(a.threads)
    for (int64_t v = 0; v < a.num_rows; ++v)
      for_tiles<T>(a.cols, MaximumRow<T>{a, v, 0, 0, a.fresh != 0, a.last != 0, nullptr});
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads)
  for (int64_t c = 0; c < a.num_chunks; ++c)
    for_blocks(a, c, a.fresh || a.last, [&](int64_t v, int64_t k, int64_t end, bool first, bool last) {
      for_tiles<T>(a.cols, MaximumRow<T>{a, v, k, end, first && a.fresh, last && a.last, nullptr});
    });
}

template <class T>
void combine(const Maximum<T>& a) {
#pragma omp parallel for num_threads(a.threads)
  for (int64_t i = 0; i < a.num_rows; ++i) {
    const T* message = a.rows + i * a.ld;
    for_tiles<T>(a.cols, MaximumRow<T>{a, a.index[i], 0, 0, a.fresh != 0, a.last != 0, message});
  }
}

template <class T>
void gradient(const Maximum<T>& a) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads)
  for (int64_t c = 0; c < a.num_chunks; ++c)
    for (int64_t v = a.chunks[c]; v < a.chunks[c + 1]; ++v)
      if (a.fresh || a.indptr[v] < a.indptr[v + 1]) for_tiles<T>(a.cols, GradientRow<T>{a, v});
}

}  // namespace

MGGCN_EXPORT(mggcn_maximum_f32)(const Maximum<float>* a) { maximum(*a); }
MGGCN_EXPORT(mggcn_maximum_f64)(const Maximum<double>* a) { maximum(*a); }
MGGCN_EXPORT(mggcn_maximum_combine_f32)(const Maximum<float>* a) { combine(*a); }
MGGCN_EXPORT(mggcn_maximum_combine_f64)(const Maximum<double>* a) { combine(*a); }
MGGCN_EXPORT(mggcn_maximum_grad_f32)(const Maximum<float>* a) { gradient(*a); }
MGGCN_EXPORT(mggcn_maximum_grad_f64)(const Maximum<double>* a) { gradient(*a); }
