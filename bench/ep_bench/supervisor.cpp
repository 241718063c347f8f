#include "bench/ep_bench/supervisor.hpp"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/ep_bench/clock.hpp"
#include "bench/ep_bench/ranks.hpp"
#include "bench/ep_bench/text.hpp"

namespace ep::bench {
namespace {

constexpr int64_t kNsPerS = 1'000'000'000;
// The library notices a dead peer within 2 s.
constexpr int64_t kGraceNs = 3 * kNsPerS;
// Behind the library's own timeout, whose message is better than ours.
constexpr int64_t kPatienceNs = 5 * kNsPerS;

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::string place_of(const RankNotes& notes) {
  const int32_t round = notes.round.load();
  return round < 0 ? str("in '", notes.doing.load(), "'")
                   : str("in '", notes.doing.load(), "', round ", round);
}

std::string end_of(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return str("killed by signal ", signal, " (", strsignal(signal), ")");
  }
  return str("ended with status ", WEXITSTATUS(status));
}

}  // namespace

Supervisor::~Supervisor() {
  kill_all();
}

void Supervisor::start(Ranks ranks,
                       const std::function<void(std::function<void()> wake_starter)>& main) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe");
  std::fflush(nullptr);  // or the child would print it again
  const pid_t pid = fork();
  if (pid < 0) {
    ::close(ends[0]);
    ::close(ends[1]);
    throw_errno("fork");
  }
  if (pid == 0) {
    ::close(ends[0]);
    main([write_end = ends[1]] {
      const char byte = 1;
      // The pipe holds thousands of these; a lost one only costs the grace period.
      [[maybe_unused]] const ssize_t written = ::write(write_end, &byte, 1);
    });
    _exit(1);
  }
  ::close(ends[1]);
  children_.push_back({pid, ends[0], ranks});
}

void Supervisor::wait() {
  while (!children_.empty()) {
    const int64_t left_ns = deadline_ns() - now_ns();
    if (left_ns <= 0) {
      if (failed_ns_ == 0) note_who_is_stuck();
      break;
    }
    std::vector<pollfd> fds;
    for (const Child& child : children_)
      fds.push_back({child.pipe, POLLIN, 0});
    const int64_t left_ms = std::min<int64_t>(left_ns / 1'000'000 + 1, INT_MAX);
    if (::poll(fds.data(), fds.size(), static_cast<int>(left_ms)) < 0 && errno != EINTR) {
      throw_errno("poll");
    }
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents != 0) hear(children_[i]);
    }
    std::erase_if(children_, [](const Child& child) { return child.pid == 0; });
  }
  kill_all();
  if (failed_ns_ != 0) throw RanksFailed(failures());
}

int64_t Supervisor::deadline_ns() const {
  if (failed_ns_ != 0) return failed_ns_ + kGraceNs;
  int64_t last_progress = 0;
  for (uint32_t rank = 0; rank < board_.num_ranks(); ++rank) {
    last_progress = std::max(last_progress, board_.notes(rank).progress_ns.load());
  }
  return last_progress + static_cast<int64_t>(timeout_s_ * kNsPerS) + kPatienceNs;
}

void Supervisor::hear(Child& child) {
  char byte = 0;
  const ssize_t got = ::read(child.pipe, &byte, 1);
  if (got < 0 && errno == EINTR) return;
  if (got > 0) {
    if (failed_ns_ == 0) failed_ns_ = now_ns();
  } else {
    reap(child);
  }
}

void Supervisor::reap(Child& child) {
  int status = 0;
  while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  ::close(child.pipe);
  child.pid = 0;
  if (status == 0) return;
  if (failed_ns_ == 0) failed_ns_ = now_ns();
  board_.barrier().stop();
  bool has_explained = false;
  for (uint32_t rank = child.ranks.first; rank < child.ranks.end; ++rank) {
    has_explained = has_explained || board_.notes(rank).blame.load() != Blame::kNone;
  }
  for (uint32_t rank = child.ranks.first; rank < child.ranks.end && !has_explained; ++rank) {
    RankNotes& notes = board_.notes(rank);
    notes.fail(Blame::kDied, str("its process ", end_of(status), " ", place_of(notes)));
  }
}

void Supervisor::note_who_is_stuck() {
  failed_ns_ = now_ns();
  for (uint32_t rank = 0; rank < board_.num_ranks(); ++rank) {
    RankNotes& notes = board_.notes(rank);
    if (notes.is_done.load()) continue;
    const int64_t idle_s = (failed_ns_ - notes.progress_ns.load()) / kNsPerS;
    // Who waits for others at the barrier is not to blame, unless all do.
    notes.fail(notes.is_waiting.load() ? Blame::kStopped : Blame::kTimeout,
               str("no progress for ", idle_s, " s ", place_of(notes)));
  }
}

void Supervisor::kill_all() {
  for (const Child& child : children_)
    ::kill(child.pid, SIGKILL);
  for (const Child& child : children_) {
    while (::waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    ::close(child.pipe);
  }
  children_.clear();
}

std::string Supervisor::failures() const {
  std::vector<std::pair<Blame, std::string>> lines;
  for (uint32_t rank = 0; rank < board_.num_ranks(); ++rank) {
    const RankNotes& notes = board_.notes(rank);
    const Blame blame = notes.blame.load(std::memory_order_acquire);
    if (blame == Blame::kNone) continue;
    lines.emplace_back(blame, str("rank ", rank, ": ", notes.failure.data()));
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string text;
  for (const auto& [blame, line] : lines) {
    // Whoever was merely stopped has nothing to add.
    if (blame == Blame::kStopped && blame != lines.front().first) continue;
    text += str(text.empty() ? "" : "\n", line);
  }
  return text.empty() ? "a rank failed without saying why" : text;
}

}  // namespace ep::bench
