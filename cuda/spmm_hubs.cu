// spmm_hubs: out[v, :] (+)= sum over s < n of parts[first + s, :] for each hub (v, first, n), then the row's epilogue.
// in    hubs int32 [num_hubs, 4] (row, first slot, slots, unused), parts real [slots, D], rows of ld_parts
// out   storage [V, D] (or another type: out.cuh), rows of ld_out; accumulate != 0 adds to it
// grid  (num_hubs, ceil(D / 32)), block 512: lanes over columns, warp w adds the slots w, w + 16, ..., warp 0 the warps
// moves slots D sizeof real + num_hubs D sizeof storage bytes
// sums  in a fixed order. Twin: none, cpu/spmm.cpp splits no row.
#define MGGCN_LANES 32
#define MGGCN_PIECES 1
#define MGGCN_UNROLL 1
#define MGGCN_TIGHT
#include "spmm_store.cuh"

constexpr int kAdders = 16;  // warps of a block

extern "C" __global__ void __launch_bounds__(512)
    spmm_hubs(const int* __restrict__ hubs, const real_t* __restrict__ parts, int ld_parts, out_t* out, int ld_out,
              int cols, int accumulate, const real_t* row_scale, const real_t* bias, const real_t* out_scale,
              const long long* row_ids, const long long* clock, int relu, unsigned layer, unsigned threshold,
              float keep_scale) {
  __shared__ real_t shared[kAdders][32];
  const Output output = {out, ld_out, cols, 0, accumulate};
  const Epilogue epilogue = {row_scale, bias, out_scale, row_ids, {clock, layer, threshold, keep_scale}, relu};
  const int4 hub = *reinterpret_cast<const int4*>(hubs + 4 * (int)blockIdx.x);
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, column = (int)blockIdx.y * 32 + lane;
  real_t sum = 0;
  if (column < cols) {
#pragma unroll 4
    for (int s = warp; s < hub.z; s += kAdders) sum += parts[(long long)(hub.y + s) * ld_parts + column];
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= cols) return;
#pragma unroll
  for (int w = 1; w < kAdders; ++w) sum += shared[w][lane];
  real_t z[1] = {sum};
  finish_piece(z, hub.x, column, output, epilogue);
}
