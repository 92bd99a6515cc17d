#ifndef KDA_ACL_ACL_RT_H_
#define KDA_ACL_ACL_RT_H_

/* Devices, memory and streams. Device 0 is the CPU, whose memory is the host's; devices 1, 2, ... are the NVIDIA GPUs
   0, 1, ... that the library's CUDA backend can use. Each thread has a current device, at first 0. Tensors, memory,
   streams and copies without a stream are of the device that was current when they were made. Every function may be
   called from any thread. */

#include <stddef.h>
#include <stdint.h>

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void* aclrtStream;
typedef void* aclrtContext;

/* A hint without effect here. */
typedef enum aclrtMemMallocPolicy {
  ACL_MEM_MALLOC_HUGE_FIRST,
  ACL_MEM_MALLOC_HUGE_ONLY,
  ACL_MEM_MALLOC_NORMAL_ONLY,
  ACL_MEM_MALLOC_HUGE_FIRST_P2P,
  ACL_MEM_MALLOC_HUGE_ONLY_P2P,
  ACL_MEM_MALLOC_NORMAL_ONLY_P2P,
  ACL_MEM_MALLOC_HUGE1G_ONLY,
  ACL_MEM_MALLOC_HUGE1G_ONLY_P2P,
  ACL_MEM_TYPE_LOW_BAND_WIDTH = 0x0100,
  ACL_MEM_TYPE_HIGH_BAND_WIDTH = 0x1000,
  ACL_MEM_ACCESS_USER_SPACE_READONLY = 0x100000
} aclrtMemMallocPolicy;

typedef enum aclrtMemcpyKind {
  ACL_MEMCPY_HOST_TO_HOST,
  ACL_MEMCPY_HOST_TO_DEVICE,
  ACL_MEMCPY_DEVICE_TO_HOST,
  ACL_MEMCPY_DEVICE_TO_DEVICE,
  ACL_MEMCPY_DEFAULT
} aclrtMemcpyKind;

/* Counts the CPU and the GPUs. */
KDA_API aclError aclrtGetDeviceCount(uint32_t* count);
/* A device that is not there is refused with ACL_ERROR_RT_INVALID_DEVICEID. */
KDA_API aclError aclrtSetDevice(int32_t deviceId);
KDA_API aclError aclrtGetDevice(int32_t* deviceId);
/* Nothing is kept for a device that could be given back. */
KDA_API aclError aclrtResetDevice(int32_t deviceId);
KDA_API aclError aclrtSynchronizeDevice(void);

/* A context stands for its device, which creating it and setting it make current. */
KDA_API aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId);
KDA_API aclError aclrtDestroyContext(aclrtContext context);
KDA_API aclError aclrtSetCurrentContext(aclrtContext context);

/* On the CPU work on a stream has finished when the call that started it returns; on a GPU when the stream or the
   device has been synchronized. A null stream is the current device's default one: on a GPU CUDA's legacy default
   stream. */
KDA_API aclError aclrtCreateStream(aclrtStream* stream);
KDA_API aclError aclrtDestroyStream(aclrtStream stream);
KDA_API aclError aclrtSynchronizeStream(aclrtStream stream);

/* Of the current device, aligned to 512 bytes (GPU: to 256); size must not be 0. aclrtFree waits for the GPU. */
KDA_API aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy policy);
KDA_API aclError aclrtFree(void* devPtr);
KDA_API aclError aclrtMallocHost(void** hostPtr, size_t size);
KDA_API aclError aclrtFreeHost(void* hostPtr);

/* destMax and maxCount are what the destination holds: a larger count is refused. */
KDA_API aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind);
KDA_API aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind,
                                  aclrtStream stream);
KDA_API aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count);
KDA_API aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif /* KDA_ACL_ACL_RT_H_ */
