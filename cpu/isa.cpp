// mggcn_isas: how many of the instruction sets of kernels the processor and its system have, in this order: baseline,
// avx2, avx512, avx512_bf16. Who has one has those before.
#if defined(__x86_64__)
extern "C" __attribute__((visibility("default"))) int mggcn_isas() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return 2;
  return __builtin_cpu_supports("avx512bf16") ? 4 : 3;
}
#else
extern "C" __attribute__((visibility("default"))) int mggcn_isas() { return 1; }
#endif
