// A dense product as every instruction set takes it, how its rows are shared out, and what becomes of a row that is
// summed: the epilogue, or the way back through an activation, and the one rounding to the stored type.
#pragma once
#include "activation.h"
#include "epilogue.h"

namespace {

constexpr int64_t kRowBlock = 64;  // rows of a that meet every panel before the next ones come
constexpr int64_t kItems = 2;      // parts of the work that every thread should find at least

// Only the functions that store results know their type O: what multiplies is compiled once for S.
template <class S>
struct Product {  // `GemmArgs` of mggcn/backend/cpu/structs.py
  const S* a;
  const S* b;
  void* out;                              // O
  const S* h;                             // the activation, if there is one: out itself where S is O
  const Epilogue<Real<S>>* epilogue;      // or null
  const Activation<Real<S>>* activation;  // or null: then the result is the gradient before it
  double* partials;                       // [kPartials, N] or null: column sums of the gradient are added
  Real<S>* packed;                        // rows: b in panels; sums: the sums of every segment
  Real<S>* own;                           // [threads, ld_own]; sums: both operands, packed
  int64_t rows, inner, cols, ld_a, step_k, step_n, ld_out, ld_h, ld_own, segments, first_row;
  int32_t a_t, accumulate, threads;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class O, class S>
inline O* out_row(const Product<S>& p, int64_t i) {
  return (O*)p.out + i * p.ld_out;
}

// Row i of the result from what is left after the product in z, which may be the place of the result.
template <class O, class S>
inline void store_row(const Product<S>& p, int64_t i, Real<S>* z) {
  if (p.epilogue) finish_row(z, 0, p.cols, p.first_row + i, *p.epilogue);
  O* out = out_row<O>(p, i);
  if ((void*)z != (void*)out) narrow_row(z, out, p.cols);
}

// Rows [first, first + count) of the result from their sums c: stored, or taken to before the activation.
template <class O, class S>
inline void finish_rows(const Product<S>& p, int64_t first, int64_t count, Real<S>* c, int64_t ld_c, double* sums) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<S, O> || std::is_same_v<S, Real<S>>) {
      if (p.activation) {
        gradient_row(c + i * ld_c, p.h + (first + i) * p.ld_h, out_row<O>(p, first + i), p.cols,
                     p.first_row + first + i, *p.activation, sums);
        continue;
      }
    }
    store_row<O>(p, first + i, c + i * ld_c);
  }
}

// f(first, count, column sums or null) for blocks of rows, handed out dynamically.
template <class S, class F>
inline void for_blocks(const Product<S>& p, F f) {
  // With column sums the chunks are those of columns.cpp: their sums are added in order.
  const int64_t chunks = p.partials ? kPartials : (p.rows + kRowBlock - 1) / kRowBlock;
#pragma omp for schedule(dynamic, 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t end = p.partials ? chunk_start(p.rows, chunk + 1) : least((chunk + 1) * kRowBlock, p.rows);
    for (int64_t first = p.partials ? chunk_start(p.rows, chunk) : chunk * kRowBlock; first < end; first += kRowBlock)
      f(first, least(kRowBlock, end - first), p.partials ? p.partials + chunk * p.cols : nullptr);
  }
}

}  // namespace
