// AMX tiles: eight registers of 16 rows of 64 bytes, and the one product that bfloat16 has.
//   load<t>, store<t>, zero<t>: tile t from or to rows `stride` bytes apart
//   product<c, a, b>: c[16, 16] float += a[16, 32] bf16  b[32, 16] bf16, b by pairs: row k holds b[2k, n], b[2k+1, n]
//   Tiles: while one lives, its thread has tiles of full size. Every thread needs its own. The process must have been
//   granted them (mggcn/backend/cpu/machine.py).
// MGGCN_AMX_EMULATED: the same bits from plain C++, for any processor. What a product does (Intel's manual; compared
// bit by bit with a processor, also for subnormal numbers, infinities and NaN): the even and the odd numbers of the
// inner dimension are summed apart, from zero, in order, each step a fused multiply-add; both sums are added, then
// added to c. All roundings are to nearest even; subnormal operands count as zero, subnormal results become zero.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {
namespace amx {

#ifdef MGGCN_AMX_EMULATED
struct Tile {
  alignas(64) uint32_t row[16][16];
};
inline thread_local Tile tile[8];
struct [[maybe_unused]] Tiles {};

inline float normal(uint32_t bits) {
  if (!(bits & 0x7f800000)) bits &= 0x80000000;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float normal(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return normal(bits);
}
template <int t>
inline void zero() {
  tile[t] = Tile{};
}
template <int t>
inline void load(const void* from, int64_t stride) {
  for (int i = 0; i < 16; ++i) memcpy(tile[t].row[i], (const char*)from + i * stride, 64);
}
template <int t>
inline void store(void* to, int64_t stride) {
  for (int i = 0; i < 16; ++i) memcpy((char*)to + i * stride, tile[t].row[i], 64);
}
template <int c, int a, int b>
inline void product() {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        const uint32_t x = tile[a].row[m][k], y = tile[b].row[k][n];
        even = normal(std::fma(normal(x << 16), normal(y << 16), even));
        odd = normal(std::fma(normal(x & 0xffff0000), normal(y & 0xffff0000), odd));
      }
      const float sum = normal(normal(tile[c].row[m][n]) + normal(even + odd));
      memcpy(&tile[c].row[m][n], &sum, 4);
    }
}
#else
// Instructions as text, not GCC's intrinsics: those of GCC 12 name only the first 8 bytes of a configuration as read,
// and no memory at all as read by a load, so that stores before them are moved or dropped.
struct alignas(64) Layout {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
struct Tiles {
  Tiles() {
    const Layout layout;
    asm volatile("ldtilecfg %0" : : "m"(layout));
  }
  // Else the kernel would save 8 KiB more whenever it switches threads.
  ~Tiles() { asm volatile("tilerelease"); }
};
template <int t>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(t));
}
template <int t>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(t) : "memory");
}
template <int t>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(t) : "memory");
}
template <int c, int a, int b>
inline void product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}
#endif

}  // namespace amx
}  // namespace
