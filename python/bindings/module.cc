// The extension module kda._kda: what the package kda is made from. Not an interface for users.

#include <nanobind/nanobind.h>

#include <exception>

#include "array.h"
#include "chunk_kda_fwd.h"
#include "gates.h"
#include "info.h"
#include "kda/status.h"

namespace nb = nanobind;

namespace {

PyObject* exception_of(kda::ErrorKind kind) {
  switch (kind) {
    case kda::ErrorKind::kMissing:
    case kda::ErrorKind::kDtype:
      return PyExc_TypeError;
    case kda::ErrorKind::kValue:
      return PyExc_ValueError;
    case kda::ErrorKind::kOutOfMemory:
      return PyExc_MemoryError;
    case kda::ErrorKind::kUnavailable:
    case kda::ErrorKind::kInternal:
      break;
  }
  return PyExc_RuntimeError;
}

void translate(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const kda::Error& error) {
    PyErr_SetObject(exception_of(error.kind()), kda::python::to_str(error.what()).ptr());
  }
}

}  // namespace

NB_MODULE(_kda, module) {
  nb::register_exception_translator(&translate);
  kda::python::bind_info(module);
  kda::python::bind_array(module);
  kda::python::bind_chunk_kda_fwd(module);
  kda::python::bind_gates(module);
}
