// A stand-in for libcudart.so.13, the CUDA runtime, with devices whose memory is the host's.
//
// Copies are done at once by the calling thread, so streams and events have nothing to wait for. No kernel can run: a
// launch is an error, which shows an operation that redirect.cpp has not taken to the CPU. Build adds the functions of
// the runtime that the packages name and this file does not have: those return an error.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_DEVICES = 16 };
static const size_t MEMORY = 80ull << 30;  // bytes of a device, as it says; the host's memory is the real limit
static const cudaError_t KERNEL = cudaErrorLaunchFailure;

static __thread int current = 0;
static __thread cudaError_t last_error = cudaSuccess;

static cudaError_t noted(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

// ---- devices: VCPO_FAKE_CUDA_DEVICES of them (1), with an H100's numbers

static int devices(void) {
  const char *wanted = getenv("VCPO_FAKE_CUDA_DEVICES");
  int count = wanted ? atoi(wanted) : 1;
  return count < MOST_DEVICES ? count : MOST_DEVICES;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = devices();
  return *count ? cudaSuccess : noted(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return noted(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaInitDevice(int device, unsigned flags, unsigned of_flags) { return cudaSetDevice(device); }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char *cudaGetErrorString(cudaError_t error) {
  if (error == KERNEL) return "fake CUDA: a kernel was launched, and there is no GPU to run it";
  if (error == cudaErrorNotSupported) return "fake CUDA: a function that the stand-in does not have";
  return error ? "fake CUDA: an error" : "no error";
}

const char *cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorFake" : "cudaSuccess"; }

#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *of, int device) {
  memset(of, 0, sizeof *of);
  strcpy(of->name, "NVIDIA H100 80GB HBM3 (fake)");
  of->major = 9;
  of->minor = 0;
  of->totalGlobalMem = MEMORY;
  of->multiProcessorCount = 132;
  of->warpSize = 32;
  of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = INT32_MAX;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->maxThreadsPerMultiProcessor = 2048;
  of->maxBlocksPerMultiProcessor = 32;
  of->sharedMemPerBlock = 48 << 10;
  of->sharedMemPerBlockOptin = 227 << 10;
  of->sharedMemPerMultiprocessor = 228 << 10;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->l2CacheSize = 50 << 20;
  of->totalConstMem = 64 << 10;
  of->textureAlignment = 512;
  of->unifiedAddressing = of->managedMemory = of->concurrentKernels = 1;
  of->asyncEngineCount = 3;
  of->pciBusID = 1 + device;
  of->uuid.bytes[0] = (char)device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp of;
  cudaGetDeviceProperties(&of, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = of.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = of.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = of.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = of.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = of.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = of.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)of.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)of.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)of.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = of.regsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = of.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = of.maxGridSize[1]; break;
    case cudaDevAttrL2CacheSize: *value = of.l2CacheSize; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) { *can = device != other; return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}

// ---- memory: blocks of the host's, remembered with their device

struct block {
  char *start;
  size_t size;
  int device, pinned;
  struct block *next;
};
static struct block *blocks;
static size_t used[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t allocate(void **start, size_t size, int pinned) {
  if (posix_memalign(start, 512, size ? size : 1)) return noted(cudaErrorMemoryAllocation);
  struct block *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  *block = (struct block){*start, size, current, pinned, blocks};
  blocks = block;
  if (!pinned) used[current] += size;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

static cudaError_t release(void *start) {
  struct block *found = NULL;
  pthread_mutex_lock(&lock);
  for (struct block **at = &blocks; *at && !found; at = found ? at : &(*at)->next)
    if ((*at)->start == start) {
      found = *at;
      *at = found->next;
      if (!found->pinned) used[found->device] -= found->size;
    }
  pthread_mutex_unlock(&lock);
  if (!found) return start ? noted(cudaErrorInvalidValue) : cudaSuccess;
  free(found);
  free(start);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **start, size_t size) { return allocate(start, size, 0); }
cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t stream) { return allocate(start, size, 0); }
cudaError_t cudaMallocHost(void **start, size_t size) { return allocate(start, size, 1); }
cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) { return allocate(start, size, 1); }
cudaError_t cudaFree(void *start) { return release(start); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return release(start); }
cudaError_t cudaFreeHost(void *start) { return release(start); }

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *total = MEMORY;
  *available = MEMORY - used[current];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *of, const void *pointer) {
  memset(of, 0, sizeof *of);
  of->type = cudaMemoryTypeUnregistered;
  of->device = -1;
  pthread_mutex_lock(&lock);
  for (struct block *block = blocks; block; block = block->next)
    if ((char *)pointer >= block->start && (char *)pointer < block->start + block->size) {
      of->type = block->pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
      of->device = block->device;
      of->devicePointer = (void *)pointer;
      of->hostPointer = block->pinned ? (void *)pointer : NULL;
      break;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy(to, from, size, kind);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t size, cudaStream_t stream) {
  return cudaMemcpy(to, from, size, cudaMemcpyDefault);
}

cudaError_t cudaMemset(void *start, int value, size_t size) { memset(start, value, size); return cudaSuccess; }

cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
  return cudaMemset(start, value, size);
}

// ---- streams and events: all work is done when a call returns

static void *new_handle(void) {
  static uintptr_t handles = 4096;
  return (void *)__sync_add_and_fetch(&handles, 16);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = new_handle();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(struct timespec));
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  struct timespec *a = (struct timespec *)start, *b = (struct timespec *)end;
  *milliseconds = (float)((b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) * 1e-6);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}

// ---- kernels: registered by the libraries that have them, and refused when they are launched

void **__cudaRegisterFatBinary(void *binary) { static void *handle[4]; return handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
void __cudaRegisterManagedVar() {}
char __cudaInitModule(void **handle) { return 1; }
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *function) {
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  of->numRegs = 32;
  of->binaryVersion = of->ptxVersion = 90;
  return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) { return cudaSuccess; }

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  return noted(KERNEL);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) {
  return noted(KERNEL);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return noted(KERNEL);
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
  return noted(KERNEL);
}

// ---- the driver, which torch reaches through the runtime

extern void *fake_driver_function(const char *name);  // driver.c

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = fake_driver_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
