// Some columns of a row at a time in double, whatever they are stored as, and single ones at its end.
#pragma once
#include "common.h"

namespace {

constexpr int kSlots = 4;  // vectors whose sums are under way at once

// As many columns as a register has doubles; they are summed in one of the slots.
template <int kSlot>
struct Wide {
  static constexpr int width = kVectorBytes / 8, slot = kSlot;
  typedef Vector<double>::type type;
  typedef float floats __attribute__((vector_size(kVectorBytes / 2)));
  typedef float any_floats __attribute__((vector_size(kVectorBytes / 2), aligned(4), may_alias));

  static MGGCN_INLINE type load(const double* p) { return Vector<double>::load(p); }
  static MGGCN_INLINE type load(const float* p) {
    return __builtin_convertvector((floats) * reinterpret_cast<const any_floats*>(p), type);
  }
  static MGGCN_INLINE type load(const bf16* p) {
    float x[width];
    for (int i = 0; i < width; ++i) x[i] = widen(p[i]);
    return load(x);
  }
  static MGGCN_INLINE void store(double* p, type x) { Vector<double>::store(p, x); }
  static MGGCN_INLINE void store(float* p, type x) {
    *reinterpret_cast<any_floats*>(p) = __builtin_convertvector(x, floats);
  }
  static MGGCN_INLINE void store(bf16* p, type x) {
    float y[width];
    store(y, x);
    for (int i = 0; i < width; ++i) p[i] = narrow<bf16>(y[i]);
  }
};

// One column.
struct One {
  static constexpr int width = 1;
  typedef double type;

  template <class S>
  static MGGCN_INLINE double load(const S* p) {
    return (double)widen(*p);
  }
  template <class S>
  static MGGCN_INLINE void store(S* p, double x) {
    *p = narrow<S>((Real<S>)x);
  }
};

// Calls f(Wide or One, first column) for all columns of a row.
template <class F>
MGGCN_INLINE void over_columns(int64_t cols, const F& f) {
  constexpr int w = Wide<0>::width;
  int64_t d = 0;
  for (; d + kSlots * w <= cols; d += kSlots * w) {
    f(Wide<0>{}, d);
    f(Wide<1>{}, d + w);
    f(Wide<2>{}, d + 2 * w);
    f(Wide<3>{}, d + 3 * w);
  }
  for (; d + w <= cols; d += w) f(Wide<0>{}, d);
  for (; d < cols; ++d) f(One{}, d);
}

// A sum over the columns of a row: several sums and one of the columns at its end, added in an order that is fixed.
struct RowSum {
  Vector<double>::type slots[kSlots] = {};
  double one = 0;

  template <class L>
  MGGCN_INLINE void add(typename L::type x) {
    if constexpr (L::width == 1)
      one += x;
    else
      slots[L::slot] += x;
  }
  MGGCN_INLINE double total() const {
    const Vector<double>::type sums = (slots[0] + slots[1]) + (slots[2] + slots[3]);
    double sum = one;
    for (int i = 0; i < Wide<0>::width; ++i) sum += sums[i];
    return sum;
  }
};

}  // namespace
