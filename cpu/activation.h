// The gradient of a row before its activation: h = out_scale * d with d = (h != 0) * keep_scale * h_scale * g.
#pragma once
#include "pieces.h"

namespace {

template <class R>
struct Activation {
  const R* h_scale;    // [V] or null
  const R* out_scale;  // [V] or null
  double keep_scale;
  int32_t masked;  // 0: no activation, d does not look at h
};

// to: takes the place of h, or is a row of another type that h is left beside. sums: null, or where the columns of d
// are added. g is of the type of storage or of sums.
template <class S, class O, class G>
__attribute__((noinline)) void gradient_row(const G* g, const S* h, O* to, int64_t cols, int64_t row,
                                            const Activation<Real<S>>& a, double* sums) {
  typedef Real<S> R;
  const R keep = (R)(float)a.keep_scale, scale = a.h_scale ? keep * a.h_scale[row] : keep;
  const auto gradient = [&](R* out, int64_t first, int64_t count) {
    const G* in = g + first;
    if (a.masked)
      for (int64_t d = 0; d < count; ++d) {
        const R product = widen(in[d]) * scale;  // before the mask: else a branch for each element
        out[d] = out[d] != (R)0 ? product : (R)0;
      }
    else
      for (int64_t d = 0; d < count; ++d) out[d] = widen(in[d]) * scale;
    if (sums)
      for (int64_t d = 0; d < count; ++d) sums[first + d] += out[d];
    if (a.out_scale) {
      const R s = a.out_scale[row];
      for (int64_t d = 0; d < count; ++d) out[d] *= s;
    }
  };
  if constexpr (std::is_same_v<S, O>)
    in_pieces(to, cols, gradient);
  else
    between(h, to, cols, gradient);
}

}  // namespace
