// The CUDA that mggcn's kernels use, for a C++ compiler: included in front of a .cu file, which is then compiled as it
// is.
//
// There: thread and block indices, static and dynamic shared memory (poisoned with NaN for each block; a dynamic array
// is declared through EMULATE_DYNAMIC_SHARED), __syncthreads, __syncwarp, shuffles and votes, integer and float
// atomics, vector types, the intrinsics below. Seen: a missing barrier (wrong result for some seed), a divergent one
// (deadlock), a warp operation with lanes missing, misaligned and null accesses, an index outside a local or static
// shared array, a shift by too much, writes behind dynamic shared memory; in other builds of the same text
// (tests/emulator/checked.py) accesses outside tensors, and races whatever their result. Not there: __CUDA_ARCH__,
// inline PTX, cp.async, tensor cores, cooperative groups, memory order without barriers.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>

#include "races.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("emulate_shared")))
#define __restrict__
#define __constant__ static const
#define EMULATE_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulate::dynamic_shared)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }

constexpr int warpSize = 32;

static inline void __syncthreads() { emulate::meet_block(0); }
static inline int __syncthreads_count(int p) { return emulate::meet_block(p); }
static inline int __syncthreads_or(int p) { return emulate::meet_block(p) > 0; }
static inline int __syncthreads_and(int p) {
  const int votes = emulate::meet_block(p);
  return votes == emulate::last_count;
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) { emulate::meet(emulate::Operation::sync, mask, 0, 0); }

namespace emulate {
template <class T>
T exchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = meet(Operation::shuffle, mask, bits, source);
  memcpy(&value, &bits, sizeof(T));
  return value;
}
inline unsigned lane() { return current % 32; }
}  // namespace emulate

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emulate::exchange(mask, value, emulate::lane() / width * width + (unsigned)source % width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const unsigned lane = emulate::lane(), other = lane ^ (unsigned)lanes;
  return emulate::exchange(mask, value, other / width <= lane / width ? other : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = emulate::lane(), other = lane + by;
  return emulate::exchange(mask, value, other / width == lane / width ? other : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = emulate::lane();
  return emulate::exchange(mask, value, lane % width >= by ? lane - by : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return (unsigned)emulate::meet(emulate::Operation::ballot, mask, predicate != 0, 0);
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}
static inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
// Rounded whatever follows: no multiply-add is made of them.
static inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
static inline double __dmul_rn(double a, double b) {
  volatile double product = a * b;
  return product;
}
static inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
static inline float __int_as_float(int v) { return bits_as<float>(v); }
static inline int __float_as_int(float v) { return bits_as<int>(v); }
static inline double __longlong_as_double(long long v) { return bits_as<double>(v); }
static inline long long __double_as_longlong(double v) { return bits_as<long long>(v); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
EMULATE_QUIET T __ldcg(const T* p) {
  emulate::read_from_l2(p, sizeof(T));
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldlu(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}
template <class T>
void __stcg(T* p, T v) {
  *p = v;
}
template <class T>
EMULATE_QUIET T atomicAdd(T* p, T v) {
  emulate::meet_atomically(p, sizeof(T));
  const T old = *p;
  *p = old + v;
  return old;
}
template <class T>
EMULATE_QUIET T atomicMax(T* p, T v) {
  emulate::meet_atomically(p, sizeof(T));
  const T old = *p;
  *p = old > v ? old : v;
  return old;
}
template <class T>
EMULATE_QUIET T atomicMin(T* p, T v) {
  emulate::meet_atomically(p, sizeof(T));
  const T old = *p;
  *p = old < v ? old : v;
  return old;
}
template <class T>
EMULATE_QUIET T atomicExch(T* p, T v) {
  emulate::meet_atomically(p, sizeof(T));
  const T old = *p;
  *p = v;
  return old;
}
template <class T>
EMULATE_QUIET T atomicCAS(T* p, T compare, T v) {
  emulate::meet_atomically(p, sizeof(T));
  const T old = *p;
  if (old == compare) *p = v;
  return old;
}
static inline void __threadfence() { emulate::fence(); }
static inline void __threadfence_block() {}
[[noreturn]] static inline void __trap() { emulate::die("__trap"); }
#define __expf(x) expf(x)
#define __logf(x) logf(x)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

// What -fsanitize checks call; each gets a record that begins with the place in the source.
struct EmulatePlace {
  const char* file;
  unsigned line, column;
};
extern "C" {
#define EMULATE_CHECK(name, what, ...)                                                                   \
  __attribute__((visibility("hidden"))) void __ubsan_handle_##name(EmulatePlace* place, ##__VA_ARGS__) { \
    emulate::die(what, place->line);                                                                     \
  }
EMULATE_CHECK(type_mismatch_v1, pointer ? "a misaligned access" : "an access through a null pointer", uintptr_t pointer)
EMULATE_CHECK(out_of_bounds, "an index outside its array", uintptr_t)
EMULATE_CHECK(shift_out_of_bounds, "a shift by too much or of a negative number", uintptr_t, uintptr_t)
EMULATE_CHECK(divrem_overflow, "an integer division by zero", uintptr_t, uintptr_t)
#undef EMULATE_CHECK
}

// A kernel behind one C signature: argument i lies in the i-th 8 bytes.
namespace emulate {

template <class A>
constexpr const char* kind() {
  if (std::is_pointer<A>::value) return "p8 ";
  if (std::is_floating_point<A>::value) return sizeof(A) == 4 ? "f4 " : "f8 ";
  if (std::is_signed<A>::value) return sizeof(A) == 4 ? "i4 " : "i8 ";
  return sizeof(A) == 4 ? "u4 " : "u8 ";
}
template <class... A>
struct Kernel {
  void (*function)(A...);
  const char* arguments;
  template <size_t... I>
  void call(std::index_sequence<I...>) const {
    function(*reinterpret_cast<const A*>(arguments + 8 * I)...);
  }
};
template <class... A>
void run(void (*function)(A...), Launch& l) {
  const Kernel<A...> kernel{function, l.arguments};
  const auto body = [](const void* k) { static_cast<const Kernel<A...>*>(k)->call(std::index_sequence_for<A...>{}); };
  launch(l, body, &kernel);
}
// The kinds of the parameters, "p8 i4 f4 ".
template <class... A>
void describe(void (*)(A...), char* text) {
  *text = 0;
  (strcat(text, kind<A>()), ...);
}

}  // namespace emulate
#define EMULATE_EXPORT extern "C" __attribute__((visibility("default"))) void
#define EMULATE_KERNEL(name)                                                         \
  EMULATE_EXPORT emulate_run_##name(emulate::Launch* l) { emulate::run(&name, *l); } \
  EMULATE_EXPORT emulate_describe_##name(char* text) { emulate::describe(&name, text); }
