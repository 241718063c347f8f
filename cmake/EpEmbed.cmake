# Headers as text in a C++ file, for a compiler that runs inside the library.
#
# Included, it defines ep_embed_headers(<target> <root> <header>...).  Run as a script
#   cmake -DROOT=... -DHEADERS=a,b -DOUTPUT=... -P EpEmbed.cmake
# it writes the file: ep::device::cuda::kernel_headers(), with the headers under the names by which they
# include each other, and one hash of them all.  A header that is not there ends the build.

if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(EP_EMBED_SCRIPT "${CMAKE_CURRENT_LIST_FILE}")

  function(ep_embed_headers target root)
    set(output "${CMAKE_CURRENT_BINARY_DIR}/kernel_headers.cpp")
    list(TRANSFORM ARGN PREPEND "${root}/" OUTPUT_VARIABLE files)
    list(JOIN ARGN "," names)
    add_custom_command(
      OUTPUT "${output}"
      COMMAND "${CMAKE_COMMAND}" "-DROOT=${root}" "-DHEADERS=${names}" "-DOUTPUT=${output}" -P
              "${EP_EMBED_SCRIPT}"
      DEPENDS ${files} "${EP_EMBED_SCRIPT}"
      COMMENT "Embedding the kernels' headers"
      VERBATIM)
    target_sources(${target} PRIVATE "${output}")
  endfunction()
  return()
endif()

string(REPLACE "," ";" headers "${HEADERS}")
set(entries "")
set(fingerprints "")
foreach(header IN LISTS headers)
  file(READ "${ROOT}/${header}" text)
  string(SHA256 text_hash "${text}")
  string(APPEND fingerprints "${header} ${text_hash}\n")
  string(APPEND entries "    {\"${header}\", R\"ep_text(${text})ep_text\"},\n")
endforeach()
string(SHA256 hash "${fingerprints}")
file(
  WRITE "${OUTPUT}"
  "// Made by cmake/EpEmbed.cmake.
#include \"device/cuda/kernel_source.hpp\"

namespace ep::device::cuda {
namespace {

constexpr jit::Header kHeaders[] = {
${entries}};

}  // namespace

const jit::HeaderBundle& kernel_headers() {
  static constexpr jit::HeaderBundle kBundle{kHeaders, \"${hash}\"};
  return kBundle;
}

}  // namespace ep::device::cuda
")
