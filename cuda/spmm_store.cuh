// Where the sums of a row go: added to what lies in out if asked, through the epilogue, then stored past the L2 cache's
// working set, which the dense operand needs.
#pragma once
#include "spmm_rows.cuh"

#if defined(MGGCN_OUT_REAL)
typedef real_t out_t;  // float32 beside bf16 storage: gradients of weights
__device__ __forceinline__ real_t widen_out(out_t x) { return x; }
__device__ __forceinline__ out_t narrow_out(real_t x) { return x; }
#else
typedef storage_t out_t;
__device__ __forceinline__ real_t widen_out(out_t x) { return widen(x); }
__device__ __forceinline__ out_t narrow_out(real_t x) { return narrow(x); }
#endif

struct Output {
  out_t* at;
  int ld, cols;
  int vectors;  // whether whole pieces may be read and written at once: the rows are aligned to 16 bytes
  int accumulate;
};

__device__ __forceinline__ void add_out(const Output& out, const out_t* p, int column, real_t (&z)[kColumns]) {
#if !defined(MGGCN_TIGHT) && !defined(MGGCN_OUT_REAL)
  if (out.vectors) {
    real_t before[kColumns];
    load_vector(p, before);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) z[i] += before[i];
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (column + i < out.cols) z[i] += widen_out(p[i]);
}

__device__ __forceinline__ void store_out(const Output& out, out_t* p, int column, const real_t (&z)[kColumns]) {
#if !defined(MGGCN_TIGHT) && !defined(MGGCN_OUT_REAL)
  if (out.vectors && column + kColumns <= out.cols) {
    piece_t packed;
    store_vector(reinterpret_cast<storage_t*>(&packed), z);
    __stcs(reinterpret_cast<piece_t*>(p), packed);
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (column + i < out.cols) p[i] = narrow_out(z[i]);
}

// One piece of a row, finished.
__device__ __forceinline__ void finish_piece(real_t (&z)[kColumns], long long row, int column, const Output& out,
                                             const Epilogue& epilogue) {
  out_t* p = out.at + row * out.ld + column;
  if (out.accumulate) add_out(out, p, column, z);
  finish_columns<kColumns>(z, row, column, out.cols, epilogue);
  store_out(out, p, column, z);
}

// The pieces of a row that this lane holds, finished.
__device__ __forceinline__ void finish_row(Sums& sum, long long row, const Output& out, const Epilogue& epilogue) {
#pragma unroll
  for (int k = 0; k < kPieces; ++k)
    if (column_of(k) < out.cols) finish_piece(sum[k], row, column_of(k), out, epilogue);
}
