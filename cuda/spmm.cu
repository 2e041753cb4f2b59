// spmm_balanced: out[v, :] (+)= sum over e in row v of values[e] * h[indices[e], :], then the epilogue of the row.
// in    indptr int64 [V+1], indices int32 [nnz], values real [nnz] (-DMGGCN_WEIGHTED), h storage [N, D], rows of ld_h
// out   storage [V, D] (or another type: out.cuh), rows of ld_out; accumulate != 0 adds to it
// grid  (num_parts + num_long + ceil(V / (4 kGroups)), tiles of columns), block 128: the longest work first
//       block b < num_parts: part parts[b] = (row, first nonzero, nonzeros, slot) of a hub, into workspace[slot, :]
//       then a block per row of long_rows (int32); as in a part, its four warps take 32 neighbours at a time in turn
//       then a group of kLanes lanes per row of at most `limit` nonzeros: rows of 256 are one window, and order[v]
//       (uint8) is where in its window the next row lies, longest first, so that groups of a warp end together
// moves nnz (4 + D sizeof storage) + V (17 + D sizeof storage) bytes when h misses the caches; 4 nnz more for each
//       further tile, which are slices of h that fit the L2 cache where that pays (mggcn/backend/cuda/variants.py)
// sums  in an order that the schedule fixes (mggcn/backend/cuda/spmm.py); no atomics. Twin: cpu/spmm.cpp.
// gain  predicted, not measured: over spmm_groups 1.1 to 1.5 where rows differ by little, without bound where hubs
//       are; slices up to 1.5 where h is ten times the cache and rows are long
#include "spmm_store.cuh"

constexpr int kWindow = 256;

// sum of the groups of a warp, in all of them.
__device__ __forceinline__ void add_groups(Sums& sum) {
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
    for (int k = 0; k < kPieces; ++k)
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[k][i] += __shfl_xor_sync(kFullWarp, sum[k][i], step);
}

// Warp 0: sum = (sum + that of warp 2) + (that of warp 1 + that of warp 3). Every thread of the block calls this.
__device__ __forceinline__ void add_warps(Sums& sum) {
  __shared__ real_t shared[2][kPieces * kColumns][kLanes];
  const int warp = threadIdx.x / 32, lane = lane_of(kLanes);
  const bool holds = threadIdx.x % 32 < kLanes;
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
    if (holds && warp >= half && warp < 2 * half)
#pragma unroll
      for (int k = 0; k < kPieces; ++k)
#pragma unroll
        for (int i = 0; i < kColumns; ++i) shared[warp - half][k * kColumns + i][lane] = sum[k][i];
    __syncthreads();
    if (holds && warp < half)
#pragma unroll
      for (int k = 0; k < kPieces; ++k)
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum[k][i] += shared[warp][k * kColumns + i][lane];
    __syncthreads();
  }
}

__device__ __forceinline__ void store_part(const Sums& sum, real_t* to, int cols) {
#pragma unroll
  for (int k = 0; k < kPieces; ++k)
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (column_of(k) + i < cols) to[column_of(k) + i] = sum[k][i];
}

extern "C" __global__ void __launch_bounds__(128, 8)
    spmm_balanced(const long long* __restrict__ indptr, const int* __restrict__ indices,
                  const real_t* __restrict__ values, const storage_t* __restrict__ h, int ld_h, out_t* out, int ld_out,
                  int vectors, int rows, int cols, int accumulate, const int* __restrict__ parts, int num_parts,
                  const int* __restrict__ long_rows, int num_long, const unsigned char* __restrict__ order, int limit,
                  real_t* workspace, int ld_workspace, const real_t* row_scale, const real_t* bias,
                  const real_t* out_scale, const long long* row_ids, const long long* clock, int relu, unsigned layer,
                  unsigned threshold, float keep_scale) {
  const Output output = {out, ld_out, cols, vectors, accumulate};
  const Epilogue epilogue = {row_scale, bias, out_scale, row_ids, {clock, layer, threshold, keep_scale}, relu};
  const Dense dense = {h, (unsigned)ld_h * (unsigned)sizeof(storage_t)};
  const int block = (int)blockIdx.x, head = num_parts + num_long;
  Sums sum;
  clear(sum);
  int row = -1;  // of this lane's sums; -1: nobody's
  if (block < head) {
    int offset = 0, slot = -1;
    Neighbours neighbours;
    if (block < num_parts) {
      const int4 part = *reinterpret_cast<const int4*>(parts + 4 * block);
      row = part.x, offset = part.y, neighbours.count = part.z, slot = part.w;
    } else {
      row = long_rows[block - num_parts];
      neighbours.count = (int)(indptr[row + 1] - indptr[row]);
    }
    neighbours.indices = indices + indptr[row] + offset;
    neighbours.values = values + indptr[row] + offset;
    add_neighbours<32, kWarps * 32>(neighbours, (int)threadIdx.x / 32 * 32, neighbours.count, dense, cols, sum);
    add_groups(sum);
    add_warps(sum);
    if (threadIdx.x >= kLanes) row = -1;
    if (slot >= 0) {
      if (row >= 0) store_part(sum, workspace + (long long)slot * ld_workspace, cols);
      row = -1;
    }
  } else {
    const int place = (block - head) * (kWarps * kGroups) + (int)threadIdx.x / kLanes;
    Neighbours neighbours = {indices, values, 0};
    if (place < rows) {
      row = place / kWindow * kWindow + order[place];
      const long long begin = indptr[row], count = indptr[row + 1] - begin;
      if (count > limit)
        row = -1;
      else if (count)  // the first nonzero after the last row's is not ours to read
        neighbours = {indices + begin, values + begin, (int)count};
    }
    add_neighbours<kLanes, kLanes>(neighbours, 0, longest_of_warp(neighbours.count), dense, cols, sum);
  }
  if (row >= 0) finish_row(sum, row, output, epilogue);
}
