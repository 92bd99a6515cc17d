/* Every C header by itself and all of them together, as strict C11. The same file is compiled as C++ too. */

#include "acl/acl.h"
#include "acl/acl_base.h"
#include "acl/acl_rt.h"
#include "aclnn/acl_meta.h"
#include "aclnn/aclnn_base.h"
#include "aclnn_chunk_kda_fwd.h"
#include "aclnn_kda_gate.h"
#include "aclnn_kda_gate_cumsum.h"
#include "aclnnop/aclnn_chunk_kda_fwd.h"
#include "aclnnop/aclnn_kda_gate.h"
#include "aclnnop/aclnn_kda_gate_cumsum.h"
#include "kda/acl_cuda.h"

/* The values that programs store and pass on: they are CANN's. */
typedef char check_float[ACL_FLOAT == 0 ? 1 : -1];
typedef char check_float16[ACL_FLOAT16 == 1 ? 1 : -1];
typedef char check_int32[ACL_INT32 == 3 ? 1 : -1];
typedef char check_int64[ACL_INT64 == 9 ? 1 : -1];
typedef char check_bf16[ACL_BF16 == 27 ? 1 : -1];
typedef char check_format[ACL_FORMAT_ND == 2 ? 1 : -1];
typedef char check_copy[ACL_MEMCPY_HOST_TO_DEVICE == 1 && ACL_MEMCPY_DEVICE_TO_HOST == 2 ? 1 : -1];
typedef char check_policy[ACL_MEM_MALLOC_HUGE_FIRST == 0 ? 1 : -1];

/* The signatures, argument by argument. */
typedef aclnnStatus (*chunk_kda_fwd_plan)(const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
                                          const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
                                          const aclIntArray*, const aclIntArray*, const char*, double, int64_t, bool,
                                          double, bool, bool, const aclTensor*, const aclTensor*, const aclTensor*,
                                          const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
                                          const aclTensor*, const aclTensor*, const aclTensor*, const aclTensor*,
                                          uint64_t*, aclOpExecutor**);
typedef aclnnStatus (*kda_gate_plan)(const aclTensor*, const aclTensor*, const aclTensor*, bool, double,
                                     const aclTensor*, uint64_t*, aclOpExecutor**);
typedef aclnnStatus (*kda_gate_cumsum_plan)(const aclTensor*, const aclTensor*, const aclTensor*, const aclIntArray*,
                                            int64_t, bool, bool, double, const aclTensor*, uint64_t*, aclOpExecutor**);
typedef aclnnStatus (*second_phase)(void*, uint64_t, aclOpExecutor*, aclrtStream);

int main(void) {
  /* volatile, or the compiler would know that no address is null */
  chunk_kda_fwd_plan volatile plan = aclnnChunkKdaFwdGetWorkspaceSize;
  kda_gate_plan volatile gate_plan = aclnnKdaGateGetWorkspaceSize;
  kda_gate_cumsum_plan volatile cumsum_plan = aclnnKdaGateCumsumGetWorkspaceSize;
  const second_phase phases[3] = {aclnnChunkKdaFwd, aclnnKdaGate, aclnnKdaGateCumsum};
  int i;
  if (!plan || !gate_plan || !cumsum_plan) return 1;
  for (i = 0; i < 3; ++i) {
    if (phases[i](NULL, 0, NULL, NULL) != ACLNN_ERR_INNER_NULLPTR) return 1;
  }
  return ACL_SUCCESS;
}
