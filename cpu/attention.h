// What the passes of attention share: rows by heads, scores of a block of edges, and their weights.
// A head has C columns, D = H C. An edge u -> v has the score e = LeakyReLU(s_u + t_v) (GAT, Velickovic et al. 2018,
// eq. 3) or e = sum over c of a_c LeakyReLU(x_uc + y_vc) (GATv2, Brody et al. 2022, eq. 7), and its weight is the
// softmax of e over the in-edges of v. Rows that travel forwards are [x (D) | s (H), of GAT | number of u]; backwards,
// of destinations, [g (D) | d (H) | t (H) or y (D) | m (H) | 1 / l (H) | number of v].
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

// Scores and what follows from them, of up to kBlock edges, by head. Places from n on repeat an edge, so that loops may
// run to their ends; next: rows of the edges behind these, of this row or of later ones, to be fetched meanwhile.
template <class T>
struct Block {
  int n;
  const T *row[kBlock], *next[kBlock];
  T weight[kHeads * kBlock];  // scores, then exp(e - m), or the softmax
  T kept[kHeads * kBlock];    // 0 or 1 / (1 - p) of dropout
  T grad[kHeads * kBlock];    // of the score
  T slope[kHeads * kBlock];   // of LeakyReLU, GAT
};

MGGCN_INLINE float exp_of(float x) {
  // exp(x) = 2^n exp(r), |r| <= log(2) / 2, a polynomial of degree 7 (Cephes): vectorised, relative error 2e-7.
  const float magic = 12582912.0f, n = (x * 1.44269504f + magic) - magic;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const int32_t bits = (int32_t)((uint32_t)((int32_t)n + 127) << 23);
  float power;
  memcpy(&power, &bits, 4);
  const float value = (p * r * r + r + 1.0f) * power;
  return x < -87.0f ? 0.0f : value;
}
MGGCN_INLINE double exp_of(double x) { return std::exp(x); }

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

// out[i] = the sum over the columns of term(columns of row i, columns of the own row, first column), for N rows at
// once.
template <int N, class T, class Term>
MGGCN_INLINE void sums_of_rows(const T* const* row, int64_t from, const T* mine, int64_t cols, T* out,
                               const Term& term) {
  typedef VectorLanes<T> L;
  typename L::type sum[N] = {};
  int64_t c = 0;
  for (; cols - c >= L::width; c += L::width) {
    const typename L::type y = L::load(mine + c);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) sum[i] += term.template of<L>(L::load(row[i] + from + c), y, c);
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) out[i] = sum_of<T>(sum[i]);
  for (; c < cols; ++c)
    for (int i = 0; i < N; ++i) out[i] += term.template of<OneLane<T>>(row[i][from + c], mine[c], c);
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
MGGCN_INLINE void sums_of_block(const Block<T>& b, int64_t from, const T* mine, int64_t cols, T* out,
                                const Term& term) {
  if (b.n > kBlock / 2)
    sums_of_rows<kBlock>(b.row, from, mine, cols, out, term);
  else
    sums_of_rows<kBlock / 2>(b.row, from, mine, cols, out, term);
}

template <class T>
MGGCN_INLINE void load_block(const Attention<T>& a, int64_t k, int64_t end, int64_t last, Block<T>& b) {
  b.n = (int)(end - k < kBlock ? end - k : kBlock);
  for (int i = 0; i < kBlock; ++i) {
    b.row[i] = a.rows + a.indices[k + (i < b.n ? i : 0)] * a.ld;
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

// weight = scores, from what edges' rows have at `theirs` and the own row at `mine`: s and t, or x and y.
template <class T>
MGGCN_INLINE void score_block(const Attention<T>& a, Block<T>& b, const T* mine, int64_t theirs) {
  const T slope = (T)a.slope;
  for (int64_t h = 0; h < a.heads; ++h) {
    T *e = b.weight + h * kBlock, *r = b.slope + h * kBlock;
    if (a.a) {
      const int64_t first = h * a.cols;
      sums_of_block(b, theirs + first, mine + first, a.cols, e, ScoreTerm<T>{a.a + first, slope});
      continue;
    }
    const T own = mine[h];
    for (int i = 0; i < b.n; ++i) {
      const T q = b.row[i][theirs + h] + own;
      r[i] = q > 0 ? (T)1 : slope;
      e[i] = r[i] * q;
    }
  }
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
  uint16_t words[8 * kHeads / 8];
  for (int i = 0; i < b.n; ++i) {
    const uint32_t theirs = number_at(b.row[i] + at);
    Dropout key = a.dropout;
    const uint32_t source = by_source ? mine : theirs, destination = by_source ? theirs : mine;
    key.layer |= 0x80000000u;
    const int64_t skipped = a.first % 8;
    for (int64_t h = 0; h < skipped + a.heads; h += 8)
      philox_words<1>(key, (int64_t)((uint64_t)destination << 32 | source), (uint32_t)((a.first + h) / 8), words + h);
    for (int64_t h = 0; h < a.heads; ++h) b.kept[h * kBlock + i] = words[skipped + h] >= key.threshold ? scale : (T)0;
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
    typename L::type sum[K];
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) sum[k] = L::load(acc + column + k * L::width);
    for (int i = 0; i < n; ++i) {
      const T* x = row[i] + from + column;
      const typename L::type w = L::fill(weight[i]);
      if (K > 1)
#pragma GCC unroll 8
        for (int64_t c = 0; c < K * L::width; c += 64 / (int64_t)sizeof(T))
          __builtin_prefetch(next[i] + from + column + c);
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
