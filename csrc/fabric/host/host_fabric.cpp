// connect_host(): three collective steps.
//   1 identity  who is on which node, in which process; all decide alike whether this can work
//   2 window    every rank has its window and its door; those of one process share mappings
//   3 mesh      every rank has mapped the windows of all others
// A rank that fails still takes part in the next step, so the others learn it at once.
#include <algorithm>
#include <utility>
#include <vector>

#include <unistd.h>

#include "common/text.hpp"
#include "ep/error.hpp"
#include "fabric/fabric.hpp"
#include "fabric/host/agreement.hpp"
#include "fabric/host/identity.hpp"
#include "fabric/host/mesh.hpp"
#include "fabric/host/watcher.hpp"
#include "fabric/host/window.hpp"

namespace ep::fabric {
namespace {

// However late the ranks meet, a step that all have reached does not fail for want of a second.
constexpr double kLeastStepS = 1.0;

struct IdentityRecord {
  Identity identity;
  uint64_t num_bytes;
};

struct WindowRecord {
  Door door;
  uint64_t handover;  // address, for the ranks of the same process
};

class HostFabric final : public Fabric {
 public:
  HostFabric(uint32_t rank, std::vector<std::shared_ptr<Window>> windows, std::vector<Link> links)
      : rank_(rank),
        windows_(std::move(windows)),
        links_(std::move(links)),
        watcher_(watched(links_)) {}

  uint32_t num_nodes() const override { return 1; }
  std::byte* window(uint32_t rank) const override { return windows_.at(rank)->base(); }

  std::shared_ptr<void> own_window() const override {
    return {windows_[rank_], windows_[rank_]->base()};
  }

  void watch(std::function<void(uint32_t rank)> on_lost) override {
    watcher_.stop();
    watcher_.start(rank_, std::move(on_lost));
  }

  void stop_watching() noexcept override { watcher_.stop(); }

 private:
  static std::vector<Watcher::Peer> watched(const std::vector<Link>& links) {
    std::vector<Watcher::Peer> peers;
    for (const Link& link : links)
      peers.push_back({link.rank(), link.socket(), link.process()});
    return peers;
  }

  uint32_t rank_;
  std::vector<std::shared_ptr<Window>> windows_;
  std::vector<Link> links_;
  Watcher watcher_;  // the last: it uses the links until it has stopped
};

// Withdraws what nobody may take any more, also when the set-up fails.
class Offer {
 public:
  Offer() = default;
  ~Offer() {
    if (handover_ != nullptr) handover_->withdraw();
  }
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;

  void make(std::shared_ptr<Window> window, uint32_t num_takers) {
    if (num_takers > 0) handover_ = Handover::offer(std::move(window), num_takers);
  }
  uint64_t address() const { return reinterpret_cast<uintptr_t>(handover_); }

 private:
  Handover* handover_ = nullptr;
};

class SetUp {
 public:
  SetUp(Communicator& group, uint64_t num_bytes, double timeout_s)
      : group_(group),
        rank_(group.rank()),
        num_bytes_(num_bytes),
        deadline_(timeout_s, group.interrupt),
        windows_(group.num_ranks()) {}

  std::unique_ptr<Fabric> run() {
    agree_on_identities();
    Failure failure = failure_of([&] { make_window(); });
    std::vector<Door> doors = swap_windows(failure);
    std::vector<Link> links;
    failure = failure_of([&] { links = map_remote_windows(doors); });
    listener_.reset();  // also tells peers that still want to connect of a failure
    file_ = Fd();
    // Others may still be in the mesh for all of their time.
    const Step step{3, step_s() + kLeastStepS};
    raise_failures(exchange(group_, step, bytes_of(rank_), failure), failure);
    return std::make_unique<HostFabric>(rank_, std::move(windows_), std::move(links));
  }

 private:
  double step_s() const { return std::max(deadline_.remaining_s(), kLeastStepS); }

  void agree_on_identities() {
    IdentityRecord mine{{}, num_bytes_};
    const Failure failure = failure_of([&] { mine.identity = this_process(rank_); });
    const Step step{1, deadline_.remaining_s()};
    const std::vector<Report> reports = exchange(group_, step, bytes_of(mine), failure);
    raise_failures(reports, failure);
    const IdentityRecord first = reports[0].as<IdentityRecord>();
    for (uint32_t rank = 0; rank < reports.size(); ++rank) {
      const IdentityRecord theirs = reports[rank].as<IdentityRecord>();
      if (theirs.num_bytes != first.num_bytes) {
        throw InvalidArgument(str("window size differs: rank 0 has ", first.num_bytes,
                                  " bytes, rank ", rank, " has ", theirs.num_bytes));
      }
      const std::string why = why_apart(first.identity, theirs.identity);
      if (!why.empty()) {
        throw Unsupported(str("ranks 0 and ", rank, " cannot share windows: ", why,
                              "; host windows need all ranks on one node"));
      }
      if (rank == rank_) continue;
      std::vector<uint32_t>& side =
          is_same_process(mine.identity, theirs.identity) ? local_ : remote_;
      side.push_back(rank);
    }
    if (num_bytes_ == 0) throw InvalidArgument("window size: 0 bytes");
  }

  void make_window() {
    file_ = create_window_file(num_bytes_, rank_);
    windows_[rank_] = map_window(file_, num_bytes_, rank_);
    if (!remote_.empty()) listener_ = std::make_unique<MeshListener>(rank_);
    offer_.make(windows_[rank_], static_cast<uint32_t>(local_.size()));
  }

  std::vector<Door> swap_windows(const Failure& failure) {
    const WindowRecord mine{listener_ ? listener_->door() : Door{}, offer_.address()};
    const Step step{2, step_s()};
    const std::vector<Report> reports = exchange(group_, step, bytes_of(mine), failure);
    // Before any error is raised: whoever offers a window counts on all takers.
    for (const uint32_t rank : local_) {
      const uint64_t address = reports[rank].as<WindowRecord>().handover;
      if (address != 0) windows_[rank] = reinterpret_cast<Handover*>(address)->take();
    }
    raise_failures(reports, failure);
    std::vector<Door> doors;
    for (const Report& report : reports)
      doors.push_back(report.as<WindowRecord>().door);
    return doors;
  }

  std::vector<Link> map_remote_windows(const std::vector<Door>& doors) {
    std::vector<Link> links;
    if (!remote_.empty()) {
      const MeshRequest request{rank_, remote_, doors, file_.get()};
      for (MeshPeer& peer : connect_mesh(request, *listener_, deadline_.with(step_s()))) {
        windows_[peer.link.rank()] = map_window(peer.window_file, num_bytes_, rank_);
        links.push_back(std::move(peer.link));
      }
    }
    for (const uint32_t rank : local_) {
      if (!windows_[rank])
        throw PeerError(str("rank ", rank, " gave up during set-up"), {rank}, "gave up");
    }
    return links;
  }

  Communicator& group_;
  const uint32_t rank_;
  const uint64_t num_bytes_;
  const Deadline deadline_;
  std::vector<uint32_t> local_, remote_;  // of this process, and of others; both without this rank
  std::vector<std::shared_ptr<Window>> windows_;
  Fd file_;
  std::unique_ptr<MeshListener> listener_;
  Offer offer_;
};

}  // namespace

std::unique_ptr<Fabric> connect_host(Communicator& group, uint64_t num_bytes, double timeout_s) {
  return SetUp(group, num_bytes, timeout_s).run();
}

}  // namespace ep::fabric
