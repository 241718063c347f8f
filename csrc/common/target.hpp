// Which compiler is reading: the only file that asks.
//
//   EP_HOST_DEVICE  inlined into the kernel
//   EP_OUTLINED     a function of its own on a GPU: what runs a few times per operation and would cost those who
//                   call it registers, and the compiler time
//   EP_NO_UNROLL    before a loop: on a GPU, its body exists once
//
// ptxas gives a function registers that none of its callers has alive, so what a kernel needs is the sum along its
// deepest chain of calls: few levels, and little alive across a call.
#pragma once

//                                       g++/clang   nvcc (host)   nvcc (device)   NVRTC
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define EP_CUDA_COMPILE 1  //                0           1              1             1
#define EP_HOST_DEVICE __host__ __device__ __forceinline__
#define EP_OUTLINED __host__ __device__ __noinline__
#define EP_DEVICE __device__ __forceinline__
#define EP_NO_UNROLL _Pragma("unroll 1")
#else
#define EP_CUDA_COMPILE 0
#define EP_HOST_DEVICE inline
#define EP_OUTLINED inline
#define EP_DEVICE inline
#define EP_NO_UNROLL
#endif

#if defined(__CUDA_ARCH__)
#define EP_DEVICE_PASS 1  //                 0           0              1             1
#else
#define EP_DEVICE_PASS 0
#endif

// NVRTC has no standard headers; these few names are all that layout/ and kernels/ need.
#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
namespace std {
enum class byte : unsigned char {};
}  // namespace std
#else
#include <cstddef>
#include <cstdint>
#endif
