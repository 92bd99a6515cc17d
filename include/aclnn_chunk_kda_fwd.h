#ifndef KDA_ACLNN_CHUNK_KDA_FWD_H_
#define KDA_ACLNN_CHUNK_KDA_FWD_H_

#include "aclnnop/aclnn_chunk_kda_fwd.h"

#endif /* KDA_ACLNN_CHUNK_KDA_FWD_H_ */
