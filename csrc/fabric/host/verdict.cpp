#include "fabric/host/verdict.hpp"

#include <algorithm>
#include <cstring>

#include "common/text.hpp"
#include "ep/error.hpp"

namespace ep::fabric {
namespace {

constexpr uint32_t kMaxRanks = 1024;
constexpr size_t kMaxListed = 16;

std::vector<uint32_t> others(const std::vector<uint32_t>& ranks, uint32_t num_ranks) {
  std::vector<uint32_t> rest;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) rest.push_back(rank);
  }
  return rest;
}

[[noreturn]] void raise_timeout(const Verdict& verdict, const Place& place) {
  const std::vector<uint32_t>& missing = verdict.ranks;
  if (std::find(missing.begin(), missing.end(), place.rank) == missing.end()) {
    throw Timeout(str(place.phase, ": rank ", place.rank, " waited up to ", place.timeout_s,
                      " s for ", rank_list(missing), " (call ", verdict.round, ")", verdict.text),
                  missing, place.phase);
  }
  const std::vector<uint32_t> waiters = others(missing, place.num_ranks);
  const std::string reason = str("gave up on call ", verdict.round);
  throw PeerError(str(place.phase, ": rank ", place.rank, " came too late: ", rank_list(waiters),
                      " ", reason, "; the next call can succeed"),
                  waiters, reason);
}

}  // namespace

void raise(const Verdict& verdict, const Place& place) {
  switch (verdict.cause) {
    case Cause::kTimeout:
      raise_timeout(verdict, place);
    case Cause::kLost:
      throw PeerLost(str(place.phase, ": rank ", place.rank, " has lost ", rank_list(verdict.ranks),
                         " (ended, or its connection broke)", verdict.text),
                     verdict.ranks);
    case Cause::kInvalid:
      throw InvalidArgument(str(place.phase, ": ", verdict.text));
    case Cause::kInterrupted: {
      const std::string reason = str("interrupted in call ", verdict.round);
      throw PeerError(str(place.phase, ": ended by ", rank_list(verdict.ranks), ": ", reason,
                          "; the next call can succeed"),
                      verdict.ranks, reason);
    }
  }
  throw Error(str(place.phase, ": unknown verdict"));
}

Communicator::Bytes encode(const Verdict& verdict) {
  std::vector<uint32_t> words{static_cast<uint32_t>(verdict.cause),
                              static_cast<uint32_t>(verdict.ranks.size())};
  words.insert(words.end(), verdict.ranks.begin(), verdict.ranks.end());
  Communicator::Bytes bytes(words.size() * sizeof(uint32_t) + verdict.text.size());
  std::memcpy(bytes.data(), words.data(), words.size() * sizeof(uint32_t));
  std::memcpy(bytes.data() + words.size() * sizeof(uint32_t), verdict.text.data(),
              verdict.text.size());
  return bytes;
}

std::optional<Verdict> decode(std::span<const std::byte> bytes,
                              uint64_t round,
                              uint32_t num_ranks) {
  const auto word = [&](size_t i) {
    uint32_t value = 0;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    return value;
  };
  if (bytes.size() < 2 * sizeof(uint32_t)) return std::nullopt;
  const uint32_t cause = word(0), count = word(1);
  if (cause < 1 || cause > 4 || count > num_ranks) return std::nullopt;
  const size_t text_at = (2 + size_t{count}) * sizeof(uint32_t);
  if (bytes.size() < text_at) return std::nullopt;
  Verdict verdict{static_cast<Cause>(cause), round};
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t rank = word(2 + i);
    if (rank >= num_ranks) return std::nullopt;
    verdict.ranks.push_back(rank);
  }
  verdict.text.assign(reinterpret_cast<const char*>(bytes.data()) + text_at,
                      bytes.size() - text_at);
  return verdict;
}

std::string rank_list(std::span<const uint32_t> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < kMaxListed; ++i) {
    text += str(i == 0 ? "" : ", ", ranks[i]);
  }
  if (ranks.size() > kMaxListed) text += str(", ... (", ranks.size(), " in all)");
  return text;
}

void check_ranks(uint32_t rank, uint32_t num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw InvalidArgument(str("num_ranks=", num_ranks, " must be from 1 to ", kMaxRanks));
  }
  if (rank >= num_ranks) {
    throw InvalidArgument(str("rank=", rank, " must be below num_ranks=", num_ranks));
  }
}

void check_contribution(std::span<const std::byte> mine) {
  if (mine.size() <= kMaxContributionBytes) return;
  throw InvalidArgument(
      str("all_gather: ", mine.size(), " bytes; a rank may give at most ", kMaxContributionBytes));
}

}  // namespace ep::fabric
