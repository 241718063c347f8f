// Coop: the threads that call together, and the memory they share with others.
//
// Kernel bodies are written for one *worker* (a warp on the GPU, a thread on the host) and take it as a Coop;
// a block has one or more workers, a launch has blocks that are all alive at once.  What a Coop offers:
//
//   static constexpr Form kForm
//   uint32_t thread_rank(), size()       my place among the worker's threads;  void sync()
//   T    uniform(T)                      thread 0's value, for all threads of the worker
//   uint32_t match(uint32_t)             kWarp only: the threads with my value, as a mask of ranks
//   uint32_t count(uint32_t)             kWarp only: how many threads a mask holds
//   float    max_all(float)              kWarp only: all threads' largest; none negative or NaN
//   uint32_t worker(), num_workers()     my worker's place in its block;       void block_sync()
//   bool block_all(bool)                 true where it is for every worker; syncs the block
//   T    block_broadcast(T)              worker 0's thread 0's value, for the block; syncs the block
//   uint32_t block(), num_blocks()       my block's place in the launch
//
//   T    load<Order, Scope>(const T*)              words that another worker or rank may touch:
//   void store<Order, Scope>(T*, T)                T is uint32_t or uint64_t, naturally aligned
//   T    fetch_add / fetch_min / exchange<Order, Scope>(T*, T)
//   T    compare_exchange<Order, Scope>(T*, T expected, T desired)     returns what was there
//   T    read(const T*);  void write(T*, T)        plain accesses to memory that others write or read,
//                                                  ordered by a release and an acquire elsewhere
//   void ring(Doorbell*)                 wakes sleepers of that window; nothing on a GPU
//   uint64_t now_ns()                    monotonic
//   auto b = coop.make_backoff();        the state of one wait (type Coop::Backoff; neither copied nor moved)
//   Backoff; void back_off(Backoff&)     one step of waiting: spin, then yield, then sleep
//
// sync, uniform, block_sync and block_broadcast order memory too: what a thread wrote before is
// covered by another's release behind it, and what thread 0 acquired before holds for all.
//
// A Coop is a handle and is passed by value: on a GPU that is nothing, where a reference is an address to keep.
//
// Every one of these is called by one thread or by all threads alike, as its caller's comment says; leaves
// that spread work over lanes are free functions with a form for each Coop (leaves/).
#pragma once

#include "common/target.hpp"

namespace ep::kernels {

enum class Form : uint8_t { kOneThread, kWarp };
enum class Order : uint8_t { kRelaxed, kAcquire, kRelease, kAcqRel };
enum class Scope : uint8_t { kBlock, kDevice, kSystem };

}  // namespace ep::kernels
