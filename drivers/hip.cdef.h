/* The HIP runtime API as kvferry uses it: prototypes, constants, struct layouts. From the public header
   hip_runtime_api.h of ROCm 6 and 7; the numbers are the same in hip-python 6.2, 6.4, 7.2 and 10.0. */
typedef int hipError_t;
typedef int hipDevice_t;
typedef unsigned long long hipDeviceptr_t; /* void * in the header: the same register, and an integer for Python */
typedef void *hipStream_t;
typedef void *hipEvent_t;

#define hipHostRegisterPortable 1
#define hipHostRegisterMapped 2
#define hipHostMallocPortable 1
#define hipHostMallocMapped 2
#define hipStreamNonBlocking 1
#define hipStreamWaitValueGte 0
#define hipEventDefault 0
#define hipEventDisableTiming 2
#define hipErrorNotReady 600

#define hipDeviceAttributeCanUseHostPointerForRegisteredMem 4
#define hipDeviceAttributeIntegrated 16
#define hipDeviceAttributeMultiprocessorCount 63
#define hipDeviceAttributeCanUseStreamWaitValue 10013

/* The one field that is wanted. ROCm 6 fixed the layout by giving the call that fills it a name of its own; a later
   layout gets a later name. The offset, and the size of 1472, are what hip-python 6.2.0, 6.4.4, 7.2.2 and 10.0.0 were
   compiled with: zero a hipDeviceProp_t of theirs (c_sizeof() bytes at as_c_void_p()), write "gfx942" at each offset in
   turn, and see at which one its gcnArchName reads so. The rest is room. */
typedef struct { char before[1160]; char gcnArchName[256]; char after[2680]; } hipDeviceProp_tR0600;

hipError_t hipInit(unsigned int flags);
hipError_t hipDriverGetVersion(int *version);
const char *hipGetErrorName(hipError_t error);
hipError_t hipGetLastError(void);

hipError_t hipGetDeviceCount(int *count);
hipError_t hipDeviceGet(hipDevice_t *device, int ordinal);
hipError_t hipDeviceGetName(char *name, int length, hipDevice_t device);
hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600 *properties, int device);
hipError_t hipDeviceGetPCIBusId(char *address, int length, int device);
hipError_t hipDeviceGetAttribute(int *value, int attribute, int device);

hipError_t hipGetDevice(int *device);
hipError_t hipSetDevice(int device);

hipError_t hipHostRegister(void *address, size_t nbytes, unsigned int flags);
hipError_t hipHostUnregister(void *address);
hipError_t hipHostGetDevicePointer(hipDeviceptr_t *device_pointer, void *address, unsigned int flags);
hipError_t hipHostGetFlags(unsigned int *flags, void *address);
hipError_t hipHostMalloc(void **address, size_t nbytes, unsigned int flags);
hipError_t hipHostFree(void *address);
hipError_t hipMalloc(hipDeviceptr_t *address, size_t nbytes);
hipError_t hipFree(hipDeviceptr_t address);

hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t dst, const void *src, size_t nbytes, hipStream_t stream);
hipError_t hipMemcpyDtoHAsync(void *dst, hipDeviceptr_t src, size_t nbytes, hipStream_t stream);
hipError_t hipMemsetD8Async(hipDeviceptr_t dst, unsigned char value, size_t nbytes, hipStream_t stream);
/* ROCm 7.1. Attributes are "not supported", says the header: only NULL, NULL, 0 works, so their layout is not here. */
hipError_t hipMemcpyBatchAsync(hipDeviceptr_t *dsts, hipDeviceptr_t *srcs, size_t *sizes, size_t count,
                               void *attributes, size_t *attribute_indices, size_t n_attributes,
                               size_t *failed, hipStream_t stream);

hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned int flags);
hipError_t hipStreamDestroy(hipStream_t stream);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipStreamIsCapturing(hipStream_t stream, int *status);
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned int flags);
hipError_t hipStreamWaitValue32(hipStream_t stream, hipDeviceptr_t address, unsigned int value, unsigned int flags,
                                unsigned int mask);

hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned int flags);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
hipError_t hipEventQuery(hipEvent_t event);
hipError_t hipEventSynchronize(hipEvent_t event);
hipError_t hipEventElapsedTime(float *milliseconds, hipEvent_t start, hipEvent_t end);
