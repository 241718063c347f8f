// An inference engine's expert parallelism without Python and without torch: one MoE layer over R
// ranks, checked against an evaluation in one rank.
//
//   engine threads    R                    ranks are threads
//   engine processes  R ADDRESS            this program starts R processes that meet at ADDRESS
//   engine process    R ADDRESS RANK       this process is one of R that a launcher started
//   engine callbacks  R                    R processes that gather bytes themselves, as with MPI
//
// ADDRESS is "127.0.0.1:29500" or "[::1]:29500": rank 0 listens there.
// Exit status: 0 all is equal to the bit, 1 something is not or failed, 2 bad usage.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "ep/ep.hpp"
#include "meet.hpp"
#include "moe_layer.hpp"

namespace engine {
namespace {

bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// A rank that gives a wrong id is told so; the others learn in the same call who it was.  Nobody
// hangs, and the next call is good again.
bool refuses_a_wrong_id(MoeLayer& layer, const std::vector<float>& tokens, const Routes& routes) {
  Routes wrong = routes;
  const bool is_culprit = layer.buffer().rank() == 0;
  if (is_culprit) wrong.experts[0] = kExperts;
  const ep::Status status = layer.try_send(tokens, wrong);
  if (is_culprit) return status.kind() == ep::ErrorKind::kInvalidArgument;
  const auto* error = dynamic_cast<const ep::PeerError*>(status.error());
  return error != nullptr && error->peers == std::vector<uint32_t>{0};
}

bool serve(std::shared_ptr<ep::Communicator> group) {
  const Model model = Model::seeded();
  Heap heap;
  MoeLayer layer(group, model, heap);
  const uint32_t rank = group->rank();

  // As many tokens as happen to be here; none on the third rank.
  const size_t num_tokens = rank == 2 ? 0 : 5 + 3 * rank;
  const std::vector<float> tokens = Seeded(100 + rank).numbers(num_tokens * kHidden);
  const std::vector<float> others = Seeded(200 + rank).numbers(num_tokens * kHidden);
  const Routes routes = model.route(tokens);

  const bool is_good = equal(layer.forward(tokens, routes), model.evaluate(tokens, routes));
  const bool is_good_again = equal(layer.again(others, routes), model.evaluate(others, routes));
  const bool is_refused = refuses_a_wrong_id(layer, tokens, routes);
  const bool is_good_after = equal(layer.forward(tokens, routes), model.evaluate(tokens, routes));

  std::printf(
      "rank %u of %u: %zu tokens; forward %s, replay %s, wrong id %s, afterwards %s; "
      "%.1f kB of ours\n",
      rank, group->num_ranks(), num_tokens, is_good ? "equal" : "DIFFERS",
      is_good_again ? "equal" : "DIFFERS", is_refused ? "refused" : "NOT REFUSED",
      is_good_after ? "equal" : "DIFFERS", static_cast<double>(heap.bytes) * 1e-3);
  return is_good && is_good_again && is_refused && is_good_after && heap.bytes > 0;
}

int usage() {
  std::fputs(
      "usage: engine threads|callbacks R\n"
      "       engine processes R ADDRESS\n"
      "       engine process R ADDRESS RANK\n",
      stderr);
  return 2;
}

int main(const std::vector<std::string>& arguments) {
  if (arguments.size() < 2) return usage();
  const std::string& how = arguments[0];
  const auto num_ranks = static_cast<uint32_t>(std::strtoul(arguments[1].c_str(), nullptr, 10));
  if (num_ranks < 1 || num_ranks > 64) return usage();
  bool good = false;
  if (how == "threads" && arguments.size() == 2) {
    good = in_threads(num_ranks, serve);
  } else if (how == "callbacks" && arguments.size() == 2) {
    good = through_callbacks(num_ranks, serve);
  } else if (how == "processes" && arguments.size() == 3) {
    good = in_children(
        num_ranks, [&](uint32_t rank) { return at_address(arguments[2], rank, num_ranks, serve); });
  } else if (how == "process" && arguments.size() == 4) {
    const auto rank = static_cast<uint32_t>(std::strtoul(arguments[3].c_str(), nullptr, 10));
    good = at_address(arguments[2], rank, num_ranks, serve);
  } else {
    return usage();
  }
  std::puts(good ? "engine: all equal to one rank's evaluation" : "engine: FAILED");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace engine

int main(int argc, char** argv) {
  try {
    return engine::main({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine: %s\n", error.what());
    return 1;
  }
}
