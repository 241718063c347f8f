// The version, written here and nowhere else: CMake and the Python package read it from this file.
#pragma once

#define EP_VERSION_MAJOR 0
#define EP_VERSION_MINOR 1
#define EP_VERSION_PATCH 0

// Everything public lives in an inline namespace that is named after the version up to which the ABI is
// the same (0.x: the minor version).  Users write ep::EPBuffer; the linker sees ep::v0_1::EPBuffer, so
// headers and library of different versions do not link, and two versions in one process do not meet.
#define EP_PASTE_NAMESPACE(major, minor) v##major##_##minor
#define EP_EXPAND_NAMESPACE(major, minor) EP_PASTE_NAMESPACE(major, minor)
#define EP_ABI_NAMESPACE EP_EXPAND_NAMESPACE(EP_VERSION_MAJOR, EP_VERSION_MINOR)

namespace ep::inline EP_ABI_NAMESPACE {

// "major.minor.patch" of the library that is linked; the macros above are the headers'.
const char* version() noexcept;

}  // namespace ep::inline EP_ABI_NAMESPACE
