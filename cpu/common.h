// What every kernel shares: the names of an instruction set, vectors, storage types, and the chunks of sums.
// Each .cpp is compiled once per instruction set (MGGCN_ISA = baseline, avx2; gemm.cpp also avx512, avx512_bf16); all
// code but the exported C functions lies in an anonymous namespace, so that no inlined copy of one set is linked into
// the other.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#define MGGCN_JOIN2(a, b) a##_##b
#define MGGCN_JOIN(a, b) MGGCN_JOIN2(a, b)
#define MGGCN_EXPORT(name) extern "C" __attribute__((visibility("default"))) void MGGCN_JOIN(name, MGGCN_ISA)

// What must stay in registers: a call would take it through memory.
#define MGGCN_INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kMaxTile = 12;  // accumulators per row pass: 12 of the 16 registers
#else
constexpr int kVectorBytes = 16;
constexpr int kMaxTile = 8;
#endif

template <class T, int kBytes = kVectorBytes>
struct Vector {
  static constexpr int width = kBytes / sizeof(T);
  typedef T type __attribute__((vector_size(kBytes)));
  typedef T unaligned __attribute__((vector_size(kBytes), aligned(sizeof(T)), may_alias));
  static inline type load(const T* p) { return (type) * reinterpret_cast<const unaligned*>(p); }
  static inline void store(T* p, type v) { *reinterpret_cast<unaligned*>(p) = v; }
  static inline type fill(T x) { return x - type{}; }
};

// bfloat16: the upper half of a float. Stored only; sums, scales and edge values beside it are float.
struct bf16 {
  uint16_t bits;
};

template <class S>
struct RealOf {
  typedef S type;
};
template <>
struct RealOf<bf16> {
  typedef float type;
};
template <class S>
using Real = typename RealOf<S>::type;

template <class T>
inline T widen(T x) {
  return x;
}
inline float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <class S>
inline S narrow(Real<S> x) {
  if constexpr (std::is_same_v<S, bf16>) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return bf16{(uint16_t)(x == x ? rounded : bits >> 16 | 0x40)};
  } else {
    return x;
  }
}

// Fixed number of row chunks whose partial sums are added in order: sums do not depend on the number of threads.
constexpr int kPartials = 64;

inline int64_t chunk_start(int64_t rows, int64_t chunk) { return rows * chunk / kPartials; }

// The rows of a call: all that its sums run over, or a window of these, rows first, ... of `total`. Sums then go on
// from where the window before has left them, row after row, so that windows change no bit.
struct Window {
  int64_t first, total;

  bool is_last(int64_t rows) const { return first + rows == total; }
};

// Rows [begin, end) of a call; none if end is not behind begin.
struct Span {
  int64_t begin, end;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The rows of a chunk among the `rows` rows of a call.
inline Span chunk_rows(const Window& w, int64_t rows, int64_t chunk) {
  return {most(chunk_start(w.total, chunk) - w.first, 0), least(chunk_start(w.total, chunk + 1) - w.first, rows)};
}

// The last of `parts` parts, begun at total * part / parts, that begins at or before a row.
inline int64_t part_of(int64_t total, int64_t parts, int64_t row) { return (parts * (row + 1) - 1) / total; }

// Behind the last row: adds the losses of all chunks, in order, to the loss.
inline void add_losses(const Window& w, int64_t rows, const double* losses, double inv_count, double* loss) {
  if (!w.is_last(rows)) return;
  double sum = 0;
  for (int c = 0; c < kPartials; ++c) sum += losses[c];
  *loss += sum * inv_count;
}

}  // namespace
