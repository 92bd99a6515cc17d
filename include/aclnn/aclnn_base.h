#ifndef KDA_ACLNN_ACLNN_BASE_H_
#define KDA_ACLNN_ACLNN_BASE_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What operators return. */
static const aclnnStatus ACLNN_SUCCESS = 0;
static const aclnnStatus ACLNN_ERR_PARAM_NULLPTR = 161001;
static const aclnnStatus ACLNN_ERR_PARAM_INVALID = 161002;
static const aclnnStatus ACLNN_ERR_RUNTIME_ERROR = 361001;
static const aclnnStatus ACLNN_ERR_INNER = 561000;
static const aclnnStatus ACLNN_ERR_INNER_CREATE_EXECUTOR = 561101;
static const aclnnStatus ACLNN_ERR_INNER_NULLPTR = 561103;

/* Nothing needs them: they exist for programs that call them. */
KDA_API aclnnStatus aclnnInit(const char* configPath);
KDA_API aclnnStatus aclnnFinalize(void);

#ifdef __cplusplus
}
#endif

#endif /* KDA_ACLNN_ACLNN_BASE_H_ */
