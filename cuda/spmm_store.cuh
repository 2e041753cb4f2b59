// Where the sums of a row go: added to what lies in out if asked, through the epilogue, then stored past the L2 cache's
// working set, which the dense operand needs.
#pragma once
#include "out.cuh"
#include "spmm_rows.cuh"

struct Output {
  out_t* at;
  int ld, cols;
  int vectors;  // whether whole pieces may be read and written at once: the rows are aligned to 16 bytes
  int accumulate;
};

__device__ __forceinline__ void add_out(const Output& out, const out_t* p, int column, real_t (&z)[kColumns]) {
#if !defined(MGGCN_TIGHT)
  // A row of floats beside bf16 may end in the middle of a piece.
  if (out.vectors && (kOutWords == 1 || column + kColumns <= out.cols)) {
    real_t before[kColumns];
    load_out_vector(p, before);
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
#if !defined(MGGCN_TIGHT)
  if (out.vectors && column + kColumns <= out.cols) {
    out_word_t words[kOutWords];
    pack_out(z, words);
#pragma unroll
    for (int w = 0; w < kOutWords; ++w) __stcs(reinterpret_cast<out_word_t*>(p) + w, words[w]);
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
