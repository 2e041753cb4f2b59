// What attention and the maximum do to rows without their edges: partial results of several ranks are merged, and
// products are taken by head. Bitwise repeatable. Twins: cpu/attention.cpp, cpu/maximum.cpp.
#include "teams.cuh"
#include "vertex_numbers.cuh"

__device__ __forceinline__ real_t warp_sum(real_t x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

__device__ __forceinline__ real_t warp_dot(const storage_t* x, const storage_t* y, int cols) {
  real_t sum = 0;
  for (int c = (int)threadIdx.x % 32; c < cols; c += 32) sum += widen(x[c]) * widen(y[c]);
  return warp_sum(sum);
}

// The triples (z, m, l) of a message [z | m | l], one for each of `index`, join those that lie there.
// grid  ceil(rows of the message H / 4), block 128
extern "C" __global__ void __launch_bounds__(128)
    attend_combine(const int* index, const storage_t* message, long long ld, storage_t* out, long long ld_out,
                   storage_t* state, long long ld_state, int heads, int cols, long long num_rows) {
  const long long i = warp_number() / heads;
  const int head = (int)(warp_number() % heads), width = heads * cols;
  if (i >= num_rows) return;
  const storage_t *from = message + i * ld, *m2 = from + width + head;
  const real_t sum = widen(m2[heads]);
  if (sum == 0) return;  // no edges there
  storage_t *to = out + index[i] * ld_out, *held = state + index[i] * ld_state + head;
  const real_t m = widen(held[0]), l = widen(held[heads]), other = widen(m2[0]), most = other > m ? other : m;
  const real_t scale = exp_of(m - most), scale2 = exp_of(other - most);
  for (int c = head * cols + (int)threadIdx.x % 32; c < (head + 1) * cols; c += 32)
    to[c] = narrow(widen(to[c]) * scale + widen(from[c]) * scale2);
  __syncwarp();
  if (threadIdx.x % 32 == 0) held[0] = narrow(most), held[heads] = narrow(l * scale + sum * scale2);
}

// out[v, h] = the sum over the columns of head h of x[v, :] y[v, :]; y of stride 0 is one row for all.
// grid  ceil(V H / 4), block 128
extern "C" __global__ void __launch_bounds__(128)
    head_dots(const storage_t* x, long long ld_x, const storage_t* y, long long ld_y, storage_t* out, long long ld_out,
              int heads, int cols, long long num_rows) {
  const long long row = warp_number() / heads;
  const int head = (int)(warp_number() % heads);
  if (row >= num_rows) return;
  const real_t sum = warp_dot(x + row * ld_x + head * cols, y + row * ld_y + head * cols, cols);
  if (threadIdx.x % 32 == 0) out[row * ld_out + head] = narrow(sum);
}

// Rows [maxima | winners] of a message, one for each of `index`, join those that lie there.
// grid  ceil(rows of the message / 4), block 128
extern "C" __global__ void __launch_bounds__(128)
    maximum_combine(const int* index, const storage_t* message, long long ld, storage_t* out, long long ld_out,
                    storage_t* winners, long long ld_winners, int cols, long long num_rows) {
  const long long i = warp_number();
  if (i >= num_rows) return;
  for (int column = (int)threadIdx.x % 32; column < cols; column += 32) {
    const storage_t* x = message + i * ld + column;
    storage_t *to = out + index[i] * ld_out + column, *whose = winners + index[i] * ld_winners + column;
    real_t value = widen(*to);
    number_t winner = number_of(*whose);
    take(widen(x[0]), number_of(x[cols]), value, winner);
    *to = narrow(value);
    *whose = as_storage(winner);
  }
}
