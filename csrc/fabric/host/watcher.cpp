#include "fabric/host/watcher.hpp"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/text.hpp"
#include "ep/error.hpp"
#include "fabric/host/socket.hpp"

namespace ep::fabric {
namespace {

// A thread inherits its creator's mask: the user's signals stay with the user's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void Watcher::start(uint32_t rank, std::function<void(uint32_t rank)> on_lost) {
  if (peers_.empty()) return;
  on_lost_ = std::move(on_lost);
  wake_ = Fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_) throw descriptor_shortage(rank, errno);
  owner_pid_ = ::getpid();
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw CapacityError(
        str("rank ", rank, " cannot start the thread that watches peers: ", error.what()), rank, 1,
        0);
  }
  (void)::pthread_setname_np(thread_.native_handle(), "ep-watch");
}

void Watcher::stop() noexcept {
  if (!thread_.joinable()) return;
  if (::getpid() != owner_pid_) {
    // There is nothing to join here and a thread object must not be destroyed unjoined.
    (void)new std::thread(std::move(thread_));
    return;
  }
  const uint64_t one = 1;
  // Fails only when the counter is full, that is, when the wake-up is there already.
  while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  if (thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

void Watcher::run() {
  while (!peers_.empty()) {
    std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
    for (const Peer& peer : peers_) {
      fds.push_back({peer.socket, POLLIN | POLLRDHUP, 0});
      fds.push_back({peer.process, POLLIN, 0});  // a negative one is skipped
    }
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;  // EINTR, or ENOMEM for the moment
    bool is_stopped = fds[0].revents != 0;
    std::vector<Peer> still_there;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (!is_stopped && is_gone(peers_[i], fds[1 + 2 * i].revents, fds[2 + 2 * i].revents)) {
        on_lost_(peers_[i].rank);
        is_stopped = ::poll(fds.data(), 1, 0) > 0;
      } else {
        still_there.push_back(peers_[i]);
      }
    }
    peers_ = std::move(still_there);
    if (is_stopped) return;
  }
}

bool Watcher::is_gone(const Peer& peer, short socket_events, short process_events) const {
  if (process_events != 0 || (socket_events & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) != 0)
    return true;
  if ((socket_events & POLLIN) == 0) return false;
  // Nobody sends anything after the set-up; whatever it is must not keep poll() from sleeping.
  char ignored[64];
  const ssize_t got = ::recv(peer.socket, ignored, sizeof ignored, MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

}  // namespace ep::fabric
