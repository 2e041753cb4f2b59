// Layer norm and batch norm of dense rows, computed in double and rounded where they are stored. Twin: cpu/norms.cpp.
// Gain and bias are real_t, all other vectors over columns double. Sums are added in an order that shapes alone fix, by
// chunks of rows (cuda/columns.cu); the chunks are left to be added. Partial sums without a chunk become 0, so that no
// launch need clear them.
#include "columns.cuh"
#include "sums.cuh"

constexpr int kRowsOfBatch = 32;  // rows whose means a block has at a time

__device__ __forceinline__ double warp_total(double x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

struct Moments {
  double mean, scale;
};

// Of a row, by a warp: in two passes, so that nothing cancels.
__device__ __forceinline__ Moments moments(const storage_t* z, int cols, double eps) {
  double sum = 0, squares = 0;
  for (int d = threadIdx.x; d < cols; d += 32) sum += widen(z[d]);
  const double mean = warp_total(sum) / cols;
  for (int d = threadIdx.x; d < cols; d += 32) {
    const double y = widen(z[d]) - mean;
    squares += y * y;
  }
  return {mean, 1 / sqrt(warp_total(squares) / cols + eps)};
}

// layer_norm: out = gain * (z - mean) * scale + bias, scale = 1 / sqrt(variance + eps), mean and variance of the row.
// in    z [V, D]; gain, bias [D];  out  out [V, D], may be z. Moves 2 V D; a row is read again from the cache.
// grid  ceil(V / y), block (32, y): a warp per row
extern "C" __global__ void __launch_bounds__(kSumThreads)
    layer_norm(const storage_t* z, long long ld_z, const real_t* gain, const real_t* bias, storage_t* out,
               long long ld_out, double eps, long long rows, int cols) {
  const long long v = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  if (v >= rows) return;
  z += v * ld_z, out += v * ld_out;
  const Moments m = moments(z, cols, eps);
  for (int d = threadIdx.x; d < cols; d += 32)
    out[d] = narrow((real_t)((widen(z[d]) - m.mean) * m.scale * gain[d] + bias[d]));
}

// layer_norm_grad: out = scale * (h - mean(h) - y mean(h y)), h = gain * g, y = (z - mean) * scale, means over a row.
// in    g, z [V, D]; gain [D]
// out   out [V, D], may be g; partials double [2, num_partials >= chunks, D]: by chunk the column sums of g, and of g
// y.
//       Moves 3 V D, if the cache holds a batch of rows.
// grid  chunks, block (32, y): means of a batch by a warp per row, then columns by all threads
extern "C" __global__ void __launch_bounds__(kSumThreads)
    layer_norm_grad(const storage_t* g, long long ld_g, const storage_t* z, long long ld_z, const real_t* gain,
                    storage_t* out, long long ld_out, double* partials, int num_partials, double eps, long long rows,
                    int cols) {
  __shared__ double kept[kRowsOfBatch][4];  // mean, scale, mean(h), mean(h y)
  const long long chunks = gridDim.x, begin = rows * blockIdx.x / chunks, end = rows * (blockIdx.x + 1ll) / chunks;
  const int thread = threadIdx.y * 32 + threadIdx.x, threads = 32 * blockDim.y;
  double *of_bias = partials, *of_gain = partials + (long long)num_partials * cols;
  for (long long first = begin; first < end; first += kRowsOfBatch) {
    const int count = end - first < kRowsOfBatch ? (int)(end - first) : kRowsOfBatch;
    for (int r = threadIdx.y; r < count; r += blockDim.y) {
      const storage_t *row = z + (first + r) * ld_z, *back = g + (first + r) * ld_g;
      const Moments m = moments(row, cols, eps);
      double of_h = 0, of_hy = 0;
#pragma unroll 1
      for (int d = threadIdx.x; d < cols; d += 32) {
        const double h = (double)widen(back[d]) * gain[d];
        of_h += h;
        of_hy += h * ((widen(row[d]) - m.mean) * m.scale);
      }
      of_h = warp_total(of_h) / cols, of_hy = warp_total(of_hy) / cols;
      if (threadIdx.x == 0) kept[r][0] = m.mean, kept[r][1] = m.scale, kept[r][2] = of_h, kept[r][3] = of_hy;
    }
    __syncthreads();
    for (int d = thread; d < cols; d += threads) {
      const double factor = gain[d];
      double bias_sum = 0, gain_sum = 0;
#pragma unroll 2
      for (int r = 0; r < count; ++r) {
        const double x = widen(g[(first + r) * ld_g + d]);
        const double y = (widen(z[(first + r) * ld_z + d]) - kept[r][0]) * kept[r][1];
        bias_sum += x, gain_sum += x * y;
        out[(first + r) * ld_out + d] = narrow((real_t)(kept[r][1] * (x * factor - kept[r][2] - y * kept[r][3])));
      }
      const long long at = blockIdx.x * (long long)cols + d;
      of_bias[at] = first == begin ? bias_sum : of_bias[at] + bias_sum;
      of_gain[at] = first == begin ? gain_sum : of_gain[at] + gain_sum;
    }
    __syncthreads();
  }
  for (long long c = blockIdx.x + chunks; c < num_partials; c += chunks)
    for (int d = thread; d < cols; d += threads) of_bias[c * cols + d] = of_gain[c * cols + d] = 0;
}

// The sums of a block's threads into its chunk's row of partials, and 0 where there is no chunk.
__device__ __forceinline__ void store_sums(const double (&sums)[kVector], double (&shared)[kVector][kSumThreads],
                                           int column, int cols, double* partials, int num_partials) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared[i][threadIdx.y * blockDim.x + threadIdx.x] = sums[i];
  sum_over_y(shared);
  if (threadIdx.y) return;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (column + i >= cols) break;
    partials[(long long)blockIdx.x * cols + column + i] = shared[i][threadIdx.x];
    for (long long c = blockIdx.x + gridDim.x; c < num_partials; c += gridDim.x) partials[c * cols + column + i] = 0;
  }
}

// column_moments: by chunk the column sums of once * z, or with means those of once * (z - mean)^2.
// in    z [V, D]; mean double [D] or null; once double [V], 0 for rows that another rank counts
// out   partials double [num_partials >= chunks, D]. Moves V D.
// grid  (chunks, ceil(D / (kVector x))), block (x, y): as activation_grad
extern "C" __global__ void __launch_bounds__(kSumThreads)
    column_moments(const storage_t* z, long long ld_z, const double* mean, const double* once, double* partials,
                   int num_partials, long long rows, int cols) {
  __shared__ double shared[kVector][kSumThreads];
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector, left = cols - column;
  const long long end = rows * (blockIdx.x + 1ll) / gridDim.x;
  const bool aligned = rows_aligned(z, ld_z);
  double sums[kVector] = {};
  for (long long v = rows * blockIdx.x / gridDim.x + threadIdx.y; v < end && left > 0; v += blockDim.y) {
    if (once[v] == 0) continue;
    real_t x[kVector];
    load_columns<kVector>(z + v * ld_z + column, left, aligned, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const double y = mean && i < left ? x[i] - mean[column + i] : x[i];
      sums[i] += mean ? y * y : y;
    }
  }
  store_sums(sums, shared, column, cols, partials, num_partials);
}

// batch_norm: out = factor * (z - mean) + shift.
// in    z [V, D]; mean, factor, shift double [D];  out  out [V, D], may be z. Moves 2 V D.
// grid  (ceil(V / y), ceil(D / (kVector x))), block (x, y): as finish_rows
extern "C" __global__ void __launch_bounds__(128)
    batch_norm(const storage_t* z, long long ld_z, const double* mean, const double* factor, const double* shift,
               storage_t* out, long long ld_out, long long rows, int cols) {
  const long long v = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector, left = cols - column;
  if (v >= rows || left <= 0) return;
  real_t x[kVector];
  load_columns<kVector>(z + v * ld_z + column, left, rows_aligned(z, ld_z), x);
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (i < left) x[i] = (real_t)((x[i] - mean[column + i]) * factor[column + i] + shift[column + i]);
  store_columns<kVector>(out + v * ld_out + column, left, rows_aligned(out, ld_out), x);
}

// column_products: by chunk the column sums of g, and of g * (z - mean).
// in    g, z [V, D]; mean double [D], or null for 0;  out  partials double [2, num_partials >= chunks, D]. Moves 2 V D.
// grid  as column_moments
extern "C" __global__ void __launch_bounds__(kSumThreads)
    column_products(const storage_t* g, long long ld_g, const storage_t* z, long long ld_z, const double* mean,
                    double* partials, int num_partials, long long rows, int cols) {
  __shared__ double shared[kVector][kSumThreads];
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector, left = cols - column;
  const long long end = rows * (blockIdx.x + 1ll) / gridDim.x;
  const bool aligned = rows_aligned(g, ld_g) && rows_aligned(z, ld_z);
  double of_bias[kVector] = {}, of_gain[kVector] = {};
  for (long long v = rows * blockIdx.x / gridDim.x + threadIdx.y; v < end && left > 0; v += blockDim.y) {
    real_t x[kVector], y[kVector];
    load_columns<kVector>(g + v * ld_g + column, left, aligned, x);
    load_columns<kVector>(z + v * ld_z + column, left, aligned, y);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      of_bias[i] += x[i];
      const double away = mean && i < left ? y[i] - mean[column + i] : y[i];
      of_gain[i] += x[i] * away;
    }
  }
  store_sums(of_bias, shared, column, cols, partials, num_partials);
  store_sums(of_gain, shared, column, cols, partials + (long long)num_partials * cols, num_partials);
}

// batch_norm_grad: out = factor * (g - once * (slope * (z - mean) + shift)).
// in    g, z [V, D]; mean, factor, slope, shift double [D]; once double [V];  out  out [V, D], may be g. Moves 3 V D.
// grid  as batch_norm
extern "C" __global__ void __launch_bounds__(128)
    batch_norm_grad(const storage_t* g, long long ld_g, const storage_t* z, long long ld_z, const double* mean,
                    const double* factor, const double* slope, const double* shift, const double* once, storage_t* out,
                    long long ld_out, long long rows, int cols) {
  const long long v = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * kVector, left = cols - column;
  if (v >= rows || left <= 0) return;
  real_t x[kVector], y[kVector];
  load_columns<kVector>(g + v * ld_g + column, left, rows_aligned(g, ld_g), x);
  load_columns<kVector>(z + v * ld_z + column, left, rows_aligned(z, ld_z), y);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i >= left) continue;
    const int d = column + i;
    x[i] = (real_t)((x[i] - ((y[i] - mean[d]) * slope[d] + shift[d]) * once[v]) * factor[d]);
  }
  store_columns<kVector>(out + v * ld_out + column, left, rows_aligned(out, ld_out), x);
}
