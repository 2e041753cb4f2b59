// Losses of entries that are compared one by one, with their gradient, and counts of the right ones. Twin:
// cpu/entries.cpp.
#include "loss.cuh"

__device__ __forceinline__ float log_one_more(float x) { return log1pf(x); }
__device__ __forceinline__ double log_one_more(double x) { return log1p(x); }

// The loss of one known entry, its gradient in g. kind 0: cross-entropy of sigmoid(x); 1: squared, 2: absolute error.
__device__ __forceinline__ double entry(int kind, real_t x, real_t target, real_t& g) {
  const real_t off = x - target;
  if (kind == 1) {
    g = 2 * off;
    return (double)off * off;
  }
  const real_t size = kind ? (off < 0 ? -off : off) : (x < 0 ? -x : x);
  if (kind) {
    g = off > 0 ? (real_t)1 : off < 0 ? (real_t)-1 : off;  // NaN stays
    return size;
  }
  const real_t small = exponential(-size), share = 1 / (1 + small);
  g = (x >= 0 ? share : small * share) - target;
  return (double)((x > 0 ? x : (real_t)0) - x * target) + (double)log_one_more(small);
}

// entry_loss: the loss of every known entry, its gradient written over the scores; unknown entries and other rows get
// 0. in    z [V, T], targets [V, T], NaN where unknown, inv_count = 1 / global number of known entries of rows that
// count; changing: as softmax_xent's (loss.cu);
//       kind 0: targets in [0, 1] and cross-entropy of sigmoid(z); 1: (z - target)^2; 2: |z - target|
// out   z = row_scale * the gradient * inv_count. Moves 3 V T. The rest, and the grid: struct LossArgs.
extern "C" __global__ void __launch_bounds__(kLossThreads)
    entry_loss(storage_t* z, long long ld, long long rows, int cols, const real_t* targets, const unsigned char* mask,
               double inv_count, const double* changing, int kind, const real_t* row_scale, double* losses,
               unsigned* arrived, double* total, double* partials, int num_partials, int in_shared) {
  if (changing) inv_count = *changing;
  EMULATE_DYNAMIC_SHARED(double, columns);
  __shared__ double group_loss[kLossThreads / 4];
  __shared__ bool last;
  const LossArgs args = {z,      ld,      rows,  cols,     mask,         inv_count, row_scale,
                         losses, arrived, total, partials, num_partials, in_shared};
  loss_of_rows(args, columns, group_loss, &last, [&](storage_t* row, long long v, real_t scale, double* sums) {
    const unsigned group = group_lanes();
    double loss = 0;
    for (int d = threadIdx.x; d < cols; d += blockDim.x) {
      const real_t target = targets[v * cols + d];
      real_t g = 0;
      if (target == target) loss += entry(kind, widen(row[d]), target, g);
      g *= (real_t)inv_count;
      if (sums) sums[d] += g;
      row[d] = narrow(g * scale);
    }
    for (int step = blockDim.x / 2; step; step /= 2) loss += __shfl_xor_sync(group, loss, step, blockDim.x);
    return loss;
  });
}

// entry_counts: counts[s, 0 / 1 / 2, d] += known entries of column d in the rows of split s that are right and positive
// (z > 0 and target > 0.5), predicted positive, and positive.
// in    z [V, T], targets [V, T], mask uint8 [V] (bit s: the row is in split s)
// out   counts int64 [3, 3, T]. Integer atomics only: the same in every run. Moves 2 V T
// grid  chunks, block (x, y): group y of block b has rows b y' + y, ... of all; y' groups in a block
extern "C" __global__ void __launch_bounds__(kLossThreads, 1)
    entry_counts(const storage_t* z, long long ld, long long rows, int cols, const real_t* targets,
                 const unsigned char* mask, long long* counts) {
  unsigned long long* total = reinterpret_cast<unsigned long long*>(counts);
  const long long first = (long long)blockIdx.x * blockDim.y + threadIdx.y, stride = (long long)gridDim.x * blockDim.y;
  for (int d = threadIdx.x; d < cols; d += blockDim.x) {
    unsigned long long mine[9] = {};
    for (long long v = first; v < rows; v += stride) {
      const real_t target = targets[v * cols + d];
      if (target != target) continue;
      const bool predicted = widen(z[v * ld + d]) > 0, positive = target > (real_t)0.5;
#pragma unroll
      for (int split = 0; split < 3; ++split) {
        if (!(mask[v] >> split & 1)) continue;
        mine[3 * split] += predicted && positive;
        mine[3 * split + 1] += predicted;
        mine[3 * split + 2] += positive;
      }
    }
#pragma unroll
    for (int i = 0; i < 9; ++i)
      if (mine[i]) atomicAdd(&total[i * cols + d], mine[i]);
  }
}
