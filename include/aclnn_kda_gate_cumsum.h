#ifndef KDA_ACLNN_KDA_GATE_CUMSUM_H_
#define KDA_ACLNN_KDA_GATE_CUMSUM_H_

#include "aclnnop/aclnn_kda_gate_cumsum.h"

#endif /* KDA_ACLNN_KDA_GATE_CUMSUM_H_ */
