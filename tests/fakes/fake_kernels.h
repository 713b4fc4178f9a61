/* Kernels on the fake drivers: the host build of the real ones. */
#pragma once
#include "fake_streams.h"

typedef struct {
  uint64_t begin, end;
} kernel_range;

typedef struct {
  uint64_t address, nbytes;
  uint32_t is_write, happened;
} kernel_fault;

static int (*kernels_find)(const char *);
static int (*kernels_launch)(int, uint32_t, const void *, const kernel_range *, uint32_t, kernel_fault *);
static unsigned char *last_image;
static size_t last_image_nbytes;

/* The host build (kv_transfer.<machine>.so) that plays the GPU. */
EXPORT int fake_set_kernels(const char *path) {
  void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!lib) return -1;
  *(void **)&kernels_find = dlsym(lib, "kv_host_find");
  *(void **)&kernels_launch = dlsym(lib, "kv_host_launch");
  return kernels_find && kernels_launch ? 0 : -1;
}

/* The bytes of the last image that was loaded. */
EXPORT const unsigned char *fake_image(size_t *nbytes) {
  *nbytes = last_image_nbytes;
  return last_image;
}

static uint16_t u16(const unsigned char *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t u32(const unsigned char *p) { return u16(p) | (uint32_t)u16(p + 2) << 16; }
static uint64_t u64(const unsigned char *p) { return u32(p) | (uint64_t)u32(p + 4) << 32; }

static void keep_bytes(const void *image, size_t nbytes) {
  free(last_image);
  last_image = malloc(nbytes);
  last_image_nbytes = nbytes;
  memcpy(last_image, image, nbytes);
}

/* Keeps a copy of a 64-bit ELF image that ends with one of its header tables, as compilers write them. */
static int keep_image(const unsigned char *image, int machine, uint32_t *elf_flags, int *abi_version) {
  if (!image || memcmp(image, "\177ELF\2\1", 6) || u16(image + 18) != machine) return NO_BINARY;
  *elf_flags = u32(image + 48);
  *abi_version = image[8];
  size_t nbytes = u64(image + 40) + (size_t)u16(image + 58) * u16(image + 60);
  size_t segments_end = u64(image + 32) + (size_t)u16(image + 54) * u16(image + 56);
  if (segments_end > nbytes) nbytes = segments_end;
  if (nbytes < 64) return INVALID_IMAGE;
  keep_bytes(image, nbytes);
  return OK;
}

static int find_kernel(const char *name, uintptr_t *kernel) {
  int k = kernels_find && name ? kernels_find(name) : -1;
  if (k < 0) return NOT_FOUND;
  *kernel = 0x1000u + (uintptr_t)k; /* a handle that is no address */
  return OK;
}

static int by_begin(const void *a, const void *b) {
  uint64_t x = ((const kernel_range *)a)->begin, y = ((const kernel_range *)b)->begin;
  return x < y ? -1 : x > y;
}

/* `extra` is (1, block, 2, &nbytes, end); otherwise the first of `parameters` points to the block. */
static const void *argument_block(void **parameters, void **extra, void *end) {
  if (!extra) return parameters ? parameters[0] : NULL;
  const void *block = NULL;
  for (; *extra != end; extra += 2)
    if (*extra == (void *)1) block = extra[1];
  return block;
}

/* What the device reaches, sorted: its own memory, and what is registered at the addresses that it has there. */
static uint32_t device_ranges(int device, kernel_range *ranges) {
  uint32_t n = 0;
  for (int i = 0; i < n_allocations; i++)
    if (allocations[i].device == device) ranges[n++] = (kernel_range){allocations[i].begin, allocations[i].end};
  for (int i = 0; i < n_registrations; i++) {
    uint64_t alias = registrations[i].alias[device];
    if (alias) ranges[n++] = (kernel_range){alias, alias + registrations[i].nbytes};
  }
  qsort(ranges, n, sizeof ranges[0], by_begin);
  return n;
}

static int launch(uintptr_t kernel, uint32_t ctas, uint32_t threads, const void *block, void *stream) {
  static kernel_range ranges[2 * MAX_RANGES];
  int device = current_device(), code = stream_ok(stream);
  if (code) return code;
  if (!kernels_launch || kernel < 0x1000 || !block || !ctas || !threads || threads > 1024) return INVALID_VALUE;
  uint32_t n = device_ranges(device, ranges);
  kernel_fault fault = {0};
  faulted[device] = kernels_launch((int)(kernel - 0x1000), ctas, block, ranges, n, &fault) != 0;
  if (fault.happened)
    log_add("fault address=%#llx nbytes=%llu write=%u device=%d result=700\n", (unsigned long long)fault.address,
            (unsigned long long)fault.nbytes, fault.is_write, device);
  return faulted[device] ? ILLEGAL_ADDRESS : OK;
}
