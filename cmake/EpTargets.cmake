# The two INTERFACE targets that all our code links: how it is compiled, and what is warned about.
# Both stay inside the build: an installed ep::ep carries neither.

find_package(Threads REQUIRED)

add_library(ep_options INTERFACE)
target_compile_features(ep_options INTERFACE cxx_std_20)
# combine promises one rounding per operation; g++ fuses a multiply and an add unless told not to.
target_compile_options(ep_options INTERFACE -ffp-contract=off)
target_link_libraries(ep_options INTERFACE Threads::Threads)

if(EP_SANITIZE STREQUAL "address")
  set(sanitize -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(EP_SANITIZE STREQUAL "thread")
  set(sanitize -fsanitize=thread)
elseif(EP_SANITIZE STREQUAL "")
  set(sanitize "")
else()
  message(FATAL_ERROR "EP_SANITIZE=${EP_SANITIZE}: use address, thread or nothing.")
endif()
if(sanitize)
  target_compile_options(ep_options INTERFACE ${sanitize} -fno-omit-frame-pointer)
  target_link_options(ep_options INTERFACE ${sanitize})
endif()

add_library(ep_warnings INTERFACE)
# A field that a designated initialiser leaves out has its default; that is what they are for.
target_compile_options(
  ep_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                        -Wno-missing-field-initializers $<$<BOOL:${EP_WERROR}>:-Werror>)

# Compiles a target the way the project's own code is compiled.
function(ep_set_options target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:ep_options>
                                          $<BUILD_INTERFACE:ep_warnings>)
  set_target_properties(
    ${target}
    PROPERTIES CXX_STANDARD 20
               CXX_STANDARD_REQUIRED ON
               CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON)
endfunction()
