// The end of an epoch: two launches, where torch's fused optimisers and the books take seven. Twin: torch's own steps,
// in mggcn/backend/cpu/epoch_end.py, whose formulas these are.
#include "common.cuh"

constexpr int kEndThreads = 256;
constexpr int kPartColumns = 8;
enum Rule { kAdam, kAdamW, kSgd };
enum Signal { kLoss, kStop };

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

// base to the power of n > 0; pow() is a call, around which compilers spill.
__device__ __forceinline__ double power(double base, int n) {
  double result = 1;
  for (; n; n /= 2, base *= base)
    if (n % 2) result *= base;
  return result;
}

// What every weight of a part is moved by. second: Adam's beta2, SGD's momentum.
struct Factors {
  real_t decay, shrink, first, second, rest, rate, root_correction, eps;
};

// Every thread's x added up, in the order of a tree, for thread 0.
__device__ double block_sum(double x) {
  __shared__ double sums[kEndThreads];
  sums[threadIdx.x] = x;
  for (int step = kEndThreads / 2; step; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  return threadIdx.x ? 0 : sums[0];
}

// clip_factor: what gradients are multiplied by so that their norm is at most `limit`, as torch's clip_grad_norm_.
// in    grads [W]; parts as for end_epoch; limit, infinity for none; eps
// out   factor double [1] = min(1, limit / (norm of all parts + eps)), NaN if the norm is not finite; squares double
//       [grid]: sums of squares of the parts; arrived unsigned [1], 0 before and after. Moves W.
// grid  a block for every part, block 256. The block that arrives last adds the parts up, always in one order.
extern "C" __global__ void __launch_bounds__(kEndThreads)
    clip_factor(const real_t* grads, const long long* parts, double limit, double eps, double* squares, double* factor,
                unsigned* arrived) {
  __shared__ bool last;
  const long long* part = parts + (long long)kPartColumns * blockIdx.x;
  double own = 0;
  for (long long i = part[0] + threadIdx.x; i < part[1]; i += kEndThreads) own += (double)grads[i] * (double)grads[i];
  own = block_sum(own);
  if (threadIdx.x == 0) {
    squares[blockIdx.x] = own;
    __threadfence();
    last = atomicAdd(arrived, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();  // what the other blocks wrote before they arrived
  double all = 0;
  for (unsigned k = threadIdx.x; k < gridDim.x; k += kEndThreads) all += squares[k];
  all = block_sum(all);
  if (threadIdx.x) return;
  const double ratio = limit / (sqrt(all) + eps);
  *factor = all - all != 0 ? all - all : ratio > 1 ? 1 : ratio;  // x - x is NaN unless x is finite
  *arrived = 0;
}

__device__ Factors factors_of(int rule, double decay, double momentum, double beta1, double beta2, double eps,
                              double rate, int steps) {
  if (rule == kSgd) return {(real_t)decay, 1, 0, (real_t)momentum, 1, (real_t)rate, 1, 0};
  const double shrink = rule == kAdamW ? 1 - rate * decay : 1;
  return {(real_t)(rule == kAdam ? decay : 0),
          (real_t)shrink,
          (real_t)(1 - beta1),
          (real_t)beta2,
          (real_t)(1 - beta2),
          (real_t)(rate / (1 - power(beta1, steps))),
          (real_t)sqrt(1 - power(beta2, steps)),
          (real_t)eps};
}

__device__ __forceinline__ real_t moved(real_t weight, real_t grad, real_t* average, real_t* square, int rule,
                                        const Factors& f) {
  grad += weight * f.decay;
  if (rule == kSgd) {
    if (average) *average = grad = *average * f.second + grad;
    return weight - f.rate * grad;
  }
  weight *= f.shrink;
  const real_t mean = *average + f.first * (grad - *average);
  const real_t spread = *square * f.second + f.rest * grad * grad;
  *average = mean, *square = spread;
  return weight - f.rate * mean / (root(spread) / f.root_correction + f.eps);
}

// end_epoch: weights move against their gradients, by Adam (rule 0), AdamW (1) or SGD (2), at the rate of the epoch on
// the clock; operands get them in the type of activations. Then history[epoch % E, :] = signals, signals = own, and the
// clock and all counts of steps go on by 1. If halted is not 0, or the loss signals[0] or the factor is not finite,
// weights, averages and counts of steps stay, the stop signal of that row of the history is NaN, and halted keeps or
// becomes epoch + 1: what was queued behind a bad epoch changes nothing either.
// in    grads [W], factor double [1] that multiplies them; rates double [E], own double [K];
//       parts long long [grid, 8]: elements [begin, end) of a weight, its columns, that of the first element, the place
//       of that one's row among the operands (-1: none), the stride of rows there, whether the weight decays, 0
// out   weights [W]; averages, squares [W] (Adam's two; SGD's momentum or null, null); steps float [S], all equal;
//       operands or null; history double [E, K], signals double [K], clock long long [2], halted long long [1];
//       arrived unsigned [1], 0 before and after. Moves 3 to 7 W.
// grid  a block for every part, block 256. Thread 0 of the block that arrives last keeps the books: every block has
//       read rate and steps by then. Integer atomics only: the same in every run.
extern "C" __global__ void __launch_bounds__(kEndThreads)
    end_epoch(real_t* weights, const real_t* grads, const double* factor, real_t* averages, real_t* squares,
              storage_t* operands, const long long* parts, int rule, double decay, double momentum, double beta1,
              double beta2, double eps, float* steps, int num_steps, const double* rates, const double* own,
              double* signals, int num_signals, double* history, int window, long long* clock, long long* halted,
              unsigned* arrived) {
  __shared__ Factors factors;
  __shared__ bool moves;
  const long long* part = parts + (long long)kPartColumns * blockIdx.x;
  if (threadIdx.x == 0) {
    factors =
        factors_of(rule, part[6] ? decay : 0, momentum, beta1, beta2, eps, rates[clock[1] % window], (int)steps[0] + 1);
    moves = *halted == 0 && signals[kLoss] - signals[kLoss] == 0 && *factor == *factor;
  }
  __syncthreads();
  const long long begin = part[0], operand = part[4], ld = part[5];
  const real_t clip = (real_t)*factor;
  const unsigned cols = (unsigned)part[2], column = (unsigned)part[3], count = moves ? (unsigned)(part[1] - begin) : 0;
  for (unsigned k = threadIdx.x; k < count; k += kEndThreads) {
    const long long i = begin + k;
    const real_t weight = moved(weights[i], clip * grads[i], averages ? averages + i : nullptr,
                                squares ? squares + i : nullptr, rule, factors);
    weights[i] = weight;
    if (operand >= 0) operands[operand + (column + k) / cols * ld + (column + k) % cols] = narrow(weight);
  }
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence();
  if (atomicAdd(arrived, 1u) + 1 < gridDim.x) return;
  __threadfence();  // what the other blocks wrote before they arrived
  const long long epoch = clock[1];
  double* row = history + epoch % window * num_signals;
  *arrived = 0;
  clock[1] = epoch + 1;
  for (int k = 0; k < num_steps; ++k) steps[k] += moves;
  for (int k = 0; k < num_signals; ++k) {
    row[k] = signals[k];
    signals[k] = own[k];
  }
  if (moves) return;
  row[kStop] = __longlong_as_double(0x7ff8000000000000ll);
  if (*halted == 0) *halted = epoch + 1;
}
