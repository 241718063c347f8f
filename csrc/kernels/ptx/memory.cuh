// Accesses to words that other threads, blocks, GPUs or the host touch meanwhile: one instruction
// each.
//
// The words are in global memory: a window of any GPU that is mapped here, or pinned host memory.
// Saying so (.global) spares the instructions from providing for shared memory.
//
// Order and scope are the instruction's modifiers.  Every statement is volatile and clobbers
// memory, relaxed ones too: the compiler moves no access of ours across another.
#pragma once

#include "kernels/coop.hpp"

namespace ep::kernels::ptx {

// Modifiers, spelled for the "C" constraint, which wants arrays with static storage.
template <Order kOrder>
struct OrderText;
template <>
struct OrderText<Order::kRelaxed> {
  static constexpr char kText[] = "relaxed";
};
template <>
struct OrderText<Order::kAcquire> {
  static constexpr char kText[] = "acquire";
};
template <>
struct OrderText<Order::kRelease> {
  static constexpr char kText[] = "release";
};
template <>
struct OrderText<Order::kAcqRel> {
  static constexpr char kText[] = "acq_rel";
};

template <Scope kScope>
struct ScopeText;
template <>
struct ScopeText<Scope::kBlock> {
  static constexpr char kText[] = "cta";
};
template <>
struct ScopeText<Scope::kDevice> {
  static constexpr char kText[] = "gpu";
};
template <>
struct ScopeText<Scope::kSystem> {
  static constexpr char kText[] = "sys";
};

// ld.{relaxed,acquire}
template <Order kOrder, Scope kScope>
EP_DEVICE uint32_t ld(const uint32_t* word) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kAcquire);
  uint32_t value;
  asm volatile("ld.%2.%3.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(word)), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
  return value;
}
template <Order kOrder, Scope kScope>
EP_DEVICE uint64_t ld(const uint64_t* word) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kAcquire);
  uint64_t value;
  asm volatile("ld.%2.%3.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(word)), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
  return value;
}

// st.{relaxed,release}
template <Order kOrder, Scope kScope>
EP_DEVICE void st(uint32_t* word, uint32_t value) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kRelease);
  asm volatile("st.%2.%3.global.u32 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(word)), "r"(value), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
}
template <Order kOrder, Scope kScope>
EP_DEVICE void st(uint64_t* word, uint64_t value) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kRelease);
  asm volatile("st.%2.%3.global.u64 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(word)), "l"(value), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
}

// atom.add, atom.min, atom.exch: return what was there.
template <Order kOrder, Scope kScope>
EP_DEVICE uint32_t atom_add(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.%3.%4.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(word)), "r"(value), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
  return before;
}
template <Order kOrder, Scope kScope>
EP_DEVICE uint64_t atom_add(uint64_t* word, uint64_t value) {
  uint64_t before;
  asm volatile("atom.%3.%4.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word)), "l"(value), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
  return before;
}
template <Order kOrder, Scope kScope>
EP_DEVICE uint32_t atom_min(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.%3.%4.global.min.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(word)), "r"(value), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
  return before;
}
template <Order kOrder, Scope kScope>
EP_DEVICE uint64_t atom_min(uint64_t* word, uint64_t value) {
  uint64_t before;
  asm volatile("atom.%3.%4.global.min.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word)), "l"(value), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
  return before;
}
template <Order kOrder, Scope kScope>
EP_DEVICE uint32_t atom_exch(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.%3.%4.global.exch.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(word)), "r"(value), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
  return before;
}
template <Order kOrder, Scope kScope>
EP_DEVICE uint64_t atom_exch(uint64_t* word, uint64_t value) {
  uint64_t before;
  asm volatile("atom.%3.%4.global.exch.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word)), "l"(value), "C"(OrderText<kOrder>::kText),
                 "C"(ScopeText<kScope>::kText)
               : "memory");
  return before;
}

// atom.cas: `desired` where `expected` was; returns what was there.
template <Order kOrder, Scope kScope>
EP_DEVICE uint32_t atom_cas(uint32_t* word, uint32_t expected, uint32_t desired) {
  uint32_t before;
  asm volatile("atom.%4.%5.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(word)), "r"(expected), "r"(desired),
                 "C"(OrderText<kOrder>::kText), "C"(ScopeText<kScope>::kText)
               : "memory");
  return before;
}
template <Order kOrder, Scope kScope>
EP_DEVICE uint64_t atom_cas(uint64_t* word, uint64_t expected, uint64_t desired) {
  uint64_t before;
  asm volatile("atom.%4.%5.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word)), "l"(expected), "l"(desired),
                 "C"(OrderText<kOrder>::kText), "C"(ScopeText<kScope>::kText)
               : "memory");
  return before;
}

}  // namespace ep::kernels::ptx
