#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <future>
#include <system_error>
#include <thread>
#include <vector>

namespace kda::reference {

// f(i) for every i in [0, count), on all CPUs that a thread can be had for.
template <class F>
void for_each(std::int64_t count, const F& f) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t i = next++; i < count; i = next++) f(i);
  };
  std::vector<std::future<void>> helpers;
  const auto threads = std::min<std::int64_t>(count, std::thread::hardware_concurrency());
  try {
    for (std::int64_t i = 1; i < threads; ++i) helpers.push_back(std::async(std::launch::async, work));
  } catch (const std::system_error&) {  // those there are will do
  }
  work();
  for (auto& helper : helpers) helper.get();
}

}  // namespace kda::reference
