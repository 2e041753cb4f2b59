// gemm: out (+)= a b, then the row epilogue if one is given.
// in    a S [M, K], stored so or transposed (a_t), with the leading dimension of its storage;
//       b S [K, N], element (k, n) at k step_k + n step_n
// out   O [M, N]; S, O, R: float, float or bf16, float; double; bf16, bf16 or float, float. O is rounded once, after
// the epilogue. work  M N K multiply-adds; moves M K + M N numbers (rows) or K (M + N) (sums), the small matrix lies in
// the cache. Two ways, for the products of a layer, whose long dimension is the vertices (docs/notes/0014):
//   rows  a not transposed, M long: b is packed once; blocks of rows, handed out dynamically, are multiplied with
//   panels
//         of it and finished, or taken back through an activation, while they lie in the cache. Any number of threads
//         gives the same bits.
//   sums  a transposed, K long: segments of K, a number that depends on the shape alone, sum to results of their own,
//         which are added in order.
#include <omp.h>

#include "gemm_product.h"
#include "gemm_tile.h"

namespace {

// Rows of a packed panel that are used at a time: at most 24 KiB.
template <class S>
constexpr int64_t kInner = kTileBytes == 64 ? 128 * Factors<S>::group : 256;
// Rows of both operands that a thread packs at a time for a sum: as many bytes of pairs as of numbers of sums.
template <class S>
constexpr int64_t kSumInner = 128 * Factors<S>::group;

template <class S>
__attribute__((noinline)) void pack(const Product<S>& p, const Panels& panels) {
  constexpr int width = kTileWidth<S>, group = Factors<S>::group;
#pragma omp for schedule(static)
  for (int64_t panel = 0; panel < panels.count; ++panel) {
    const int64_t first = panels.first(panel) * width, end = panels.first(panel + 1) * width;
    Packed<S>* place = (Packed<S>*)p.packed + first * whole_groups<S>(p.inner);
    for (int64_t k = 0; k < p.inner; k += group, place += (end - first) * group)
      pack_group(p.b + k * p.step_k + first * p.step_n, least(group, p.inner - k), p.step_k, p.step_n,
                 least(end, p.cols) - first, end - first, place);
  }
}

// Rows [first, first + count) of the product into c. own: room for these rows of a, used if they need a conversion.
template <class S>
__attribute__((noinline)) void block_of_rows(const Product<S>& p, const Panels& panels, int64_t first, int64_t count,
                                             Real<S>* own, Real<S>* c, int64_t ld_c) {
  constexpr int width = kTileWidth<S>;
  const Packed<S>* a;
  int64_t ld_a = p.ld_a;
  if constexpr (std::is_same_v<S, Packed<S>>) {
    a = p.a + first * ld_a;
  } else {
    ld_a = p.inner;
    for (int64_t i = 0; i < count; ++i) widen_row(p.a + (first + i) * p.ld_a, own + i * ld_a, p.inner);
    a = own;
  }
  int64_t k = 0;
  do {  // once if there is nothing to sum
    const int64_t inner = least(kInner<S>, p.inner - k);
    for (int64_t panel = 0; panel < panels.count; ++panel) {
      const int64_t at = panels.first(panel) * width, vectors = panels.first(panel + 1) - panels.first(panel);
      const Packed<S>* b = (const Packed<S>*)p.packed + at * whole_groups<S>(p.inner) + k * vectors * width;
      const auto row = [&](int64_t i) { return a + i * ld_a + k; };
      tiles<Tiled<S>, kTileRows, 0>(0, count, vectors, inner, row, ld_a, b, c + at, ld_c, k || p.accumulate);
    }
    k += kInner<S>;
  } while (k < p.inner);
}

// Rows [first, first + count) of the result, stored or, if the product is a gradient, taken to before the activation.
template <class O, class S>
inline void finished_block(const Product<S>& p, const Panels& panels, int64_t first, int64_t count, Real<S>* own,
                           double* sums) {
  typedef Real<S> R;
  const bool direct = std::is_same_v<O, R> && panels.cols == p.cols && !p.activation;
  R* c = direct ? (R*)p.out + first * p.ld_out : own;
  const int64_t ld_c = direct ? p.ld_out : panels.cols;
  if (!direct && p.accumulate)
    for (int64_t i = 0; i < count; ++i) widen_row(out_row<O>(p, first + i), c + i * ld_c, p.cols);
  block_of_rows(p, panels, first, count, own + kRowBlock * panels.cols, c, ld_c);
  finish_rows<O>(p, first, count, c, ld_c, sums);
}

template <class O, class S>
void gemm_rows(const Product<S>& p, int32_t thread) {
  const Panels panels(p.cols, kTileWidth<S>);
  pack(p, panels);
  Real<S>* own = p.own + thread * p.ld_own;
  for_blocks(
      p, [&](int64_t first, int64_t count, double* sums) { finished_block<O>(p, panels, first, count, own, sums); });
}

// How a thread packs kSumInner rows of both operands: panels of kTileRows columns of a, and panels of b as of a product
// of rows. Panels lie a line apart, so that they do not meet in the same places of the cache.
template <class S>
struct Packing {
  static constexpr int64_t line = 64 / sizeof(Packed<S>), left_step = kSumInner<S> * kTileRows + line;
  Panels panels;  // of the columns [first, end) of b
  int64_t first, end, left;

  Packing(int64_t rows, int64_t first_col, int64_t end_col)
      : panels(end_col - first_col, kTileWidth<S>),
        first(first_col),
        end(end_col),
        left((rows + kTileRows - 1) / kTileRows * left_step) {}
  int64_t right(int64_t panel) const {
    return left + kSumInner<S> * panels.first(panel) * kTileWidth<S> + panel * line;
  }
};

// Rows [k, k + inner) of both, each row in the order of memory.
template <class S>
inline void pack_rows(const Product<S>& p, const Packing<S>& packing, int64_t k, int64_t inner, Packed<S>* own) {
  constexpr int width = kTileWidth<S>, group = Factors<S>::group;
  for (int64_t e = 0; e < inner; e += group) {
    const int64_t count = least(group, inner - e);
    const S* rows = p.a + (k + e) * p.ld_a;
    Packed<S>* place = own + e * kTileRows;
    int64_t i = 0;
    for (; i + kTileRows <= p.rows; i += kTileRows, place += packing.left_step)
      pack_group(rows + i, count, p.ld_a, 1, kTileRows, kTileRows, place);
    if (i < p.rows) pack_group(rows + i, count, p.ld_a, 1, p.rows - i, p.rows - i, place);
    const S* right = p.b + (k + e) * p.step_k + packing.first * p.step_n;
    for (int64_t panel = 0; panel < packing.panels.count; ++panel) {
      const int64_t from = packing.panels.first(panel) * width, to = packing.panels.first(panel + 1) * width;
      pack_group(right + from * p.step_n, count, p.step_k, p.step_n, least(to, packing.end - packing.first) - from,
                 to - from, own + packing.right(panel) + e * (to - from));
    }
  }
}

// The sum of rows [k0, k1) into c, columns as packed.
template <class S>
__attribute__((noinline)) void sum_segment(const Product<S>& p, const Packing<S>& packing, int64_t k0, int64_t k1,
                                           Packed<S>* own, Real<S>* c, int64_t ld_c) {
  int64_t k = k0;
  do {  // once if there is nothing to sum
    const int64_t inner = least(kSumInner<S>, k1 - k);
    pack_rows(p, packing, k, inner, own);
    for (int64_t panel = 0; panel < packing.panels.count; ++panel) {
      const int64_t at = packing.panels.first(panel), vectors = packing.panels.first(panel + 1) - at;
      const auto row = [&](int64_t i) {
        return own + i / kTileRows * packing.left_step + i % kTileRows * Factors<S>::group;
      };
      tiles<Tiled<S>, kTileRows, kTileRows>(0, p.rows, vectors, whole_groups<S>(inner), row, 0,
                                            own + packing.right(panel), c + packing.first + at * kTileWidth<S>, ld_c,
                                            k > k0);
    }
    k += kSumInner<S>;
  } while (k < k1);
}

template <class O, class S>
void gemm_sums(const Product<S>& p, int32_t thread) {
  typedef Real<S> R;
  constexpr int width = kTileWidth<S>;
  const Panels all(p.cols, width);
  // Fewer segments than threads want: columns are shared out as well, which changes no sum.
  const int64_t wanted = (kItems * p.threads + p.segments - 1) / p.segments, across = least(wanted, all.count);
  Packed<S>* own = (Packed<S>*)(p.own + thread * p.ld_own);
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < p.segments * across; ++item) {
    const int64_t segment = item / across, j = item % across;
    const int64_t first = all.first(all.count * j / across) * width,
                  end = all.first(all.count * (j + 1) / across) * width;
    sum_segment(p, Packing<S>(p.rows, first, least(end, p.cols)), p.inner * segment / p.segments,
                p.inner * (segment + 1) / p.segments, own, p.packed + segment * p.rows * all.cols, all.cols);
  }
#pragma omp for schedule(static)
  for (int64_t i = 0; i < p.rows; ++i) {
    R* z = p.packed + i * all.cols;
    for (int64_t segment = 1; segment < p.segments; ++segment) {
      const R* more = p.packed + (segment * p.rows + i) * all.cols;
      for (int64_t d = 0; d < p.cols; ++d) z[d] += more[d];
    }
    if (p.accumulate)
      for (int64_t d = 0; d < p.cols; ++d) z[d] += widen(out_row<O>(p, i)[d]);
    store_row<O>(p, i, z);
  }
}

}  // namespace

#define MGGCN_GEMM(suffix, S, O)                           \
  MGGCN_EXPORT(mggcn_gemm_##suffix)(const Product<S>* p) { \
    _Pragma("omp parallel num_threads(p->threads)") {      \
      if (p->a_t)                                          \
        gemm_sums<O>(*p, omp_get_thread_num());            \
      else                                                 \
        gemm_rows<O>(*p, omp_get_thread_num());            \
    }                                                      \
  }
MGGCN_GEMM(f32, float, float)
MGGCN_GEMM(f64, double, double)
MGGCN_GEMM(bf16, bf16, bf16)
MGGCN_GEMM(bf16_f32, bf16, float)
MGGCN_GEMM(f32_bf16, float, bf16)
