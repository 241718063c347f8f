// Runs a function in R ranks: threads of this process, or processes that meet on a loopback port.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ep/communicator.hpp"

// Percent of the work that long tests do.  Sanitizers' presets define less.
#ifndef EP_TEST_SCALE
#define EP_TEST_SCALE 100
#endif

namespace ep::test {

// A count that shrinks with EP_TEST_SCALE, at least 1.
constexpr uint32_t scaled(uint32_t count) {
  const uint32_t less = count * EP_TEST_SCALE / 100;
  return less == 0 ? 1 : less;
}

using RankFunction = std::function<void(std::shared_ptr<Communicator>)>;

// Every rank runs to its end, whatever the others do; then the first failure, by rank, is thrown as
// std::runtime_error "rank r: ...".  A rank that leaves early lets the others wait for their
// buffer's timeout, so buffers in tests have short ones.
void run_threads(uint32_t num_ranks, const RankFunction& function);

// REQUIRES: this process has no other threads (it forks).  A child that has a failed expectation
// fails too.
void run_processes(uint32_t num_ranks, const RankFunction& function);

// A port of 127.0.0.1 that was free a moment ago.
uint16_t free_port();

}  // namespace ep::test
