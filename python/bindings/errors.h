#pragma once

#include <string>
#include <string_view>

#include "kda/status.h"

namespace kda::python {

// Runs `function`. A message that begins with "from: " begins with "to: " then, and its argument `argument` is called
// `argument_called`: the operators of the library have several Python functions, with names of their own.
template <typename Function>
auto renaming_errors(std::string_view from, std::string_view to, std::string_view argument,
                     std::string_view argument_called, Function function) {
  try {
    return function();
  } catch (const Error& error) {
    std::string_view rest(error.what());
    const std::string prefix = std::string(from) + ": ";
    if ((from == to && argument == argument_called) || !rest.starts_with(prefix)) throw;
    rest.remove_prefix(prefix.size());
    std::string message = std::string(to) + ": ";
    if (rest.starts_with(std::string(argument) + ": ")) {
      message += argument_called;
      rest.remove_prefix(argument.size());
    }
    message += rest;
    throw Error(error.kind(), message);
  }
}

}  // namespace kda::python
