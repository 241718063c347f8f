// Construction: what all ranks must agree on, then the windows.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "buffer/core.hpp"
#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::buffer {
namespace {

constexpr uint64_t kAgreementVersion = 1;

// What a rank tells the others: its values, or why it cannot take part.
struct Proposal {
  std::string error;  // empty: good
  uint64_t buffer_id = 0;
  std::vector<NamedValue> values;
};

class Writer {
 public:
  void number(uint64_t v) { append(&v, sizeof v); }
  void text(const std::string& s) {
    number(s.size());
    append(s.data(), s.size());
  }
  Communicator::Bytes bytes;

 private:
  void append(const void* data, size_t size) {
    const auto* from = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), from, from + size);
  }
};

class Reader {
 public:
  Reader(const Communicator::Bytes& bytes, uint32_t rank) : bytes_(bytes), rank_(rank) {}
  uint64_t number() {
    uint64_t v = 0;
    std::memcpy(&v, take(sizeof v), sizeof v);
    return v;
  }
  std::string text() {
    const uint64_t size = number();
    return {reinterpret_cast<const char*>(take(size)), size};
  }

 private:
  const std::byte* take(uint64_t size) {
    if (size > bytes_.size() - at_) {
      throw InvalidArgument(str("rank ", rank_, " sent ", bytes_.size(),
                                " bytes where a buffer's agreement was ",
                                "expected: is it constructing the same buffer?"));
    }
    at_ += size;
    return bytes_.data() + at_ - size;
  }
  const Communicator::Bytes& bytes_;
  uint32_t rank_;
  uint64_t at_ = 0;
};

Communicator::Bytes encode(const Proposal& p) {
  Writer w;
  w.number(kAgreementVersion);
  w.text(p.error);
  w.number(p.buffer_id);
  w.number(p.values.size());
  for (const NamedValue& v : p.values) {
    w.text(v.name);
    w.number(v.value);
  }
  return std::move(w.bytes);
}

Proposal decode(const Communicator::Bytes& bytes, uint32_t rank) {
  Reader r(bytes, rank);
  const uint64_t version = r.number();
  if (version != kAgreementVersion) {
    throw InvalidArgument(str("rank ", rank, " speaks agreement version ", version, ", this rank ",
                              kAgreementVersion, ": all ranks need the same version of ep"));
  }
  Proposal p;
  p.error = r.text();
  p.buffer_id = r.number();
  p.values.resize(std::min<uint64_t>(r.number(), 4096));
  for (NamedValue& v : p.values) {
    v.name = r.text();
    v.value = r.number();
  }
  return p;
}

// The first difference, found alike by every rank: lowest rank that differs from rank 0.
void check_equal(const std::vector<Proposal>& proposals) {
  const Proposal& first = proposals[0];
  for (size_t rank = 1; rank < proposals.size(); ++rank) {
    const Proposal& other = proposals[rank];
    for (size_t i = 0; i < std::min(first.values.size(), other.values.size()); ++i) {
      if (first.values[i].value == other.values[i].value) continue;
      throw InvalidArgument(str(first.values[i].name, " differs between ranks: rank 0 has ",
                                first.values[i].value, ", rank ", rank, " has ",
                                other.values[i].value));
    }
  }
}

uint64_t random_id() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;  // never 0: 0 is "no buffer"
}

}  // namespace

Environment host_environment() {
  return {device::create_host_device(), &fabric::connect_host};
}

std::shared_ptr<Core> connect(Communicator& group,
                              const BufferConfig& config,
                              const Environment& environment,
                              double timeout_s) {
  auto core = std::make_shared<Core>();
  Proposal mine;
  std::exception_ptr own_error;
  try {
    core->settings = make_settings(config, group.rank(), group.num_ranks());
    if (config.ranks_per_node != 0 && config.ranks_per_node < group.num_ranks()) {
      throw Unsupported(
          str("ranks_per_node=", config.ranks_per_node, " for ", group.num_ranks(),
              " ranks declares several nodes, which this version does not support; one node is"));
    }
    mine.values = agreed_values(core->settings);
    mine.buffer_id = random_id();
  } catch (const Error& error) {
    mine.error = error.what();
    own_error = std::current_exception();
  }
  const auto blobs = group.all_gather(encode(mine), timeout_s);
  if (own_error) std::rethrow_exception(own_error);
  std::vector<Proposal> proposals;
  for (uint32_t r = 0; r < blobs.size(); ++r)
    proposals.push_back(decode(blobs[r], r));
  for (uint32_t r = 0; r < proposals.size(); ++r) {
    if (!proposals[r].error.empty()) {
      throw InvalidArgument(str("rank ", r, " cannot construct its buffer: ", proposals[r].error));
    }
  }
  check_equal(proposals);
  core->buffer_id = proposals[0].buffer_id;
  const layout::WindowLayout& window = core->settings.window;
  core->fabric = environment.connect(group, window.num_bytes, timeout_s);
  for (uint32_t r = 0; r < group.num_ranks(); ++r)
    core->windows.push_back(core->fabric->window(r));
  core->device = environment.device;
  core->arena = std::make_shared<Arena>(core->fabric->own_window(), core->windows[group.rank()],
                                        window.arena_offset, core->settings.arena_bytes);
  return core;
}

}  // namespace ep::buffer
