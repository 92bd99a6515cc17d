# Sets KDA_CUDA to whether libkda_cuda is built.
set(KDA_CUDA OFF)
if(KDA_BUILD_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(KDA_CUDA ON)
  endif()
elseif(KDA_BUILD_CUDA)
  set(KDA_CUDA ON)
endif()

if(KDA_CUDA)
  # The targets name their own architectures.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  # CMake 3.25 does not know how to ask nvcc for C++20 when that is new to it.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
  endif()
endif()
message(STATUS "CUDA backend: ${KDA_CUDA}")
