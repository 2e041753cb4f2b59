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

constexpr int kWarpsOfBlock = 4;

// The place of this warp in the grid.
__device__ __forceinline__ long long warp_number() { return blockIdx.x * (long long)kWarpsOfBlock + threadIdx.x / 32; }

__device__ __forceinline__ real_t infinity() { return (real_t)__int_as_float(0x7f800000); }
