#pragma once

// Everything public but the float64 reference (kda/reference.h).

#include "kda/chunk_kda_fwd.h"
#include "kda/device.h"
#include "kda/info.h"
#include "kda/kda_gate.h"
#include "kda/kda_gate_cumsum.h"
#include "kda/plan.h"
#include "kda/status.h"
#include "kda/tensor.h"
