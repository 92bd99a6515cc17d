#include "kda/info.h"

#include "cuda/loader.h"
#include "kda/status.h"

namespace kda {
namespace {

BackendInfo cpu_backend() {
  try {
    const int threads = default_num_threads();
    return {"cpu", true,
            cpu_instruction_set() + ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads")};
  } catch (const Error& error) {
    return {"cpu", false, error.what()};
  }
}

}  // namespace

const char* version() noexcept { return KDA_VERSION; }

std::vector<BackendInfo> backends() { return {cpu_backend(), cuda::backend_info()}; }

}  // namespace kda
