#include <array>
#include <string>

#include "chunk_kda_fwd/arguments.h"

namespace kda {
namespace {

constexpr std::array kLayouts{Layout::kBSND, Layout::kBNSD, Layout::kTND, Layout::kNTD};

}  // namespace

std::string_view name_of(Layout layout) noexcept {
  switch (layout) {
    case Layout::kBSND:
      return "BSND";
    case Layout::kBNSD:
      return "BNSD";
    case Layout::kTND:
      return "TND";
    case Layout::kNTD:
      return "NTD";
  }
  return {};
}

Layout parse_layout(std::string_view name) {
  for (const Layout layout : kLayouts) {
    if (name_of(layout) == name) return layout;
  }
  fail(ErrorKind::kValue, {kChunkKdaFwdName, "layout"}, "BSND, BNSD, TND or NTD", '"' + std::string(name) + '"');
}

}  // namespace kda
