// A libcuda.so.1 over host memory: the few functions that the bindings are asked for here, with the signatures
// of cuda.h. Batched copies run at once; what was called is written to the file that FAKE_CUDA_LOG names.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500, ALREADY_REGISTERED = 712 };

typedef struct { int type, id; } Location;
typedef struct { int order; Location source, target; unsigned flags; } Attributes;

static __thread void* current;
static size_t registered;

static void say(const char* format, size_t a, size_t b) {
  const char* path = getenv("FAKE_CUDA_LOG");
  FILE* log = path ? fopen(path, "a") : NULL;
  if (!log) return;
  fprintf(log, format, a, b);
  fclose(log);
}

CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
CUresult cuDriverGetVersion(int* version) { *version = 12080; return OK; }
CUresult cuDeviceGet(int* device, int index) { *device = index; return index == 3 ? OK : 101; }
CUresult cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(size_t)(0x1000 + device); return OK; }
CUresult cuCtxSetCurrent(void* context) { current = context; return OK; }
CUresult cuMemHostRegister_v2(void* address, size_t size, unsigned flags) {
  if (!current) return INVALID_CONTEXT;
  if (flags != 1) return INVALID_VALUE;
  if (registered == (size_t)address) return ALREADY_REGISTERED;
  registered = (size_t)address;
  say("register %zx %zu\n", (size_t)address, size);
  return OK;
}
CUresult cuMemHostUnregister(void* address) {
  if (registered != (size_t)address) return 713;
  registered = 0;
  say("unregister %zx %zu\n", (size_t)address, 0);
  return OK;
}
// As CUDA 12.8 has it.
CUresult cuMemcpyBatchAsync(size_t* targets, size_t* sources, size_t* sizes, size_t count, Attributes* attributes,
                            size_t* firsts, size_t kinds, size_t* failed, void* stream) {
  if (!current) return INVALID_CONTEXT;
  if (kinds != 1 || firsts[0] != 0 || attributes->order != 1 || attributes->flags != 1 || !stream) return INVALID_VALUE;
  if (attributes->source.type || attributes->source.id || attributes->target.type || attributes->target.id)
    return INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    if (sizes[i] == 0) {
      *failed = i;
      return INVALID_VALUE;
    }
    memcpy((void*)targets[i], (void*)sources[i], sizes[i]);
  }
  say("copied %zu on %zx\n", count, (size_t)stream);
  return OK;
}
// What CUDA 13 has under the name: no place for the failed copy. Asking for it by mistake must not pass.
static CUresult newer_batch(void) { return 999; }

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, unsigned long long flags, int* status) {
  struct { const char* name; void* function; } known[] = {
      {"cuInit", cuInit},
      {"cuDriverGetVersion", cuDriverGetVersion},
      {"cuDeviceGet", cuDeviceGet},
      {"cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain},
      {"cuCtxSetCurrent", cuCtxSetCurrent},
      {"cuMemHostRegister", cuMemHostRegister_v2},
      {"cuMemHostUnregister", cuMemHostUnregister},
      {"cuGetProcAddress", cuGetProcAddress_v2},
      {"cuMemcpyBatchAsync", version >= 13000 ? (void*)newer_batch : (void*)cuMemcpyBatchAsync},
  };
  int is_old = getenv("FAKE_CUDA_OLD") && strcmp(symbol, "cuMemcpyBatchAsync") == 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!is_old && strcmp(known[i].name, symbol) == 0) {
      *function = known[i].function;
      if (status) *status = 0;
      return OK;
    }
  *function = NULL;
  if (status) *status = is_old ? 2 : 1;
  return is_old ? OK : NOT_FOUND;
}
CUresult cuGetProcAddress(const char* symbol, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
