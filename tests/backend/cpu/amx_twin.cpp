// What AMX's products of bfloat16 are, number by number: the scalar twin of cpu/gemm_amx.cpp.
//   out[i, j] = sum over k of a[i, k] b[k, j]; a: element (i, k) at i step_i + k step_k, b [inner, cols] with ld_b.
// The inner dimension goes in steps of 32, its last one filled up with zeros. Of a step the products of even k are
// summed from zero in order, each step fused and rounded once, then those of odd k; both sums are added, then added to
// the number's sum. Numbers below the normal ones count as zero, before and after. Segments of whole steps are summed
// from zero and added in order without that.
#include <cmath>
#include <cstdint>
#include <cstring>

static float normal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
static float number(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, 4);
  return normal(x);
}

extern "C" void amx_twin(const uint16_t* a, int64_t step_i, int64_t step_k, const uint16_t* b, int64_t ld_b, float* out,
                         int64_t rows, int64_t inner, int64_t cols, int64_t segments, int32_t from_out) {
  const int64_t steps = (inner + 31) / 32;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) {
      float whole = 0;
      for (int64_t segment = 0; segment < segments; ++segment) {
        float sum = from_out ? out[i * cols + j] : 0.0f;
        for (int64_t step = steps * segment / segments; step < steps * (segment + 1) / segments; ++step) {
          float both[2] = {0, 0};
          for (int64_t k = step * 32; k < step * 32 + 32; ++k) {
            const float x = k < inner ? number(a[i * step_i + k * step_k]) : 0.0f;
            const float y = k < inner ? number(b[k * ld_b + j]) : 0.0f;
            both[k % 2] = normal(std::fma(x, y, both[k % 2]));
          }
          sum = normal(normal(sum) + normal(both[0] + both[1]));
        }
        whole = segment ? whole + sum : sum;
      }
      out[i * cols + j] = whole;
    }
}
