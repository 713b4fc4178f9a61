/* A libamdhip64.so.7 without a GPU. What it does is in the four headers beside it; here is how HIP calls it.

   -DNO_BATCH leaves out the batch copy, -DNO_R0600 the properties of ROCm 6 and later. */
#include "fake_kernels.h"

typedef int hipError_t;
typedef unsigned long long hipDeviceptr_t; /* void * in the header: the same register */
typedef void *hipStream_t;
typedef void *hipEvent_t;

#define POINTER(p) ((unsigned long long)(uintptr_t)(p))
#define ARCH_OFFSET 1160 /* gcnArchName in hipDeviceProp_tR0600, whose size is 1472 */
#define PROPERTIES_NBYTES 1472

static __thread int current;
static __thread int last_error;
static char architecture[64] = "gfx942:sramecc+:xnack-";
static char product[64] = "Fake MI300X";

static int current_device(void) { return current; }

static void reset_modules(void);

static void reset_platform(void) {
  current = last_error = 0;
  strcpy(architecture, "gfx942:sramecc+:xnack-");
  strcpy(product, "Fake MI300X");
  reset_modules();
}

EXPORT void fake_set_architecture(const char *name) { snprintf(architecture, sizeof architecture, "%s", name); }
EXPORT void fake_set_product(const char *name) { snprintf(product, sizeof product, "%s", name); }

static int device_ok(int device) { return device >= 0 && device < n_devices ? OK : INVALID_DEVICE; }

/* A failed call leaves its code behind for the thread. */
static int kept(int code) {
  if (code) last_error = code;
  return code;
}
#define HIP_CALL(call, needs, work, ...)            \
  do {                                              \
    int code_ = fake_enter(call, needs);            \
    if (!code_) code_ = (work);                     \
    return kept(fake_leave(code_, call, __VA_ARGS__)); \
  } while (0)

/* ---- the runtime and its devices -------------------------------------------------------------------------------- */

static int begin(unsigned flags) {
  if (flags) return INVALID_VALUE;
  if (!n_devices) return NO_DEVICE;
  initialised_by = getpid();
  return OK;
}
EXPORT hipError_t hipInit(unsigned flags) { HIP_CALL("hipInit", ANYTIME, begin(flags), " flags=%u", flags); }
EXPORT hipError_t hipDriverGetVersion(int *version) { return version ? (*version = 70226015, OK) : INVALID_VALUE; }
EXPORT hipError_t hipRuntimeGetVersion(int *version) { return hipDriverGetVersion(version); }

EXPORT const char *hipGetErrorName(hipError_t error) {
  switch (error) {
    case OK: return "hipSuccess";
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case NOT_INITIALIZED: return "hipErrorNotInitialized";
    case 4: return "hipErrorDeinitialized";
    case NO_DEVICE: return "hipErrorNoDevice";
    case INVALID_DEVICE: return "hipErrorInvalidDevice";
    case INVALID_IMAGE: return "hipErrorInvalidImage";
    case INVALID_CONTEXT: return "hipErrorInvalidContext";
    case NO_BINARY: return "hipErrorNoBinaryForGpu";
    case INVALID_HANDLE: return "hipErrorInvalidHandle";
    case NOT_FOUND: return "hipErrorNotFound";
    case NOT_READY: return "hipErrorNotReady";
    case ILLEGAL_ADDRESS: return "hipErrorIllegalAddress";
    case ALREADY_REGISTERED: return "hipErrorHostMemoryAlreadyRegistered";
    case NOT_REGISTERED: return "hipErrorHostMemoryNotRegistered";
    case 719: return "hipErrorLaunchFailure";
    case NOT_SUPPORTED: return "hipErrorNotSupported";
    case CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
    default: return "hipErrorUnknown";
  }
}
EXPORT const char *hipGetErrorString(hipError_t error) { return hipGetErrorName(error); }
EXPORT hipError_t hipGetLastError(void) {
  int code = last_error;
  last_error = OK;
  return code;
}
EXPORT hipError_t hipPeekAtLastError(void) { return last_error; }

EXPORT hipError_t hipGetDeviceCount(int *count) {
  HIP_CALL("hipGetDeviceCount", ANYTIME, (*count = n_devices, n_devices ? OK : NO_DEVICE), " count=%d", n_devices);
}
EXPORT hipError_t hipDeviceGet(int *device, int ordinal) {
  HIP_CALL("hipDeviceGet", INITIALISED, (*device = ordinal, device_ok(ordinal)), " ordinal=%d", ordinal);
}
EXPORT hipError_t hipDeviceGetName(char *name, int length, int device) {
  HIP_CALL("hipDeviceGetName", INITIALISED,
           (snprintf(name, (size_t)length, "%s %d", product, device), device_ok(device)), " ordinal=%d", device);
}
EXPORT hipError_t hipDeviceGetPCIBusId(char *text, int length, int device) {
  HIP_CALL("hipDeviceGetPCIBusId", INITIALISED,
           (snprintf(text, (size_t)length, "0000:%02X:00.0", 0xC0 + device), device_ok(device)), " ordinal=%d", device);
}
#ifndef NO_R0600
static int properties(char *out, int device) {
  if (!out || device_ok(device)) return INVALID_DEVICE;
  memset(out, 0xA5, PROPERTIES_NBYTES); /* the real one fills every field */
  snprintf(out, 256, "%s %d", product, device);
  snprintf(out + ARCH_OFFSET, 256, "%s", architecture);
  return OK;
}
EXPORT hipError_t hipGetDevicePropertiesR0600(void *out, int device) {
  HIP_CALL("hipGetDevicePropertiesR0600", INITIALISED, properties(out, device), " ordinal=%d", device);
}
#endif

static int attribute_of(int attribute) {
  int value;
  if (overridden(attribute, &value)) return value;
  switch (attribute) {
    case 4: return !alias_mode; /* CanUseHostPointerForRegisteredMem */
    case 63: return 304;        /* MultiprocessorCount */
    case 10013: return 1;       /* CanUseStreamWaitValue */
    default: return 0;
  }
}
EXPORT hipError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
  HIP_CALL("hipDeviceGetAttribute", INITIALISED, (*value = attribute_of(attribute), device_ok(device)),
           " attribute=%d ordinal=%d", attribute, device);
}

EXPORT hipError_t hipGetDevice(int *device) {
  HIP_CALL("hipGetDevice", ANYTIME, (*device = current, OK), "%s", "");
}
static int set_device(int device) {
  int code = device_ok(device);
  if (!code) current = device;
  return code;
}
EXPORT hipError_t hipSetDevice(int device) {
  HIP_CALL("hipSetDevice", ANYTIME, set_device(device), " ordinal=%d", device);
}
EXPORT hipError_t hipDeviceSynchronize(void) { HIP_CALL("hipDeviceSynchronize", CONTEXT, OK, "%s", ""); }

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* Flag 8 is coarse-grained memory, not read-only: the range has to be writable. */
EXPORT hipError_t hipHostRegister(void *address, size_t nbytes, unsigned flags) {
  HIP_CALL("hipHostRegister", CONTEXT, flags > 15 ? INVALID_VALUE : host_register(POINTER(address), nbytes, flags, 0),
           " address=%#llx nbytes=%zu flags=%u", POINTER(address), nbytes, flags);
}
EXPORT hipError_t hipHostUnregister(void *address) {
  HIP_CALL("hipHostUnregister", CONTEXT,
           address ? drop_registration(POINTER(address), 0, NOT_REGISTERED) : INVALID_VALUE, " address=%#llx",
           POINTER(address));
}
EXPORT hipError_t hipHostGetDevicePointer(hipDeviceptr_t *out, void *address, unsigned flags) {
  HIP_CALL("hipHostGetDevicePointer", CONTEXT, host_device_pointer(out, POINTER(address), flags), " address=%#llx",
           POINTER(address));
}
EXPORT hipError_t hipHostGetFlags(unsigned *flags, void *address) {
  HIP_CALL("hipHostGetFlags", CONTEXT, host_flags(flags, POINTER(address)), " address=%#llx", POINTER(address));
}
EXPORT hipError_t hipHostMalloc(void **out, size_t nbytes, unsigned flags) {
  HIP_CALL("hipHostMalloc", CONTEXT, host_alloc(out, nbytes, flags), " nbytes=%zu flags=%u", nbytes, flags);
}
EXPORT hipError_t hipHostFree(void *address) {
  HIP_CALL("hipHostFree", CONTEXT, drop_registration(POINTER(address), 1, INVALID_VALUE), " address=%#llx",
           POINTER(address));
}
EXPORT hipError_t hipMalloc(hipDeviceptr_t *out, size_t nbytes) {
  HIP_CALL("hipMalloc", CONTEXT, device_alloc(out, nbytes), " nbytes=%zu", nbytes);
}
EXPORT hipError_t hipFree(hipDeviceptr_t address) {
  HIP_CALL("hipFree", CONTEXT, device_free(address), " address=%#llx", address);
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

#define IN_STREAM(stream, work) (stream_ok(stream) ? INVALID_HANDLE : (work))

EXPORT hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t dst, const void *src, size_t nbytes, hipStream_t stream) {
  HIP_CALL("hipMemcpyHtoDAsync", CONTEXT, IN_STREAM(stream, copy_to_device(dst, POINTER(src), nbytes)),
           " dst=%#llx src=%#llx nbytes=%zu stream=%p", dst, POINTER(src), nbytes, stream);
}
EXPORT hipError_t hipMemcpyDtoHAsync(void *dst, hipDeviceptr_t src, size_t nbytes, hipStream_t stream) {
  HIP_CALL("hipMemcpyDtoHAsync", CONTEXT, IN_STREAM(stream, copy_to_host(POINTER(dst), src, nbytes)),
           " dst=%#llx src=%#llx nbytes=%zu stream=%p", POINTER(dst), src, nbytes, stream);
}
static int fill(hipDeviceptr_t dst, unsigned char value, size_t nbytes) {
  int code = device_operand_ok(dst, nbytes);
  if (!code) memset((void *)(uintptr_t)dst, value, nbytes);
  return code;
}
EXPORT hipError_t hipMemsetD8Async(hipDeviceptr_t dst, unsigned char value, size_t nbytes, hipStream_t stream) {
  HIP_CALL("hipMemsetD8Async", CONTEXT, IN_STREAM(stream, fill(dst, value, nbytes)), " dst=%#llx value=%u nbytes=%zu",
           dst, value, nbytes);
}
#ifndef NO_BATCH
static int batch(hipDeviceptr_t *dsts, hipDeviceptr_t *srcs, size_t *sizes, size_t count, void *attributes,
                 size_t n_attributes, size_t *failed, hipStream_t stream) {
  if (stream_ok(stream)) return INVALID_HANDLE;
  if (stream_capturing(stream)) return CAPTURE_UNSUPPORTED;
  if (n_attributes) return NOT_SUPPORTED;
  if (attributes) return INVALID_VALUE;
  return copy_batch((uint64_t *)dsts, (uint64_t *)srcs, sizes, count, failed);
}
EXPORT hipError_t hipMemcpyBatchAsync(hipDeviceptr_t *dsts, hipDeviceptr_t *srcs, size_t *sizes, size_t count,
                                      void *attributes, size_t *indices, size_t n_attributes, size_t *failed,
                                      hipStream_t stream) {
  (void)indices;
  HIP_CALL("hipMemcpyBatchAsync", CONTEXT,
           batch(dsts, srcs, sizes, count, attributes, n_attributes, failed, stream), " count=%zu stream=%p", count,
           stream);
}
#endif

/* ---- streams and events ----------------------------------------------------------------------------------------- */

EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t *out, unsigned flags) {
  HIP_CALL("hipStreamCreateWithFlags", CONTEXT, flags > 1 ? INVALID_VALUE : new_handle(out, STREAM, 0), " flags=%u",
           flags);
}
EXPORT hipError_t hipStreamDestroy(hipStream_t stream) {
  HIP_CALL("hipStreamDestroy", CONTEXT, drop_handle(stream, STREAM), " stream=%p", stream);
}
EXPORT hipError_t hipStreamSynchronize(hipStream_t stream) {
  HIP_CALL("hipStreamSynchronize", CONTEXT, stream_ok(stream), " stream=%p", stream);
}
EXPORT hipError_t hipStreamIsCapturing(hipStream_t stream, int *status) {
  HIP_CALL("hipStreamIsCapturing", CONTEXT, capture_status(stream, status), " stream=%p", stream);
}
EXPORT hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
  HIP_CALL("hipStreamWaitEvent", CONTEXT, flags ? INVALID_VALUE : event_wait(stream, event), " stream=%p event=%p",
           stream, event);
}
/* Whatever could still come has come: a word that is not there yet never will be, and the answer is NOT_READY.
   The comparison is not cyclic, unlike CUDA's. */
static int wait_value(hipStream_t stream, hipDeviceptr_t address, unsigned value, unsigned flags, unsigned mask) {
  if (stream_ok(stream)) return INVALID_HANDLE;
  if (flags || address % 4 || !in_device_range(address, 4)) return INVALID_VALUE;
  return (*(unsigned *)(uintptr_t)address & mask) >= value ? OK : NOT_READY;
}
EXPORT hipError_t hipStreamWaitValue32(hipStream_t stream, hipDeviceptr_t address, unsigned value, unsigned flags,
                                       unsigned mask) {
  HIP_CALL("hipStreamWaitValue32", CONTEXT, wait_value(stream, address, value, flags, mask),
           " stream=%p address=%#llx value=%u flags=%u mask=%#x", stream, address, value, flags, mask);
}

EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t *out, unsigned flags) {
  HIP_CALL("hipEventCreateWithFlags", CONTEXT, flags > 7 ? INVALID_VALUE : new_handle(out, EVENT, !(flags & 2)),
           " flags=%u", flags);
}
EXPORT hipError_t hipEventDestroy(hipEvent_t event) {
  HIP_CALL("hipEventDestroy", CONTEXT, drop_handle(event, EVENT), " event=%p", event);
}
EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  HIP_CALL("hipEventRecord", CONTEXT, event_record(event, stream), " event=%p stream=%p", event, stream);
}
EXPORT hipError_t hipEventQuery(hipEvent_t event) {
  HIP_CALL("hipEventQuery", CONTEXT, event_ok(event), " event=%p", event);
}
EXPORT hipError_t hipEventSynchronize(hipEvent_t event) {
  HIP_CALL("hipEventSynchronize", CONTEXT, event_ok(event), " event=%p", event);
}
EXPORT hipError_t hipEventElapsedTime(float *ms, hipEvent_t start, hipEvent_t end) {
  HIP_CALL("hipEventElapsedTime", CONTEXT, event_elapsed(ms, start, end), " start=%p end=%p", start, end);
}

/* ---- kernels ---------------------------------------------------------------------------------------------------- */

/* A GPU of somebody else's making: executes the image that was loaded. Answers the launch's code; after one that is not
   0 the device is lost. `kernarg_nbytes` is 0 where the launch did not say. It may be called on any thread, and must not
   call the fake. */
typedef int (*launch_executor)(const void *image, size_t image_nbytes, const char *kernel, uint32_t ctas, uint32_t threads,
                               const void *kernarg, size_t kernarg_nbytes, const kernel_range *ranges,
                               uint32_t n_ranges);
static launch_executor executor;

/* Launches of modules that were loaded before or after go to it; NULL: to the host build again. */
EXPORT void fake_set_executor(launch_executor given) { executor = given; }

/* A module holds a copy of its image, to see whether the caller's still is the same. */
typedef struct module {
  struct module *next;
  const unsigned char *image;
  unsigned char *copy;
  size_t nbytes;
} module;

typedef struct function {
  struct function *next;
  const module *module;
  uintptr_t host_kernel; /* 0: not in the host build */
  char name[64];
} function;

static module *modules;
static function *functions;

static void reset_modules(void) {
  executor = NULL;
  for (module *m = modules, *next; m; m = next) {
    next = m->next;
    free(m->copy);
    free(m);
  }
  for (function *f = functions, *next; f; f = next) {
    next = f->next;
    free(f);
  }
  modules = NULL;
  functions = NULL;
}

static module *module_of(const void *handle) {
  module *m = modules;
  while (m && m != handle) m = m->next;
  return m;
}
static const function *known_function(const void *handle) {
  const function *f = functions;
  while (f && f != handle) f = f->next;
  return f;
}

/* The machine number that clang writes into the lowest byte of the flags (LLVM's AMDGPU usage guide), and that of the
   generic target that runs on the device as well. */
static int suits(int number, const char *name) {
  static const struct {
    const char *name;
    int number, generic;
  } machines[] = {{"gfx906", 0x2f, 0x51},  {"gfx908", 0x30, -1},    {"gfx90a", 0x3f, -1},
                  {"gfx942", 0x4c, 0x5f},  {"gfx950", 0x4f, 0x5f},  {"gfx1030", 0x36, 0x53},
                  {"gfx1100", 0x41, 0x54}, {"gfx1101", 0x46, 0x54}, {"gfx1102", 0x47, 0x54},
                  {"gfx1103", 0x44, 0x54}, {"gfx1150", 0x43, 0x54}, {"gfx1151", 0x4a, 0x54},
                  {"gfx1200", 0x48, 0x59}, {"gfx1201", 0x4e, 0x59}};
  size_t length = strcspn(name, ":");
  for (size_t i = 0; i < sizeof machines / sizeof machines[0]; i++)
    if (strlen(machines[i].name) == length && !strncmp(machines[i].name, name, length))
      return number == machines[i].number || number == machines[i].generic;
  return 0;
}
static int load_image(void **handle, const void *image) {
  uint32_t flags;
  int abi;
  if (!handle || !image) return INVALID_VALUE;
  /* The real one reads the first 4096 bytes, whatever the size, and keeps the pointer. */
  for (int i = 0; i < 4096; i++) (void)((const volatile char *)image)[i];
  int code = keep_image(image, 224, &flags, &abi);
  if (!code && !suits((int)(flags & 0xFF), architecture)) code = NO_BINARY;
  if (code) return code;
  module *m = malloc(sizeof *m);
  *m = (module){modules, image, malloc(last_image_nbytes), last_image_nbytes};
  memcpy(m->copy, last_image, last_image_nbytes);
  *handle = modules = m;
  return OK;
}
EXPORT hipError_t hipModuleLoadData(void **module, const void *image) {
  HIP_CALL("hipModuleLoadData", CONTEXT, load_image(module, image), " nbytes=%zu", last_image_nbytes);
}
EXPORT hipError_t hipModuleUnload(void *module) {
  HIP_CALL("hipModuleUnload", CONTEXT, module_of(module) ? OK : INVALID_HANDLE, "%s", "");
}
/* A kernel is there if the image has a descriptor of that name. */
static int has_kernel(const module *m, const char *name) {
  char symbol[80];
  int length = snprintf(symbol, sizeof symbol, "%c%s.kd", 0, name);
  return length < (int)sizeof symbol && memmem(m->copy, m->nbytes, symbol, (size_t)length + 1) != NULL;
}
/* Bytes that have changed since they were loaded are a buffer that was not kept alive. */
static int function_of(void **handle, const void *module_handle, const char *name) {
  const module *m = module_of(module_handle);
  if (!m || memcmp(m->image, m->copy, m->nbytes)) return INVALID_HANDLE;
  if (!name || !has_kernel(m, name)) return NOT_FOUND;
  function *f = calloc(1, sizeof *f);
  *f = (function){.next = functions, .module = m};
  snprintf(f->name, sizeof f->name, "%s", name);
  find_kernel(name, &f->host_kernel);
  *handle = functions = f;
  return OK;
}
EXPORT hipError_t hipModuleGetFunction(void **function, void *module, const char *name) {
  HIP_CALL("hipModuleGetFunction", CONTEXT, function_of(function, module, name), " name=%s", name);
}
EXPORT hipError_t hipFuncGetAttribute(int *value, int attribute, void *function) {
  HIP_CALL("hipFuncGetAttribute", CONTEXT,
           known_function(function) ? (*value = attribute == 0 ? 1024 : 0, OK) : INVALID_HANDLE, " attribute=%d",
           attribute);
}

/* The size that `extra` gives of the argument block; 0 where there is none. */
static size_t argument_nbytes(void **extra) {
  for (; extra && *extra != (void *)3; extra += 2)
    if (*extra == (void *)2) return *(const size_t *)extra[1];
  return 0;
}
/* The executor runs without the lock: on a GPU, too, other calls go on meanwhile. */
static int execute(const function *f, unsigned ctas, unsigned threads, const void *block, size_t nbytes, void *stream) {
  int device = current_device(), code = stream_ok(stream);
  if (code) return code;
  if (!block || !ctas || !threads || threads > 1024) return INVALID_VALUE;
  kernel_range *ranges = malloc(2 * MAX_RANGES * sizeof *ranges);
  uint32_t n = device_ranges(device, ranges);
  launch_executor run = executor;
  pthread_mutex_unlock(&fake_mutex);
  code = run(f->module->copy, f->module->nbytes, f->name, ctas, threads, block, nbytes, ranges, n);
  pthread_mutex_lock(&fake_mutex);
  free(ranges);
  if (code) faulted[device] = 1;
  return code;
}
static int launch_function(void *handle, unsigned ctas, unsigned threads, void *stream, void **parameters, void **extra) {
  const function *f = known_function(handle);
  const void *block = argument_block(parameters, extra, (void *)3);
  if (!f) return INVALID_HANDLE;
  if (executor) return execute(f, ctas, threads, block, argument_nbytes(extra), stream);
  return launch(f->host_kernel, ctas, threads, block, stream);
}
EXPORT hipError_t hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                        unsigned bz, unsigned shared, hipStream_t stream, void **parameters,
                                        void **extra) {
  HIP_CALL("hipModuleLaunchKernel", CONTEXT,
           gy != 1 || gz != 1 || by != 1 || bz != 1 || shared
               ? INVALID_VALUE
               : launch_function(function, gx, bx, stream, parameters, extra),
           " ctas=%u threads=%u stream=%p", gx, bx, stream);
}
