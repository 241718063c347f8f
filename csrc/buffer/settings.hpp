// A buffer's configuration, checked and completed: pure functions of BufferConfig and the group's size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ep/buffer.hpp"
#include "layout/window_layout.hpp"

namespace ep::buffer {

struct Settings {
  BufferConfig config;  // as given
  uint32_t rank = 0, num_ranks = 1;
  uint64_t token_bytes = 0, output_bytes = 0, arena_bytes = 0;
  std::vector<uint32_t> expert_offsets;  // [R+1]
  std::vector<uint32_t> expert_rank;     // [E]
  uint32_t max_local_experts = 0;
  uint32_t num_sms = 1;
  layout::WindowLayout window{};

  uint32_t num_local_experts() const { return expert_offsets[rank + 1] - expert_offsets[rank]; }
};

// Throws InvalidArgument naming the argument, its value and the limit, or Unsupported.
Settings make_settings(const BufferConfig& config, uint32_t rank, uint32_t num_ranks);

// Worker threads per operation when nobody says: the machine's cores shared by the ranks, at most 8.
uint32_t default_num_sms(uint32_t num_cores, uint32_t num_ranks);

Memory memory_of(const Settings& settings);

// What must be equal on all ranks, in the order in which differences are reported.
struct NamedValue {
  std::string name;
  uint64_t value;
};
std::vector<NamedValue> agreed_values(const Settings& settings);

}  // namespace ep::buffer
