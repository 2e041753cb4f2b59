// The gradient of edge_reduce by one operand: what an edge adds to it is scale * d, where d is, by `partial`,
//   one  g[v]      times  g[v] * a      over  g[v] / a      ratio  g[v] * (a / b) / b
// with v the edge's destination and a, b its rows of operands; 0 where `winners`, if given, names another edge of v.
#pragma once
#include "edges.cuh"

enum Partial { kOne = 0, kTimes = 1, kOver = 2, kRatio = 3 };

struct Gradient {
  EdgeRows edges;
  Operand a, b;
  const storage_t* g;
  long long ld_g;
  const int* winners;
  storage_t* out;
  long long ld_out;
  int cols, partial, narrow_out;
  real_t scale;
};

// d = what entry k of a row adds, in the columns of this lane.
__device__ __forceinline__ void derive(const Gradient& x, long long row, long long k, int column,
                                       real_t (&d)[kVector]) {
  const long long v = x.edges.place ? x.edges.ends[k] : row;
  const int place = x.edges.place ? x.edges.place[k] : (int)(k - x.edges.indptr[row]);
  real_t a[kVector] = {}, b[kVector] = {};
  load_columns<kVector>(x.g + v * x.ld_g + column, x.cols - column, rows_aligned(x.g, x.ld_g), d);
  if (x.partial != kOne) load_operand(x.a, x.edges, row, k, column, x.cols, a);
  if (x.partial == kRatio) load_operand(x.b, x.edges, row, k, column, x.cols, b);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (x.partial == kTimes) d[i] = d[i] * a[i];
    if (x.partial == kOver) d[i] = d[i] / a[i];
    if (x.partial == kRatio) d[i] = d[i] * (a[i] / b[i]) / b[i];
    const bool counts = column + i < x.cols && (!x.winners || x.winners[v * x.cols + column + i] == place);
    if (!counts) d[i] = 0;
  }
}

__device__ __forceinline__ void add(real_t (&sum)[kVector], const real_t (&d)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum[i] += d[i];
}

__device__ __forceinline__ real_t total(const real_t (&d)[kVector]) {
  real_t sum = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum += d[i];
  return sum;
}

__device__ __forceinline__ void store(const Gradient& x, long long i, int column, real_t (&d)[kVector]) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) d[j] *= x.scale;
  store_columns<kVector>(x.out + i * x.ld_out + column, x.cols - column, rows_aligned(x.out, x.ld_out), d);
}
