// gemm in AMX tiles: as gemm.cpp for operands in bfloat16, results and ways as there (docs/notes/0014).
// Tiles 0 1 / 2 3 hold 32 x 32 float sums; 4, 5 are 16 rows each of the left operand, 32 of the inner dimension ("a
// step"); 6, 7 are 16 columns each of the right one. Four loads of 1 KiB for four products, the fewest that eight tiles
// allow. Ragged edges are copied and filled with zeros: what lies behind a row may be NaN, which times zero is NaN.
//   rows  b is packed once, [panel of 32 columns][step][2 tiles]; rows of a are loaded where they lie
//   sums  kDeep rows of both operands at a time: the narrower one is transposed, the wider one packed by pairs of rows;
//         segments of whole steps, their number a function of the shape, are added in order
// The order of sums is that of the tiles, of steps and of segments: any number of threads gives the same bits.
#include <omp.h>

#include <utility>

#include "amx_tiles.h"
#include "gemm_product.h"

namespace {

constexpr int64_t kSide = 32, kTile = 1024, kPair = 2 * kTile;  // numbers; bytes of a tile and of both of an operand
constexpr int64_t kDeep = 512;                                  // kDeep of mggcn/backend/cpu/sizes.py

inline int64_t up(int64_t n) { return (n + kSide - 1) / kSide * kSide; }

// The sums in tiles 0 to 3 += left x right, `steps` steps. Left: its second tile `half` bytes on; a step takes it
// `next` bytes on. n: tiles of columns.
template <int n>
inline void multiply(int64_t steps, const char* left, int64_t stride, int64_t half, int64_t next, const char* right) {
  for (int64_t k = 0; k < steps; ++k, left += next, right += kPair) {
    amx::load<4>(left, stride), amx::load<5>(left + half, stride);
    amx::load<6>(right, 64);
    if (n > 1) amx::load<7>(right + kTile, 64);
    amx::product<0, 4, 6>();
    if (n > 1) amx::product<1, 4, 7>();
    amx::product<2, 5, 6>();
    if (n > 1) amx::product<3, 5, 7>();
  }
}

// Tiles 0 to 3: from zero, or from sums and back to them, 32 rows `ld` numbers apart.
inline void zero_sums() { amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>(); }
inline void load_sums(const float* c, int64_t ld) {
  amx::load<0>(c, 4 * ld), amx::load<1>(c + 16, 4 * ld);
  amx::load<2>(c + 16 * ld, 4 * ld), amx::load<3>(c + 16 * ld + 16, 4 * ld);
}
inline void store_sums(float* c, int64_t ld) {
  amx::store<0>(c, 4 * ld), amx::store<1>(c + 16, 4 * ld);
  amx::store<2>(c + 16 * ld, 4 * ld), amx::store<3>(c + 16 * ld + 16, 4 * ld);
}

// A copy of rows x cols numbers, element (i, d) at i step + d step_d, filled up with zeros to 32 rows of `width`.
inline void stage(const bf16* from, int64_t step, int64_t step_d, int64_t rows, int64_t cols, bf16* to, int64_t width) {
  for (int64_t i = 0; i < kSide; ++i, to += width) {
    const int64_t held = i < rows ? cols : 0;
    if (step_d == 1)
      memcpy(to, from + i * step, held * sizeof(bf16));
    else
      for (int64_t d = 0; d < held; ++d) to[d] = from[i * step + d * step_d];
    memset(to + held, 0, (width - held) * sizeof(bf16));
  }
}

// 32 rows of 32 columns, ld apart, by pairs of rows: two tiles of 16 columns.
inline void pack_pairs(const bf16* from, int64_t ld, char* to) {
  typedef uint32_t __attribute__((may_alias)) Pair;
  for (int64_t k = 0; k < 16; ++k) {
    const bf16 *lower = from + 2 * k * ld, *upper = lower + ld;
    for (int64_t half = 0; half < 2; ++half) {
      Pair* out = (Pair*)(to + half * kTile + 64 * k);
      for (int64_t n = 0; n < 16; ++n) out[n] = lower[16 * half + n].bits | (uint32_t)upper[16 * half + n].bits << 16;
    }
  }
}

// What a vector of 64 bytes takes from two others in each of its quarters, as the instructions that unpack do.
typedef uint16_t Words __attribute__((vector_size(64)));
typedef uint32_t Doubles __attribute__((vector_size(64)));
typedef uint64_t Quads __attribute__((vector_size(64)));
#if defined(__clang__)
#define MGGCN_PICK(T, a, b, ...) __builtin_shufflevector((T)(a), (T)(b), __VA_ARGS__)
#else
#define MGGCN_PICK(T, a, b, ...) __builtin_shuffle((T)(a), (T)(b), (T){__VA_ARGS__})
#endif
#define MGGCN_WORDS(q, o) q + o, 32 + q + o, q + o + 1, 33 + q + o, q + o + 2, 34 + q + o, q + o + 3, 35 + q + o
#define MGGCN_DOUBLES(q, o) q + o, 16 + q + o, q + o + 1, 17 + q + o
#define MGGCN_QUADS(q, o) q + o, 8 + q + o
template <int o>
inline Words words(Words a, Words b) {
  return MGGCN_PICK(Words, a, b, MGGCN_WORDS(0, o), MGGCN_WORDS(8, o), MGGCN_WORDS(16, o), MGGCN_WORDS(24, o));
}
template <int o>
inline Words doubles(Words a, Words b) {
  return (Words)MGGCN_PICK(Doubles, a, b, MGGCN_DOUBLES(0, o), MGGCN_DOUBLES(4, o), MGGCN_DOUBLES(8, o),
                           MGGCN_DOUBLES(12, o));
}
template <int o>
inline Words quads(Words a, Words b) {
  return (Words)MGGCN_PICK(Quads, a, b, MGGCN_QUADS(0, o), MGGCN_QUADS(2, o), MGGCN_QUADS(4, o), MGGCN_QUADS(6, o));
}

// 32 rows of 8 numbers, ld apart, become 8 rows of 32, 64 bytes apart: 24 unpackings of 32 numbers.
inline void transpose(const bf16* from, int64_t ld, char* to) {
  Words x[8], t[8];
  for (int64_t i = 0; i < 8; ++i)
    for (int64_t quarter = 0; quarter < 4; ++quarter)
      memcpy((char*)&x[i] + 16 * quarter, from + (8 * quarter + i) * ld, 16);
  for (int i = 0; i < 8; i += 2) t[i] = words<0>(x[i], x[i + 1]), t[i + 1] = words<4>(x[i], x[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = doubles<0>(t[i + j], t[i + j + 2]);
      x[i + 2 * j + 1] = doubles<2>(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    const Words pair[2] = {quads<0>(x[i], x[i + 4]), quads<1>(x[i], x[i + 4])};
    memcpy(to + 128 * i, pair, 128);
  }
}

// 32 rows of 32 columns, ld apart, transposed: two tiles of 16 columns.
inline void pack_transposed(const bf16* from, int64_t ld, char* to) {
  for (int64_t d = 0; d < kSide; d += 8) transpose(from + d, ld, to + 64 * d);
}

// b as [panel][step][2 tiles]. block: 32 x 32 numbers of this thread's.
void pack_right(const Product<bf16>& p, bf16* block) {
  const int64_t steps = up(p.inner) / kSide, panels = up(p.cols) / kSide;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < panels * steps; ++item) {
    const int64_t k = item % steps * kSide, n = item / steps * kSide;
    stage(p.b + k * p.step_k + n * p.step_n, p.step_k, p.step_n, least(kSide, p.inner - k), least(kSide, p.cols - n),
          block, kSide);
    pack_pairs(block, kSide, (char*)p.packed + item * kPair);
  }
}

// Rows [first, first + count), 64 at most, of the product into c, rows `ld_c` apart. copy: room for these rows of a.
void block_of_rows(const Product<bf16>& p, int64_t first, int64_t count, bf16* copy, float* c, int64_t ld_c) {
  const int64_t width = up(p.inner), steps = width / kSide;
  const char* left[2];
  int64_t ld[2];
  for (int64_t i = 0; i < count; i += kSide) {
    const bf16* rows = p.a + (first + i) * p.ld_a;
    bf16* staged = copy + i * width;
    const bool whole = count - i >= kSide && width == p.inner;
    if (!whole) stage(rows, p.ld_a, 1, least(kSide, count - i), p.inner, staged, width);
    left[i / kSide] = (const char*)(whole ? rows : staged);
    ld[i / kSide] = 2 * (whole ? p.ld_a : width);
  }
  for (int64_t n = 0; n < ld_c; n += kSide) {
    const char* right = (const char*)p.packed + n / kSide * steps * kPair;
    for (int64_t i = 0; i < count; i += kSide) {
      float* sums = c + i * ld_c + n;
      const int64_t stride = ld[i / kSide];
      if (p.accumulate)
        load_sums(sums, ld_c);
      else
        zero_sums();
      if (p.cols - n > 16)
        multiply<2>(steps, left[i / kSide], stride, 16 * stride, 2 * kSide, right);
      else
        multiply<1>(steps, left[i / kSide], stride, 16 * stride, 2 * kSide, right);
      store_sums(sums, ld_c);
    }
  }
}

template <class O>
void amx_rows(const Product<bf16>& p, int32_t thread) {
  const int64_t ld_c = up(p.cols);
  float* c = p.own + thread * p.ld_own;
  bf16* copy = (bf16*)(c + kRowBlock * ld_c);
  pack_right(p, (bf16*)c);
  const amx::Tiles tiles;
  blocks_of_rows<O>(p, [&](int64_t first, int64_t count) {
    if (p.accumulate)
      for (int64_t i = 0; i < count; ++i) widen_row(out_row<O>(p, first + i), c + i * ld_c, p.cols);
    block_of_rows(p, first, count, copy, c, ld_c);
    return Block<bf16>{c, ld_c};
  });
}

// An operand of a sum: columns [first, end) of `rows` rows.
struct Operand {
  const bf16* at;
  int64_t step, step_d, first, end;
};

// An operand's columns of some tiles.
inline Operand cut(Operand x, const Span& tiles) {
  x.first = tiles.begin * kSide;
  x.end = least(tiles.end * kSide, x.end);
  return x;
}

// Rows [k, k + count) of an operand as [panel][step][2 tiles]. block: 32 rows of 32 numbers.
template <class Pack>
inline void pack_rows(const Operand& x, int64_t k, int64_t count, bf16* block, char* to, Pack pack) {
  const int64_t steps = up(count) / kSide;
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t d = x.first; d < x.end; d += kSide) {
      const bf16* from = x.at + (k + s * kSide) * x.step + d * x.step_d;
      char* out = to + ((d - x.first) / kSide * steps + s) * kPair;
      const int64_t rows = least(kSide, count - s * kSide), cols = least(kSide, x.end - d);
      if (rows == kSide && cols == kSide && x.step_d == 1) {
        pack(from, x.step, out);
      } else {
        stage(from, x.step, x.step_d, rows, cols, block, kSide);
        pack(block, kSide, out);
      }
    }
}

// The sums of rows [k0, k1) into c [left columns, ld_c], from the first columns of both operands on; started: added to
// what c holds.
void sum_segment(const Operand& left, const Operand& right, int64_t k0, int64_t k1, bool started, char* own, float* c,
                 int64_t ld_c) {
  const int64_t lefts = up(left.end - left.first), rights = up(right.end - right.first);
  bf16* block = (bf16*)own;
  char *packed_left = own + kPair, *packed_right = packed_left + 2 * lefts * kDeep;
  int64_t k = k0;
  do {  // once if there is nothing to sum
    const int64_t count = least(kDeep, k1 - k), steps = up(count) / kSide;
    pack_rows(left, k, count, block, packed_left, pack_transposed);
    pack_rows(right, k, count, block, packed_right, pack_pairs);
    for (int64_t n = 0; n < rights; n += kSide)
      for (int64_t m = 0; m < lefts; m += kSide) {
        float* sums = c + m * ld_c + n;
        if (started || k > k0)
          load_sums(sums, ld_c);
        else
          zero_sums();
        multiply<2>(steps, packed_left + m / kSide * steps * kPair, 64, kTile, kPair,
                    packed_right + n / kSide * steps * kPair);
        store_sums(sums, ld_c);
      }
    k += kDeep;
  } while (k < k1);
}

template <class O>
void amx_sums(const Product<bf16>& p, int32_t thread) {
  // The narrower operand is transposed, which costs more than packing by pairs. Which one changes no bit.
  const bool swapped = p.cols < p.rows;
  Operand left = {p.a, p.ld_a, 1, 0, p.rows}, right = {p.b, p.step_k, p.step_n, 0, p.cols};
  if (swapped) std::swap(left, right);
  const int64_t ld_c = up(right.end), whole = up(left.end) * ld_c, panels = ld_c / kSide, tiles = up(left.end) / kSide;
  // Segments have whole steps, and windows begin at multiples of two: a step lies in one window.
  const Window& w = p.window;
  const int64_t steps = up(w.total) / kSide, begin = w.first / kSide, end = up(w.first + p.inner) / kSide;
  const Shares shares(p, begin, end, steps, panels, tiles);
  float* own = p.own + thread * p.ld_own;
  {
    const amx::Tiles in_use;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < shares.count(); ++item) {
      const int64_t segment = shares.segment(item);
      const Operand some = cut(left, shares.rows(item, tiles)), part = cut(right, shares.columns(item, panels));
      const int64_t k0 = steps * segment / p.segments * kSide - w.first,
                    k1 = steps * (segment + 1) / p.segments * kSide - w.first;
      sum_segment(some, part, most(k0, 0), least(k1, p.inner), k0 < 0, (char*)own,
                  p.packed + segment * whole + some.first * ld_c + part.first, ld_c);
    }
  }
  if (!w.is_last(p.inner)) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < p.rows; ++i) {
    const int64_t at = swapped ? i : i * ld_c, step = swapped ? ld_c : 1;
    for (int64_t d = 0; d < p.cols; ++d) own[d] = p.packed[at + d * step];
    for (int64_t segment = 1; segment < p.segments; ++segment)
      for (int64_t d = 0; d < p.cols; ++d) own[d] += p.packed[segment * whole + at + d * step];
    if (p.accumulate)
      for (int64_t d = 0; d < p.cols; ++d) own[d] += widen(out_row<O>(p, i)[d]);
    store_row<O>(p, i, own);
  }
}

}  // namespace

#define MGGCN_GEMM(suffix, O)                                 \
  MGGCN_EXPORT(mggcn_gemm_##suffix)(const Product<bf16>* p) { \
    _Pragma("omp parallel num_threads(p->threads)") {         \
      if (p->a_t)                                             \
        amx_sums<O>(*p, omp_get_thread_num());                \
      else                                                    \
        amx_rows<O>(*p, omp_get_thread_num());                \
    }                                                         \
  }
MGGCN_GEMM(bf16, bf16)
MGGCN_GEMM(bf16_f32, float)
