// spmm_groups: out[v, :] (+)= sum over e in row v of values[e] * h[indices[e], :], then the epilogue of the row.
// in    indptr int64 [V+1], indices int32 [nnz], values real [nnz] (-DMGGCN_WEIGHTED), h storage [N, D], rows of ld_h
// out   storage [V, D] (or another type: out.cuh), rows of ld_out; accumulate != 0 adds to it
// grid  (ceil(V / (4 kGroups)), tiles of columns), block 128: a group of kLanes lanes per row, rows as they come
// moves nnz (4 + D sizeof storage) + V (16 + D sizeof storage) bytes when h misses the caches; 4 nnz more for each
//       further tile
// gain  predicted, not measured: over spmm_simple 2 to 6 at widths up to 64 (all lanes busy, 16-byte loads, up to
//       8 rows of h in flight per lane instead of one), 1.2 to 2 above. A warp takes as long as its longest row.
//       Twin: cpu/spmm.cpp.
#include "spmm_store.cuh"

extern "C" __global__ void __launch_bounds__(128, 8)
    spmm_groups(const long long* __restrict__ indptr, const int* __restrict__ indices,
                const real_t* __restrict__ values, const storage_t* __restrict__ h, int ld_h, out_t* out, int ld_out,
                int vectors, int rows, int cols, int accumulate, const real_t* row_scale, const real_t* bias,
                const real_t* out_scale, const long long* row_ids, const long long* clock, int relu, unsigned layer,
                unsigned threshold, float keep_scale) {
  const Output output = {out, ld_out, cols, vectors, accumulate};
  const Epilogue epilogue = {row_scale, bias, out_scale, row_ids, {clock, layer, threshold, keep_scale}, relu};
  const Dense dense = {h, (unsigned)ld_h * (unsigned)sizeof(storage_t)};
  const int row = (int)blockIdx.x * (kWarps * kGroups) + (int)threadIdx.x / kLanes;
  Neighbours neighbours = {indices, values, 0};
  if (row < rows) {
    const long long begin = indptr[row];
    const int count = (int)(indptr[row + 1] - begin);
    if (count) neighbours = {indices + begin, values + begin, count};
  }
  Sums sum;
  clear(sum);
  add_neighbours<kLanes, kLanes>(neighbours, 0, longest_of_warp(neighbours.count), dense, cols, sum);
  if (row < rows) finish_row(sum, row, output, epilogue);
}
