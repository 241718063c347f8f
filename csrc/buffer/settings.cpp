#include "buffer/settings.hpp"

#include <algorithm>
#include <cmath>
#include <thread>

#include "common/math.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"
#include "layout/output_layout.hpp"
#include "layout/rows.hpp"

namespace ep::buffer {
namespace {

void check_range(const char* name, uint64_t value, uint64_t least, uint64_t most) {
  if (value < least || value > most) {
    throw InvalidArgument(str(name, "=", value, " is outside [", least, ", ", most, "]"));
  }
}

// As evenly as can be: the first E % R ranks own one more.
std::vector<uint32_t> even_offsets(uint32_t num_experts, uint32_t num_ranks) {
  std::vector<uint32_t> offsets{0};
  for (uint32_t r = 0; r < num_ranks; ++r) {
    offsets.push_back(offsets.back() + num_experts / num_ranks +
                      (r < num_experts % num_ranks ? 1 : 0));
  }
  return offsets;
}

void check_offsets(const std::vector<uint32_t>& offsets, uint32_t num_experts, uint32_t num_ranks) {
  if (offsets.size() != num_ranks + 1) {
    throw InvalidArgument(str("expert_offsets has ", offsets.size(), " entries; ", num_ranks,
                              " ranks need ", num_ranks + 1));
  }
  for (uint32_t r = 0; r < num_ranks; ++r) {
    if (offsets[r + 1] < offsets[r]) {
      throw InvalidArgument(str("expert_offsets[", r + 1, "]=", offsets[r + 1],
                                " is less than expert_offsets[", r, "]=", offsets[r]));
    }
  }
  if (offsets.front() != 0 || offsets.back() != num_experts) {
    throw InvalidArgument(str("expert_offsets goes from ", offsets.front(), " to ", offsets.back(),
                              "; it must go from 0 to num_experts=", num_experts));
  }
}

void check_device(const std::string& device) {
  if (device == "auto" || device == "cpu" || device.starts_with("cpu:")) return;
  if (device.starts_with("cuda")) {
    throw Unsupported(
        str("device=\"", device, "\" is not supported by this version; device=\"cpu\" is"));
  }
  throw InvalidArgument(
      str("device=\"", device, "\" is neither \"auto\" nor \"cpu\" nor \"cuda\""));
}

void check_timeout(double seconds) {
  if (seconds < 0 || (seconds > 0 && std::isfinite(seconds))) return;
  throw InvalidArgument(
      str("timeout_s=", seconds, " is neither a positive number of seconds nor negative (none)"));
}

constexpr uint64_t kMaxArenaBytes = 0x7FFFFFFFull * layout::kArenaAlignBytes;
constexpr uint64_t kUncounted = uint64_t{1} << 62;  // as much, or more

// num_regions worst-case pairs ("expert", K = num_topk): a dispatch's rows and a combine's.  Address space:
// pages are committed when first written.
uint64_t default_arena_bytes(const Settings& s) {
  const BufferConfig& c = s.config;
  const uint64_t rows = uint64_t{s.num_ranks} * c.max_tokens_per_rank * c.num_topk;
  // Divided, since 64 bits may not hold the product; what comes on top is less than 1 KiB per row.
  if (rows > kUncounted / (s.token_bytes + s.output_bytes) / c.num_regions) return kUncounted;
  layout::OutputShape shape{};
  shape.num_ranks = s.num_ranks;
  shape.max_local_experts = s.max_local_experts;
  shape.x_bytes = static_cast<uint32_t>(s.token_bytes);
  shape.idx_bytes = 8 * c.num_topk;
  shape.weights_bytes = 4 * c.num_topk;
  shape.is_expert = 1;
  // scales and extras share token_bytes with x, each padded to a row pitch of its own
  const uint64_t padding =
      rows * layout::kRowAlignBytes * (1 + kMaxExtras) + layout::kArenaAlignBytes * 16;
  const uint64_t row_weights = rows * 4 * c.num_topk + layout::kArenaAlignBytes;
  const uint64_t output = rows * layout::row_pitch(s.output_bytes) + row_weights;
  const uint64_t pair = layout::OutputLayout::make(shape, rows).num_bytes + padding + output;
  return c.num_regions * pair;
}

}  // namespace

uint32_t default_num_sms(uint32_t num_cores, uint32_t num_ranks) {
  return std::clamp<uint32_t>(num_cores / std::max(1u, num_ranks), 1, 8);
}

Settings make_settings(const BufferConfig& config, uint32_t rank, uint32_t num_ranks) {
  check_range("num_ranks", num_ranks, 1, layout::kMaxRanks);
  check_range("rank", rank, 0, num_ranks - 1);
  check_range("num_experts", config.num_experts, 1, layout::kMaxExperts);
  check_range("num_topk", config.num_topk, 1, layout::kMaxTopk);
  // A row has at least 16 bytes: four fp32, where output_bytes does not say otherwise.
  check_range("hidden", config.hidden, config.output_bytes == 0 ? 4 : 1, uint64_t{1} << 24);
  check_range("max_tokens_per_rank", config.max_tokens_per_rank, 1, layout::kMaxRows / num_ranks);
  check_range("num_regions", config.num_regions, 1, 64);
  check_range("num_sms", config.num_sms, 0, layout::kMaxChannels);
  check_device(config.device);
  if (!config.expert_slot.empty()) {
    throw Unsupported("expert_slot is not supported by this version: map topk_idx before dispatch");
  }
  if (config.elastic) {
    throw Unsupported("elastic=true is not supported by this version: a lost rank raises PeerLost");
  }
  check_timeout(config.timeout_s);
  Settings s;
  s.config = config;
  s.rank = rank;
  s.num_ranks = num_ranks;
  s.token_bytes = config.token_bytes != 0 ? config.token_bytes : uint64_t{4} * config.hidden + 64;
  s.output_bytes = config.output_bytes != 0 ? config.output_bytes : uint64_t{4} * config.hidden;
  check_range("token_bytes", s.token_bytes, 16, uint64_t{1} << 28);
  check_range("output_bytes", s.output_bytes, 16, uint64_t{1} << 28);
  s.expert_offsets = config.expert_offsets.empty() ? even_offsets(config.num_experts, num_ranks)
                                                   : config.expert_offsets;
  check_offsets(s.expert_offsets, config.num_experts, num_ranks);
  s.expert_rank.resize(config.num_experts);
  for (uint32_t r = 0; r < num_ranks; ++r) {
    std::fill(s.expert_rank.begin() + s.expert_offsets[r],
              s.expert_rank.begin() + s.expert_offsets[r + 1], r);
    s.max_local_experts =
        std::max(s.max_local_experts, s.expert_offsets[r + 1] - s.expert_offsets[r]);
  }
  s.num_sms = config.num_sms != 0 ? config.num_sms
                                  : default_num_sms(std::thread::hardware_concurrency(), num_ranks);
  s.arena_bytes = config.arena_bytes != 0 ? config.arena_bytes : default_arena_bytes(s);
  if (s.arena_bytes > kMaxArenaBytes) {
    const char* more =
        s.arena_bytes == kUncounted ? " or more bytes; at most " : " bytes; at most ";
    throw InvalidArgument(str("the arena would take ", s.arena_bytes, more, kMaxArenaBytes,
                              " can be addressed: set arena_bytes, or lower max_tokens_per_rank=",
                              config.max_tokens_per_rank));
  }
  s.arena_bytes = align_up(s.arena_bytes, layout::WindowLayout::kPageBytes);
  s.window = layout::WindowLayout::make(
      {num_ranks, config.num_experts, s.max_local_experts, 0, s.arena_bytes});
  return s;
}

Memory memory_of(const Settings& settings) {
  const layout::WindowLayout& w = settings.window;
  return {w.staging_offset, w.arena_offset - w.staging_offset, w.num_bytes - w.arena_offset,
          w.num_bytes};
}

std::vector<NamedValue> agreed_values(const Settings& s) {
  std::vector<NamedValue> values{
      {"num_experts", s.config.num_experts}, {"num_topk", s.config.num_topk},
      {"hidden", s.config.hidden},           {"max_tokens_per_rank", s.config.max_tokens_per_rank},
      {"token_bytes", s.token_bytes},        {"output_bytes", s.output_bytes},
      {"num_regions", s.config.num_regions}, {"ranks_per_node", s.config.ranks_per_node},
  };
  for (uint32_t r = 1; r < s.num_ranks; ++r) {
    values.push_back({str("expert_offsets[", r, "]"), s.expert_offsets[r]});
  }
  values.push_back({"arena_bytes", s.arena_bytes});
  return values;
}

}  // namespace ep::buffer
