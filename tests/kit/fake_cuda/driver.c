// A stand-in for libcuda.so.1, the CUDA driver. torch, vLLM and Triton ask it whether there is a device, and load it.
// Build adds the functions of the driver that the packages name and this file does not have: those return an error.
#include <cuda.h>
#include <string.h>

static CUcontext const the_context = (CUcontext)0x1000;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = the_context; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error ? "fake CUDA driver: not there" : "no error";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = error ? "CUDA_ERROR_FAKE" : "CUDA_SUCCESS";
  return CUDA_SUCCESS;
}

static CUresult not_there(void) { return CUDA_ERROR_NOT_SUPPORTED; }

// The driver's functions by name, as cudaGetDriverEntryPointByVersion (cudart.c) and cuGetProcAddress give them.
void *fake_driver_function(const char *name) {
  static const struct { const char *name; void *function; } all[] = {
      {"cuInit", cuInit},
      {"cuDriverGetVersion", cuDriverGetVersion},
      {"cuDeviceGetCount", cuDeviceGetCount},
      {"cuDeviceGet", cuDeviceGet},
      {"cuCtxGetCurrent", cuCtxGetCurrent},
      {"cuCtxGetDevice", cuCtxGetDevice},
      {"cuDevicePrimaryCtxGetState", cuDevicePrimaryCtxGetState},
      {"cuGetErrorString", cuGetErrorString},
      {"cuGetErrorName", cuGetErrorName},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!strcmp(name, all[i].name)) return all[i].function;
  return not_there;
}

#undef cuGetProcAddress
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
  *function = fake_driver_function(name);
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
