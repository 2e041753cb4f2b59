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
  S* carry;                               // [2, M + N]: rows of both operands that a window leaves to the next one
  int64_t rows, inner, cols, ld_a, step_k, step_n, ld_out, ld_h, ld_own, segments, first_row;
  Window window;  // of the rows whose columns are summed: rows of the result for partials, else of both operands
  int32_t a_t, accumulate, threads;
};

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

// Sums of the rows of a block before they are finished.
template <class S>
struct Block {
  Real<S>* at;
  int64_t ld;
};

// As blocks_of_rows in a window, which may have rows of few chunks: several threads multiply those of one, and finish
// them one after the other, in order.
template <class O, class S, class F>
inline void blocks_in_order(const Product<S>& p, F product) {
  const Window& w = p.window;
#pragma omp for ordered schedule(dynamic, 1)
  for (int64_t first = 0; first < p.rows; first += kRowBlock) {
    const int64_t end = least(first + kRowBlock, p.rows);
    const Block<S> c = product(first, end - first);
#pragma omp ordered
    for (int64_t v = first, next; v < end; v = next) {
      const int64_t chunk = part_of(w.total, kPartials, w.first + v);
      next = least(chunk_start(w.total, chunk + 1) - w.first, end);
      finish_rows<O>(p, v, next - v, c.at + (v - first) * c.ld, c.ld, p.partials + chunk * p.cols);
    }
  }
}

// product(first, count) for blocks of rows, handed out dynamically, which are finished at once.
template <class O, class S, class F>
inline void blocks_of_rows(const Product<S>& p, F product) {
  if (p.partials && p.rows < p.window.total) return blocks_in_order<O>(p, product);
  // With column sums the chunks are those of columns.cpp: their sums are added in order.
  const int64_t chunks = p.partials ? kPartials : (p.rows + kRowBlock - 1) / kRowBlock;
#pragma omp for schedule(dynamic, 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t end = p.partials ? chunk_start(p.rows, chunk + 1) : least((chunk + 1) * kRowBlock, p.rows);
    for (int64_t first = p.partials ? chunk_start(p.rows, chunk) : chunk * kRowBlock; first < end; first += kRowBlock) {
      const int64_t count = least(kRowBlock, end - first);
      const Block<S> c = product(first, count);
      finish_rows<O>(p, first, count, c.at, c.ld, p.partials ? p.partials + chunk * p.cols : nullptr);
    }
  }
}

// How the sums of a call are shared out: the segments that have rows here, each by columns where they are fewer than
// threads want, and in a window, which may have rows of one alone, also by rows of the result. That changes no sum.
struct Shares {
  int64_t first, segments, across, down;

  // begin, end, total: of the call, and of all windows, in rows or in steps of them. panels, tiles: of the result.
  template <class S>
  Shares(const Product<S>& p, int64_t begin, int64_t end, int64_t total, int64_t panels, int64_t tiles) {
    first = begin ? part_of(total, p.segments, begin) : 0;
    segments = (end < total ? part_of(total, p.segments, end - 1) + 1 : p.segments) - first;
    const int64_t wanted = (kItems * p.threads + segments - 1) / segments;
    across = least(wanted, panels);
    down = p.inner < p.window.total ? least((wanted + across - 1) / across, tiles) : 1;
  }
  int64_t count() const { return segments * across * down; }
  int64_t segment(int64_t item) const { return first + item / (across * down); }
  // Part of `panels` panels, or of `tiles` tiles, that an item has.
  Span columns(int64_t item, int64_t panels) const { return part(item % across, across, panels); }
  Span rows(int64_t item, int64_t tiles) const { return part(item / across % down, down, tiles); }

 private:
  static Span part(int64_t i, int64_t parts, int64_t all) { return {all * i / parts, all * (i + 1) / parts}; }
};

}  // namespace
