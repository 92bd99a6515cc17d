#ifndef KDA_ACL_ACL_H_
#define KDA_ACL_ACL_H_

#include "acl/acl_base.h"
#include "acl/acl_rt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* No other function needs aclInit. The configuration file is not read. A second call before aclFinalize returns
   ACL_ERROR_REPEAT_INITIALIZE, aclFinalize without aclInit ACL_ERROR_UNINITIALIZE. */
KDA_API aclError aclInit(const char* configPath);
KDA_API aclError aclFinalize(void);

#ifdef __cplusplus
}
#endif

#endif /* KDA_ACL_ACL_H_ */
