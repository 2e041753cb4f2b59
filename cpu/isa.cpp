// mggcn_isa: the instruction sets of this build that the processor has; the caller picks the last bit set.
#if defined(__x86_64__)
extern "C" __attribute__((visibility("default"))) int mggcn_has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
extern "C" __attribute__((visibility("default"))) int mggcn_has_avx2() { return 0; }
#endif
