// The epilogue of a row: z = out_scale * drop(relu(row_scale * z + bias)); null pointers and zeros switch parts off.
// Scales are in the type of sums, one per row. NaN passes through ReLU, so that a broken sum is seen in the loss.
// `first` is the column of the row at which z begins, a multiple of 8: columns may be finished in several pieces.
#pragma once
#include "philox.h"

namespace {

template <class T>
struct Epilogue {
  const T* row_scale;      // [V] or null
  const T* bias;           // [D] or null
  const T* out_scale;      // [V] or null
  const int64_t* row_ids;  // [V] original ids, read if dropout is on
  Dropout dropout;
  int32_t relu;
};

template <class T>
inline void drop_row(T* z, int64_t first, int64_t cols, int64_t id, const Dropout& dropout) {
  const T scale = (T)(float)dropout.keep_scale;
  uint16_t words[64];
  for (int64_t at = 0; at < cols; at += 64) {
    const int64_t count = cols - at < 64 ? cols - at : 64;
    const uint32_t group = dropout.first_group + (uint32_t)((first + at) / 8);
    philox_words(dropout, id, group, words);
    for (int64_t d = 0; d < count; ++d) z[at + d] = words[d] >= dropout.threshold ? z[at + d] * scale : (T)0;
  }
}

// Not inlined, nor is gradient_row of activation.h: a call for a row is nothing, and a copy for each kernel and type is
// seconds of compiling.
template <class T>
__attribute__((noinline)) void finish_row(T* z, int64_t first, int64_t cols, int64_t row, const Epilogue<T>& e) {
  if (e.row_scale) {
    const T s = e.row_scale[row];
    for (int64_t d = 0; d < cols; ++d) z[d] *= s;
  }
  if (e.bias)
    for (int64_t d = 0; d < cols; ++d) z[d] += e.bias[first + d];
  if (e.relu)
    for (int64_t d = 0; d < cols; ++d) z[d] = z[d] < (T)0 ? (T)0 : z[d];
  if (e.dropout.threshold) drop_row(z, first, cols, e.row_ids[row], e.dropout);
  if (e.out_scale) {
    const T s = e.out_scale[row];
    for (int64_t d = 0; d < cols; ++d) z[d] *= s;
  }
}

}  // namespace
