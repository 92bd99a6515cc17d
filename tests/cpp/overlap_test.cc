#include "core/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace kda {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();

// Views are never dereferenced here, so any address will do.
TensorView at(std::intptr_t address, Dtype dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides) {
  return TensorView::strided(reinterpret_cast<void*>(address), dtype, std::span<const std::int64_t>(shape), strides);
}

// The address of every element, found by counting through all indices.
std::vector<std::int64_t> element_addresses(const TensorView& view) {
  std::vector<std::int64_t> addresses;
  if (view.numel() == 0) return addresses;
  addresses.push_back(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(view.data)));
  for (std::size_t axis = 0; axis < view.sizes().size(); ++axis) {
    const std::size_t count = addresses.size();
    for (std::int64_t i = 1; i < view.shape[axis]; ++i) {
      const std::int64_t offset = i * view.strides[axis] * static_cast<std::int64_t>(size_of(view.dtype));
      for (std::size_t n = 0; n < count; ++n) addresses.push_back(addresses[n] + offset);
    }
  }
  return addresses;
}

std::set<std::int64_t> bytes_of(const TensorView& view) {
  std::set<std::int64_t> bytes;
  for (const std::int64_t address : element_addresses(view)) {
    for (std::size_t i = 0; i < size_of(view.dtype); ++i) bytes.insert(address + static_cast<std::int64_t>(i));
  }
  return bytes;
}

bool overlap_by_counting(const TensorView& a, const TensorView& b) {
  const auto bytes = bytes_of(a);
  const auto others = bytes_of(b);
  return std::any_of(others.begin(), others.end(), [&](std::int64_t byte) { return bytes.contains(byte); });
}

bool self_overlap_by_counting(const TensorView& view) {
  const auto addresses = element_addresses(view);
  return std::set<std::int64_t>(addresses.begin(), addresses.end()).size() != addresses.size();
}

class RandomViews {
 public:
  explicit RandomViews(unsigned seed) : engine_(seed) {}

  TensorView next(std::int64_t largest_stride) {
    static constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kInt64};
    std::vector<std::int64_t> shape, strides;
    for (std::int64_t rank = uniform(0, 4); rank > 0; --rank) {
      shape.push_back(uniform(0, 20) == 0 ? 0 : uniform(1, 5));
      strides.push_back(uniform(-largest_stride, largest_stride));
    }
    return at(10'000 + uniform(0, 400), kDtypes[uniform(0, 2)], shape, strides);
  }

 private:
  std::int64_t uniform(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }

  std::mt19937 engine_;
};

TEST(Overlap, RandomPairsAgreeWithCounting) {
  RandomViews views(1);
  std::map<bool, int> seen;
  for (int i = 0; i < 20'000; ++i) {
    const TensorView a = views.next(i % 100 + 1);
    const TensorView b = views.next(i % 100 + 1);
    const bool expected = overlap_by_counting(a, b);
    ++seen[expected];
    ASSERT_EQ(overlap(a, b), expected) << "pair " << i;
    ASSERT_EQ(overlap(b, a), expected) << "pair " << i;
  }
  EXPECT_GT(seen[true], 1000);
  EXPECT_GT(seen[false], 1000);
}

TEST(Overlap, RandomViewsOverlapThemselvesAsCounted) {
  RandomViews views(2);
  std::map<bool, int> seen;
  for (int i = 0; i < 20'000; ++i) {
    const TensorView view = views.next(i % 100 + 1);
    const bool expected = self_overlap_by_counting(view);
    ++seen[expected];
    ASSERT_EQ(overlaps_itself(view), expected) << "view " << i;
  }
  EXPECT_GT(seen[true], 1000);
  EXPECT_GT(seen[false], 1000);
}

TEST(Overlap, ByteRangesAgreeWithCounting) {
  RandomViews views(3);
  for (int i = 0; i < 2000; ++i) {
    const TensorView view = views.next(30);
    const auto range = byte_range(view);
    ASSERT_TRUE(range.has_value());
    const auto bytes = bytes_of(view);
    if (bytes.empty()) {
      EXPECT_EQ(range->low, range->high);
      continue;
    }
    const auto base = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(view.data));
    EXPECT_EQ(base + range->low, *bytes.begin());
    EXPECT_EQ(base + range->high, *bytes.rbegin() + 1);
  }
}

TEST(Overlap, SlicesOfOneFusedProjectionAreDisjoint) {
  // q, k and v of 32 heads of 128, cut from rows of 3 * 4096 elements.
  const std::vector<std::int64_t> shape{8, 4096, 32, 128}, strides{std::int64_t{4096} * 12288, 12288, 128, 1};
  const TensorView q = at(1 << 20, Dtype::kBFloat16, shape, strides);
  const TensorView k = at((1 << 20) + 8192, Dtype::kBFloat16, shape, strides);
  const TensorView shifted = at((1 << 20) + 8190, Dtype::kBFloat16, shape, strides);
  EXPECT_FALSE(overlap(q, k));
  EXPECT_TRUE(overlap(q, shifted));
  EXPECT_FALSE(overlaps_itself(q));
}

TEST(Overlap, InterleavedElementsAreDisjoint) {
  const TensorView even = at(4096, Dtype::kFloat32, {1000, 64}, {128, 2});
  const TensorView odd = at(4100, Dtype::kFloat32, {1000, 64}, {128, 2});
  const TensorView between = at(4098, Dtype::kFloat32, {1000, 64}, {128, 2});
  EXPECT_FALSE(overlap(even, odd));
  EXPECT_TRUE(overlap(even, between));
}

TEST(Overlap, ReversedAndTransposedViewsDoNotOverlapThemselves) {
  EXPECT_FALSE(overlaps_itself(at(1 << 20, Dtype::kFloat32, {7, 5, 3}, {-15, 1, 5})));
  EXPECT_FALSE(overlaps_itself(at(1 << 20, Dtype::kFloat32, {7, 5}, {4, 28})));
  EXPECT_TRUE(overlaps_itself(at(1 << 20, Dtype::kFloat32, {8, 5}, {4, 28})));
}

TEST(Overlap, BroadcastOverlapsItself) {
  EXPECT_TRUE(overlaps_itself(at(4096, Dtype::kFloat32, {4, 2}, {1, 0})));
  EXPECT_FALSE(overlaps_itself(at(4096, Dtype::kFloat32, {4, 1}, {1, 0})));
}

TEST(Overlap, NothingSharesNothing) {
  const TensorView empty = at(4096, Dtype::kFloat32, {4, 0}, {0, 0});
  const TensorView full = at(4096, Dtype::kFloat32, {4, 4}, {4, 1});
  EXPECT_FALSE(overlap(empty, full));
  EXPECT_FALSE(overlap(full, TensorView{}));
  EXPECT_FALSE(overlaps_itself(empty));
  EXPECT_FALSE(overlaps_itself(TensorView{}));
}

TEST(Overlap, HostileNumbersAnswerTrueWithoutOverflow) {
  const TensorView full = at(4096, Dtype::kFloat32, {4, 4}, {4, 1});
  for (const std::int64_t stride : {kHuge, kLowest, kHuge / 2, std::int64_t{1} << 61}) {
    const TensorView wild = at(4096, Dtype::kFloat32, {5, 3}, {stride, stride});
    EXPECT_FALSE(byte_range(wild).has_value());
    EXPECT_TRUE(overlap(wild, full));
    EXPECT_TRUE(overlaps_itself(wild));
  }
  const TensorView endless = at(4096, Dtype::kInt64, {kHuge, kHuge}, {1, kHuge});
  EXPECT_EQ(endless.numel(), kHuge);
  EXPECT_FALSE(byte_range(endless).has_value());
  EXPECT_TRUE(overlap(endless, full));
}

TEST(Overlap, LargestAddressableViewsAreDecided) {
  const std::int64_t half = std::int64_t{1} << 58;
  const TensorView wide = at(0, Dtype::kInt64, {2, 2}, {half, half - 1});
  EXPECT_FALSE(overlaps_itself(wide));
  EXPECT_TRUE(overlaps_itself(at(0, Dtype::kInt64, {2, 2}, {half, half})));
  EXPECT_FALSE(overlap(wide, at(8, Dtype::kInt64, {1}, {1})));
  EXPECT_TRUE(overlap(wide, at(0, Dtype::kInt64, {1}, {1})));
}

TEST(Overlap, UnusedStridesDoNotCount) {
  const TensorView row = at(4096, Dtype::kFloat32, {1, 4}, {kHuge, 1});
  EXPECT_TRUE(byte_range(row).has_value());
  EXPECT_FALSE(overlaps_itself(row));
}

// A subset-sum problem without structure: the search has to give up in bounded time, and then must not claim
// disjointness.
TEST(Overlap, HardProblemsEndSoon) {
  std::mt19937_64 engine(7);
  int decided = 0;
  for (int i = 0; i < 20; ++i) {
    std::vector<std::int64_t> shape(8, 1000), strides;
    for (int axis = 0; axis < 8; ++axis) strides.push_back(static_cast<std::int64_t>(engine() >> 16) | 1);
    const TensorView view = at(4096, Dtype::kBFloat16, shape, strides);
    const TensorView other = at(1 << 30, Dtype::kBFloat16, shape, strides);
    EXPECT_TRUE(overlap(view, view));
    EXPECT_EQ(overlap(view, other), overlap(other, view));
    if (const bool overlapping = overlaps_itself(view); !overlapping) ++decided;
  }
  EXPECT_LT(decided, 20);
}

}  // namespace
}  // namespace kda
