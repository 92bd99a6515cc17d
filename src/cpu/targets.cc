#include "cpu/targets.h"

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "kda/info.h"
#include "kda/status.h"

namespace kda::cpu {
namespace {

// Best first: Highway numbers better targets lower.
std::vector<std::int64_t> usable_targets() {
  std::vector<std::int64_t> targets;
  // Highway reports ARM's only where the CPU has AES too.
  const std::int64_t usable = HWY_TARGETS & (HWY_ARCH_ARM_A64 ? HWY_TARGETS : hwy::SupportedTargets());
  for (int bit = 0; bit < 63; ++bit) {
    const std::int64_t target = std::int64_t{1} << bit;
    if ((usable & target) != 0) targets.push_back(target);
  }
  return targets;
}

// Highway has several names for NEON, by what else the CPU can do that we do not use.
std::string_view name_of(std::int64_t target) { return HWY_ARCH_ARM_A64 ? "NEON" : hwy::TargetName(target); }

std::int64_t choose_target() {
  const std::vector<std::int64_t> targets = usable_targets();
  if (targets.empty()) throw Error(ErrorKind::kUnavailable, "cpu: expected at least SSE4.2, got less");
  const char* wanted = std::getenv("KDA_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return targets.front();
  std::string names;
  for (const std::int64_t target : targets) {
    if (wanted == name_of(target)) return target;
    names += names.empty() ? "" : ", ";
    names += name_of(target);
  }
  throw Error(ErrorKind::kUnavailable, "KDA_CPU_ISA: expected one of " + names + ", got " + wanted);
}

}  // namespace

std::int64_t chosen_target() {
  static const std::int64_t target = choose_target();
  return target;
}

}  // namespace kda::cpu

namespace kda {

std::string cpu_instruction_set() { return std::string(cpu::name_of(cpu::chosen_target())); }

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  for (const std::int64_t target : cpu::usable_targets()) names.emplace_back(cpu::name_of(target));
  return names;
}

}  // namespace kda
