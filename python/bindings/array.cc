#include "array.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "kda/device.h"
#include "kda/status.h"

namespace kda::python {
namespace {

constexpr std::array kDtypes = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16,
                                Dtype::kFloat64, Dtype::kInt32,   Dtype::kInt64};

// Characters that UTF-8 has no bytes for, as Python makes them of bytes that are none, are spelled out.
std::string text(nb::handle object) {
  const nb::object utf8 = nb::steal(PyUnicode_AsEncodedString(nb::str(object).ptr(), "utf-8", "backslashreplace"));
  if (!utf8.is_valid()) nb::raise_python_error();
  return {PyBytes_AsString(utf8.ptr()), static_cast<std::size_t>(PyBytes_Size(utf8.ptr()))};
}

std::string class_name(nb::handle object) { return nb::inst_name(object).c_str(); }

// The form that all messages of the library have.
[[noreturn]] void fail(ErrorKind kind, const Argument& argument, std::string_view expected, std::string_view got) {
  std::string message;
  for (const std::string_view part : {argument.op, std::string_view(": "), argument.name,
                                      std::string_view(": expected "), expected, std::string_view(", got "), got}) {
    message += part;
  }
  throw Error(kind, message);
}

[[noreturn]] void refuse_object(const Argument& argument, nb::handle object, const std::string& reason) {
  fail(ErrorKind::kDtype, argument, "an array of " + std::string(argument.dtypes),
       class_name(object) + (reason.empty() ? "" : " (" + reason + ")"));
}

std::optional<Dtype> parse_dtype(std::string_view name) {
  const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](Dtype dtype) { return name_of(dtype) == name; });
  if (found == kDtypes.end()) return std::nullopt;
  return *found;
}

// A format of the struct module in native byte order; none for anything else.
std::optional<Dtype> dtype_of_format(std::string_view format) {
  if (format.size() == 2 && (format[0] == '@' || format[0] == '=')) format.remove_prefix(1);
  if (format == "e") return Dtype::kFloat16;
  if (format == "f") return Dtype::kFloat32;
  if (format == "d") return Dtype::kFloat64;
  if (format == "i") return Dtype::kInt32;
  if (format == "q" || (format == "l" && sizeof(long) == 8)) return Dtype::kInt64;
  if (format == "l") return Dtype::kInt32;
  return std::nullopt;
}

std::string name_of_dlpack(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto bits = std::to_string(dtype.bits);
  std::string name;
  switch (static_cast<Code>(dtype.code)) {
    case Code::Int:
      name = "int" + bits;
      break;
    case Code::UInt:
      name = "uint" + bits;
      break;
    case Code::Float:
      name = "float" + bits;
      break;
    case Code::Bfloat:
      name = "bfloat" + bits;
      break;
    case Code::Complex:
      name = "complex" + bits;
      break;
    case Code::Bool:
      name = "bool";
      break;
    default:
      name = "DLPack type " + std::to_string(dtype.code) + " of " + bits + " bits";
  }
  return dtype.lanes == 1 ? name : name + "x" + std::to_string(dtype.lanes);
}

Device device_of(std::string_view type, std::int64_t index, const Argument& argument) {
  if (type == "cpu") return {};
  if (type == "cuda") return {DeviceType::kCuda, static_cast<int>(index)};
  fail(ErrorKind::kUnavailable, argument, "a device with a backend (cpu, cuda)", type);
}

Device device_of_dlpack(int type, int index, const Argument& argument) {
  // The device types of DLPack: 1 CPU, 2 CUDA, 3 CUDA's pinned and 13 managed memory, which the CPU reads.
  if (type == 2) return device_of("cuda", index, argument);
  if (type == 1 || type == 3 || type == 13) return {};
  return device_of("DLPack device " + std::to_string(type), index, argument);
}

void check_rank(std::size_t rank, const Argument& argument) {
  if (rank > kMaxRank) {
    fail(ErrorKind::kValue, argument, "a rank of at most " + std::to_string(kMaxRank), "rank " + std::to_string(rank));
  }
}

// The kernels load whole elements: an address between two elements is not theirs to read.
void check_alignment(const TensorView& view, const Argument& argument) {
  const std::size_t size = size_of(view.dtype);
  if (view.numel() > 0 && reinterpret_cast<std::uintptr_t>(view.data) % size != 0) {
    fail(ErrorKind::kValue, argument, "data aligned to its elements of " + std::to_string(size) + " bytes",
         "an address in between");
  }
}

class Buffer {
 public:
  Buffer(nb::handle object, const Argument& argument) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_RECORDS_RO) != 0) {
      PyErr_Clear();
      refuse_dtype(argument, dtype_text(object));
    }
  }
  ~Buffer() { PyBuffer_Release(&buffer_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] const Py_buffer& get() const noexcept { return buffer_; }

  // What the object itself calls its dtype.
  static std::string dtype_text(nb::handle object) {
    return nb::hasattr(object, "dtype") ? text(nb::object(object.attr("dtype"))) : class_name(object);
  }

 private:
  Py_buffer buffer_{};
};

TensorView view_of_buffer(nb::handle object, std::optional<Dtype> dtype, const Argument& argument) {
  const Buffer buffer(object, argument);
  const Py_buffer& b = buffer.get();
  if (!dtype) dtype = dtype_of_format(b.format != nullptr ? b.format : "B");
  if (!dtype || static_cast<std::size_t>(b.itemsize) != size_of(*dtype)) {
    refuse_dtype(argument, Buffer::dtype_text(object));
  }
  check_rank(static_cast<std::size_t>(b.ndim), argument);
  TensorView view;
  view.data = b.buf;
  view.dtype = *dtype;
  view.rank = b.ndim;
  for (int d = 0; d < b.ndim; ++d) {
    if (b.shape[d] > 1 && b.strides[d] % b.itemsize != 0) {
      fail(ErrorKind::kValue, argument, "strides of whole elements of " + std::to_string(b.itemsize) + " bytes",
           "a stride of " + std::to_string(b.strides[d]) + " bytes");
    }
    view.shape[d] = b.shape[d];
    view.strides[d] = b.strides[d] / b.itemsize;
  }
  return view;
}

TensorView view_of_parts(const nb::tuple& parts, const Argument& argument) {
  const auto shape = nb::cast<nb::tuple>(parts[3]);
  const auto strides = nb::cast<nb::tuple>(parts[4]);
  check_rank(shape.size(), argument);
  TensorView view;
  view.dtype = dtype_named(nb::cast<std::string_view>(parts[2]), argument);
  view.device = device_of(nb::cast<std::string_view>(parts[5]), nb::cast<std::int64_t>(parts[6]), argument);
  view.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(parts[1]));
  view.rank = static_cast<int>(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    view.shape[d] = nb::cast<std::int64_t>(shape[d]);
    view.strides[d] = nb::cast<std::int64_t>(strides[d]);
  }
  return view;
}

// Why an object would not be exported, in its own words: their first line.
std::string dlpack_refusal(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack__")) return "";
  try {
    object.attr("__dlpack__")();
  } catch (nb::python_error& error) {
    const std::string reason = text(error.value());
    return reason.substr(0, reason.find('\n'));
  }
  return "";
}

TensorView view_of_dlpack(const nb::ndarray<nb::ro>& array, const Argument& argument) {
  check_rank(array.ndim(), argument);
  TensorView view;
  view.dtype = dtype_named(name_of_dlpack(array.dtype()), argument);
  view.device = device_of_dlpack(array.device_type(), array.device_id(), argument);
  view.data = const_cast<void*>(array.data());
  view.rank = static_cast<int>(array.ndim());
  for (std::size_t d = 0; d < array.ndim(); ++d) {
    view.shape[d] = array.shape(d);
    view.strides[d] = array.stride(d);
  }
  return view;
}

std::int64_t integer(nb::handle value, const Argument& argument) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) {
    fail(ErrorKind::kDtype, argument, "integers", class_name(value));
  }
  const auto index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) nb::raise_python_error();
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) {
    fail(ErrorKind::kValue, argument, "64-bit integers", text(index));
  }
  return result;
}

bool is_sequence(nb::handle object) { return nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object); }

std::vector<std::int64_t> integers_of_sequence(nb::handle values, const Argument& argument, bool pairs) {
  std::vector<std::int64_t> result;
  result.reserve(nb::len(values));
  for (nb::handle value : values) {
    if (!pairs || !is_sequence(value)) {
      result.push_back(integer(value, argument));
      continue;
    }
    if (nb::len(value) != 2) {
      fail(ErrorKind::kValue, argument, "pairs of integers", "one of " + std::to_string(nb::len(value)));
    }
    for (nb::handle half : value) result.push_back(integer(half, argument));
  }
  return result;
}

template <typename T>
std::vector<std::int64_t> read(const TensorView& view) {
  const auto* data = static_cast<const T*>(view.data);
  const std::int64_t columns = view.rank == 2 ? view.shape[1] : 1;
  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(view.numel()));
  for (std::int64_t i = 0; i < view.shape[0]; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) result.push_back(data[i * view.strides[0] + j * view.strides[1]]);
  }
  return result;
}

std::vector<std::int64_t> integers_of_array(const ArrayView& array, const Argument& argument, bool pairs) {
  const TensorView& view = array.view();
  if (view.device.type != DeviceType::kCpu) {
    fail(ErrorKind::kUnavailable, argument, "an array on the CPU", name_of(view.device));
  }
  if (view.dtype != Dtype::kInt32 && view.dtype != Dtype::kInt64) refuse_dtype(argument, name_of(view.dtype));
  const bool legal = view.rank == 1 || (pairs && view.rank == 2 && view.shape[1] == 2);
  if (!legal) {
    std::string shape;
    for (std::int64_t extent : view.sizes()) shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    fail(ErrorKind::kValue, argument, pairs ? "shape [2*NC] or [NC,2]" : "shape [N+1]", "[" + shape + "]");
  }
  return view.dtype == Dtype::kInt32 ? read<std::int32_t>(view) : read<std::int64_t>(view);
}

// Memory as an object with __dlpack__; `array` is one of the tuples that ArrayView reads, and stays alive with it.
nb::ndarray<nb::array_api> exported(const nb::tuple& array) {
  const TensorView view = ArrayView(array, {"kda", "array", "float32, float16 or bfloat16"}).view();
  using Code = nb::dlpack::dtype_code;
  const Code code = view.dtype == Dtype::kBFloat16 ? Code::Bfloat : Code::Float;
  std::array<std::size_t, kMaxRank> shape{};
  std::copy_n(view.shape.begin(), view.rank, shape.begin());
  const bool is_cuda = view.device.type == DeviceType::kCuda;
  return {view.data,
          static_cast<std::size_t>(view.rank),
          shape.data(),
          array[0],
          view.strides.data(),
          nb::dlpack::dtype{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * size_of(view.dtype)), 1},
          is_cuda ? nb::device::cuda::value : nb::device::cpu::value,
          view.device.index};
}

// The bytes of a C-contiguous buffer.
class HostBytes {
 public:
  HostBytes(nb::handle object, int flags, std::size_t expected) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | flags) != 0) nb::raise_python_error();
    if (static_cast<std::size_t>(buffer_.len) == expected) return;
    PyBuffer_Release(&buffer_);
    throw Error(ErrorKind::kValue, "DeviceMemory: expected " + std::to_string(expected) + " bytes");
  }
  ~HostBytes() { PyBuffer_Release(&buffer_); }
  HostBytes(const HostBytes&) = delete;
  HostBytes& operator=(const HostBytes&) = delete;

  [[nodiscard]] void* data() const noexcept { return buffer_.buf; }

 private:
  Py_buffer buffer_{};
};

void bind_device_memory(nb::module_& module) {
  nb::class_<DeviceMemory>(module, "DeviceMemory")
      .def(
          "__init__",
          [](DeviceMemory* self, int device, std::size_t bytes) {
            new (self) DeviceMemory({DeviceType::kCuda, device}, bytes);
          },
          nb::arg("device"), nb::arg("nbytes"))
      .def_prop_ro("address", [](const DeviceMemory& m) { return reinterpret_cast<std::uintptr_t>(m.data()); })
      .def("copy_from_host",
           [](DeviceMemory& m, nb::handle from) { m.copy_from_host(HostBytes(from, 0, m.bytes()).data()); })
      .def("copy_to_host", [](const DeviceMemory& m, nb::handle to) {
        m.copy_to_host(HostBytes(to, PyBUF_WRITABLE, m.bytes()).data());
      });
  module.def(
      "synchronize",
      [](int device, std::uintptr_t stream) {
        const nb::gil_scoped_release release;
        synchronize({DeviceType::kCuda, device}, reinterpret_cast<Stream>(stream));
      },
      nb::arg("device"), nb::arg("stream"));
}

}  // namespace

void refuse_dtype(const Argument& argument, std::string_view given) {
  fail(ErrorKind::kDtype, argument, "dtype " + std::string(argument.dtypes), given);
}

nb::str to_str(std::string_view text) {
  const auto size = static_cast<Py_ssize_t>(text.size());
  nb::object decoded = nb::steal(PyUnicode_DecodeUTF8(text.data(), size, "backslashreplace"));
  if (!decoded.is_valid()) nb::raise_python_error();
  return nb::borrow<nb::str>(decoded);
}

nb::tuple to_tuple(std::span<const std::int64_t> sizes) {
  nb::list list;
  for (const std::int64_t size : sizes) list.append(size);
  return nb::tuple(list);
}

nb::tuple to_spec(const TensorView& view) {
  return nb::make_tuple(to_tuple(view.sizes()), to_str(name_of(view.dtype)));
}

Dtype dtype_named(std::string_view name, const Argument& argument) {
  const std::optional<Dtype> dtype = parse_dtype(name);
  if (!dtype) refuse_dtype(argument, name);
  return *dtype;
}

ArrayView::ArrayView(nb::handle array, const Argument& argument) {
  if (array.is_none()) return;
  if (nb::isinstance<nb::tuple>(array)) {
    const auto parts = nb::cast<nb::tuple>(array);
    if (parts.size() == 2) {
      std::optional<Dtype> dtype;
      if (!parts[1].is_none()) dtype = dtype_named(nb::cast<std::string_view>(parts[1]), argument);
      view_ = view_of_buffer(parts[0], dtype, argument);
    } else {
      view_ = view_of_parts(parts, argument);
    }
    owner_ = nb::borrow(parts[0]);
  } else {
    if (!nb::try_cast(array, dlpack_)) refuse_object(argument, array, dlpack_refusal(array));
    view_ = view_of_dlpack(dlpack_, argument);
  }
  check_alignment(view_, argument);
}

std::optional<std::vector<std::int64_t>> integers(nb::handle values, const Argument& argument, bool pairs) {
  if (values.is_none()) return std::nullopt;
  if (nb::isinstance<nb::list>(values)) return integers_of_sequence(values, argument, pairs);
  return integers_of_array(ArrayView(values, argument), argument, pairs);
}

std::optional<std::vector<std::int64_t>> integers(nb::handle values, const Argument& argument, bool pairs,
                                                  ArrayView& on_gpu) {
  if (values.is_none() || nb::isinstance<nb::list>(values)) return integers(values, argument, pairs);
  ArrayView array(values, argument);
  if (array.view().device.type == DeviceType::kCpu) return integers_of_array(array, argument, pairs);
  on_gpu = std::move(array);
  return std::nullopt;
}

nb::object to_numpy(std::vector<double> numbers, std::span<const std::int64_t> shape) {
  auto held = std::make_unique<std::vector<double>>(std::move(numbers));
  if (held->empty()) held->reserve(1);  // NumPy wants an address even of nothing
  double* data = held->data();
  const nb::capsule owner(held.release(), [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
  std::array<std::size_t, kMaxRank> extents{};
  std::copy(shape.begin(), shape.end(), extents.begin());
  return nb::cast(nb::ndarray<nb::numpy, double>(data, shape.size(), extents.data(), owner));
}

void bind_array(nb::module_& module) {
  module.def("exported", &exported, nb::arg("array"));
  bind_device_memory(module);
  module.def(
      "integers",
      [](nb::handle values, std::string_view op, std::string_view name) {
        const auto read = integers(values, {op, name, "int64 or int32"}, false);
        nb::list result;
        for (const std::int64_t value : read.value()) result.append(value);
        return result;
      },
      nb::arg("values"), nb::arg("op"), nb::arg("name"));
}

}  // namespace kda::python
