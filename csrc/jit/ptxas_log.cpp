#include "jit/ptxas_log.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <vector>

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::jit {
namespace {

// The numbers that stand right before `unit`, in order.
std::vector<uint32_t> numbers_before(std::string_view log, std::string_view unit) {
  std::vector<uint32_t> found;
  for (size_t at = log.find(unit); at != std::string_view::npos; at = log.find(unit, at + 1)) {
    size_t begin = at;
    while (begin > 0 && log[begin - 1] >= '0' && log[begin - 1] <= '9')
      --begin;
    uint32_t number = 0;
    const auto result = std::from_chars(log.data() + begin, log.data() + at, number);
    if (begin != at && result.ec == std::errc{}) found.push_back(number);
  }
  return found;
}

uint32_t sum(const std::vector<uint32_t>& numbers) {
  uint32_t total = 0;
  for (const uint32_t n : numbers)
    total += n;
  return total;
}

uint32_t largest(const std::vector<uint32_t>& numbers) {
  return numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end());
}

}  // namespace

ResourceUse parse_ptxas_log(std::string_view log) {
  const std::vector<uint32_t> registers = numbers_before(log, " registers");
  const std::vector<uint32_t> stores = numbers_before(log, " bytes spill stores");
  const std::vector<uint32_t> loads = numbers_before(log, " bytes spill loads");
  if (registers.empty() || stores.empty() || loads.size() != stores.size()) {
    throw Error(str("ptxas does not tell what the kernel needs; its log is:\n", log));
  }
  ResourceUse use;
  use.registers = largest(registers);
  use.spill_store_bytes = sum(stores);
  use.spill_load_bytes = sum(loads);
  use.stack_bytes = std::max(largest(numbers_before(log, " bytes stack frame")),
                             largest(numbers_before(log, " bytes cumulative stack size")));
  use.shared_bytes = largest(numbers_before(log, " bytes smem"));
  return use;
}

}  // namespace ep::jit
