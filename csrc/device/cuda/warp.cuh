// Warp: the Coop of the CUDA target.  One warp is one worker; the contract is kernels/coop.hpp.
//
// REQUIRES: one-dimensional blocks of whole warps, all lanes alive.  Only NVRTC reads what is
// inside the #if; a host compiler, which checks that headers stand alone, sees an empty file.
#pragma once

#include "common/doorbell.hpp"
#include "kernels/coop.hpp"

#if EP_CUDA_COMPILE
#include "kernels/ptx/clock.cuh"
#include "kernels/ptx/memory.cuh"

namespace ep::device::cuda {

// std::type_identity_t: NVRTC has no <type_traits>.
template <typename T>
struct Identity {
  using Type = T;
};
template <typename T>
using NotDeduced = typename Identity<T>::Type;

class Warp {
 public:
  using Order = kernels::Order;
  using Scope = kernels::Scope;

  static constexpr kernels::Form kForm = kernels::Form::kWarp;

  // Volatile, so that it is read again where it is needed: a register saved for the whole kernel.
  static EP_DEVICE uint32_t thread_rank() {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }
  static EP_DEVICE constexpr uint32_t size() { return kLanes; }

  // Orders the lanes' accesses: what lanes wrote before it is covered by a lane's release after it.
  static EP_DEVICE void sync() { __syncwarp(); }

  // A shuffle orders no memory.  The sync behind it makes an acquire by lane 0 hold for the lanes
  // that go on because of its value: they may have looked before it did.
  template <typename T>
  static EP_DEVICE T uniform(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    T first;
    if constexpr (sizeof(T) <= sizeof(uint32_t)) {
      first = static_cast<T>(__shfl_sync(kAllLanes, static_cast<uint32_t>(value), 0));
    } else {
      first = static_cast<T>(__shfl_sync(kAllLanes, static_cast<uint64_t>(value), 0));
    }
    __syncwarp();
    return first;
  }

  // The lanes that hold the same value as this one, as a mask.
  static EP_DEVICE uint32_t match(uint32_t value) { return __match_any_sync(kAllLanes, value); }
  static EP_DEVICE uint32_t count(uint32_t lanes) { return static_cast<uint32_t>(__popc(lanes)); }

  // REQUIRES: no lane's value is negative or NaN; such floats are ordered as their bits are.
  static EP_DEVICE float max_all(float value) {
    return __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(value)));
  }

  static EP_DEVICE uint32_t worker() { return threadIdx.x / kLanes; }
  static EP_DEVICE uint32_t num_workers() { return blockDim.x / kLanes; }
  static EP_DEVICE void block_sync() { __syncthreads(); }
  static EP_DEVICE bool block_all(bool value) { return __syncthreads_and(value ? 1 : 0) != 0; }

  // Behind the second sync the word may be written again.
  template <typename T>
  static EP_DEVICE T block_broadcast(T value) {
    __shared__ T word;
    if (threadIdx.x == 0) word = value;
    __syncthreads();
    const T result = word;
    __syncthreads();
    return result;
  }

  static EP_DEVICE uint32_t block() { return blockIdx.x; }
  static EP_DEVICE uint32_t num_blocks() { return gridDim.x; }

  template <Order kOrder, Scope kScope, typename T>
  static EP_DEVICE T load(const T* word) {
    return kernels::ptx::ld<kOrder, kScope>(word);
  }

  template <Order kOrder, Scope kScope, typename T>
  static EP_DEVICE void store(T* word, NotDeduced<T> value) {
    kernels::ptx::st<kOrder, kScope>(word, value);
  }

  template <Order kOrder, Scope kScope, typename T>
  static EP_DEVICE T fetch_add(T* word, NotDeduced<T> value) {
    return kernels::ptx::atom_add<kOrder, kScope>(word, value);
  }

  template <Order kOrder, Scope kScope, typename T>
  static EP_DEVICE T fetch_min(T* word, NotDeduced<T> value) {
    return kernels::ptx::atom_min<kOrder, kScope>(word, value);
  }

  template <Order kOrder, Scope kScope, typename T>
  static EP_DEVICE T exchange(T* word, NotDeduced<T> value) {
    return kernels::ptx::atom_exch<kOrder, kScope>(word, value);
  }

  template <Order kOrder, Scope kScope, typename T>
  static EP_DEVICE T compare_exchange(T* word, NotDeduced<T> expected, NotDeduced<T> desired) {
    return kernels::ptx::atom_cas<kOrder, kScope>(word, expected, desired);
  }

  // Plain accesses.  Never through the read-only cache (ld.global.nc), which no acquire invalidates:
  // a test looks for it in the code.
  template <typename T>
  static EP_DEVICE T read(const T* at) {
    if constexpr (kIsVector<T>) {
      return __builtin_bit_cast(T, *reinterpret_cast<const ulonglong2*>(at));
    } else {
      return *at;
    }
  }

  template <typename T>
  static EP_DEVICE void write(T* at, NotDeduced<T> value) {
    if constexpr (kIsVector<T>) {
      *reinterpret_cast<ulonglong2*>(at) = __builtin_bit_cast(ulonglong2, value);
    } else {
      *at = value;
    }
  }

  // Nobody sleeps on a GPU.
  static EP_DEVICE void ring(Doorbell*) {}

  static EP_DEVICE uint64_t now_ns() { return kernels::ptx::globaltimer(); }

  // One wait's naps: doubling, so that waiting warps leave the memory system to those that work,
  // and bounded, so that a wait ends soon after its word has come.
  class Backoff {
   public:
    EP_DEVICE Backoff() {}
    Backoff(const Backoff&) = delete;
    Backoff& operator=(const Backoff&) = delete;

   private:
    friend class Warp;
    static constexpr uint32_t kFirstNs = 32, kLongestNs = 1024;
    uint32_t nap_ns_ = kFirstNs;
  };
  static EP_DEVICE Backoff make_backoff() { return Backoff(); }
  static EP_DEVICE void back_off(Backoff& backoff) {
    __nanosleep(backoff.nap_ns_);
    if (backoff.nap_ns_ < Backoff::kLongestNs) backoff.nap_ns_ *= 2;
  }

 private:
  static constexpr uint32_t kLanes = 32;
  static constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

  // Types that one 16-byte access moves.
  template <typename T>
  static constexpr bool kIsVector = sizeof(T) == 16 && alignof(T) == 16;
};

}  // namespace ep::device::cuda
#endif
