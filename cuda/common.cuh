// What every kernel shares: storage and accumulation types, 16-byte loads and stores.
// A .cu file is compiled once per storage type: -DMGGCN_F32, -DMGGCN_F64 or -DMGGCN_BF16. It needs no header of CUDA's,
// so that NVRTC, nvcc and the tests' emulator compile the same text. Kernels are extern "C"; their parameters are
// pointers, int, unsigned, long long, float and double, which is what the launcher (mggcn/backend/cuda/kernels.py)
// reads off them.
#pragma once

#if defined(MGGCN_F64)
typedef double storage_t;
typedef double real_t;
#elif defined(MGGCN_BF16)
struct storage_t {
  unsigned short bits;
};
typedef float real_t;
#elif defined(MGGCN_F32)
typedef float storage_t;
typedef float real_t;
#else
#error "define MGGCN_F32, MGGCN_F64 or MGGCN_BF16"
#endif

#ifndef EMULATE_DYNAMIC_SHARED
#define EMULATE_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

constexpr int kVector = 16 / (int)sizeof(storage_t);  // columns of a 16-byte load: 4, 2 or 8
constexpr unsigned kFullWarp = 0xffffffffu;

// The bits of the bf16 nearest to x, ties to even; NaN stays NaN.
__device__ __forceinline__ unsigned short nearest_bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  return (unsigned short)(x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#if defined(MGGCN_BF16)
__device__ __forceinline__ real_t widen(storage_t x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ storage_t narrow(real_t x) {
  storage_t y;
  y.bits = nearest_bf16(x);
  return y;
}
#else
__device__ __forceinline__ real_t widen(storage_t x) { return x; }
__device__ __forceinline__ storage_t narrow(real_t x) { return x; }
#endif

// x[0 .. kVector) = the columns at p, which is aligned to 16 bytes.
__device__ __forceinline__ void load_vector(const storage_t* p, real_t (&x)[kVector]) {
#if defined(MGGCN_F64)
  const double2 v = *reinterpret_cast<const double2*>(p);
  x[0] = v.x, x[1] = v.y;
#elif defined(MGGCN_BF16)
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  const unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(word[i] << 16);
    x[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
  }
#else
  const float4 v = *reinterpret_cast<const float4*>(p);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#endif
}

__device__ __forceinline__ void store_vector(storage_t* p, const real_t (&x)[kVector]) {
#if defined(MGGCN_F64)
  *reinterpret_cast<double2*>(p) = make_double2(x[0], x[1]);
#elif defined(MGGCN_BF16)
  unsigned word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = (unsigned)narrow(x[2 * i]).bits | (unsigned)narrow(x[2 * i + 1]).bits << 16;
  *reinterpret_cast<uint4*>(p) = make_uint4(word[0], word[1], word[2], word[3]);
#else
  *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
#endif
}

__device__ __forceinline__ real_t larger(real_t a, real_t b) { return a < b ? b : a; }

// a b, rounded, and never fused with what is added: minus its equal it is 0, however large.
__device__ __forceinline__ real_t rounded_product(real_t a, real_t b) {
#if defined(MGGCN_F64)
  return __dmul_rn(a, b);
#else
  return __fmul_rn(a, b);
#endif
}

__device__ __forceinline__ real_t exp_of(real_t x) {
#if defined(MGGCN_F64)
  return exp(x);
#else
  return expf(x);
#endif
}
