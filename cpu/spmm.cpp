// spmm: out[v, :] (+)= sum over e in row v of values[e] * dense[indices[e], :], then the row epilogue if one is given.
// in    indptr int64 [V+1], indices int32 [nnz], values T [nnz] or null (ones), dense T [N, D] row-major, leading ld
// out   T [V, D]; accumulate != 0 adds to it. Rows of a chunk run in order in one thread: bitwise repeatable.
//       Columns of a row up to the next whole vector, if within its ld, may be overwritten: they are padding.
// work  nnz D multiply-adds; moves nnz (4 + D sizeof T) + 2 V D sizeof T bytes when dense misses the caches.
// chunks int64 [num_chunks+1] are row ranges of about equal work, handed out dynamically. Twin: cuda/spmm.cu.
#include "common.h"
#include "epilogue.h"

namespace {

// One row times `Tile` vectors of columns, the sums in registers. A negative tile count is never instantiated.
template <int Tile, bool Weighted, class T>
inline __attribute__((always_inline)) void row_tile(int64_t begin, int64_t end, const int32_t* indices, const T* values,
                                                    const T* dense, int64_t ld, T* out, bool accumulate) {
  typedef Vector<T> V;
  typename V::type sum[Tile];
#pragma GCC unroll 16
  for (int k = 0; k < Tile; ++k) sum[k] = accumulate ? V::load(out + k * V::width) : typename V::type{};
  for (int64_t e = begin; e < end; ++e) {
    const T* x = dense + (int64_t)indices[e] * ld;
    if (Weighted) {
      const typename V::type w = V::fill(values[e]);
#pragma GCC unroll 16
      for (int k = 0; k < Tile; ++k) sum[k] += w * V::load(x + k * V::width);
    } else {
#pragma GCC unroll 16
      for (int k = 0; k < Tile; ++k) sum[k] += V::load(x + k * V::width);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < Tile; ++k) V::store(out + k * V::width, sum[k]);
}

template <bool Weighted, class T>
inline void row_tail(int64_t begin, int64_t end, const int32_t* indices, const T* values, const T* dense, int64_t ld,
                     T* out, int64_t cols, bool accumulate) {
  T sum[Vector<T>::width];
  for (int64_t d = 0; d < cols; ++d) sum[d] = accumulate ? out[d] : (T)0;
  for (int64_t e = begin; e < end; ++e) {
    const T* x = dense + (int64_t)indices[e] * ld;
    const T w = Weighted ? values[e] : (T)1;
    for (int64_t d = 0; d < cols; ++d) sum[d] += w * x[d];
  }
  for (int64_t d = 0; d < cols; ++d) out[d] = sum[d];
}

template <bool Weighted, class T>
inline void spmm_row(int64_t begin, int64_t end, const int32_t* indices, const T* values, const T* dense, int64_t ld,
                     T* out, int64_t cols, bool accumulate) {
  constexpr int width = Vector<T>::width;
  int64_t vectors = cols / width;
  // Tiles of nearly equal size: 16 vectors run as 8 + 8, not 12 + 4.
  const int64_t passes = (vectors + kMaxTile - 1) / kMaxTile;
  for (int64_t pass = passes; pass > 0; --pass) {
    const int64_t tile = (vectors + pass - 1) / pass;
    switch (tile) {
      // clang-format off
#define MGGCN_TILE(N)                                                                  \
  case N:                                                                              \
    row_tile<N, Weighted, T>(begin, end, indices, values, dense, ld, out, accumulate); \
    break;
      MGGCN_TILE(1) MGGCN_TILE(2) MGGCN_TILE(3) MGGCN_TILE(4) MGGCN_TILE(5) MGGCN_TILE(6) MGGCN_TILE(7) MGGCN_TILE(8)
#if defined(__AVX2__)
      MGGCN_TILE(9) MGGCN_TILE(10) MGGCN_TILE(11) MGGCN_TILE(12)
#endif
// clang-format on
#undef MGGCN_TILE
    }
    dense += tile * width;
    out += tile * width;
    vectors -= tile;
  }
  if (cols % width) row_tail<Weighted, T>(begin, end, indices, values, dense, ld, out, cols % width, accumulate);
}

template <class T>
void spmm(int64_t num_chunks, const int64_t* chunks, const int64_t* indptr, const int32_t* indices, const T* values,
          const T* dense, int64_t ld_dense, T* out, int64_t ld_out, int64_t cols, int32_t accumulate,
          const Epilogue<T>* epilogue, int32_t threads) {
  // Rows padded to whole vectors run without a scalar tail: the padding holds numbers that nobody reads.
  constexpr int width = Vector<T>::width;
  const int64_t padded = (cols + width - 1) / width * width;
  const int64_t run = ld_dense >= padded && ld_out >= padded ? padded : cols;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t c = 0; c < num_chunks; ++c) {
    for (int64_t v = chunks[c]; v < chunks[c + 1]; ++v) {
      T* z = out + v * ld_out;
      if (values)
        spmm_row<true, T>(indptr[v], indptr[v + 1], indices, values, dense, ld_dense, z, run, accumulate != 0);
      else
        spmm_row<false, T>(indptr[v], indptr[v + 1], indices, values, dense, ld_dense, z, run, accumulate != 0);
      if (epilogue) finish_row(z, cols, v, *epilogue);
    }
  }
}

}  // namespace

#define MGGCN_SPMM(name, T)                                                                                        \
  MGGCN_EXPORT(name)                                                                                               \
  (int64_t num_chunks, const int64_t* chunks, const int64_t* indptr, const int32_t* indices, const T* values,      \
   const T* dense, int64_t ld_dense, T* out, int64_t ld_out, int64_t cols, int32_t accumulate,                     \
   const Epilogue<T>* epilogue, int32_t threads) {                                                                 \
    spmm<T>(num_chunks, chunks, indptr, indices, values, dense, ld_dense, out, ld_out, cols, accumulate, epilogue, \
            threads);                                                                                              \
  }
MGGCN_SPMM(mggcn_spmm_f32, float)
MGGCN_SPMM(mggcn_spmm_f64, double)
