#include "fabric/host/connection.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace ep::fabric {
namespace {

constexpr uint32_t kMagic = 0x4d4f4550;  // "PEOM"
constexpr size_t kChunkBytes = 64 * 1024;
// A peer that never stops sending must not keep receive() from returning.
constexpr int kMaxChunksPerCall = 64;

bool is_known(uint32_t kind) {
  return kind >= static_cast<uint32_t>(FrameKind::kHello) &&
         kind <= static_cast<uint32_t>(FrameKind::kInterrupt);
}

}  // namespace

Connection::Connection(Fd fd) : fd_(std::move(fd)), owner_pid_(::getpid()) {}

Connection::~Connection() {
  if (::getpid() != owner_pid_) return;
  ::shutdown(fd_.get(), SHUT_WR);
  // Closing with bytes unread would reset the connection, and the peer could lose our last frame.
  std::array<std::byte, 4096> unread;
  for (int i = 0; i < kMaxChunksPerCall; ++i) {
    if (::recv(fd_.get(), unread.data(), unread.size(), MSG_DONTWAIT) <= 0) break;
  }
}

void Connection::send(FrameKind kind,
                      uint64_t round,
                      std::shared_ptr<const Communicator::Bytes> payload) {
  const uint64_t num_bytes = payload ? payload->size() : 0;
  outbox_.push_back({{kMagic, static_cast<uint32_t>(kind), round, num_bytes}, std::move(payload)});
  flush();
}

void Connection::flush() {
  while (!outbox_.empty() && send_front()) {
  }
}

// False when the socket takes no more.
bool Connection::send_front() {
  Outgoing& front = outbox_.front();
  const uint64_t total = sizeof front.header + front.header.num_bytes;
  std::array<iovec, 2> parts{};
  size_t num_parts = 0;
  if (front.num_sent < sizeof front.header) {
    auto* at = reinterpret_cast<std::byte*>(&front.header) + front.num_sent;
    parts[num_parts++] = {at, sizeof front.header - front.num_sent};
  }
  if (front.header.num_bytes > 0) {
    const uint64_t skip = front.num_sent - std::min<uint64_t>(front.num_sent, sizeof front.header);
    auto* at = const_cast<std::byte*>(front.payload->data()) + skip;  // sendmsg only reads it
    parts[num_parts++] = {at, front.header.num_bytes - skip};
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = num_parts;
  const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (errno == EINTR) return true;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return false;
    outbox_.clear();  // the peer is gone; receive() will find out, after what it sent last
    return false;
  }
  front.num_sent += static_cast<uint64_t>(sent);
  if (front.num_sent == total) outbox_.pop_front();
  return true;
}

void Connection::drop_unsent_verdicts() {
  std::erase_if(outbox_, [](const Outgoing& out) {
    return out.header.kind == static_cast<uint32_t>(FrameKind::kVerdict) && out.num_sent == 0;
  });
}

void Connection::receive(FunctionRef<bool(Frame&&)> on_frame) {
  std::array<std::byte, kChunkBytes> chunk;
  for (int i = 0; i < kMaxChunksPerCall; ++i) {
    const Parse parsed = parse(on_frame);
    if (parsed == Parse::kNonsense) is_closed_ = true;
    if (parsed == Parse::kStopped || is_closed_) return;
    const ssize_t got = ::recv(fd_.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      is_closed_ = true;
      return;
    }
    inbox_.insert(inbox_.end(), chunk.data(), chunk.data() + got);
  }
}

Connection::Parse Connection::parse(FunctionRef<bool(Frame&&)> on_frame) {
  size_t at = 0;
  Parse result = Parse::kNeedsMore;
  while (result == Parse::kNeedsMore && inbox_.size() - at >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, inbox_.data() + at, sizeof header);
    if (header.magic != kMagic || !is_known(header.kind) || header.num_bytes > max_payload_) {
      return Parse::kNonsense;
    }
    if (inbox_.size() - at - sizeof header < header.num_bytes) break;
    const auto payload = inbox_.begin() + static_cast<ptrdiff_t>(at + sizeof header);
    at += sizeof header + header.num_bytes;
    const bool goes_on = on_frame({static_cast<FrameKind>(header.kind),
                                   header.round,
                                   {payload, payload + static_cast<ptrdiff_t>(header.num_bytes)}});
    if (!goes_on) result = Parse::kStopped;
  }
  inbox_.erase(inbox_.begin(), inbox_.begin() + static_cast<ptrdiff_t>(at));
  return result;
}

short Connection::poll_events() const {
  return static_cast<short>(has_unsent() ? POLLIN | POLLOUT : POLLIN);
}

}  // namespace ep::fabric
