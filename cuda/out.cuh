// The type of results: that of storage; -DMGGCN_OUT_REAL: float beside bf16 storage; -DMGGCN_OUT_BF16: bf16 beside
// float storage. Values are rounded once, when they are stored.
#pragma once
#include "common.cuh"

#if defined(MGGCN_OUT_REAL)
typedef real_t out_t;
__device__ __forceinline__ real_t widen_out(out_t x) { return x; }
__device__ __forceinline__ out_t narrow_out(real_t x) { return x; }
#elif defined(MGGCN_OUT_BF16)
struct out_t {
  unsigned short bits;
};
__device__ __forceinline__ real_t widen_out(out_t x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ out_t narrow_out(real_t x) { return {nearest_bf16(x)}; }
#else
typedef storage_t out_t;
__device__ __forceinline__ real_t widen_out(out_t x) { return widen(x); }
__device__ __forceinline__ out_t narrow_out(real_t x) { return narrow(x); }
#endif

// kVector results at once, in words of one access each.
#if defined(MGGCN_OUT_REAL)
typedef float4 out_word_t;
#elif defined(MGGCN_OUT_BF16)
typedef uint2 out_word_t;
#elif defined(MGGCN_F64)
typedef double2 out_word_t;
#elif defined(MGGCN_BF16)
typedef uint4 out_word_t;
#else
typedef float4 out_word_t;
#endif
constexpr int kOutWords = kVector * (int)sizeof(out_t) / (int)sizeof(out_word_t);

// x[0 .. kVector) = the results at p, which is aligned to 16 bytes, or to 8 if bf16 beside float32.
__device__ __forceinline__ void load_out_vector(const out_t* p, real_t (&x)[kVector]) {
#if defined(MGGCN_OUT_REAL)
#pragma unroll
  for (int w = 0; w < kOutWords; ++w) {
    const float4 v = reinterpret_cast<const float4*>(p)[w];
    x[4 * w] = v.x, x[4 * w + 1] = v.y, x[4 * w + 2] = v.z, x[4 * w + 3] = v.w;
  }
#elif defined(MGGCN_OUT_BF16)
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  x[0] = __uint_as_float(v.x << 16), x[1] = __uint_as_float(v.x & 0xffff0000u);
  x[2] = __uint_as_float(v.y << 16), x[3] = __uint_as_float(v.y & 0xffff0000u);
#else
  load_vector(p, x);
#endif
}

// The words of kVector results.
__device__ __forceinline__ void pack_out(const real_t (&x)[kVector], out_word_t (&words)[kOutWords]) {
#if defined(MGGCN_OUT_REAL)
#pragma unroll
  for (int w = 0; w < kOutWords; ++w) words[w] = make_float4(x[4 * w], x[4 * w + 1], x[4 * w + 2], x[4 * w + 3]);
#elif defined(MGGCN_OUT_BF16)
  words[0] = make_uint2((unsigned)nearest_bf16(x[0]) | (unsigned)nearest_bf16(x[1]) << 16,
                        (unsigned)nearest_bf16(x[2]) | (unsigned)nearest_bf16(x[3]) << 16);
#else
  store_vector(reinterpret_cast<storage_t*>(&words), x);
#endif
}
