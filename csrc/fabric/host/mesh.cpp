#include "fabric/host/mesh.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/text.hpp"
#include "ep/error.hpp"
#include "fabric/host/socket.hpp"
#include "fabric/host/verdict.hpp"

namespace ep::fabric {
namespace {

constexpr uint32_t kMagic = 0x4d534d45;  // "EMSM"
constexpr int kListenBacklog = 1024;
constexpr size_t kMaxStrangers = 1024;
constexpr double kRetryS =
    0.005;  // for what poll() cannot tell: a full backlog, too many files in flight
constexpr double kProbeS = 0.25;  // between two looks whether those that are to connect still live

struct Greeting {
  uint32_t magic, from, to;
  Token secret_from, secret_to;
};

struct Message {
  enum class Kind : uint8_t { kNone, kClosed, kNonsense, kGood } kind = Kind::kNone;
  Greeting greeting{};
  Fd file{};
};

sockaddr_un address_of(const Token& name, socklen_t& num_bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::string path = "ep-moe-";
  for (const uint8_t byte : name) {
    path += "0123456789abcdef"[byte >> 4];
    path += "0123456789abcdef"[byte & 15];
  }
  // A zero byte in front: an abstract name, which is in no file system and ends with its socket.
  std::memcpy(address.sun_path + 1, path.data(), path.size());
  num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  return address;
}

Fd open_socket(uint32_t rank) {
  // SEQPACKET: a greeting arrives whole or not at all.
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd) return fd;
  if (errno == EMFILE || errno == ENFILE) throw descriptor_shortage(rank, errno);
  throw Unsupported(str("rank ", rank, ": no unix sockets: ", errno_text(errno)));
}

ucred credentials(int socket) {
  ucred peer{};
  peer.uid = static_cast<uid_t>(-1);
  socklen_t num_bytes = sizeof peer;
  (void)::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &num_bytes);
  return peer;
}

bool send_greeting(int socket, const Greeting& greeting, int file) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  iovec part{const_cast<Greeting*>(&greeting), sizeof greeting};  // sendmsg only reads it
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof file);
  std::memcpy(CMSG_DATA(header), &file, sizeof file);
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof greeting;
}

// The first file goes to `file`; there is room for two, so a second may come, and is closed.
void take_files(msghdr& message, Fd& file) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int raw = -1;
      std::memcpy(&raw, CMSG_DATA(header) + i * sizeof raw, sizeof raw);
      Fd owner(raw);
      if (!file) file = std::move(owner);
    }
  }
}

Message receive_greeting(int socket, uint32_t rank) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  Message result;
  iovec part{&result.greeting, sizeof result.greeting};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return result;
  if (got <= 0) {
    result.kind = Message::Kind::kClosed;
    return result;
  }
  take_files(message, result.file);
  const bool is_whole = got == sizeof result.greeting && (message.msg_flags & MSG_TRUNC) == 0 &&
                        result.greeting.magic == kMagic;
  // The kernel drops a file for which this process has no descriptor.
  if (is_whole && !result.file && (message.msg_flags & MSG_CTRUNC) != 0) {
    throw descriptor_shortage(rank, EMFILE);
  }
  result.kind = is_whole && result.file ? Message::Kind::kGood : Message::Kind::kNonsense;
  return result;
}

class Builder {
 public:
  Builder(const MeshRequest& request, const MeshListener& listener)
      : job_(request), listener_(listener) {
    for (const uint32_t rank : request.remote)
      peers_.push_back({rank});
  }

  std::vector<MeshPeer> run(const Deadline& deadline) {
    for (;;) {
      for (Peer& peer : peers_)
        advance(peer);
      accept_strangers();
      const std::vector<uint32_t> unfinished = unfinished_ranks();
      if (unfinished.empty()) break;
      if (probe_at_.passed()) probe();
      if (deadline.passed()) {
        throw Timeout(str("connect: rank ", job_.rank, " could not swap windows in time with ",
                          rank_list(unfinished)),
                      unfinished, "connect");
      }
      wait(deadline);
    }
    std::vector<MeshPeer> done;
    for (Peer& peer : peers_)
      done.push_back({std::move(*peer.link), std::move(peer.file)});
    return done;
  }

 private:
  struct Peer {
    uint32_t rank;
    std::optional<Link> link{};
    bool has_sent = false;
    Fd file{};
  };

  std::vector<uint32_t> unfinished_ranks() const {
    std::vector<uint32_t> ranks;
    for (const Peer& peer : peers_) {
      if (!peer.has_sent || !peer.file) ranks.push_back(peer.rank);
    }
    return ranks;
  }

  [[noreturn]] void lose(uint32_t peer, const std::string& why) const {
    throw PeerLost(str("connect: rank ", job_.rank, " has lost rank ", peer, ": ", why), {peer});
  }

  void advance(Peer& peer) {
    if (!peer.link && peer.rank < job_.rank) {
      if (Fd socket = dial(peer.rank)) peer.link.emplace(peer.rank, std::move(socket));
    }
    if (!peer.link) return;
    if (!peer.has_sent) send(peer);
    if (!peer.file) receive(peer);
  }

  // Empty when its backlog is full.
  Fd dial(uint32_t peer) const {
    Fd socket = open_socket(job_.rank);
    socklen_t num_bytes = 0;
    const sockaddr_un address = address_of(job_.doors[peer].name, num_bytes);
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), num_bytes) == 0)
      return socket;
    if (errno != EAGAIN && errno != EINTR) lose(peer, errno_text(errno));
    return Fd();
  }

  // A higher rank connects here, so only a look at its door tells that it has failed or is dead:
  // the door is open until the rank is connected to all, this one included.
  void probe() {
    for (const Peer& peer : peers_) {
      if (!peer.link && peer.rank > job_.rank) dial(peer.rank);
    }
    probe_at_ = Deadline(kProbeS);
  }

  void send(Peer& peer) {
    const Greeting greeting{kMagic, job_.rank, peer.rank, job_.doors[job_.rank].secret,
                            job_.doors[peer.rank].secret};
    peer.has_sent = send_greeting(peer.link->socket(), greeting, job_.window_file);
    // ETOOMANYREFS: the user's bound of files in flight; it falls as others receive.
    const bool may_retry = errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS ||
                           errno == EINTR || errno == ENOBUFS;
    if (!peer.has_sent && !may_retry) lose(peer.rank, errno_text(errno));
  }

  // From a peer that this rank has connected to; whoever connects here is heard as a stranger.
  void receive(Peer& peer) {
    Message message = receive_greeting(peer.link->socket(), job_.rank);
    if (message.kind == Message::Kind::kNone) return;
    if (message.kind == Message::Kind::kClosed) lose(peer.rank, "it hung up");
    if (!is_from(message, peer.link->socket(), peer.rank)) lose(peer.rank, "its greeting is wrong");
    peer.file = std::move(message.file);
  }

  bool is_from(const Message& message, int socket, uint32_t rank) const {
    const Greeting& greeting = message.greeting;
    return message.kind == Message::Kind::kGood && greeting.from == rank &&
           greeting.to == job_.rank && greeting.secret_from == job_.doors[rank].secret &&
           greeting.secret_to == job_.doors[job_.rank].secret &&
           credentials(socket).uid == ::geteuid();
  }

  void accept_strangers() {
    while (Fd socket = accept_from(listener_.fd(), job_.rank)) {
      if (strangers_.size() == kMaxStrangers) strangers_.erase(strangers_.begin());
      strangers_.push_back(std::move(socket));
    }
    for (Fd& stranger : strangers_) {
      Message message = receive_greeting(stranger.get(), job_.rank);
      if (message.kind == Message::Kind::kNone) continue;
      Fd socket = std::exchange(stranger, Fd());
      for (Peer& peer : peers_) {
        if (peer.link || !is_from(message, socket.get(), peer.rank)) continue;
        peer.link.emplace(peer.rank, std::move(socket));
        peer.file = std::move(message.file);
        send(peer);
        break;
      }
    }
    std::erase_if(strangers_, [](const Fd& fd) { return !fd; });
  }

  void wait(const Deadline& deadline) {
    std::vector<pollfd> fds{{listener_.fd(), POLLIN, 0}};
    bool must_retry = false;
    for (const Peer& peer : peers_) {
      must_retry =
          must_retry || (!peer.link && peer.rank < job_.rank) || (peer.link && !peer.has_sent);
      if (peer.link && !peer.file) fds.push_back({peer.link->socket(), POLLIN, 0});
    }
    for (const Fd& stranger : strangers_)
      fds.push_back({stranger.get(), POLLIN, 0});
    const double bound_s = must_retry ? kRetryS : probe_at_.remaining_s();
    wait_ready(fds, deadline, bound_s);
  }

  const MeshRequest& job_;
  const MeshListener& listener_;
  std::vector<Peer> peers_;
  std::vector<Fd> strangers_;
  Deadline probe_at_{kProbeS};
};

}  // namespace

Token random_token() {
  Token token{};
  // Up to 256 bytes come whole or not at all.
  while (::getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    if (errno != EINTR) throw Unsupported(str("getrandom: ", errno_text(errno)));
  }
  return token;
}

MeshListener::MeshListener(uint32_t rank)
    : door_{random_token(), random_token()}, fd_(open_socket(rank)) {
  socklen_t num_bytes = 0;
  const sockaddr_un address = address_of(door_.name, num_bytes);
  if (::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), num_bytes) != 0 ||
      ::listen(fd_.get(), kListenBacklog) != 0) {
    throw Unsupported(
        str("rank ", rank, " cannot listen at an abstract unix name: ", errno_text(errno)));
  }
}

Link::Link(uint32_t rank, Fd socket)
    : rank_(rank), owner_pid_(::getpid()), socket_(std::move(socket)) {
  const pid_t pid = credentials(socket_.get()).pid;
  // 0: a process of a pid namespace that this one does not see.  Without it the socket must do.
  if (pid > 0) process_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

Link::~Link() {
  // Closing alone would not reach the peer while a forked child of this process has a copy.
  if (socket_ && ::getpid() == owner_pid_) ::shutdown(socket_.get(), SHUT_RDWR);
}

std::vector<MeshPeer> connect_mesh(const MeshRequest& request,
                                   const MeshListener& listener,
                                   const Deadline& deadline) {
  return Builder(request, listener).run(deadline);
}

}  // namespace ep::fabric
