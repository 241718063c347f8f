// How the processes of a tcp() group meet: call 0 of its protocol (tcp_communicator.cpp).
//
//   rank r                                   rank 0
//   connects, again and again                listens, accepts
//   Hello {version, rank, num_ranks}  ---->  checks it
//                                     <----  Admitted
//                                     <----  Welcome, once everybody is here (it listens no more),
//                                            or Verdict: who is missing or lost, what differs
//   Abandon when its time is up,      ---->  ends the meeting for everybody
//   Interrupt when its user leaves
//
// Who connects and says something else, or nothing, is dropped; rank 0 keeps accepting.  A
// connection that closes before Admitted is tried again; one that closes after it means that its
// peer is lost.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fabric/host/connection.hpp"
#include "fabric/host/deadline.hpp"
#include "fabric/host/socket.hpp"
#include "fabric/host/verdict.hpp"

namespace ep::fabric {

// How long a rank whose time is up waits for rank 0 to say who was missing.
inline constexpr double kVerdictGraceS = 0.5;

struct Meeting {
  HostPort at;
  Place place;
  Deadline deadline;
};

// Rank 0: the connections to all the others, by rank; element 0 is null.
std::vector<std::unique_ptr<Connection>> receive_ranks(const Meeting& meeting);

// The others: the connection to rank 0.
std::unique_ptr<Connection> join_rank_0(const Meeting& meeting);

}  // namespace ep::fabric
