// The epilogue of a row: z = out_scale * drop(relu(row_scale * z + bias)); null pointers and zeros switch parts off.
// Scales are in the storage type, one per row. NaN passes through ReLU, so that a broken sum is seen in the loss.
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
inline void drop_row(T* z, int64_t cols, int64_t id, const Dropout& dropout) {
  const T scale = (T)(float)dropout.keep_scale;
  uint16_t words[64];
  for (int64_t first = 0; first < cols; first += 64) {
    philox_words(dropout, id, (uint32_t)(first / 8), words);
    const int64_t count = cols - first < 64 ? cols - first : 64;
    for (int64_t d = 0; d < count; ++d) z[first + d] = words[d] >= dropout.threshold ? z[first + d] * scale : (T)0;
  }
}

template <class T>
inline void finish_row(T* z, int64_t cols, int64_t row, const Epilogue<T>& e) {
  if (e.row_scale) {
    const T s = e.row_scale[row];
    for (int64_t d = 0; d < cols; ++d) z[d] *= s;
  }
  if (e.bias)
    for (int64_t d = 0; d < cols; ++d) z[d] += e.bias[d];
  if (e.relu)
    for (int64_t d = 0; d < cols; ++d) z[d] = z[d] < (T)0 ? (T)0 : z[d];
  if (e.dropout.threshold) drop_row(z, cols, e.row_ids[row], e.dropout);
  if (e.out_scale) {
    const T s = e.out_scale[row];
    for (int64_t d = 0; d < cols; ++d) z[d] *= s;
  }
}

}  // namespace
