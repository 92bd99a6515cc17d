#ifndef KDA_ACLNN_KDA_GATE_H_
#define KDA_ACLNN_KDA_GATE_H_

#include "aclnnop/aclnn_kda_gate.h"

#endif /* KDA_ACLNN_KDA_GATE_H_ */
