#ifndef KDA_ACL_CUDA_H_
#define KDA_ACL_CUDA_H_

/* Streams that a program has from CUDA, for the operators of the C API. Not a part of acl. */

#include "acl/acl_rt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A handle for a cudaStream_t of GPU deviceId - 1, which stays the caller's: aclrtDestroyStream destroys the handle
   alone. cudaStream may be null (the legacy default stream), cudaStreamLegacy or cudaStreamPerThread. */
KDA_API aclError kdaStreamFromCuda(aclrtStream* stream, int32_t deviceId, void* cudaStream);

#ifdef __cplusplus
}
#endif

#endif /* KDA_ACL_CUDA_H_ */
