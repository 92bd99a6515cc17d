#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace kda::testing {

// Whether a forked child, whose status is what body() returns, ends well.
template <typename Body>
bool child_succeeds(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace kda::testing
