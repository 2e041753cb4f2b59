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
//         which are added in order. A call may have a window of K: packed, and carry, then keep what the next one goes
//         on from, and the result is written with the last one.
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

// Rows [first, first + count) of the product, in the place of the result where nothing is left to be done.
template <class O, class S>
inline Block<S> product_block(const Product<S>& p, const Panels& panels, int64_t first, int64_t count, Real<S>* own) {
  typedef Real<S> R;
  const bool direct = std::is_same_v<O, R> && panels.cols == p.cols && !p.activation;
  R* c = direct ? (R*)p.out + first * p.ld_out : own;
  const int64_t ld_c = direct ? p.ld_out : panels.cols;
  if (!direct && p.accumulate)
    for (int64_t i = 0; i < count; ++i) widen_row(out_row<O>(p, first + i), c + i * ld_c, p.cols);
  block_of_rows(p, panels, first, count, own + kRowBlock * panels.cols, c, ld_c);
  return {c, ld_c};
}

template <class O, class S>
void gemm_rows(const Product<S>& p, int32_t thread) {
  const Panels panels(p.cols, kTileWidth<S>);
  pack(p, panels);
  Real<S>* own = p.own + thread * p.ld_own;
  blocks_of_rows<O>(p, [&](int64_t first, int64_t count) { return product_block<O>(p, panels, first, count, own); });
}

// How a thread packs kSumInner rows of both operands: panels of kTileRows columns of a, and panels of b as of a product
// of rows. Panels lie a line apart, so that they do not meet in the same places of the cache.
template <class S>
struct Packing {
  static constexpr int64_t line = 64 / sizeof(Packed<S>), left_step = kSumInner<S> * kTileRows + line;
  Panels panels;  // of the columns [first, end) of b
  int64_t first, end, top, rows, left;

  // cols: of b. across, down: panels of its columns, and tiles of the columns of a.
  Packing(const Product<S>& p, const Panels& all, const Span& across, const Span& down)
      : Packing(all.first(across.begin) * kTileWidth<S>, least(all.first(across.end) * kTileWidth<S>, p.cols),
                down.begin * kTileRows, least(down.end * kTileRows, p.rows)) {}
  Packing(int64_t first_col, int64_t end_col, int64_t first_row, int64_t end_row)
      : panels(end_col - first_col, kTileWidth<S>),
        first(first_col),
        end(end_col),
        top(first_row),
        rows(end_row - first_row),
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
    const S* rows = p.a + (k + e) * p.ld_a + packing.top;
    Packed<S>* place = own + e * kTileRows;
    int64_t i = 0;
    for (; i + kTileRows <= packing.rows; i += kTileRows, place += packing.left_step)
      pack_group(rows + i, count, p.ld_a, 1, kTileRows, kTileRows, place);
    if (i < packing.rows) pack_group(rows + i, count, p.ld_a, 1, packing.rows - i, packing.rows - i, place);
    const S* right = p.b + (k + e) * p.step_k + packing.first * p.step_n;
    for (int64_t panel = 0; panel < packing.panels.count; ++panel) {
      const int64_t from = packing.panels.first(panel) * width, to = packing.panels.first(panel + 1) * width;
      pack_group(right + from * p.step_n, count, p.step_k, p.step_n, least(to, packing.end - packing.first) - from,
                 to - from, own + packing.right(panel) + e * (to - from));
    }
  }
}

// The sum of rows [k0, k1) into c, rows and columns as packed; started: it is added to what c holds.
template <class S>
__attribute__((noinline)) void sum_rows(const Product<S>& p, const Packing<S>& packing, int64_t k0, int64_t k1,
                                        bool started, Packed<S>* own, Real<S>* c, int64_t ld_c) {
  int64_t k = k0;
  do {  // once if there is nothing to sum
    const int64_t inner = least(kSumInner<S>, k1 - k);
    pack_rows(p, packing, k, inner, own);
    for (int64_t panel = 0; panel < packing.panels.count; ++panel) {
      const int64_t at = packing.panels.first(panel), vectors = packing.panels.first(panel + 1) - at;
      const auto row = [&](int64_t i) {
        return own + i / kTileRows * packing.left_step + i % kTileRows * Factors<S>::group;
      };
      tiles<Tiled<S>, kTileRows, kTileRows>(
          0, packing.rows, vectors, whole_groups<S>(inner), row, 0, own + packing.right(panel),
          c + packing.top * ld_c + packing.first + at * kTileWidth<S>, ld_c, started || k > k0);
    }
    k += kSumInner<S>;
  } while (k < k1);
}

// Rows [begin, end) of a call that are in a segment, whose first row may lie in a window before (`start` < 0). Where
// lanes hold pairs, those of a segment may lie across the edge between two windows: then the row before the edge is
// left to the window behind, which sums it with its first row.
template <class S>
struct Stretch {
  int64_t start, begin, end;
  bool joins, leaves;

  Stretch(const Product<S>& p, int64_t segment) {
    constexpr int64_t group = Factors<S>::group;
    start = p.window.total * segment / p.segments - p.window.first;
    const int64_t stop = p.window.total * (segment + 1) / p.segments - p.window.first;
    joins = start < 0 && start % group;
    leaves = stop > p.inner && (p.inner - start) % group;
    begin = most(start, 0) + joins;
    end = least(stop, p.inner) - leaves;
  }
};

// Copies a row of both operands to one of the two places for them.
template <class S>
void carry_row(const Product<S>& p, int64_t k, int64_t place) {
  S* to = p.carry + place * (p.rows + p.cols);
  memcpy(to, p.a + k * p.ld_a, p.rows * sizeof(S));
  for (int64_t d = 0; d < p.cols; ++d) to[p.rows + d] = p.b[k * p.step_k + d * p.step_n];
}

// The product of the two rows that were carried.
template <class S>
inline Product<S> carried(Product<S> p) {
  p.ld_a = p.step_k = p.rows + p.cols;
  p.step_n = 1;
  p.a = p.carry;
  p.b = p.carry + p.rows;
  return p;
}

template <class S>
inline void sum_segment(const Product<S>& p, const Packing<S>& packing, const Stretch<S>& rows, Packed<S>* own,
                        Real<S>* c, int64_t ld_c) {
  if (rows.joins) sum_rows(carried(p), packing, 0, 2, rows.start < -1, own, c, ld_c);
  sum_rows(p, packing, rows.begin, rows.end, rows.start < 0, own, c, ld_c);
}

template <class O, class S>
void gemm_sums(const Product<S>& p, int32_t thread) {
  typedef Real<S> R;
  const Panels all(p.cols, kTileWidth<S>);
  const int64_t down = (p.rows + kTileRows - 1) / kTileRows;
  const Shares shares(p, p.window.first, p.window.first + p.inner, p.window.total, all.count, down);
  Packed<S>* own = (Packed<S>*)(p.own + thread * p.ld_own);
  if (Stretch<S>(p, shares.first).joins) {
#pragma omp single
    carry_row(p, 0, 1);
  }
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < shares.count(); ++item) {
    const int64_t segment = shares.segment(item);
    const Packing<S> packing(p, all, shares.columns(item, all.count), shares.rows(item, down));
    sum_segment(p, packing, Stretch<S>(p, segment), own, p.packed + segment * p.rows * all.cols, all.cols);
  }
  if (Stretch<S>(p, shares.first + shares.segments - 1).leaves) {
#pragma omp single
    carry_row(p, p.inner - 1, 0);
  }
  if (!p.window.is_last(p.inner)) return;
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
