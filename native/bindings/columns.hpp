// Numpy columns in and out, and sequences of keys, between Python and the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>
#include <string>
#include <vector>

#include "pool/pool.hpp"

namespace umbp {

template <class T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <class T>
nanobind::ndarray<nanobind::numpy, T> array_of(T* data, std::initializer_list<size_t> shape) {
  nanobind::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nanobind::ndarray<nanobind::numpy, T>(data, shape, owner);
}

using U8Array = nanobind::ndarray<nanobind::numpy, u8>;
using U64Array = nanobind::ndarray<nanobind::numpy, u64>;
using BoolArray = nanobind::ndarray<nanobind::numpy, bool>;

// The texts of a sequence of str (or bytes), valid while this lives.
class Texts {
 public:
  Texts(nanobind::handle sequence, bool bytes)
      : owner_(nanobind::steal<nanobind::tuple>(PySequence_Tuple(sequence.ptr()))) {
    if (!owner_.is_valid()) throw nanobind::python_error();
    views.reserve(nanobind::len(owner_));
    for (size_t i = 0, n = nanobind::len(owner_); i < n; i++)
      views.push_back(text(PyTuple_GetItem(owner_.ptr(), Py_ssize_t(i)), bytes));
  }
  std::vector<std::string_view> views;

  static std::string_view text(PyObject* object, bool bytes) {
    Py_ssize_t size = 0;
    if (bytes) {
      char* data = nullptr;
      if (PyBytes_AsStringAndSize(object, &data, &size) != 0) throw nanobind::python_error();
      return {data, size_t(size)};
    }
    const char* data = PyUnicode_AsUTF8AndSize(object, &size);
    if (!data) throw nanobind::python_error();
    return {data, size_t(size)};
  }

 private:
  nanobind::tuple owner_;
};

inline std::vector<Digest> digests_of(const Texts& texts, u64 seed) {
  std::vector<Digest> digests;
  digests.reserve(texts.views.size());
  for (std::string_view view : texts.views) digests.push_back(digest_of(view, seed));
  return digests;
}

inline std::vector<Digest> raw_digests_of(const std::string& prefix, const Texts& texts, u64 seed) {
  RawHasher hasher(prefix, seed);
  std::vector<Digest> digests;
  digests.reserve(texts.views.size());
  for (std::string_view view : texts.views) digests.push_back(hasher(view));
  return digests;
}

// Keys in either spelling, hashed without the GIL.
struct Keys {
  Keys(const Pool& pool, nanobind::handle keys) : texts(keys, false), seed(pool.segment()->hash_seed()) {}
  Keys(const Pool& pool, std::string prefix_, nanobind::handle hashes)
      : texts(hashes, true), seed(pool.segment()->hash_seed()), prefix(std::move(prefix_)), raw(true) {}
  size_t size() const { return texts.views.size(); }
  std::vector<Digest> digests() const {
    return raw ? raw_digests_of(prefix, texts, seed) : digests_of(texts, seed);
  }

  Texts texts;
  u64 seed;
  std::string prefix;
  bool raw = false;
};

template <class T>
std::vector<T> vector_of(const Column<T>& column) {
  return {column.data(), column.data() + column.shape(0)};
}

inline std::span<const u64> span_of(const Column<u64>& column) {
  return {column.data(), column.shape(0)};
}

}  // namespace umbp
