// Who may connect to a rank, and what file it takes as a window.
#include "fabric/host/mesh.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/un.h>

#include "fabric/host/window.hpp"
#include "fabric/rank_processes.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t kWindowBytes = 4096;

Fd dial_door(const Door& door) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::string path = "ep-moe-";
  for (const uint8_t byte : door.name) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", byte);
    path += hex;
  }
  std::memcpy(address.sun_path + 1, path.data(), path.size());
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const auto num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), num_bytes), 0);
  return fd;
}

// Swaps windows between `num_ranks` ranks after `before` has seen the doors; false where it timed
// out.
std::vector<bool> swap_windows(uint32_t num_ranks,
                               const std::vector<bool>& comes,
                               double timeout_s,
                               const std::function<void(const std::vector<Door>&)>& before) {
  std::vector<std::unique_ptr<MeshListener>> listeners;
  std::vector<Door> doors;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    listeners.push_back(std::make_unique<MeshListener>(rank));
    doors.push_back(listeners.back()->door());
  }
  before(doors);
  std::vector<char> is_done(num_ranks, 0);
  run_threads(num_ranks, [&](uint32_t rank) {
    if (!comes[rank]) return;
    std::vector<uint32_t> remote;
    for (uint32_t peer = 0; peer < num_ranks; ++peer) {
      if (peer != rank) remote.push_back(peer);
    }
    const Fd file = create_window_file(kWindowBytes, rank);
    const MeshRequest request{rank, remote, doors, file.get()};
    try {
      std::vector<MeshPeer> peers = connect_mesh(request, *listeners[rank], Deadline(timeout_s));
      for (size_t i = 0; i < peers.size(); ++i) {
        EXPECT_EQ(peers[i].link.rank(), remote[i]);
        EXPECT_NE(map_window(peers[i].window_file, kWindowBytes, rank), nullptr);
      }
      is_done[rank] = 1;
    } catch (const Timeout&) {
    } catch (const PeerLost&) {
    }
  });
  return std::vector<bool>(is_done.begin(), is_done.end());
}

TEST(Mesh, ConnectsAllToAll) {
  for (const uint32_t num_ranks : {2u, 3u, 9u}) {
    const std::vector<bool> all(num_ranks, true);
    EXPECT_EQ(swap_windows(num_ranks, all, kLongS, [](const auto&) {}), all);
  }
}

TEST(Mesh, StrangersAreDroppedAndTheirFilesClosed) {
  swap_windows(2, {true, true}, kLongS, [](const auto&) {});
  const size_t num_fds = take_census().num_fds;
  std::vector<Fd> strangers;
  const auto be_rude = [&](const std::vector<Door>& doors) {
    for (const Door& door : doors) {
      for (const size_t num_bytes : {size_t{0}, size_t{1}, size_t{44}, size_t{9000}}) {
        strangers.push_back(dial_door(door));
        const std::string words(num_bytes, 'x');
        const int files[2] = {strangers.back().get(), strangers.back().get()};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof files)] = {};
        iovec part{const_cast<char*>(words.data()), words.size()};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof files);
        std::memcpy(CMSG_DATA(header), files, sizeof files);
        if (num_bytes == 0) continue;  // says nothing
        EXPECT_EQ(::sendmsg(strangers.back().get(), &message, 0), static_cast<ssize_t>(num_bytes));
      }
    }
  };
  EXPECT_EQ(swap_windows(3, {true, true, true}, kLongS, be_rude), std::vector<bool>(3, true));
  strangers.clear();
  EXPECT_EQ(take_census().num_fds, num_fds);
}

// The names are public (/proc/net/unix), so a process that knows them but no secret must get
// nowhere.
TEST(Mesh, WrongSecretIsNotAPeer) {
  const std::vector<bool> done =
      swap_windows(3, {true, true, false}, kShortS, [](const auto& doors) {
        for (const Door& door : doors) {
          const Fd fd = dial_door(door);
          const uint32_t greeting[11] = {0x4d534d45, 2, 0};
          EXPECT_EQ(::send(fd.get(), greeting, sizeof greeting, MSG_NOSIGNAL),
                    ssize_t{sizeof greeting});
        }
      });
  EXPECT_EQ(done, std::vector<bool>(3, false));
}

// A peer that does not come, and one that connects and says nothing.
TEST(Mesh, InterruptLeavesTheWait) {
  for (const uint32_t rank : {0u, 1u}) {
    const MeshListener mine(rank), theirs(1 - rank);
    std::vector<Door> doors{mine.door(), theirs.door()};
    if (rank == 1) std::swap(doors[0], doors[1]);
    const Fd file = create_window_file(kWindowBytes, rank), stranger = dial_door(mine.door());
    const std::vector<uint32_t> remote{1 - rank};
    const MeshRequest request{rank, remote, doors, file.get()};
    uint32_t num_asked = 0;
    const Deadline deadline(kLongS, [&] { return ++num_asked == 3; });
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(connect_mesh(request, mine, deadline), Interrupted);
    EXPECT_EQ(num_asked, 3u);
    EXPECT_LT(seconds_since(start), 0.2 + kMarginS);
  }
}

TEST(Mesh, TokensDiffer) {
  EXPECT_NE(random_token(), random_token());
}

TEST(Window, OtherFilesAreNotMapped) {
  const auto memory = [](uint64_t num_bytes, int seals) {
    Fd file(::memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(::ftruncate(file.get(), static_cast<off_t>(num_bytes)), 0);
    EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, seals), 0);
    return file;
  };
  const int sealed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  EXPECT_NE(map_window(memory(4096, sealed), kWindowBytes, 0), nullptr);
  EXPECT_THROW(map_window(memory(4096, F_SEAL_GROW), kWindowBytes, 0), Error);  // could be shrunk
  EXPECT_THROW(map_window(memory(8192, sealed), kWindowBytes, 0), Error);
  EXPECT_THROW(map_window(memory(0, sealed), kWindowBytes, 0), Error);
  EXPECT_THROW(map_window(Fd(::open("/dev/zero", O_RDWR | O_CLOEXEC)), kWindowBytes, 0), Error);
}

TEST(Window, CannotBeResizedByAnybody) {
  const Fd file = create_window_file(kWindowBytes, 0);
  EXPECT_NE(::ftruncate(file.get(), 0), 0);
  EXPECT_NE(::ftruncate(file.get(), 1 << 20), 0);
  EXPECT_NE(::fcntl(file.get(), F_GETFD) & FD_CLOEXEC, 0);
}

}  // namespace
}  // namespace ep::fabric
