// A collective step: every rank says whether its part of the work went well, and gives a record.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ep/communicator.hpp"
#include "ep/error.hpp"

namespace ep::fabric {

enum class Health : uint32_t {
  kGood = 0,
  kFailed = 1,
  kLacksPeer = 2,  // failed only because a peer hung up or did not come
};

// How this rank's part failed; empty when it did not.
struct Failure {
  Health health = Health::kGood;
  std::exception_ptr error{};
  std::string text{};
  bool is_interrupt = false;  // this rank's user leaves: it waits for nobody any more
};

template <typename Work>
Failure failure_of(Work&& work) {
  try {
    std::forward<Work>(work)();
    return {};
  } catch (const PeerLost& error) {
    return {Health::kLacksPeer, std::current_exception(), error.what()};
  } catch (const Timeout& error) {
    return {Health::kLacksPeer, std::current_exception(), error.what()};
  } catch (const Interrupted& error) {
    return {Health::kFailed, std::current_exception(), error.what(), true};
  } catch (const std::exception& error) {
    return {Health::kFailed, std::current_exception(), error.what()};
  }
}

// What a rank said.
struct Report {
  Health health = Health::kGood;
  std::string text{};  // why
  Communicator::Bytes record{};

  // The record; of no meaning where the rank has failed.
  template <typename Record>
  Record as() const {
    static_assert(std::is_trivially_copyable_v<Record>);
    Record value{};
    std::memcpy(&value, record.data(), sizeof value);
    return value;
  }
};

template <typename Record>
std::span<const std::byte> bytes_of(const Record& record) {
  static_assert(std::is_trivially_copyable_v<Record>);
  return std::as_bytes(std::span(&record, 1));
}

// `number` tells this exchange from the others of the same set-up.
struct Step {
  uint32_t number;
  double timeout_s;
};

// Collective: everybody's report, by rank, each with a record as long as `record`.  Throws what
// all_gather throws (this rank's own failure first), and Desync when a peer is at another step.  A rank
// that was interrupted tells it and does not wait.
std::vector<Report> exchange(Communicator& group,
                             const Step& step,
                             std::span<const std::byte> record,
                             const Failure& failure);

// Throws when anybody failed: this rank's own failure, else PeerError naming the ranks that failed.
// The want of a peer counts only where nobody failed otherwise: the cause is told, not its effects.
void raise_failures(const std::vector<Report>& reports, const Failure& failure);

}  // namespace ep::fabric
