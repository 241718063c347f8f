#include "fabric/host/agreement.hpp"

#include "common/text.hpp"
#include "ep/error.hpp"
#include "fabric/group_interrupt.hpp"
#include "fabric/host/verdict.hpp"

namespace ep::fabric {
namespace {

constexpr uint32_t kMagic = 0x41464550;  // "PEFA"

struct Header {
  uint32_t magic, step, health, num_record_bytes;
};

Communicator::Bytes encode(const Step& step,
                           std::span<const std::byte> record,
                           const Failure& failure) {
  const Header header{kMagic, step.number, static_cast<uint32_t>(failure.health),
                      static_cast<uint32_t>(record.size())};
  const std::span<const std::byte> head = bytes_of(header);
  const std::span<const std::byte> text = std::as_bytes(std::span(failure.text));
  Communicator::Bytes bytes(head.begin(), head.end());
  bytes.insert(bytes.end(), record.begin(), record.end());
  bytes.insert(bytes.end(), text.begin(), text.end());
  return bytes;
}

Report decode(const Communicator::Bytes& bytes,
              const Step& step,
              size_t num_record_bytes,
              uint32_t peer) {
  Header header{};
  if (bytes.size() >= sizeof header) std::memcpy(&header, bytes.data(), sizeof header);
  const bool is_ours = header.magic == kMagic && header.step == step.number &&
                       header.health <= static_cast<uint32_t>(Health::kLacksPeer) &&
                       header.num_record_bytes == num_record_bytes &&
                       bytes.size() >= sizeof header + num_record_bytes;
  if (!is_ours) {
    const uint32_t theirs = header.magic == kMagic ? header.step : 0;
    throw Desync(
        str("connect_host: this rank is at set-up step ", step.number, ", rank ", peer, " at ",
            theirs, " (", bytes.size(), " bytes; 0: in no set-up, or another version of ep)"),
        "set-up step", peer, step.number, theirs);
  }
  const auto record = bytes.begin() + sizeof header;
  const auto text = record + static_cast<ptrdiff_t>(num_record_bytes);
  Report report{static_cast<Health>(header.health), {}, {record, text}};
  for (auto at = text; at != bytes.end(); ++at)
    report.text += static_cast<char>(*at);
  return report;
}

}  // namespace

std::vector<Report> exchange(Communicator& group,
                             const Step& step,
                             std::span<const std::byte> record,
                             const Failure& failure) {
  std::vector<Communicator::Bytes> by_rank;
  std::function<bool()> leave;
  if (failure.is_interrupt) leave = [] { return true; };
  const GroupInterrupt asking(group, std::move(leave));
  try {
    by_rank = group.all_gather(encode(step, record, failure), step.timeout_s);
  } catch (const PeerError&) {
    // It has ended the step for all, and is why this rank lacks it.
    if (failure.error && failure.health != Health::kLacksPeer)
      std::rethrow_exception(failure.error);
    throw;
  } catch (...) {
    // Peers may be gone just because of it.
    if (failure.error) std::rethrow_exception(failure.error);
    throw;
  }
  std::vector<Report> reports;
  for (uint32_t rank = 0; rank < by_rank.size(); ++rank) {
    reports.push_back(decode(by_rank[rank], step, record.size(), rank));
  }
  return reports;
}

void raise_failures(const std::vector<Report>& reports, const Failure& failure) {
  const auto ranks_with = [&](Health health) {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < reports.size(); ++rank) {
      if (reports[rank].health == health) ranks.push_back(rank);
    }
    return ranks;
  };
  std::vector<uint32_t> failed = ranks_with(Health::kFailed);
  const bool is_cause = failure.health == Health::kFailed || failed.empty();
  if (failure.error && is_cause) std::rethrow_exception(failure.error);
  if (failed.empty()) failed = ranks_with(Health::kLacksPeer);
  if (failed.empty()) return;
  const std::string& reason = reports[failed[0]].text;
  throw PeerError(str("connect_host: ", rank_list(failed), " failed: ", reason), failed, reason);
}

}  // namespace ep::fabric
