// attend: z_v += the sum over the edges u -> v, by head, of exp(e - m_v) kept x_u, rescaled as the running maximum m_v
//       grows, and l_v += the sum of exp(e - m_v). Tiles come in any order; after the last z_v is divided by l_v.
//       attention.h has e and the rows. Source: FlashAttention (Dao et al. 2022, algorithm 1), by destination.
// out   T [V, D] z; beside T [V, 2 H] m and l, -infinity and 0 without entries
// work  per edge 2 D FLOP and H exponentials (GATv2: 5 D); moves 4 bytes of index and the source's row, once; per row
//       z, m and l. Nothing has a number per edge but a block on the stack. Rows of a chunk run in order in one thread:
//       bitwise repeatable. Twins: cuda/attention.cu, cuda/attention_grad.cu.
// attend_combine: the triples (z, m, l) of a message [z | m | l], one for each of `index`, join those that lie there.
// attend_sources: out[u, :] (+)= gradients of x_u (and of s_u, behind it): weights w are computed again, and the
//       gradient of a score is w (kept g_v x_u - d_v) with d_v = g_v z_v by head.
// attend_destinations: out[v, :] (+)= the gradient of t_v or y_v; beside T [V, D] (+)= that of a, by row, of GATv2.
// head_dots: out[v, h] = the sum over the columns of head h of x[v, :] y[v, :]; y of stride 0 is one row for all.
#include "attention.h"

namespace {

template <class T>
void attend_row(const Attention<T>& a, int64_t v, int64_t begin, int64_t end) {
  T *z = a.out + v * a.ld_out, *m = a.beside + v * a.ld_beside, *l = m + a.heads;
  if (a.fresh) {
    for (int64_t c = 0; c < a.width(); ++c) z[c] = 0;
    for (int64_t h = 0; h < a.heads; ++h) m[h] = -std::numeric_limits<T>::infinity(), l[h] = 0;
  }
  Block<T> b;
  Edges<T> slope = {};
  const int64_t id = a.id_forwards(), scores = a.a ? 0 : a.width(), last = end > begin ? a.indptr[a.num_rows] - 1 : 0;
  for (int64_t k = begin; k < end; k += kBlock) {
    load_block(a, k, end, last, b);
    if (a.dropout.threshold) keep_block(a, b, v, id, false);
    fetch(b, a.width(), id + (a.dropout.threshold != 0) - a.width());
    for (int64_t h = 0; h < a.heads; ++h) {
      T* acc = z + h * a.cols;
      Edges<T> e = scores_of(a, b, h, a.own + v * a.ld_own, scores, slope);
      e = first_lanes<T>(e, b.n, -std::numeric_limits<T>::infinity());
      const T largest = largest_of<T>(e)[0];
      if (largest > m[h]) {
        if (l[h] != 0) {
          const T scale = exp_of(m[h] - largest);
          for (int64_t c = 0; c < a.cols; ++c) acc[c] *= scale;
          l[h] *= scale;
        }
        m[h] = largest;
      }
      Edges<T> w = exp_of(e - m[h]);
      if (a.counts) w *= Wide<T>::load(b.count);
      l[h] += total_of<T>(w)[0];
      if (a.dropout.threshold) w *= Wide<T>::load(b.kept + h * kBlock);
      Wide<T>::store(b.weight, w);
      for_tiles<T>(a.cols, AddRows<T>{acc, b.row, b.next, b.weight, b.n, h * a.cols});
    }
  }
  if (!a.last) return;
  for (int64_t h = 0; h < a.heads; ++h) {
    const T share = l[h] == 0 ? (T)0 : 1 / l[h];
    for (int64_t c = 0; c < a.cols; ++c) z[h * a.cols + c] *= share;
  }
}

template <class T>
void attend(const Attention<T>& a) {
  for_rows(a, a.fresh || a.last, [&](int64_t v, int64_t begin, int64_t end) { attend_row(a, v, begin, end); });
}

template <class T>
void combine(const Attention<T>& a) {
#pragma omp parallel for num_threads(a.threads)
  for (int64_t i = 0; i < a.num_rows; ++i) {
    const T *from = a.rows + i * a.ld, *m2 = from + a.width();
    T *z = a.out + a.index[i] * a.ld_out, *m = a.beside + a.index[i] * a.ld_beside;
    for (int64_t h = 0; h < a.heads; ++h) {
      if (m2[a.heads + h] == 0) continue;  // no edges there
      const T most = m2[h] > m[h] ? m2[h] : m[h], scale = exp_of(m[h] - most), scale2 = exp_of(m2[h] - most);
      for (int64_t c = h * a.cols; c < (h + 1) * a.cols; ++c) z[c] = z[c] * scale + from[c] * scale2;
      m[a.heads + h] = m[a.heads + h] * scale + m2[a.heads + h] * scale2;
      m[h] = most;
    }
  }
}

// weight = the softmax times dropout, grad = the gradient of the score, from scores and the dots of g and x; `at`
// gives, for each edge, a number of the row of what travels backwards.
template <class T, class At>
MGGCN_INLINE void derive(const Attention<T>& a, Block<T>& b, int64_t h, Edges<T> scores, Edges<T> dots, const At& at) {
  Edges<T> w = exp_of(scores - at(a.maxima() + h)) * at(a.maxima() + a.heads + h);
  if (a.counts) w *= Wide<T>::load(b.count);
  const Edges<T> kept = a.dropout.threshold ? Wide<T>::load(b.kept + h * kBlock) : Wide<T>::fill((T)1);
  Wide<T>::store(b.grad, w * (kept * dots - at(a.width() + h)));
  Wide<T>::store(b.weight, w * kept);
}

template <class T>
void sources_row(const Attention<T>& a, int64_t u, int64_t begin, int64_t end) {
  const T* x = a.own + u * a.ld_own;
  T* out = a.out + u * a.ld_out;
  const int64_t width = a.width(), at = width + a.heads, id = a.maxima() + 2 * a.heads;
  if (a.fresh)
    for (int64_t c = 0; c < a.id_forwards(); ++c) out[c] = 0;
  Block<T> b;
  Edges<T> slope = {};
  const int64_t last = end > begin ? a.indptr[a.num_rows] - 1 : 0;
  for (int64_t k = begin; k < end; k += kBlock) {
    load_block(a, k, end, last, b);
    if (a.dropout.threshold) keep_block(a, b, u, id, true);
    fetch(b, width, id + (a.dropout.threshold != 0) - width);
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t first = h * a.cols;
      const Edges<T> scores = scores_of(a, b, h, a.a ? x : x + width, at, slope);
      const Edges<T> dots = sums_of_block(b, first, x + first, a.cols, Product<T>{});
      derive(a, b, h, scores, dots, [&](int64_t c) { return each<T>([&](int i) { return b.row[i][c]; }); });
      for_tiles<T>(a.cols, AddRows<T>{out + first, b.row, b.next, b.weight, b.n, first});
      if (a.a) {
        for_tiles<T>(a.cols, AddSlopes<T>{out + first, nullptr, a.a + first, x + first, b.row, b.grad, b.n, at + first,
                                          (T)a.slope});
      } else {
        out[width + h] += total_of<T>(first_lanes<T>(slope * Wide<T>::load(b.grad), b.n, 0))[0];
      }
    }
  }
}

template <class T>
void destinations_row(const Attention<T>& a, int64_t v, int64_t begin, int64_t end) {
  const T* message = a.own + v * a.ld_own;
  T *out = a.out + v * a.ld_out, *beside = a.a ? a.beside + v * a.ld_beside : nullptr;
  const int64_t width = a.width(), at = width + a.heads, id = a.id_forwards();
  if (a.fresh) {
    for (int64_t c = 0; c < a.scored(); ++c) out[c] = 0;
    for (int64_t c = 0; c < width && beside; ++c) beside[c] = 0;
  }
  Block<T> b;
  Edges<T> slope = {};
  const int64_t last = end > begin ? a.indptr[a.num_rows] - 1 : 0;
  for (int64_t k = begin; k < end; k += kBlock) {
    load_block(a, k, end, last, b);
    if (a.dropout.threshold) keep_block(a, b, v, id, false);
    fetch(b, width, id + (a.dropout.threshold != 0) - width);
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t first = h * a.cols;
      fetch(b, first, a.cols);
      const Edges<T> scores = scores_of(a, b, h, message + at, a.a ? 0 : width, slope);
      const Edges<T> dots = sums_of_block(b, first, message + first, a.cols, Product<T>{});
      derive(a, b, h, scores, dots, [&](int64_t c) { return Wide<T>::fill(message[c]); });
      if (a.a) {
        for_tiles<T>(a.cols, AddSlopes<T>{out + first, beside + first, a.a + first, message + at + first, b.row, b.grad,
                                          b.n, first, (T)a.slope});
      } else {
        out[h] += total_of<T>(first_lanes<T>(slope * Wide<T>::load(b.grad), b.n, 0))[0];
      }
    }
  }
}

template <class T>
void sources(const Attention<T>& a) {
  for_rows(a, a.fresh, [&](int64_t u, int64_t begin, int64_t end) { sources_row(a, u, begin, end); });
}

template <class T>
void destinations(const Attention<T>& a) {
  for_rows(a, a.fresh, [&](int64_t v, int64_t begin, int64_t end) { destinations_row(a, v, begin, end); });
}

template <class T>
void head_dots(const T* x, int64_t ld_x, const T* y, int64_t ld_y, T* out, int64_t ld_out, int64_t rows, int64_t heads,
               int64_t cols, int32_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t v = 0; v < rows; ++v)
    for (int64_t h = 0; h < heads; ++h)
      out[v * ld_out + h] = dot(x + v * ld_x + h * cols, y + v * ld_y + h * cols, cols);
}

}  // namespace

MGGCN_EXPORT(mggcn_attend_f32)(const Attention<float>* a) { attend(*a); }
MGGCN_EXPORT(mggcn_attend_f64)(const Attention<double>* a) { attend(*a); }
MGGCN_EXPORT(mggcn_attend_combine_f32)(const Attention<float>* a) { combine(*a); }
MGGCN_EXPORT(mggcn_attend_combine_f64)(const Attention<double>* a) { combine(*a); }
MGGCN_EXPORT(mggcn_attend_sources_f32)(const Attention<float>* a) { sources(*a); }
MGGCN_EXPORT(mggcn_attend_sources_f64)(const Attention<double>* a) { sources(*a); }
MGGCN_EXPORT(mggcn_attend_destinations_f32)(const Attention<float>* a) { destinations(*a); }
MGGCN_EXPORT(mggcn_attend_destinations_f64)(const Attention<double>* a) { destinations(*a); }
MGGCN_EXPORT(mggcn_head_dots_f32)(const float* x, int64_t ld_x, const float* y, int64_t ld_y, float* out,
                                  int64_t ld_out, int64_t rows, int64_t heads, int64_t cols, int32_t threads) {
  head_dots(x, ld_x, y, ld_y, out, ld_out, rows, heads, cols, threads);
}
MGGCN_EXPORT(mggcn_head_dots_f64)(const double* x, int64_t ld_x, const double* y, int64_t ld_y, double* out,
                                  int64_t ld_out, int64_t rows, int64_t heads, int64_t cols, int32_t threads) {
  head_dots(x, ld_x, y, ld_y, out, ld_out, rows, heads, cols, threads);
}
