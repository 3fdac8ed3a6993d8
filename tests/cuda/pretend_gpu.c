/* A GPU that answers questions and runs nothing: the CUDA driver, and those parts of the CUDA runtime that
 * torch and Triton call up to the launch of a kernel. Built as libcuda.so.1 and loaded before all else
 * (LD_PRELOAD), it stands in for both.
 *
 * PRETEND_GPU names the row of DEVICES to be; the first by default. No memory is given out and no kernel is
 * launched, so tensors on the device must be fake. What is not answered here reaches the real runtime, which
 * finds no device and says so.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const char *key, *name;
  int major, minor, multiprocessors;
  size_t bytes;                                      /* of device memory */
  int l2_bytes, shared_multiprocessor, shared_block; /* bytes; the last is what a kernel may opt in to */
  int clock_khz, memory_clock_khz, bus_bits;
} Device;

/* As torch.cuda.get_device_properties and deviceQuery print them. */
static const Device DEVICES[] = {
    {"h200", "NVIDIA H200", 9, 0, 132, 150754820096, 62914560, 233472, 232448, 1980000, 3201000, 6144},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 85017493504, 52428800, 233472, 232448, 1980000, 2619000,
     5120},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 84974501888, 41943040, 167936, 166912, 1410000, 1593000,
     5120},
};
enum { COUNT = sizeof DEVICES / sizeof *DEVICES };
enum { CONTEXT_BYTES = 512 << 20, SHARED_BLOCK = 49152, REGISTERS = 65536 };
enum { WARP = 32, THREADS_BLOCK = 1024, THREADS = 2048 };

static const Device *device(void) {
  const char *wanted = getenv("PRETEND_GPU");
  if (!wanted || !*wanted) return DEVICES;
  for (const Device *d = DEVICES; d < DEVICES + COUNT; d++)
    if (!strcmp(d->key, wanted)) return d;
  fprintf(stderr, "PRETEND_GPU=%s is unknown; valid are:", wanted);
  for (int i = 0; i < COUNT; i++) fprintf(stderr, " %s", DEVICES[i].key);
  fprintf(stderr, "\n");
  exit(2);
}

/* The runtime: what torch asks. */

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *ordinal) { *ordinal = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int ordinal) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *total = device()->bytes;
  *free = *total - CONTEXT_BYTES;
  return cudaSuccess;
}

/* Kernels of torch itself are launched without a look at the result, and asked about after. */
static cudaError_t last = cudaSuccess;
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void) {
  cudaError_t found = last;
  last = cudaSuccess;
  return found;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *entry) {
  *kernel = (cudaKernel_t)entry;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return last = cudaErrorNotSupported;
}

/* Inductor makes a few small tensors to trace its patterns with. They hold nothing: reading is an error. */
cudaError_t cudaMalloc(void **address, size_t bytes) {
  static size_t next = (size_t)1 << 40;
  *address = (void *)next;
  next += (bytes + 511) / 512 * 512;
  return cudaSuccess;
}
cudaError_t cudaFree(void *address) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return kind == cudaMemcpyDeviceToHost ? cudaErrorNotSupported : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int ordinal) {
  const Device *d = device();
  memset(p, 0, sizeof *p);
  strcpy(p->name, d->name);
  p->major = d->major;
  p->minor = d->minor;
  p->multiProcessorCount = d->multiprocessors;
  p->totalGlobalMem = d->bytes;
  p->l2CacheSize = d->l2_bytes;
  p->memoryBusWidth = d->bus_bits;
  p->warpSize = WARP;
  p->maxThreadsPerBlock = THREADS_BLOCK;
  p->maxThreadsPerMultiProcessor = THREADS;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = SHARED_BLOCK;
  p->sharedMemPerBlockOptin = d->shared_block;
  p->sharedMemPerMultiprocessor = d->shared_multiprocessor;
  p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
  p->unifiedAddressing = p->concurrentKernels = p->managedMemory = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal) {
  const Device *d = device();
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = d->major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = d->minor; break;
    case cudaDevAttrMultiProcessorCount: *value = d->multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = d->shared_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = d->shared_multiprocessor; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = REGISTERS; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = THREADS_BLOCK; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS; break;
    case cudaDevAttrWarpSize: *value = WARP; break;
    case cudaDevAttrClockRate: *value = d->clock_khz; break;
    case cudaDevAttrMemoryClockRate: *value = d->memory_clock_khz; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = d->bus_bits; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

/* The driver, without its header, whose macros rename functions: an error is an int, 0 is success. */

enum { NOT_SUPPORTED = 801 };
enum { FUNCTION_MAX_THREADS = 0, FUNCTION_REGISTERS = 4 }; /* attributes of a compiled function */
#define SUCCEEDS(name) int name(void) { return 0; }
#define FAILS(name) int name(void) { return NOT_SUPPORTED; }
#define MAKES_HANDLE(name) int name(void **handle) { *handle = (void *)1; return 0; }

int cuDeviceGetAttribute(int *value, int attribute, int ordinal) { /* the runtime numbers attributes alike */
  return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, ordinal);
}
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *ordinal, int wanted) { *ordinal = wanted; return 0; }
int cuCtxGetLimit(size_t *bytes, int limit) { *bytes = 0; return 0; }
int cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuGetErrorString(int error, const char **text) { *text = "not supported by the pretend GPU"; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == FUNCTION_MAX_THREADS ? THREADS_BLOCK : attribute == FUNCTION_REGISTERS ? 64 : 0;
  return 0;
}
SUCCEEDS(cuInit) SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuFuncSetAttribute) SUCCEEDS(cuFuncSetCacheConfig)
MAKES_HANDLE(cuCtxGetCurrent) MAKES_HANDLE(cuDevicePrimaryCtxRetain)
MAKES_HANDLE(cuModuleLoad) MAKES_HANDLE(cuModuleLoadData) MAKES_HANDLE(cuModuleLoadDataEx)
MAKES_HANDLE(cuModuleGetFunction)
FAILS(cuLaunchKernel) FAILS(cuLaunchKernelEx) FAILS(cuLaunchCooperativeKernel) FAILS(cuTensorMapEncodeTiled)
FAILS(cuLinkCreate_v2) FAILS(cuLinkAddData_v2) FAILS(cuLinkComplete) FAILS(cuPointerGetAttribute)
FAILS(cuOccupancyMaxActiveBlocksPerMultiprocessor) FAILS(cuOccupancyMaxActiveClusters)
