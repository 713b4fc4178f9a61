/* A libcuda.so.1 without a GPU. What it does is in the four headers beside it; here is how CUDA calls it.

   -DNO_BATCH leaves out the batch copy, -DBATCH_V1 has CUDA 12.8's only, -DBATCH_V2 has CUDA 13's only. */
#include "fake_kernels.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct {
  int retained;
} context;
typedef context *CUcontext;
typedef void *CUstream;
typedef void *CUevent;

#define POINTER(p) ((unsigned long long)(uintptr_t)(p))

static context contexts[MAX_DEVICES];
static __thread CUcontext stack[64];
static __thread int stack_depth;

static int current_device(void) { return stack_depth ? (int)(stack[stack_depth - 1] - contexts) : -1; }

static void reset_platform(void) {
  memset(contexts, 0, sizeof contexts);
  stack_depth = 0; /* of this thread; other threads have ended by now */
}

static int device_ok(int device) { return device >= 0 && device < n_devices ? OK : INVALID_DEVICE; }

/* ---- the driver and its devices --------------------------------------------------------------------------------- */

static int begin(unsigned flags) {
  if (flags) return INVALID_VALUE;
  if (!n_devices) return NO_DEVICE;
  initialised_by = getpid();
  return OK;
}
EXPORT CUresult cuInit(unsigned flags) { CALL("cuInit", ANYTIME, begin(flags), " flags=%u", flags); }

#if defined(NO_BATCH) || defined(BATCH_V1)
#define VERSION 12080
#else
#define VERSION 13000
#endif
EXPORT CUresult cuDriverGetVersion(int *version) { return version ? (*version = VERSION, OK) : INVALID_VALUE; }

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
  static const struct {
    int code;
    const char *name;
  } names[] = {{OK, "CUDA_SUCCESS"},
               {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
               {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
               {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
               {4, "CUDA_ERROR_DEINITIALIZED"},
               {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
               {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
               {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
               {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
               {NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
               {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
               {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
               {NOT_READY, "CUDA_ERROR_NOT_READY"},
               {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
               {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
               {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
               {719, "CUDA_ERROR_LAUNCH_FAILED"},
               {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
               {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (names[i].code == error) return *name = names[i].name, OK;
  return *name = NULL, INVALID_VALUE;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

EXPORT CUresult cuDeviceGetCount(int *count) {
  CALL("cuDeviceGetCount", INITIALISED, (*count = n_devices, OK), " count=%d", n_devices);
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  CALL("cuDeviceGet", INITIALISED, (*device = ordinal, device_ok(ordinal)), " ordinal=%d", ordinal);
}
EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  CALL("cuDeviceGetName", INITIALISED, (snprintf(name, (size_t)length, "Fake H200 %d", device), device_ok(device)),
       " ordinal=%d", device);
}
EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
  CALL("cuDeviceGetPCIBusId", INITIALISED,
       (snprintf(text, (size_t)length, "0000:%02X:00.0", 0xA0 + device), device_ok(device)), " ordinal=%d", device);
}

static int attribute_of(int attribute) {
  int value;
  if (overridden(attribute, &value)) return value;
  switch (attribute) {
    case 1: return 1024;         /* MAX_THREADS_PER_BLOCK */
    case 10: return 32;          /* WARP_SIZE */
    case 16: return 132;         /* MULTIPROCESSOR_COUNT */
    case 19: return 1;           /* CAN_MAP_HOST_MEMORY */
    case 41: return 1;           /* UNIFIED_ADDRESSING */
    case 75: return 9;           /* COMPUTE_CAPABILITY_MAJOR */
    case 76: return 0;           /* COMPUTE_CAPABILITY_MINOR */
    case 91: return !alias_mode; /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 122: return 1;          /* CAN_USE_64_BIT_STREAM_MEM_OPS */
    default: return 0;
  }
}
EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  CALL("cuDeviceGetAttribute", INITIALISED, (*value = attribute_of(attribute), device_ok(device)),
       " attribute=%d ordinal=%d", attribute, device);
}

/* ---- contexts --------------------------------------------------------------------------------------------------- */

static int retain(CUcontext *out, int device) {
  if (device_ok(device)) return INVALID_DEVICE;
  contexts[device].retained++;
  *out = &contexts[device];
  return OK;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
  CALL("cuDevicePrimaryCtxRetain", INITIALISED, retain(out, device), " ordinal=%d", device);
}
static int release(int device) {
  if (device_ok(device) || !contexts[device].retained) return INVALID_CONTEXT;
  contexts[device].retained--;
  return OK;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  CALL("cuDevicePrimaryCtxRelease_v2", INITIALISED, release(device), " ordinal=%d", device);
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  CALL("cuDevicePrimaryCtxGetState", INITIALISED,
       device_ok(device) ? INVALID_DEVICE : (*flags = 0, *active = contexts[device].retained > 0, OK), " ordinal=%d",
       device);
}

static int usable(CUcontext c) { return c >= contexts && c < contexts + MAX_DEVICES && c->retained; }
static int push(CUcontext c) {
  if (!usable(c) || stack_depth == (int)(sizeof stack / sizeof stack[0])) return INVALID_CONTEXT;
  stack[stack_depth++] = c;
  return OK;
}
static int pop(CUcontext *out) {
  if (!stack_depth) return INVALID_CONTEXT;
  CUcontext c = stack[--stack_depth];
  if (out) *out = c;
  return OK;
}
static int set_current(CUcontext c) {
  if (!c) return stack_depth ? pop(NULL) : OK;
  if (!usable(c)) return INVALID_CONTEXT;
  stack[stack_depth ? stack_depth - 1 : stack_depth++] = c;
  return OK;
}
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext c) { CALL("cuCtxPushCurrent_v2", INITIALISED, push(c), "%s", ""); }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *out) { CALL("cuCtxPopCurrent_v2", INITIALISED, pop(out), "%s", ""); }
EXPORT CUresult cuCtxSetCurrent(CUcontext c) { CALL("cuCtxSetCurrent", INITIALISED, set_current(c), "%s", ""); }
EXPORT CUresult cuCtxGetCurrent(CUcontext *out) {
  CALL("cuCtxGetCurrent", INITIALISED, (*out = stack_depth ? stack[stack_depth - 1] : NULL, OK), "%s", "");
}
EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  CALL("cuCtxGetDevice", CONTEXT, (*device = current_device(), OK), "%s", "");
}
EXPORT CUresult cuCtxSynchronize(void) { CALL("cuCtxSynchronize", CONTEXT, OK, "%s", ""); }

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int register_checked(void *address, size_t nbytes, unsigned flags) {
  int read_only = (flags & 8) != 0;
  if (flags > 15) return INVALID_VALUE;
  if (read_only && !attribute_of(113)) return NOT_SUPPORTED;
  return host_register(POINTER(address), nbytes, flags, read_only);
}
EXPORT CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
  CALL("cuMemHostRegister_v2", CONTEXT, register_checked(address, nbytes, flags), " address=%#llx nbytes=%zu flags=%u",
       POINTER(address), nbytes, flags);
}
EXPORT CUresult cuMemHostUnregister(void *address) {
  CALL("cuMemHostUnregister", CONTEXT,
       address ? drop_registration(POINTER(address), 0, NOT_REGISTERED) : INVALID_VALUE, " address=%#llx",
       POINTER(address));
}
EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned flags) {
  CALL("cuMemHostGetDevicePointer_v2", CONTEXT, host_device_pointer(out, POINTER(address), flags), " address=%#llx",
       POINTER(address));
}
EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *address) {
  CALL("cuMemHostGetFlags", CONTEXT, host_flags(flags, POINTER(address)), " address=%#llx", POINTER(address));
}
EXPORT CUresult cuMemHostAlloc(void **out, size_t nbytes, unsigned flags) {
  CALL("cuMemHostAlloc", CONTEXT, host_alloc(out, nbytes, flags), " nbytes=%zu flags=%u", nbytes, flags);
}
EXPORT CUresult cuMemFreeHost(void *address) {
  CALL("cuMemFreeHost", CONTEXT, drop_registration(POINTER(address), 1, INVALID_VALUE), " address=%#llx",
       POINTER(address));
}
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t nbytes) {
  CALL("cuMemAlloc_v2", CONTEXT, device_alloc(out, nbytes), " nbytes=%zu", nbytes);
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  CALL("cuMemFree_v2", CONTEXT, device_free(address), " address=%#llx", address);
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

#define IN_STREAM(stream, work) (stream_ok(stream) ? INVALID_HANDLE : (work))

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t nbytes, CUstream stream) {
  CALL("cuMemcpyHtoDAsync_v2", CONTEXT, IN_STREAM(stream, copy_to_device(dst, POINTER(src), nbytes)),
       " dst=%#llx src=%#llx nbytes=%zu stream=%p", dst, POINTER(src), nbytes, stream);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
  CALL("cuMemcpyDtoHAsync_v2", CONTEXT, IN_STREAM(stream, copy_to_host(POINTER(dst), src, nbytes)),
       " dst=%#llx src=%#llx nbytes=%zu stream=%p", POINTER(dst), src, nbytes, stream);
}
static int fill(CUdeviceptr dst, unsigned char value, size_t nbytes) {
  int code = device_operand_ok(dst, nbytes);
  if (!code) memset((void *)(uintptr_t)dst, value, nbytes);
  return code;
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t nbytes, CUstream stream) {
  CALL("cuMemsetD8Async", CONTEXT, IN_STREAM(stream, fill(dst, value, nbytes)), " dst=%#llx value=%u nbytes=%zu", dst,
       value, nbytes);
}

#ifndef NO_BATCH
typedef struct {
  int srcAccessOrder;
  int hints[4];
  unsigned flags;
} CUmemcpyAttributes;

static int batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                 size_t *indices, size_t n_attributes, size_t *failed, CUstream stream) {
  if ((uintptr_t)stream <= 1) return INVALID_VALUE; /* the legacy default stream */
  if (stream_ok(stream)) return INVALID_HANDLE;
  if (stream_capturing(stream)) return CAPTURE_UNSUPPORTED;
  if (!attributes || !indices || !n_attributes || n_attributes > count || indices[0]) return INVALID_VALUE;
  for (size_t i = 0; i < n_attributes; i++)
    if (attributes[i].srcAccessOrder < 1 || attributes[i].srcAccessOrder > 3 || attributes[i].flags > 1)
      return INVALID_VALUE;
  return copy_batch((uint64_t *)dsts, (uint64_t *)srcs, sizes, count, failed);
}
#ifndef BATCH_V2
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *indices, size_t n_attributes, size_t *failed,
                                   CUstream stream) {
  CALL("cuMemcpyBatchAsync", CONTEXT,
       failed ? batch(dsts, srcs, sizes, count, attributes, indices, n_attributes, failed, stream) : INVALID_VALUE,
       " count=%zu stream=%p", count, stream);
}
#endif
#ifndef BATCH_V1
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                      CUmemcpyAttributes *attributes, size_t *indices, size_t n_attributes,
                                      CUstream stream) {
  CALL("cuMemcpyBatchAsync_v2", CONTEXT,
       batch(dsts, srcs, sizes, count, attributes, indices, n_attributes, NULL, stream), " count=%zu stream=%p", count,
       stream);
}
#endif
#endif

/* ---- streams and events ----------------------------------------------------------------------------------------- */

EXPORT CUresult cuStreamCreate(CUstream *out, unsigned flags) {
  CALL("cuStreamCreate", CONTEXT, flags > 1 ? INVALID_VALUE : new_handle(out, STREAM, 0), " flags=%u", flags);
}
EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
  CALL("cuStreamDestroy_v2", CONTEXT, drop_handle(stream, STREAM), " stream=%p", stream);
}
EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  CALL("cuStreamSynchronize", CONTEXT, stream_ok(stream), " stream=%p", stream);
}
EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status) {
  CALL("cuStreamIsCapturing", CONTEXT, capture_status(stream, status), " stream=%p", stream);
}
EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  CALL("cuStreamWaitEvent", CONTEXT, flags ? INVALID_VALUE : event_wait(stream, event), " stream=%p event=%p", stream,
       event);
}
/* Whatever could still come has come: a word that is not there yet never will be, and the answer is NOT_READY. */
static int wait_value(CUstream stream, CUdeviceptr address, unsigned value, unsigned flags) {
  if (stream_ok(stream)) return INVALID_HANDLE;
  if (flags || address % 4 || !in_device_range(address, 4)) return INVALID_VALUE;
  return (int)(*(unsigned *)(uintptr_t)address - value) >= 0 ? OK : NOT_READY;
}
EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, unsigned value, unsigned flags) {
  CALL("cuStreamWaitValue32_v2", CONTEXT, wait_value(stream, address, value, flags),
       " stream=%p address=%#llx value=%u flags=%u", stream, address, value, flags);
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags) {
  CALL("cuEventCreate", CONTEXT, flags > 7 ? INVALID_VALUE : new_handle(out, EVENT, !(flags & 2)), " flags=%u", flags);
}
EXPORT CUresult cuEventDestroy_v2(CUevent event) {
  CALL("cuEventDestroy_v2", CONTEXT, drop_handle(event, EVENT), " event=%p", event);
}
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  CALL("cuEventRecord", CONTEXT, event_record(event, stream), " event=%p stream=%p", event, stream);
}
EXPORT CUresult cuEventQuery(CUevent event) { CALL("cuEventQuery", CONTEXT, event_ok(event), " event=%p", event); }
EXPORT CUresult cuEventSynchronize(CUevent event) {
  CALL("cuEventSynchronize", CONTEXT, event_ok(event), " event=%p", event);
}
EXPORT CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
  CALL("cuEventElapsedTime", CONTEXT, event_elapsed(ms, start, end), " start=%p end=%p", start, end);
}

/* ---- kernels ---------------------------------------------------------------------------------------------------- */

/* PTX is text that names what it was written for; the driver compiles it for that and everything newer. */
static int load_ptx(const char *text) {
  const char *target = strstr(text, ".target sm_");
  if (!target || atoi(target + strlen(".target sm_")) > 10 * attribute_of(75) + attribute_of(76)) return NO_BINARY;
  keep_bytes(text, strlen(text));
  return OK;
}

/* A cubin runs on its own major version from its own minor version on. ptxas 12 writes the architecture into the lowest
   byte of the flags (ABI 7), ptxas 13 and every binary for compute capability 10 and up into the second (ABI 8). */
static int load_image(const void *image) {
  uint32_t flags;
  int abi;
  if (!memcmp(image, "//", 2) || !memcmp(image, ".v", 2)) return load_ptx(image);
  int code = keep_image(image, 190, &flags, &abi);
  if (code) return code;
  uint32_t sm = abi >= 8 ? flags >> 8 & 0xFF : flags & 0xFF;
  return (int)sm / 10 == attribute_of(75) && (int)sm % 10 <= attribute_of(76) ? OK : NO_BINARY;
}
static int new_library(void **library, const void *image) {
  if (!library || !image) return INVALID_VALUE;
  int code = load_image(image);
  if (!code) *library = (void *)0x2000;
  return code;
}
EXPORT CUresult cuLibraryLoadData(void **library, const void *image, void *jit, void **jit_values, unsigned n_jit,
                                  void *options, void **values, unsigned n) {
  (void)jit, (void)jit_values, (void)n_jit, (void)options, (void)values, (void)n;
  CALL("cuLibraryLoadData", INITIALISED, new_library(library, image), " nbytes=%zu", last_image_nbytes);
}
EXPORT CUresult cuLibraryUnload(void *library) {
  CALL("cuLibraryUnload", INITIALISED, library == (void *)0x2000 ? OK : INVALID_HANDLE, "%s", "");
}
EXPORT CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  CALL("cuLibraryGetKernel", INITIALISED,
       library == (void *)0x2000 ? find_kernel(name, (uintptr_t *)kernel) : INVALID_HANDLE, " name=%s", name);
}
EXPORT CUresult cuKernelGetFunction(void **function, void *kernel) {
  CALL("cuKernelGetFunction", CONTEXT, (*function = kernel, OK), "%s", "");
}
EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, void *function) {
  CALL("cuFuncGetAttribute", CONTEXT, function ? (*value = attribute == 0 ? 1024 : 0, OK) : INVALID_HANDLE,
       " attribute=%d", attribute);
}
EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, void *kernel, CUdevice device) {
  CALL("cuKernelGetAttribute", INITIALISED,
       kernel && !device_ok(device) ? (*value = attribute == 0 ? 1024 : 0, OK) : INVALID_HANDLE, " attribute=%d",
       attribute);
}
EXPORT CUresult cuKernelSetAttribute(int attribute, int value, void *kernel, CUdevice device) {
  CALL("cuKernelSetAttribute", INITIALISED, kernel && !device_ok(device) ? OK : INVALID_HANDLE,
       " attribute=%d value=%d", attribute, value);
}
EXPORT CUresult cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream stream, void **parameters, void **extra) {
  CALL("cuLaunchKernel", CONTEXT,
       gy != 1 || gz != 1 || by != 1 || bz != 1 || shared
           ? INVALID_VALUE
           : launch((uintptr_t)function, gx, bx, argument_block(parameters, extra, NULL), stream),
       " ctas=%u threads=%u stream=%p", gx, bx, stream);
}

/* ---- how cuda-python finds all this ----------------------------------------------------------------------------- */

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  (void)flags;
  Dl_info self;
  char versioned[128];
  if (!dladdr((void *)cuInit, &self)) return NOT_FOUND;
  void *lib = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  /* The batch copy is the one call here whose first version is still asked for: by bindings for CUDA 12.8 and 12.9. */
  int first = !strcmp(name, "cuMemcpyBatchAsync") && version < 13000;
  void *found = first ? NULL : dlsym(lib, versioned);
  if (!found && (first || strcmp(name, "cuMemcpyBatchAsync"))) found = dlsym(lib, name);
  dlclose(lib);
  *function = found;
  if (status) *status = found ? 0 : 1;
  return found ? OK : NOT_FOUND;
}
