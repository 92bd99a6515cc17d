#ifndef KDA_ACLNN_ACL_META_H_
#define KDA_ACLNN_ACL_META_H_

/* Tensors, integer arrays and executors: opaque handles, good in every thread. One that was destroyed, or never was a
   handle, is refused with 161002 wherever it is passed; a null one with 161001, a null executor with 561103. */

#include <stdbool.h>
#include <stdint.h>

#include "acl/acl_rt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct aclOpExecutor aclOpExecutor;
typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclFloatArray aclFloatArray;
typedef struct aclBoolArray aclBoolArray;
typedef struct aclTensorList aclTensorList;

typedef int32_t aclnnStatus;

/* Describes memory of the thread's current device (aclrtSetDevice) that stays the caller's: index (i0, i1, ...) is
   element offset + sum(i_d * stride_d) of tensorData. A null stride means row-major. storageDims, the shape of the
   memory, is not looked at. Null on failure. */
KDA_API aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType,
                                   const int64_t* stride, int64_t offset, aclFormat format, const int64_t* storageDims,
                                   uint64_t storageDimsNum, void* tensorData);
/* An operator's first phase copies what it needs of tensors and arrays: both may be destroyed before the second. */
KDA_API aclnnStatus aclDestroyTensor(const aclTensor* tensor);

/* Copies the values. Null on failure. */
KDA_API aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size);
KDA_API aclnnStatus aclDestroyIntArray(const aclIntArray* array);

/* An executor serves one call of the second phase, which frees it whether the call succeeds or not. A repeatable one
   serves any number, from several threads at once when each has its own workspace, until aclDestroyAclOpExecutor. */
KDA_API aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor);
KDA_API aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor);

#ifdef __cplusplus
}
#endif

#endif /* KDA_ACLNN_ACL_META_H_ */
