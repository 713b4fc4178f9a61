// The host stand-in's launcher: every thread of the grid, one after the other, in the calling thread.
#pragma once

typedef void (*kv_host_kernel)(const kv_transfer_args &, kv_thread);

static const struct {
  const char *name;
  kv_host_kernel run;
} kv_host_kernels[] = {
    {"kv_transfer_w16_i64", kv_transfer_w16_i64}, {"kv_transfer_w8_i64", kv_transfer_w8_i64},
    {"kv_transfer_w4_i64", kv_transfer_w4_i64},   {"kv_transfer_w1_i64", kv_transfer_w1_i64},
    {"kv_transfer_w16_i32", kv_transfer_w16_i32}, {"kv_transfer_w8_i32", kv_transfer_w8_i32},
    {"kv_transfer_w4_i32", kv_transfer_w4_i32},   {"kv_transfer_w1_i32", kv_transfer_w1_i32},
};
static const int kv_host_n_kernels = sizeof kv_host_kernels / sizeof kv_host_kernels[0];

extern "C" __attribute__((visibility("default"))) kv_u32 kv_host_abi() { return KV_ABI; }

// The kernel's number by its name, or -1.
extern "C" __attribute__((visibility("default"))) int kv_host_find(const char *name) {
  for (int k = 0; k < kv_host_n_kernels; k++) {
    const char *x = kv_host_kernels[k].name, *y = name;
    while (*x && *x == *y) x++, y++;
    if (*x == *y) return k;
  }
  return -1;
}

// Returns 0, 500 for a kernel number that does not exist, or 700 with `fault` filled in: the drivers' codes.
// A warp's threads run from the last lane to lane 0: what lane 0 signals is then true for the whole warp.
extern "C" __attribute__((visibility("default"))) int kv_host_launch(int kernel, kv_u32 ctas, const kv_transfer_args *args,
                                                                     const kv_range *ranges, kv_u32 n_ranges,
                                                                     kv_fault *fault) {
  if (kernel < 0 || kernel >= kv_host_n_kernels) return 500;
  const kv_transfer_args &a = *args;
  for (kv_u32 cta = 0; cta < ctas; cta++)
    for (kv_u32 warp = 0; warp < a.warps_per_cta; warp++)
      for (kv_u32 lane = KV_WARP; lane-- > 0;) {
        kv_thread me = {warp * KV_WARP + lane, cta, ranges, n_ranges, fault, {0, 0}};
        kv_host_kernels[kernel].run(a, me);
        if (fault->happened) return 700;
      }
  return 0;
}
