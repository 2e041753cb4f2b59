// Passes over dense data that also sum its columns. Twin: cpu/rows.cpp.
// Sums are double and added in an order that shapes alone fix: a thread over its rows, the threads of a block in a
// tree, the blocks, one per chunk of rows, by sum_partials. No atomics: bitwise repeatable.
#include "columns.cuh"
#include "sums.cuh"

// activation_grad: to = out_scale * d with d = (h != 0 or not masked) * keep_scale * h_scale * g; the columns of d, the
// unscaled gradient, are added to partials. NaN in h counts as not zero.
// in    g [V, D], h [V, D] (read if masked); h_scale, out_scale [V'] or null, row v is their row first_row + v
// out   to [V, D]: h itself, or a matrix of another type (out.cuh); partials double [num_partials >= chunks, D] or
//       null; begins != 0 overwrites all of them, those without a chunk by 0, so that no launch need clear them. Moves
//       3 V D (2 V D if not masked).
// grid  (chunks, ceil(D / (kVector x))), block (x, y): chunk c has rows V c / chunks ..., thread y every y-th of them
extern "C" __global__ void __launch_bounds__(kSumThreads, 4)
    activation_grad(const storage_t* g, long long ld_g, const storage_t* h, long long ld_h, out_t* to, long long ld_to,
                    long long rows, int cols, long long first_row, int masked, float keep_scale, const real_t* h_scale,
                    const real_t* out_scale, double* partials, int num_partials, int begins) {
  __shared__ double shared[kVector][kSumThreads];
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector, left = cols - column;
  const long long chunks = gridDim.x, end = rows * (blockIdx.x + 1ll) / chunks;
  const bool aligned = rows_aligned(g, ld_g) && rows_aligned(h, ld_h) && rows_aligned(to, ld_to);
  double sums[kVector] = {};
  for (long long v = rows * blockIdx.x / chunks + threadIdx.y; v < end && left > 0; v += blockDim.y) {
    real_t in[kVector], out[kVector];
    load_columns<kVector>(g + v * ld_g + column, left, aligned, in);
    if (masked) load_columns<kVector>(h + v * ld_h + column, left, aligned, out);
    const real_t scale = h_scale ? (real_t)keep_scale * h_scale[first_row + v] : (real_t)keep_scale;
    const real_t after = out_scale ? out_scale[first_row + v] : (real_t)1;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const real_t d = !masked || out[i] != (real_t)0 ? in[i] * scale : (real_t)0;
      sums[i] += d;
      out[i] = d * after;
    }
    store_columns<kVector>(to + v * ld_to + column, left, aligned, out);
  }
  if (!partials) return;
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared[i][threadIdx.y * blockDim.x + threadIdx.x] = sums[i];
  sum_over_y(shared);
  if (threadIdx.y) return;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i >= left) break;
    double* sum = partials + (long long)blockIdx.x * cols + column + i;
    *sum = begins ? shared[i][threadIdx.x] : *sum + shared[i][threadIdx.x];
    for (long long c = blockIdx.x + chunks; begins && c < num_partials; c += chunks)
      partials[c * cols + column + i] = 0;
  }
}

// sum_partials: out[d] = sum over chunks of partials[chunk, d].
// in    partials double [chunks, D];  out [D] of the accumulation type. Moves 8 chunks D.
// grid  ceil(D / 32), block (32, 32): thread y adds every 32nd chunk, several of them in flight
extern "C" __global__ void __launch_bounds__(1024)
    sum_partials(const double* partials, int chunks, real_t* out, int cols) {
  __shared__ double shared[1][1024];
  const int column = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  double sum = 0;
  if (column < cols) {
#pragma unroll 16
    for (int c = threadIdx.y; c < chunks; c += blockDim.y) sum += partials[(long long)c * cols + column];
  }
  shared[0][threadIdx.y * blockDim.x + threadIdx.x] = sum;
  sum_over_y(shared);
  if (threadIdx.y == 0 && column < cols) out[column] = (real_t)shared[0][threadIdx.x];
}
