// What the passes of attention share: rows by heads, scores of a block of edges, and their weights.
// A head has C columns, D = H C. An edge u -> v has the score e = LeakyReLU(s_u + t_v) (GAT, Velickovic et al. 2018,
// eq. 3) or e = sum over c of a_c LeakyReLU(x_uc + y_vc) (GATv2, Brody et al. 2022, eq. 7), and its weight is the
// softmax of e over the in-edges of v, in which an entry of several parallel edges counts as often. Rows that travel
// forwards are [x (D) | s (H), of GAT | number of u]; backwards, of destinations, [g (D) | d (H) | t (H) or y (D) | m
// (H) | 1 / l (H) | number of v].
#pragma once
#include <cmath>
#include <limits>

#include "edges.h"
#include "philox.h"

namespace {

constexpr int kBlock = 8;   // edges whose scores are computed together: their rows stay in the first-level cache
constexpr int kHeads = 64;  // at most: scores of a block lie on the stack

template <class T>
struct Attention {
  int64_t num_chunks;
  const int64_t *chunks, *indptr;  // indptr null: no entries
  const int32_t* indices;
  const T* rows;  // [N, ...] what travels
  int64_t ld;
  const T*
      own;  // [V, ...] forwards t or y; to sources, what travelled forwards; to destinations, what travels backwards
  int64_t ld_own;
  T* out;
  int64_t ld_out;
  T* beside;  // [V, 2 H] m and l, forwards; [V, D] the gradient of a by row, to destinations of GATv2
  int64_t ld_beside;
  const T* a;                            // [H, C] of GATv2; null: GAT
  const T* counts;                       // [nnz] parallel edges of an entry; null: one each
  const int64_t* ids;                    // [V] numbers of the rows
  const int32_t* index;                  // rows that a message is for, for combine
  int64_t num_rows, heads, first, cols;  // heads from `first` on of all that the model has
  double slope;
  Dropout dropout;  // of weights: counter (head / 8, number of u, number of v, 2^31 + site)
  int32_t fresh, last, threads;

  int64_t width() const { return heads * cols; }
  int64_t scored() const { return a ? width() : heads; }
  int64_t id_forwards() const { return width() + (a ? 0 : heads); }
  int64_t maxima() const { return width() + heads + scored(); }  // where m begins in a row that travels backwards
};

// Up to kBlock edges, and what follows from the scores of a head. Places from n on repeat an edge, so that loops may
// run to their ends; next: rows of the edges behind these, of this row or of later ones, to be fetched meanwhile.
template <class T>
struct Block {
  int n;
  const T *row[kBlock], *next[kBlock];
  T count[kBlock];          // parallel edges
  T kept[kHeads * kBlock];  // by head: 0 or 1 / (1 - p) of dropout
  T weight[kBlock];         // of a head: exp(e - m), or the softmax
  T grad[kBlock];           // of a head's score
};

// A number for each edge of a block, as one vector.
template <class T>
using Wide = Vector<T, kBlock*(int)sizeof(T)>;
template <class T>
using Edges = typename Wide<T>::type;
typedef int32_t EdgeInts __attribute__((vector_size(kBlock * sizeof(int32_t))));

// of(0) .. of(7).
template <class T, class Of>
MGGCN_INLINE Edges<T> each(const Of& of) {
  return Edges<T>{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
}

// Lanes I of v and of w behind it.
template <class V, class Mask, int... I>
MGGCN_INLINE V lanes(V v, V w) {
#ifdef __clang__
  return __builtin_shufflevector(v, w, I...);
#else
  return __builtin_shuffle(v, w, Mask{I...});
#endif
}

// In every lane what `join` makes of all of them, by halves.
template <class T, class Join>
MGGCN_INLINE Edges<T> joined(Edges<T> v, const Join& join) {
  typedef typename std::conditional<sizeof(T) == 4, EdgeInts, decltype(Edges<T>{} < Edges<T>{})>::type Mask;
  v = join(v, lanes<Edges<T>, Mask, 4, 5, 6, 7, 0, 1, 2, 3>(v, v));
  v = join(v, lanes<Edges<T>, Mask, 2, 3, 0, 1, 6, 7, 4, 5>(v, v));
  return join(v, lanes<Edges<T>, Mask, 1, 0, 3, 2, 5, 4, 7, 6>(v, v));
}
template <class T>
MGGCN_INLINE Edges<T> largest_of(Edges<T> v) {
  return joined<T>(v, [](Edges<T> x, Edges<T> y) { return x > y ? x : y; });
}
template <class T>
MGGCN_INLINE Edges<T> total_of(Edges<T> v) {
  return joined<T>(v, [](Edges<T> x, Edges<T> y) { return x + y; });
}

// v in the first n lanes, and x in the others.
template <class T>
MGGCN_INLINE Edges<T> first_lanes(Edges<T> v, int n, T x) {
  const Edges<T> place = {0, 1, 2, 3, 4, 5, 6, 7};
  return place < Wide<T>::fill((T)n) ? v : Wide<T>::fill(x);
}

// x in the lanes that are set, and 0 in the others.
template <class T>
MGGCN_INLINE Edges<T> if_set(EdgeInts flags, T x) {
  const Edges<T> zero = {};
  return __builtin_convertvector(flags, decltype(zero < zero)) ? Wide<T>::fill(x) : zero;
}

MGGCN_INLINE EdgeInts load_ints(const uint32_t* p) {
  EdgeInts v;
  memcpy(&v, p, sizeof v);
  return v;
}

// exp(x) = 2^n exp(r), |r| <= log(2) / 2, a polynomial of degree 7 (Cephes): relative error 2e-7.
MGGCN_INLINE Edges<float> exp_of(Edges<float> x) {
  const Edges<float> least = Wide<float>::fill(-87.0f), zero = {};
  const Edges<float> y = x < least ? least : x;
  const float magic = 12582912.0f;
  const Edges<float> n = (y * 1.44269504f + magic) - magic;
  const Edges<float> r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  Edges<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Edges<float> power = (Edges<float>)((__builtin_convertvector(n, EdgeInts) + 127) << 23);
  return x < least ? zero : (p * r * r + r + 1.0f) * power;
}
MGGCN_INLINE Edges<double> exp_of(Edges<double> x) {
  return each<double>([&](int i) { return std::exp(x[i]); });
}
template <class T>
MGGCN_INLINE T exp_of(T x) {
  return exp_of(Wide<T>::fill(x))[0];
}

// The sum of the lanes, by halves.
template <class T>
MGGCN_INLINE T sum_of(typename VectorLanes<T>::type v) {
  T lane[VectorLanes<T>::width];
  VectorLanes<T>::store(lane, v);
#pragma GCC unroll 8
  for (int half = VectorLanes<T>::width / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

template <class T>
MGGCN_INLINE T dot(const T* x, const T* y, int64_t cols) {
  typedef VectorLanes<T> L;
  typename L::type sum[2] = {};
  int64_t c = 0;
  for (; cols - c >= 2 * L::width; c += 2 * L::width) {
    sum[0] += L::load(x + c) * L::load(y + c);
    sum[1] += L::load(x + c + L::width) * L::load(y + c + L::width);
  }
  for (; cols - c >= L::width; c += L::width) sum[0] += L::load(x + c) * L::load(y + c);
  T total = sum_of<T>(sum[0] + sum[1]);
  for (; c < cols; ++c) total += x[c] * y[c];
  return total;
}

// Lane i = the sum of the lanes of v[i], by halves.
template <class T>
MGGCN_INLINE Edges<T> sums_of_lanes(const typename VectorLanes<T>::type (&v)[kBlock]) {
  if constexpr (std::is_same<Edges<T>, Edges<float>>::value && VectorLanes<T>::width == kBlock) {
    typedef Edges<float> V;
    const auto pair = [](V a, V b) {
      return lanes<V, EdgeInts, 0, 1, 2, 3, 8, 9, 10, 11>(a, b) + lanes<V, EdgeInts, 4, 5, 6, 7, 12, 13, 14, 15>(a, b);
    };
    const auto quad = [](V a, V b) {
      return lanes<V, EdgeInts, 0, 1, 8, 9, 4, 5, 12, 13>(a, b) + lanes<V, EdgeInts, 2, 3, 10, 11, 6, 7, 14, 15>(a, b);
    };
    const V a = quad(pair(v[0], v[4]), pair(v[1], v[5])), b = quad(pair(v[2], v[6]), pair(v[3], v[7]));
    return lanes<V, EdgeInts, 0, 2, 8, 10, 4, 6, 12, 14>(a, b) + lanes<V, EdgeInts, 1, 3, 9, 11, 5, 7, 13, 15>(a, b);
  } else {
    return each<T>([&](int i) { return sum_of<T>(v[i]); });
  }
}

// Lane i = the sum over the columns of term(columns of row i, columns of the own row, first column), for the first N
// rows; the others are 0.
template <int N, class T, class Term>
MGGCN_INLINE Edges<T> sums_of_rows(const T* const* row, int64_t from, const T* mine, int64_t cols, const Term& term) {
  typedef VectorLanes<T> L;
  typename L::type sum[kBlock] = {};
  int64_t c = 0;
  for (; cols - c >= L::width; c += L::width) {
    const typename L::type y = L::load(mine + c);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) sum[i] += term.template of<L>(L::load(row[i] + from + c), y, c);
  }
  Edges<T> out = sums_of_lanes<T>(sum);
  for (; c < cols; ++c)
    out += each<T>([&](int i) { return i < N ? term.template of<OneLane<T>>(row[i][from + c], mine[c], c) : (T)0; });
  return out;
}

template <class T>
struct Product {
  template <class L>
  MGGCN_INLINE typename L::type of(typename L::type x, typename L::type y, int64_t) const {
    return x * y;
  }
};

// A term of GATv2's score: a LeakyReLU(x + y).
template <class T>
struct ScoreTerm {
  const T* a;
  T slope;
  template <class L>
  MGGCN_INLINE typename L::type of(typename L::type x, typename L::type y, int64_t c) const {
    const typename L::type q = x + y;
    return L::load(a + c) * (q > 0 ? q : slope * q);
  }
};

template <class T, class Term>
MGGCN_INLINE Edges<T> sums_of_block(const Block<T>& b, int64_t from, const T* mine, int64_t cols, const Term& term) {
  return b.n > kBlock / 2 ? sums_of_rows<kBlock>(b.row, from, mine, cols, term)
                          : sums_of_rows<kBlock / 2>(b.row, from, mine, cols, term);
}

template <class T>
MGGCN_INLINE void load_block(const Attention<T>& a, int64_t k, int64_t end, int64_t last, Block<T>& b) {
  b.n = (int)(end - k < kBlock ? end - k : kBlock);
  for (int i = 0; i < kBlock; ++i) {
    b.row[i] = a.rows + a.indices[k + (i < b.n ? i : 0)] * a.ld;
    if (a.counts) b.count[i] = a.counts[k + (i < b.n ? i : 0)];
    const int64_t ahead = k + b.n + i;
    b.next[i] = a.rows + a.indices[ahead < last ? ahead : last] * a.ld;
  }
}

// The lines of some columns of the next edges' rows.
template <class T>
MGGCN_INLINE void fetch(const Block<T>& b, int64_t first, int64_t cols) {
  for (int i = 0; i < b.n; ++i)
    for (int64_t c = first; c < first + cols; c += 64 / (int64_t)sizeof(T)) __builtin_prefetch(b.next[i] + c);
}

// A score for each edge, from what edges' rows have at `theirs` and the own row at `mine`: s and t, or x and y; slope:
// of LeakyReLU, GAT.
template <class T>
MGGCN_INLINE Edges<T> scores_of(const Attention<T>& a, const Block<T>& b, int64_t h, const T* mine, int64_t theirs,
                                Edges<T>& slope) {
  if (a.a) {
    const int64_t first = h * a.cols;
    return sums_of_block(b, theirs + first, mine + first, a.cols, ScoreTerm<T>{a.a + first, (T)a.slope});
  }
  const Edges<T> q = each<T>([&](int i) { return b.row[i][theirs + h]; }) + mine[h], zero = {};
  slope = q > zero ? Wide<T>::fill((T)1) : Wide<T>::fill((T)a.slope);
  return slope * q;
}

template <class T>
MGGCN_INLINE uint32_t number_at(const T* p) {
  uint32_t id;
  memcpy(&id, p, 4);
  return id;
}

// kept = the factors of dropout; `at`: where edges' rows have their number; by_source: they are the destinations.
template <class T>
MGGCN_INLINE void keep_block(const Attention<T>& a, Block<T>& b, int64_t row, int64_t at, bool by_source) {
  const T scale = (T)(float)a.dropout.keep_scale;
  const uint32_t mine = (uint32_t)a.ids[row];
  uint32_t theirs[kBlock];
  for (int i = 0; i < kBlock; ++i) theirs[i] = number_at(b.row[i] + at);
  for (int64_t group = a.first / 8; group <= (a.first + a.heads - 1) / 8; ++group) {
    PhiloxBlocks out;
    for (int i = 0; i < kBlock; ++i) {
      out[0][i] = (uint32_t)group;
      out[1][i] = by_source ? mine : theirs[i];
      out[2][i] = by_source ? theirs[i] : mine;
      out[3][i] = a.dropout.layer | 0x80000000u;
    }
    philox_blocks(a.dropout, out);
    const int64_t first = 8 * group - a.first;
    for (int64_t h = first < 0 ? 0 : first; h < (first + 8 < a.heads ? first + 8 : a.heads); ++h) {
      const int64_t word = h - first;
      const EdgeInts drawn = load_ints(out[word / 2]) >> (int)(16 * (word % 2)) & 0xffff;
      Wide<T>::store(b.kept + h * kBlock, if_set<T>(drawn >= (int32_t)a.dropout.threshold, scale));
    }
  }
}

// acc += the sum over a block's edges of weight times the columns `from` of their rows; the next rows' are fetched.
template <class T>
struct AddRows {
  T* acc;
  const T *const *row, *const *next;
  const T* weight;
  int n;
  int64_t from;

  template <class L, int K>
  MGGCN_INLINE void run(int64_t column) const {
    // Lines that begin in this tile: rows do so themselves.
    constexpr int64_t line = 64 / (int64_t)sizeof(T);
    const int64_t fetched = (from + column + line - 1) / line * line;
    typename L::type sum[K];
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) sum[k] = L::load(acc + column + k * L::width);
    for (int i = 0; i < n; ++i) {
      const T* x = row[i] + from + column;
      const typename L::type w = L::fill(weight[i]);
      for (int64_t c = fetched; c < from + column + K * L::width; c += line) __builtin_prefetch(next[i] + c);
#pragma GCC unroll 8
      for (int k = 0; k < K; ++k) sum[k] += w * L::load(x + k * L::width);
    }
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) L::store(acc + column + k * L::width, sum[k]);
  }
};

// For GATv2: acc += a times the sum of grad LeakyReLU'(x + y), and beside += the sum of grad LeakyReLU(x + y).
template <class T>
struct AddSlopes {
  T *acc, *beside;  // beside: or null
  const T *a, *mine;
  const T* const* row;
  const T* grad;
  int n;
  int64_t from;
  T slope;

  template <class L, int K>
  MGGCN_INLINE void run(int64_t column) const {
    typename L::type sum[K] = {}, values[K] = {}, y[K];
    const typename L::type one = L::fill((T)1), low = L::fill(slope);
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) y[k] = L::load(mine + column + k * L::width);
    for (int i = 0; i < n; ++i) {
      const T* x = row[i] + from + column;
      const typename L::type g = L::fill(grad[i]);
#pragma GCC unroll 8
      for (int k = 0; k < K; ++k) {
        const typename L::type q = L::load(x + k * L::width) + y[k], r = q > 0 ? one : low;
        sum[k] += g * r;
        values[k] += g * (r * q);
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) {
      T *to = acc + column + k * L::width, *other = beside ? beside + column + k * L::width : nullptr;
      L::store(to, L::load(to) + L::load(a + column + k * L::width) * sum[k]);
      if (other) L::store(other, L::load(other) + values[k]);
    }
  }
};

// row(v) for all rows that a pass must see: those with entries, and all where it begins or ends a result.
template <class T, class Row>
MGGCN_INLINE void for_rows(const Attention<T>& a, bool all, const Row& row) {
  if (!a.indptr) {
#pragma omp parallel for num_threads(a.threads)
    for (int64_t v = 0; v < a.num_rows; ++v) row(v, (int64_t)0, (int64_t)0);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads)
  for (int64_t c = 0; c < a.num_chunks; ++c)
    for (int64_t v = a.chunks[c]; v < a.chunks[c + 1]; ++v)
      if (all || a.indptr[v] < a.indptr[v + 1]) row(v, a.indptr[v], a.indptr[v + 1]);
}

}  // namespace
