// The command line.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/ep_bench/case.hpp"
#include "bench/ep_bench/contender.hpp"

namespace ep::bench {

// The command line asks for something that does not exist: one line, exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Mode : uint8_t {
  kThroughput,  // rounds of contenders
  kLatency,     // host time of one rank's calls
  kGrowth,      // resident memory over 10 000 rounds
};

struct Options {
  Mode mode = Mode::kThroughput;
  // Swept; every combination is one case.
  std::vector<uint32_t> ranks{2}, tokens{2048}, hidden{7168};
  std::vector<Quant> formats{Quant::kNone};
  Case fixed{};  // what is not swept
  uint32_t warmup = 5, rounds = 30;
  std::vector<Contender> contenders{Contender::kDispatch,    Contender::kCombine,
                                    Contender::kPair,        Contender::kReplay,
                                    Contender::kCombineCopy, Contender::kMemcpy};
  std::string json{};  // a path, "-" for standard output, or empty
  bool verify = false;
  bool wants_help = false;

  std::vector<Case> cases() const;
};

// Throws UsageError.
Options parse_options(int argc, char** argv);

// What --help prints.
std::string help_text();

}  // namespace ep::bench
