// spmm_simple: out[v, :] (+)= sum over e in row v of values[e] * h[indices[e], :], then the epilogue of the row.
// in    indptr int64 [V+1], indices int32 [nnz], values real [nnz] or null (ones), h storage [N, D], rows of ld_h
// out   storage [V, D] (or another type: out.cuh), rows of ld_out; accumulate != 0 adds to it
// grid  ceil(V / 4), block 128: a warp per row, its lanes stride over the columns, one neighbour after the other
// moves nnz (4 + D sizeof storage) + V (8 + D sizeof storage) bytes when h misses the caches
// The first rung: what the others are checked against and measured from. Twin: cpu/spmm.cpp.
#define MGGCN_LANES 32
#define MGGCN_PIECES 1
#define MGGCN_UNROLL 1
#define MGGCN_TIGHT
#include "spmm_store.cuh"

extern "C" __global__ void __launch_bounds__(128)
    spmm_simple(const long long* indptr, const int* indices, const real_t* values, const storage_t* h, int ld_h,
                out_t* out, int ld_out, int rows, int cols, int accumulate, const real_t* row_scale, const real_t* bias,
                const real_t* out_scale, const long long* row_ids, const long long* clock, int relu, unsigned layer,
                unsigned threshold, float keep_scale) {
  const Output output = {out, ld_out, cols, 0, accumulate};
  const Epilogue epilogue = {row_scale, bias, out_scale, row_ids, {clock, layer, threshold, keep_scale}, relu};
  const long long row = (long long)blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  for (int d = (int)threadIdx.x % 32; d < cols; d += 32) {
    real_t sum[1] = {0};
    for (long long e = indptr[row]; e < indptr[row + 1]; ++e)
      sum[0] += (values ? values[e] : (real_t)1) * widen(h[(long long)indices[e] * ld_h + d]);
    finish_piece(sum, row, d, output, epilogue);
  }
}
