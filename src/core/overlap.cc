#include "core/overlap.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <utility>

#include "core/checked.h"

namespace kda {
namespace {

constexpr Int128 kMaxInt64 = std::numeric_limits<std::int64_t>::max();

// A search that visits more nodes than this gives up. Views in practice need fewer than a hundred.
constexpr int kMaxVisits = 100'000;

// One summand coefficient * z with 0 <= z <= bound. Everything handed to the solver stays far below 2^127: coefficients
// and coefficient * bound are at most 2^65.
struct Term {
  Int128 coefficient = 0;
  Int128 bound = 0;
};

// Both views' axes and one term for the bytes within an element.
constexpr std::size_t kMaxTerms = 2 * static_cast<std::size_t>(kMaxRank) + 1;

// For a handful of elements.
template <typename Element, typename Less>
void insertion_sort(std::span<Element> elements, Less less) noexcept {
  for (std::size_t i = 1; i < elements.size(); ++i) {
    for (std::size_t j = i; j > 0 && less(elements[j], elements[j - 1]); --j) std::swap(elements[j], elements[j - 1]);
  }
}

class Terms {
 public:
  void add(Int128 coefficient, Int128 bound) noexcept {
    if (coefficient != 0 && bound != 0) terms_[size_++] = {coefficient, bound};
  }
  [[nodiscard]] std::span<Term> span() noexcept { return {terms_.data(), size_}; }

  // Sorts by ascending coefficient and joins terms whose sums are together one arithmetic progression: with it,
  // contiguous axes become one.
  void simplify() noexcept {
    insertion_sort(span(), [](const Term& a, const Term& b) { return a.coefficient < b.coefficient; });
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size_; ++i) {
      if (kept == 0 || !join(terms_[kept - 1], terms_[i])) terms_[kept++] = terms_[i];
    }
    size_ = kept;
  }

 private:
  // fine.c * {0..fine.n} + coarse.c * {0..coarse.n} has no holes when coarse.c is a multiple of fine.c that fine can
  // bridge.
  static bool join(Term& fine, const Term& coarse) noexcept {
    const Int128 ratio = coarse.coefficient / fine.coefficient;
    if (coarse.coefficient % fine.coefficient != 0 || ratio > fine.bound + 1) return false;
    fine.bound += ratio * coarse.bound;
    return true;
  }

  std::array<Term, kMaxTerms> terms_{};
  std::size_t size_ = 0;
};

Int128 gcd(Int128 a, Int128 b) noexcept {
  while (b != 0) a = std::exchange(b, a % b);
  return a;
}

// x with a * x = 1 (mod m); a and m coprime, 0 <= a < m.
Int128 inverse(Int128 a, Int128 m) noexcept {
  if (m == 1) return 0;
  Int128 previous = m, current = a, x_previous = 0, x = 1;
  while (current > 1) {
    const Int128 quotient = previous / current;
    previous = std::exchange(current, previous - quotient * current);
    x_previous = std::exchange(x, x_previous - quotient * x);
  }
  return x < 0 ? x + m : x;
}

// Decides whether sum(coefficient_i * z_i) = target has a solution, by depth-first search from the largest coefficient
// down. At each level only those z are tried that leave a rest which the smaller terms can reach in size and divide.
class BoundedSum {
 public:
  explicit BoundedSum(std::span<const Term> terms) noexcept : terms_(terms) {
    for (std::size_t i = 0; i < terms.size(); ++i) {
      reach_[i + 1] = reach_[i] + terms[i].coefficient * terms[i].bound;
      divisor_[i + 1] = gcd(divisor_[i], terms[i].coefficient);
    }
  }

  [[nodiscard]] bool reaches(Int128 target) noexcept { return reaches(terms_.size(), target); }

 private:
  // With the first `count` terms.
  bool reaches(std::size_t count, Int128 target) noexcept {
    if (target < 0 || target > reach_[count]) return false;
    if (target == 0 || ++visits_ > kMaxVisits) return true;
    if (target % divisor_[count] != 0) return false;
    if (count == 1) return true;
    return descend(terms_[count - 1], count - 1, target);
  }

  bool descend(const Term& term, std::size_t rest, Int128 target) noexcept {
    // coefficient * z = target (mod divisor_[rest]) holds for z = first + n * step.
    const Int128 common = gcd(divisor_[rest], term.coefficient);
    const Int128 step = divisor_[rest] / common;
    const Int128 first = target / common % step * inverse(term.coefficient / common % step, step) % step;
    const Int128 excess = std::max<Int128>(target - reach_[rest], 0);
    const Int128 low = (excess + term.coefficient - 1) / term.coefficient;
    const Int128 high = std::min(term.bound, target / term.coefficient);
    for (Int128 z = first + std::max<Int128>((low - first + step - 1) / step, 0) * step; z <= high; z += step) {
      if (reaches(rest, target - term.coefficient * z)) return true;
    }
    return false;
  }

  std::span<const Term> terms_;
  std::array<Int128, kMaxTerms + 1> reach_{};    // largest sum of the first i terms
  std::array<Int128, kMaxTerms + 1> divisor_{};  // gcd of the first i coefficients
  int visits_ = 0;
};

bool has_solution(Terms& terms, Int128 target) noexcept {
  terms.simplify();
  return BoundedSum(terms.span()).reaches(target);
}

// Axes with more than one index, strides in elements without their sign, largest first.
struct Axis {
  Int128 stride = 0;
  Int128 last = 0;  // largest index
};

struct Axes {
  std::array<Axis, static_cast<std::size_t>(kMaxRank)> axis{};
  std::size_t count = 0;

  explicit Axes(const TensorView& view) noexcept {
    for (std::size_t i = 0; i < view.sizes().size(); ++i) {
      const Int128 stride = view.strides[i];
      if (view.shape[i] > 1) axis[count++] = {stride < 0 ? -stride : stride, Int128{view.shape[i]} - 1};
    }
    insertion_sort(std::span(axis).first(count), [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  }
};

// Two indices that first differ (by `difference` >= 1) on axis `first` and reach the same element.
bool collides(const Axes& axes, std::size_t first) noexcept {
  Terms terms;
  Int128 target = -axes.axis[first].stride;
  terms.add(axes.axis[first].stride, axes.axis[first].last - 1);
  for (std::size_t i = first + 1; i < axes.count; ++i) {
    // The difference of two indices lies in -last..last; the solver wants 0..2*last.
    terms.add(axes.axis[i].stride, 2 * axes.axis[i].last);
    target += axes.axis[i].stride * axes.axis[i].last;
  }
  return has_solution(terms, target);
}

void add_axes(Terms& terms, const TensorView& view) noexcept {
  const Axes axes(view);
  const auto bytes = static_cast<Int128>(size_of(view.dtype));
  for (std::size_t i = 0; i < axes.count; ++i) terms.add(axes.axis[i].stride * bytes, axes.axis[i].last);
}

Int128 address_of(const TensorView& view) noexcept {
  return static_cast<Int128>(reinterpret_cast<std::uintptr_t>(view.data));
}

}  // namespace

std::optional<ByteRange> byte_range(const TensorView& view) noexcept {
  if (view.numel() == 0) return ByteRange{};
  const auto bytes = static_cast<Int128>(size_of(view.dtype));
  Int128 low = 0;
  Int128 high = bytes;
  for (std::size_t i = 0; i < view.sizes().size(); ++i) {
    // At most 2^126 before the check below.
    const Int128 reach = Int128{view.shape[i] - 1} * view.strides[i];
    if (reach > kMaxInt64 || reach < -kMaxInt64) return std::nullopt;
    (reach < 0 ? low : high) += reach * bytes;
  }
  if (high - low > kMaxInt64) return std::nullopt;
  return ByteRange{static_cast<std::int64_t>(low), static_cast<std::int64_t>(high)};
}

bool overlaps_itself(const TensorView& view) noexcept {
  if (view.numel() == 0) return false;
  if (!byte_range(view)) return true;
  const Axes axes(view);
  for (std::size_t i = 0; i < axes.count; ++i) {
    if (axes.axis[i].stride == 0 || collides(axes, i)) return true;
  }
  return false;
}

bool overlap(const TensorView& a, const TensorView& b) noexcept {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto range_a = byte_range(a);
  const auto range_b = byte_range(b);
  if (!range_a || !range_b) return true;
  const Int128 first_a = address_of(a) + range_a->low;
  const Int128 first_b = address_of(b) + range_b->low;
  const Int128 last_a = address_of(a) + range_a->high - 1;
  const Int128 last_b = address_of(b) + range_b->high - 1;
  if (last_a < first_b || last_b < first_a) return false;

  // A byte of a is first_a + (a's axes) + (byte of the element); one of b, counted down from its end, is last_b - (b's
  // axes) - (byte). They meet where the four sums add up to last_b - first_a.
  Terms terms;
  add_axes(terms, a);
  add_axes(terms, b);
  terms.add(1, static_cast<Int128>(size_of(a.dtype) + size_of(b.dtype)) - 2);
  return has_solution(terms, last_b - first_a);
}

}  // namespace kda
