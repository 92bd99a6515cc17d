#pragma once

#include "acl/acl_rt.h"
#include "core/error.h"

namespace kda::c_api {

// A live stream, or null for the default one. Throws Error.
void require_stream(Argument argument, aclrtStream stream);

}  // namespace kda::c_api
