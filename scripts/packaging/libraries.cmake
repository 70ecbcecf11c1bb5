# Of llama-cpp-python only the libraries that edgespec loads are built, a third of all. scripts/install and docs/start.md
# give this file to CMake as CMAKE_PROJECT_llama_cpp_INCLUDE. Normal variables hide the cache entries that
# llama-cpp-python forces.
set(LLAMA_BUILD_COMMON OFF)
set(LLAVA_BUILD OFF)
if(NOT DEFINED GGML_BLAS) # not asked for: on by default on a Mac, and edgespec leaves it out
  set(GGML_BLAS OFF)
endif()
