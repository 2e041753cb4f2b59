// Masked cross-entropy with its gradient, and the counts behind the scores. Twin: cpu/loss.cpp.
// A group of x = 4, 8, 16 or 32 lanes of one warp has one row at a time, lanes over the classes; a block has y groups.
#include "common.cuh"

constexpr int kLossThreads = 256;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// The lanes of this thread's group.
__device__ __forceinline__ unsigned group_lanes() {
  if (blockDim.x == 32) return kFullWarp;
  const unsigned first = threadIdx.y * blockDim.x % 32;
  return ((1u << blockDim.x) - 1u) << first;
}

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
  // All lanes have read z[label]: the shuffles lie between.
  for (int d = threadIdx.x; d < cols; d += lanes) {
    const real_t gradient = exponential(widen(z[d]) - top) * factor - (d == label ? inv_count : (real_t)0);
    if (sums) sums[d] += gradient;
    z[d] = narrow(gradient * scale);
  }
  return log(sum) + (double)top - (double)chosen;
}

// softmax_xent: cross-entropy of the rows whose mask has bit 0, its gradient written over the logits; other rows get 0.
// in    z [V, C], labels int32 [V], mask uint8 [V], inv_count = 1 / global number of those rows, row_scale [V] or null
// out   z = row_scale * (softmax(z) - onehot(label)) * inv_count; total double [1] += inv_count * the sum of
//       logsumexp(z) - z[label], through losses double [chunks];
//       partials (double [num_partials >= chunks, C] or null) = the columns of the gradient before row_scale, 0 without
//       a chunk; arrived unsigned [1], 0 before and after. Moves 2 V C.
// grid  chunks, block (x, y) of at least a warp: chunk c has rows V c / chunks ..., group y every y-th of them. The
//       first warp of the block that arrives last adds the chunks' losses, in an order that their number alone fixes.
// shared  y C doubles if in_shared, which holds the groups' columns; else y is 1 and they are summed in partials
extern "C" __global__ void __launch_bounds__(kLossThreads, 3)
    softmax_xent(storage_t* z, long long ld, long long rows, int cols, const int* labels, const unsigned char* mask,
                 double inv_count, const real_t* row_scale, double* losses, unsigned* arrived, double* total,
                 double* partials, int num_partials, int in_shared) {
  EMULATE_DYNAMIC_SHARED(double, columns);
  __shared__ double group_loss[kLossThreads / 4];
  __shared__ bool last;
  const int at = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y, groups = blockDim.y;
  double* sums = !partials   ? nullptr
                 : in_shared ? columns + threadIdx.y * cols
                             : partials + (long long)blockIdx.x * cols;
  if (sums)
    for (int d = threadIdx.x; d < cols; d += blockDim.x) sums[d] = 0;
  double loss = 0;
  const long long chunks = gridDim.x, end = rows * (blockIdx.x + 1ll) / chunks;
  for (long long v = rows * blockIdx.x / chunks + threadIdx.y; v < end; v += groups) {
    storage_t* row = z + v * ld;
    if (mask[v] & 1)
      loss += xent_row(row, cols, labels[v], (real_t)inv_count, row_scale ? row_scale[v] : (real_t)1, sums);
    else
      for (int d = threadIdx.x; d < cols; d += blockDim.x) row[d] = narrow(0);
  }
  if (threadIdx.x == 0) group_loss[threadIdx.y] = loss;
  __syncthreads();
  if (at == 0) {
    for (int k = 1; k < groups; ++k) loss += group_loss[k];
    losses[blockIdx.x] = loss;
    __threadfence();
    last = atomicAdd(arrived, 1u) + 1 == gridDim.x;
    __threadfence();  // what the other blocks wrote before they arrived
  }
  for (int d = at; partials && d < cols; d += threads) {
    if (in_shared) {
      double sum = 0;
      for (int k = 0; k < groups; ++k) sum += columns[k * cols + d];
      partials[(long long)blockIdx.x * cols + d] = sum;
    }
    for (int c = blockIdx.x + gridDim.x; c < num_partials; c += gridDim.x) partials[(long long)c * cols + d] = 0;
  }
  __syncthreads();
  if (!last || at >= 32) return;
  double sum = 0;
  for (int c = at; c < (int)gridDim.x; c += 32) sum += __ldcg(losses + c);
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  if (at) return;
  *arrived = 0;
  total[0] += sum * inv_count;
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
