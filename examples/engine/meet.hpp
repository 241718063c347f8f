// Three ways for ranks to meet: threads of one process, processes that know an address, and
// processes that already have a way to gather bytes, as those of an MPI job do.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ep/ep.hpp"

namespace engine {

// Runs one rank; false: what came out is wrong.
using RankFunction = std::function<bool(std::shared_ptr<ep::Communicator>)>;

// The one place that turns errors into a message and a verdict.
inline bool run_rank(uint32_t rank,
                     const std::function<std::shared_ptr<ep::Communicator>()>& meet,
                     const RankFunction& function) {
  try {
    return function(meet());
  } catch (const std::exception& error) {  // ep::Error and the machine's own
    std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
    return false;
  }
}

inline bool in_threads(uint32_t num_ranks, const RankFunction& function) {
  const auto groups = ep::Communicator::threads(num_ranks);
  std::vector<char> good(num_ranks, 0);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < num_ranks; ++rank)
    ranks.emplace_back([&, rank] {
      good[rank] = run_rank(
          rank, [&] { return groups[rank]; }, function);
    });
  for (std::thread& rank : ranks)
    rank.join();
  return std::count(good.begin(), good.end(), 1) == num_ranks;
}

// Forks a process per rank and waits for all.  REQUIRES: no other thread runs yet.
inline bool in_children(uint32_t num_ranks, const std::function<bool(uint32_t rank)>& function) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (child == 0) {
      const bool good = function(rank);
      std::fflush(nullptr);
      _exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    good &= waitpid(child, &status, 0) == child && status == 0;
  }
  return good;
}

// One of the processes that a launcher starts.  Rank 0 listens at `address`, "127.0.0.1:29500" or
// "[::1]:29500".
inline bool at_address(const std::string& address,
                       uint32_t rank,
                       uint32_t num_ranks,
                       const RankFunction& function) {
  return run_rank(
      rank, [&] { return ep::Communicator::tcp(address, rank, num_ranks, 30.0); }, function);
}

// Stands for an MPI communicator: gathers bytes from all ranks, through rank 0.  With MPI in its
// place the callback is
//
//   [comm](std::span<const std::byte> mine, double /* MPI has no timeouts */) {
//     int num_ranks = 0, size = static_cast<int>(mine.size());
//     MPI_Comm_size(comm, &num_ranks);
//     std::vector<int> sizes(num_ranks), offsets(num_ranks);
//     MPI_Allgather(&size, 1, MPI_INT, sizes.data(), 1, MPI_INT, comm);
//     std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), 0);
//     std::vector<std::byte> all(offsets.back() + sizes.back());
//     MPI_Allgatherv(mine.data(), size, MPI_BYTE, all.data(), sizes.data(), offsets.data(),
//                    MPI_BYTE, comm);
//     std::vector<ep::Communicator::Bytes> by_rank;
//     for (int r = 0; r < num_ranks; ++r)
//       by_rank.emplace_back(&all[offsets[r]], &all[offsets[r]] + sizes[r]);
//     return by_rank;
//   }
class Wires {
 public:
  using Bytes = ep::Communicator::Bytes;

  // Made before the ranks part: a pair of sockets between rank 0 and every other.
  explicit Wires(uint32_t num_ranks) : pairs_(num_ranks) {
    for (uint32_t rank = 1; rank < num_ranks; ++rank)
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, pairs_[rank].ends) != 0)
        throw std::system_error(errno, std::generic_category(), "socketpair");
  }
  ~Wires() {
    for (const Pair& pair : pairs_)
      for (const int end : pair.ends)
        if (end >= 0) close(end);
  }
  Wires(const Wires&) = delete;
  Wires& operator=(const Wires&) = delete;

  // In rank `rank`'s process: the ends of others are closed, or nobody would see a rank leave.
  void become(uint32_t rank) {
    rank_ = rank;
    for (uint32_t r = 1; r < pairs_.size(); ++r) {
      drop(pairs_[r].ends[rank == 0 ? 1 : 0]);
      if (rank != 0 && r != rank) drop(pairs_[r].ends[1]);
    }
  }

  std::vector<Bytes> all_gather(std::span<const std::byte> mine, double timeout_s) {
    std::vector<Bytes> by_rank(pairs_.size());
    if (rank_ != 0) {
      const int hub = pairs_[rank_].ends[1];
      send_block(hub, mine);
      for (Bytes& block : by_rank)
        block = receive_block(hub, timeout_s);
      return by_rank;
    }
    by_rank[0].assign(mine.begin(), mine.end());
    for (uint32_t r = 1; r < pairs_.size(); ++r)
      by_rank[r] = receive_block(pairs_[r].ends[0], timeout_s);
    for (uint32_t r = 1; r < pairs_.size(); ++r)
      for (const Bytes& block : by_rank)
        send_block(pairs_[r].ends[0], block);
    return by_rank;
  }

 private:
  struct Pair {
    int ends[2] = {-1, -1};  // of rank 0, of the other
  };

  static void drop(int& end) {
    if (end >= 0) close(end);
    end = -1;
  }

  static void send_all(int socket, const void* from, size_t size) {
    for (size_t sent = 0; sent < size;) {
      const ssize_t n =
          send(socket, static_cast<const std::byte*>(from) + sent, size - sent, MSG_NOSIGNAL);
      if (n < 0) throw std::system_error(errno, std::generic_category(), "send");
      sent += static_cast<size_t>(n);
    }
  }

  static void receive_all(int socket, void* to, size_t size) {
    const ssize_t n = recv(socket, to, size, MSG_WAITALL);
    if (n == static_cast<ssize_t>(size)) return;
    throw std::runtime_error(n < 0 ? "a rank does not answer" : "a rank has left");
  }

  static void send_block(int socket, std::span<const std::byte> block) {
    const uint64_t size = block.size();
    send_all(socket, &size, sizeof size);
    send_all(socket, block.data(), block.size());
  }

  static Bytes receive_block(int socket, double timeout_s) {
    const timeval patience{.tv_sec = static_cast<time_t>(timeout_s) + 1, .tv_usec = 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    uint64_t size = 0;
    receive_all(socket, &size, sizeof size);
    Bytes block(size);
    if (size != 0) receive_all(socket, block.data(), size);
    return block;
  }

  std::vector<Pair> pairs_;
  uint32_t rank_ = 0;
};

// The ranks of a job that can gather bytes already.
inline bool through_callbacks(uint32_t num_ranks, const RankFunction& function) {
  Wires wires(num_ranks);
  return in_children(num_ranks, [&](uint32_t rank) {
    wires.become(rank);
    const auto all_gather = [&wires](std::span<const std::byte> mine, double timeout_s) {
      return wires.all_gather(mine, timeout_s);
    };
    return run_rank(
        rank, [&] { return ep::Communicator::callbacks(rank, num_ranks, all_gather); }, function);
  });
}

}  // namespace engine
