// The epilogue of a row: z = out_scale * drop(relu(row_scale * z + bias)); null pointers and zeros switch parts off.
// Twin: cpu/epilogue.h. Dropout is Philox4x32-10 (Salmon et al., SC'11): key (seed, epoch), counter (column / 8, id
// low, id high, layer); the 16-bit word (column mod 8), from the low half of the first output on, keeps if >=
// threshold. NaN passes through ReLU, so that a broken sum is seen in the loss.
#pragma once
#include "common.cuh"

struct Dropout {
  const long long* clock;     // [2] seed and epoch, on the device: a captured epoch reads the current ones
  unsigned layer, threshold;  // threshold = round(65536 p); 0 drops nothing
  float keep_scale;           // 65536 / (65536 - threshold)
};

struct Epilogue {
  const real_t* row_scale;   // [V] or null
  const real_t* bias;        // [D] or null
  const real_t* out_scale;   // [V] or null
  const long long* row_ids;  // [V] original ids, read if dropout is on
  Dropout dropout;
  int relu;
};

struct Philox {
  unsigned word[4];  // 8 words of 16 bits: columns 8 group .. 8 group + 7
};

__device__ __forceinline__ Philox philox(const Dropout& key, long long id, unsigned group) {
  unsigned c0 = group, c1 = (unsigned)id, c2 = (unsigned)((unsigned long long)id >> 32), c3 = key.layer;
  unsigned k0 = (unsigned)key.clock[0], k1 = (unsigned)key.clock[1];
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  Philox p;
  p.word[0] = c0, p.word[1] = c1, p.word[2] = c2, p.word[3] = c3;
  return p;
}

__device__ __forceinline__ bool kept(const Philox& p, int column, unsigned threshold) {
  const int w = column & 7;
  const unsigned pair = w < 4 ? (w < 2 ? p.word[0] : p.word[1]) : (w < 6 ? p.word[2] : p.word[3]);
  return ((w & 1 ? pair >> 16 : pair & 0xffffu)) >= threshold;
}

// Columns column .. column + W - 1 of row `row`; W divides 8 and column. Columns from `cols` on are left alone.
template <int W>
__device__ __forceinline__ void finish_columns(real_t (&z)[W], long long row, int column, int cols, const Epilogue& e) {
  const real_t before = e.row_scale ? e.row_scale[row] : (real_t)1;
  const real_t after = e.out_scale ? e.out_scale[row] : (real_t)1;
  Philox p;
  if (e.dropout.threshold) p = philox(e.dropout, e.row_ids[row], (unsigned)column / 8);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (column + i >= cols) break;
    real_t x = z[i];
    if (e.row_scale) x *= before;
    if (e.bias) x += e.bias[column + i];
    if (e.relu) x = x < (real_t)0 ? (real_t)0 : x;
    if (e.dropout.threshold)
      x = kept(p, column + i, e.dropout.threshold) ? x * (real_t)e.dropout.keep_scale : (real_t)0;
    if (e.out_scale) x *= after;
    z[i] = x;
  }
}
