// gather: out[g, :] = sum over j < degree of dense[index[g degree + j], :], the ceiling of every sparse product:
// rows at random, 16 bytes a lane, eight in flight; no row pointers, no epilogue, all sums equally long.
// in    index int32 [groups degree], dense f32 [N, 4 vectors] row-major, both 16-byte aligned; degree a multiple of 8
// out   f32 [groups, 4 vectors]
// grid  a thread for each 16 bytes of the result; block = 128
// moves groups degree (16 vectors + 4) + groups 16 vectors bytes
extern "C" __global__ void gather(const int* __restrict__ index, const float* __restrict__ dense,
                                  float* __restrict__ out, long long groups, int degree, int vectors) {
  const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long group = thread / vectors;
  const int lane = (int)(thread % vectors);
  if (group >= groups) return;
  const int4* mine = reinterpret_cast<const int4*>(index + group * degree);
  const float4* rows = reinterpret_cast<const float4*>(dense) + lane;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int j = 0; j < degree / 4; j += 2) {
    const int4 a = mine[j], b = mine[j + 1];
    const int row[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    float4 got[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) got[i] = rows[(long long)row[i] * vectors];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum.x += got[i].x;
      sum.y += got[i].y;
      sum.z += got[i].z;
      sum.w += got[i].w;
    }
  }
  reinterpret_cast<float4*>(out)[group * vectors + lane] = sum;
}
