// Small kernels for the tests of the emulator: some right, some with a planted fault. They also compile with nvcc.
#ifndef EMULATE_DYNAMIC_SHARED
#define EMULATE_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

// out[v, :] = sum over neighbours u of dense[u, :]; one warp per row, lanes over columns.
extern "C" __global__ void spmm_csr_warp(const long long* __restrict__ indptr, const int* __restrict__ indices,
                                         const float* __restrict__ dense, float* __restrict__ out, long long rows,
                                         int width) {
  const long long v = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
  if (v >= rows) return;
  for (int d = threadIdx.x % 32; d < width; d += 32) {
    float sum = 0.0f;
    for (long long e = indptr[v]; e < indptr[v + 1]; ++e) sum += dense[(long long)indices[e] * width + d];
    out[v * width + d] = sum;
  }
}

// Row sums with a shuffle tree: one warp per row.
extern "C" __global__ void __launch_bounds__(128) row_sum_shuffle(const float* in, float* out, int rows, int cols) {
  const int v = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (v >= rows) return;
  float sum = 0.0f;
  for (int d = lane; d < cols; d += 32) sum += in[(long long)v * cols + d];
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) out[v] = sum;
}

// Prefix sum of a block in dynamic shared memory; `broken` leaves a barrier out.
extern "C" __global__ void block_scan(const float* in, float* out, int n, int broken) {
  EMULATE_DYNAMIC_SHARED(float, buffer);
  const int t = threadIdx.x;
  buffer[t] = t < n ? in[t] : 0.0f;
  __syncthreads();
  for (int step = 1; step < (int)blockDim.x; step *= 2) {
    const float left = t >= step ? buffer[t - step] : 0.0f;
    if (!broken) __syncthreads();
    buffer[t] += left;
    __syncthreads();
  }
  if (t < n) out[t] = buffer[t];
}

// Reverses 64 numbers through static shared memory; `broken` leaves the barrier out.
extern "C" __global__ void reverse(const float* in, float* out, int broken) {
  __shared__ float buffer[64];
  buffer[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
  if (!broken) __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = buffer[63 - threadIdx.x];
}

// Hands numbers from lane to lane through shared memory; `broken` leaves the warp's barrier out.
extern "C" __global__ void neighbour(float* data, int broken) {
  __shared__ float buffer[32];
  buffer[threadIdx.x] = data[threadIdx.x];
  if (!broken) __syncwarp();
  data[threadIdx.x] = buffer[(threadIdx.x + 1) % 32];
}

// Sums a block's numbers: warps add to a counter that the first thread zeroes; `broken` leaves the barrier between out.
extern "C" __global__ void count_warps(const int* in, int* out, int broken) {
  __shared__ int counter;
  int x = in[blockIdx.x * blockDim.x + threadIdx.x];
  if (threadIdx.x == 0) counter = 0;
  if (!broken) __syncthreads();
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  if (threadIdx.x % 32 == 0) atomicAdd(&counter, x);
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = counter;
}

// Half of a warp waits at the block's barrier, the other half at the warp's.
extern "C" __global__ void divergent(float* out) {
  if (threadIdx.x < 16)
    __syncthreads();
  else
    __syncwarp();
  out[threadIdx.x] = 1.0f;
}

// Half of a warp shuffles with the mask of all; the other half leaves (0), waits elsewhere (1), votes (2), or has a
// smaller mask (3).
extern "C" __global__ void lanes_missing(float* data, int how) {
  const int lane = threadIdx.x;
  float x = data[lane];
  if (lane < 16) {
    x = __shfl_sync(0xffffffffu, x, lane + 16);
  } else if (how == 1) {
    __syncthreads();
  } else if (how == 2) {
    x = (float)__any_sync(0xffffffffu, lane == 16);
  } else if (how == 3) {
    x = __shfl_sync(0xffff0000u, x, lane);
  }
  data[lane] = x;
}

// Every shuffle, vote and shared-memory vote once; data[lane, 0 .. 9).
extern "C" __global__ void collectives(int* data, int width) {
  const int lane = threadIdx.x % 32, x = 100 + threadIdx.x;
  int* out = data + 9 * threadIdx.x;
  out[0] = __shfl_sync(0xffffffffu, x, 3, width);
  out[1] = __shfl_xor_sync(0xffffffffu, x, 1, width);
  out[2] = __shfl_up_sync(0xffffffffu, x, 1, width);
  out[3] = __shfl_down_sync(0xffffffffu, x, 1, width);
  out[4] = (int)__ballot_sync(0xffffffffu, lane % 3 == 0);
  out[5] = __any_sync(0xffffffffu, lane == 31) + 2 * __all_sync(0xffffffffu, lane < 31);
  out[6] = __syncthreads_count(threadIdx.x % 2);
  out[7] = __syncthreads_or(threadIdx.x == 5) + 2 * __syncthreads_and(threadIdx.x != 5);
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  out[8] = __shfl_xor_sync(half, x, 8);
}

// 80 kB of stack, more than the emulator gives: the whole of it, or only its far end, with a leap over all between.
// Not inlined, so that nothing else pays for it.
static __device__ __attribute__((noinline)) float hoard(bool whole) {
  volatile float large[20000];
  for (int i = 0; i < (whole ? 20000 : 1); ++i) large[i] = 1.0f;
  if (!whole) __syncwarp();
  return large[0];
}

// One access that a GPU refuses: misaligned (0), null (1), outside an array (2), behind shared memory (3), shift (4),
// stack, of a thread above another's (5) and of the lowest (6).
extern "C" __global__ void forbidden(float* data, int how) {
  EMULATE_DYNAMIC_SHARED(float, buffer);
  __shared__ float fixed[8];
  if (how == 0) data[0] = reinterpret_cast<float4*>(data + 1)->x;
  if (how == 1) data[0] = *(float*)(how - 1ll);
  if (how == 2) fixed[how * 4] = 1.0f;
  if (how == 3) buffer[threadIdx.x] = 1.0f;
  if (how == 4) data[0] = (float)(1u << (how * 8));
  if (how == 5 && threadIdx.x == 1) data[0] = hoard(true);
  if (how == 6 && threadIdx.x == 0) data[0] = hoard(false);
}

// What nobody wrote: static and dynamic shared memory of each block.
extern "C" __global__ void unwritten(float* out) {
  EMULATE_DYNAMIC_SHARED(float, buffer);
  __shared__ float fixed[4];
  out[2 * blockIdx.x] = buffer[0];
  out[2 * blockIdx.x + 1] = fixed[3];
  buffer[0] = fixed[3] = 1.0f;
}

// Each number from `by` places further on: outside `in` for some.
extern "C" __global__ void shifted(const float* in, float* out, int by) {
  out[threadIdx.x] = in[(int)threadIdx.x + by];
}

// Sums of blocks of 32 numbers, and their sum by the block that arrives last. `broken`, none of which need change a
// result: 1 leaves the fence out, 2 writes what the last block writes, 3 has all threads write, 4 reads behind shared
// memory, 5 takes a shuffle for a barrier of memory, 6 leaves out the reader's fence, without which 7 reads past the L1
// cache.
extern "C" __global__ void sum_blocks(const int* in, int* sums, unsigned* arrived, int* out, int broken) {
  EMULATE_DYNAMIC_SHARED(int, held);
  __shared__ bool last;
  const int lane = threadIdx.x;
  int sum = held[lane] = in[32 * blockIdx.x + lane];
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (broken == 4 && lane == 31) sum += held[32] == 12345;
  if (broken == 5) sum += held[31 - lane] == 12345;
  if (broken == 3 || lane == 0) sums[blockIdx.x] = sum;
  if (broken == 2 && lane == 0) *out = sum;
  if (lane == 0) {
    if (broken != 1) __threadfence();
    last = atomicAdd(arrived, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last || lane) return;
  if (broken < 6) __threadfence();
  int all = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) all += broken == 7 ? __ldcg(sums + b) : sums[b];
  *out = all, *arrived = 0;
}

// Adds 1 to a number of each row, `ld` numbers apart; `broken`: rows are multiplied by it in 32 bits.
extern "C" __global__ void rows_apart(float* data, long long ld, int broken) {
  const unsigned row = threadIdx.x;
  data[broken ? row * (unsigned)ld : row * ld] += 1.0f;
}

// x y without the product that was kept before: 0, unless a compiler fuses the product and the difference.
extern "C" __global__ void difference(const float* x, const float* y, float* kept, float* out) {
  kept[threadIdx.x] = x[threadIdx.x] * y[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x] * y[threadIdx.x] - kept[threadIdx.x];
}
