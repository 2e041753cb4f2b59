// Numbers of vertices that travel in a column of their rows: the bits of an integer as wide as the type of storage.
// bfloat16 has no room for them; plans refuse it.
#pragma once
#include "common.cuh"

#if defined(MGGCN_F64)
typedef long long number_t;
constexpr number_t kNobody = 0x7fffffffffffffffll;
__device__ __forceinline__ number_t number_of(storage_t x) { return __double_as_longlong(x); }
__device__ __forceinline__ storage_t as_storage(number_t x) { return __longlong_as_double(x); }
#elif defined(MGGCN_BF16)
typedef int number_t;
constexpr number_t kNobody = 0x7fff;
__device__ __forceinline__ number_t number_of(storage_t x) { return x.bits; }
__device__ __forceinline__ storage_t as_storage(number_t x) {
  storage_t y;
  y.bits = (unsigned short)x;
  return y;
}
#else
typedef int number_t;
constexpr number_t kNobody = 0x7fffffff;
__device__ __forceinline__ number_t number_of(storage_t x) { return __float_as_int(x); }
__device__ __forceinline__ storage_t as_storage(number_t x) { return __int_as_float(x); }
#endif

__device__ __forceinline__ real_t infinity() { return (real_t)__int_as_float(0x7f800000); }

// The larger of two values, of equal ones that of the lower number; NaN is the largest. An order of all values, so that
// any tree of them gives the same.
__device__ __forceinline__ void take(real_t x, number_t id, real_t& value, number_t& winner) {
  const bool first = id < winner;
  if (x > value || (x == value && first) || (x != x && (value == value || first))) value = x, winner = id;
}
