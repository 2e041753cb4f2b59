// Masked cross-entropy with its gradient, and the counts behind the scores. Twin: cpu/loss.cpp.
#include "loss.cuh"

// z = scale * (softmax(z) - onehot(label)) * inv_count for one row, by one group; returns logsumexp(z) - z[label]. The
// columns before the scale are added to sums. Logits are read three times, from memory once.
// A logit of NaN or +infinity makes the loss NaN: the comparisons of the maximum skip NaN, the sum does not.
__device__ __forceinline__ double xent_row(storage_t* z, int cols, int label, real_t inv_count, real_t scale,
                                           double* sums) {
  const unsigned group = group_lanes();
  const int lanes = blockDim.x;
  real_t top = -(real_t)__int_as_float(0x7f800000);
  for (int d = threadIdx.x; d < cols; d += lanes) top = larger(top, widen(z[d]));
  for (int step = lanes / 2; step; step /= 2) top = larger(top, __shfl_xor_sync(group, top, step, lanes));
  const real_t chosen = widen(z[label]);
  double sum = 0;
  for (int d = threadIdx.x; d < cols; d += lanes) sum += exponential(widen(z[d]) - top);
  for (int step = lanes / 2; step; step /= 2) sum += __shfl_xor_sync(group, sum, step, lanes);
  const real_t factor = (real_t)(inv_count / sum);
  __syncwarp(group);  // all lanes have read z[label]: shuffles order no memory
  for (int d = threadIdx.x; d < cols; d += lanes) {
    const real_t gradient = exponential(widen(z[d]) - top) * factor - (d == label ? inv_count : (real_t)0);
    if (sums) sums[d] += gradient;
    z[d] = narrow(gradient * scale);
  }
  return log(sum) + (double)top - (double)chosen;
}

// The same for the target q of softmax_xent_spread.
__device__ __forceinline__ double spread_row(storage_t* z, int cols, int label, double inv_count, real_t scale,
                                             const real_t* weights, double smoothing, double* sums) {
  const unsigned group = group_lanes();
  const int lanes = blockDim.x;
  real_t top = -(real_t)__int_as_float(0x7f800000);
  for (int d = threadIdx.x; d < cols; d += lanes) top = larger(top, widen(z[d]));
  for (int step = lanes / 2; step; step /= 2) top = larger(top, __shfl_xor_sync(group, top, step, lanes));
  const auto target = [=](int d) {
    return (weights ? (double)weights[d] : 1.0) * ((d == label ? 1.0 - smoothing : 0.0) + smoothing / cols);
  };
  double sum = 0, total = 0, dot = 0;
  for (int d = threadIdx.x; d < cols; d += lanes) {
    const double q = target(d);
    const real_t shifted = widen(z[d]) - top;
    sum += exponential(shifted);
    total += q;
    if (q) dot += q * shifted;
  }
  for (int step = lanes / 2; step; step /= 2) {
    sum += __shfl_xor_sync(group, sum, step, lanes);
    total += __shfl_xor_sync(group, total, step, lanes);
    dot += __shfl_xor_sync(group, dot, step, lanes);
  }
  const double factor = total * inv_count / sum;
  for (int d = threadIdx.x; d < cols; d += lanes) {
    const real_t gradient = (real_t)(exponential(widen(z[d]) - top) * factor - target(d) * inv_count);
    if (sums) sums[d] += gradient;
    z[d] = narrow(gradient * scale);
  }
  return total * log(sum) - dot;
}

// softmax_xent: cross-entropy of the rows whose mask has bit 0, its gradient written over the logits; other rows get 0.
// in    z [V, C], labels int32 [V], inv_count = 1 / global number of those rows, or their weights; changing double [1]
//       or null: takes its place, where a recorded launch must not keep it
// out   z = row_scale * (softmax(z) - onehot(label)) * inv_count; a row's loss is logsumexp(z) - z[label]. Moves 2 V C.
// The rest, and the grid: struct LossArgs.
extern "C" __global__ void __launch_bounds__(kLossThreads, 3)
    softmax_xent(storage_t* z, long long ld, long long rows, int cols, const int* labels, const unsigned char* mask,
                 double inv_count, const double* changing, const real_t* row_scale, double* losses, unsigned* arrived,
                 double* total, double* partials, int num_partials, int in_shared) {
  if (changing) inv_count = *changing;
  EMULATE_DYNAMIC_SHARED(double, columns);
  __shared__ double group_loss[kLossThreads / 4];
  __shared__ bool last;
  const LossArgs args = {z,      ld,      rows,  cols,     mask,         inv_count, row_scale,
                         losses, arrived, total, partials, num_partials, in_shared};
  loss_of_rows(args, columns, group_loss, &last, [&](storage_t* row, long long v, real_t scale, double* sums) {
    return xent_row(row, cols, labels[v], (real_t)inv_count, scale, sums);
  });
}

// softmax_xent_spread: the same with weights [C] or null and smoothing e: q_c = weights[c] ((c == label) (1 - e) + e /
// C) in place of onehot; a row's loss is sum q_c (logsumexp(z) - z_c), its gradient (sum q) softmax(z) - q. in    z [V,
// C], labels int32 [V]; the rest, out and grid: softmax_xent
extern "C" __global__ void __launch_bounds__(kLossThreads, 1)
    softmax_xent_spread(storage_t* z, long long ld, long long rows, int cols, const int* labels,
                        const unsigned char* mask, double inv_count, const double* changing, const real_t* weights,
                        double smoothing, const real_t* row_scale, double* losses, unsigned* arrived, double* total,
                        double* partials, int num_partials, int in_shared) {
  if (changing) inv_count = *changing;
  EMULATE_DYNAMIC_SHARED(double, columns);
  __shared__ double group_loss[kLossThreads / 4];
  __shared__ bool last;
  const LossArgs args = {z,      ld,      rows,  cols,     mask,         inv_count, row_scale,
                         losses, arrived, total, partials, num_partials, in_shared};
  loss_of_rows(args, columns, group_loss, &last, [&](storage_t* row, long long v, real_t scale, double* sums) {
    return spread_row(row, cols, labels[v], inv_count, scale, weights, smoothing, sums);
  });
}

// The first column with the largest logit, found by one group; as on the CPU, NaN never wins unless it is the first.
__device__ __forceinline__ int predicted(const storage_t* z, int cols) {
  const real_t infinity = (real_t)__int_as_float(0x7f800000);
  real_t top = -infinity;
  int best = 0x7fffffff;
  for (int d = threadIdx.x; d < cols; d += blockDim.x) {
    real_t x = widen(z[d]);
    if (x != x) x = d == 0 ? infinity : -infinity;
    if (x > top || best == 0x7fffffff) top = x, best = d;
  }
  for (int step = blockDim.x / 2; step; step /= 2) {
    const real_t other_top = __shfl_xor_sync(group_lanes(), top, step, blockDim.x);
    const int other = __shfl_xor_sync(group_lanes(), best, step, blockDim.x);
    if (other_top > top || (other_top == top && other < best)) top = other_top, best = other;
  }
  return best;
}

// confusion: counts[s, 0 / 1 / 2, c] += right predictions, predictions and vertices of class c among the rows of split
// s. in    z [V, C], labels int32 [V], mask uint8 [V] (bit s: the row is in split s) out   counts int64 [3, 3, C].
// Integer atomics only: the same in every run. Moves V C. grid  chunks, block (x, y): group y of block b has rows b y'
// + y, ... of all; y' groups in a block shared  9 C counters if in_shared, else counts are added to directly
extern "C" __global__ void __launch_bounds__(kLossThreads)
    confusion(const storage_t* z, long long ld, long long rows, int cols, const int* labels, const unsigned char* mask,
              long long* counts, int in_shared) {
  EMULATE_DYNAMIC_SHARED(unsigned, counters);
  const int at = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  unsigned long long* total = reinterpret_cast<unsigned long long*>(counts);
  if (in_shared)
    for (int i = at; i < 9 * cols; i += threads) counters[i] = 0;
  __syncthreads();
  const long long stride = (long long)gridDim.x * blockDim.y;
  for (long long v = (long long)blockIdx.x * blockDim.y + threadIdx.y; v < rows; v += stride) {
    if (!(mask[v] & 7)) continue;
    const int best = predicted(z + v * ld, cols);
    // Lane k of the group counts: k = 0 right predictions, 1 predictions, 2 vertices.
    if (threadIdx.x > 2 || (threadIdx.x == 0 && best != labels[v])) continue;
    const int column = threadIdx.x == 2 ? labels[v] : best;
    for (int split = 0; split < 3; ++split) {
      if (!(mask[v] >> split & 1)) continue;
      const int slot = (3 * split + (int)threadIdx.x) * cols + column;
      if (in_shared)
        atomicAdd(&counters[slot], 1u);
      else
        atomicAdd(&total[slot], 1ull);
    }
  }
  if (!in_shared) return;
  __syncthreads();
  for (int i = at; i < 9 * cols; i += threads)
    if (counters[i]) atomicAdd(&total[i], (unsigned long long)counters[i]);
}
