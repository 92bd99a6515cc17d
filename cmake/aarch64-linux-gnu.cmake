# Cross-builds for 64-bit ARM with Debian's g++-aarch64-linux-gnu; qemu-user runs what comes out. The ARM builds of the
# libraries are looked for in KDA_AARCH64_ROOT (scripts/aarch64.sh fills it) and where Debian's multiarch puts them.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

set(KDA_AARCH64_ROOT "" CACHE PATH "A folder with the usr/ of ARM packages")
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KDA_AARCH64_ROOT)
set(CMAKE_FIND_ROOT_PATH ${KDA_AARCH64_ROOT} /)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
