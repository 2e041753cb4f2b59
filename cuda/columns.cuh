// W columns of a row at once: 16-byte accesses where the row allows them, single ones at its end and in unaligned rows.
// Nothing beyond the row's `left` columns is read or written.
#pragma once
#include "out.cuh"

// Whether every row of a matrix begins at a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ bool rows_aligned(const T* p, long long ld) {
  return (((unsigned long long)p | (unsigned long long)ld * sizeof(T)) & 15) == 0;
}

// x = W columns at p, 0 beyond the row's end; W is a multiple of kVector.
template <int W>
__device__ __forceinline__ void load_columns(const storage_t* p, int left, bool aligned, real_t (&x)[W]) {
  if (aligned && left >= W) {
#pragma unroll
    for (int i = 0; i < W; i += kVector) load_vector(p + i, reinterpret_cast<real_t(&)[kVector]>(x[i]));
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) x[i] = i < left ? widen(p[i]) : (real_t)0;
  }
}

// x = kVector columns at p, of which `left`, at least one, are the row's: no load hangs on a condition, so that those
// of several rows are under way together. With -DMGGCN_TIGHT pieces may be unaligned or end behind the row; without it
// what is behind is read.
__device__ __forceinline__ void load_piece(const storage_t* p, int left, real_t (&x)[kVector]) {
#ifdef MGGCN_TIGHT
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const real_t value = widen(p[i < left ? i : 0]);
    x[i] = i < left ? value : (real_t)0;
  }
#else
  load_vector(p, x);
#endif
}

// The same of results that lie there.
template <int W>
__device__ __forceinline__ void load_out_columns(const out_t* p, int left, bool aligned, real_t (&x)[W]) {
  if (aligned && left >= W) {
#pragma unroll
    for (int i = 0; i < W; i += kVector) load_out_vector(p + i, reinterpret_cast<real_t(&)[kVector]>(x[i]));
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) x[i] = i < left ? widen_out(p[i]) : (real_t)0;
  }
}

template <int W>
__device__ __forceinline__ void store_columns(out_t* p, int left, bool aligned, const real_t (&x)[W]) {
  if (aligned && left >= W) {
#pragma unroll
    for (int i = 0; i < W; i += kVector) {
      out_word_t words[kOutWords];
      pack_out(reinterpret_cast<const real_t(&)[kVector]>(x[i]), words);
#pragma unroll
      for (int w = 0; w < kOutWords; ++w) reinterpret_cast<out_word_t*>(p + i)[w] = words[w];
    }
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i)
      if (i < left) p[i] = narrow_out(x[i]);
  }
}
