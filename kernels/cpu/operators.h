// The kernel as operators of torch, with no Python in between: once its code has left the caches, a Python function costs 0.1 ms.
//
// Torch's stable C interface, by pointers to its functions that whoever loads this library passes; no torch headers. An operator owns its
// arguments on the stack (a tensor's handle, a string's, an optional's box) and leaves the handle of its result there.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "layer.h"

namespace {

using Value = uint64_t;  // StableIValue
using Handle = void*;

// In the order of `_FUNCTIONS` in operators.py.
struct Torch {
  int32_t (*library_init_impl)(const char* name, const char* key, const char* file, uint32_t line, Handle*);
  int32_t (*library_impl)(Handle library, const char* name, void (*)(Value*, uint64_t, uint64_t), uint64_t version);
  int32_t (*call_dispatcher)(const char* name, const char* overload, Value* stack, uint64_t version);
  int32_t (*get_data_ptr)(Handle, void**);
  int32_t (*get_dim)(Handle, int64_t*);
  int32_t (*get_sizes)(Handle, int64_t**);
  int32_t (*get_dtype)(Handle, int32_t*);
  int32_t (*is_contiguous)(Handle, bool*);
  int32_t (*empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device, int32_t index, Handle*);
  int32_t (*delete_tensor)(Handle);
  int32_t (*delete_optional)(Value*);
  int32_t (*string_c_str)(Handle, const char**);
  int32_t (*delete_string)(Handle);
  int32_t (*get_num_threads)(uint32_t*);
  const char* (*what)();
  int32_t (*bf16)();
  int32_t (*f16)();
  int32_t (*f32)();
  int32_t (*int32)();
  int32_t (*int64)();
  int32_t (*contiguous_format)();
  int32_t (*cpu)();
};

// `decode` gives what an activation's text stands for: kind, clamp, gated; limit, alpha, beta. It leaves the kind as it was
// where it can't read the text.
struct Host {
  Torch torch;
  void* gomp;
  void (*decode)(const char* text, int64_t* integers, double* reals);
};

constexpr uint64_t kVersion = (uint64_t(2) << 56) | (uint64_t(13) << 48);  // of the interface this is written for
Host host;

void check(int32_t failed) {
  if (failed) throw std::runtime_error(host.torch.what());
}

class Tensor {
 public:
  explicit Tensor(Value value) : handle_((Handle)value) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) host.torch.delete_tensor(handle_);
  }

  static Tensor optional(Value value) {
    if (!value) return Tensor(0);
    const Value held = *(Value*)value;
    host.torch.delete_optional((Value*)value);
    return Tensor(held);
  }

  explicit operator bool() const { return handle_; }
  Value release() { return (Value)std::exchange(handle_, nullptr); }

  template <typename T>
  T* data() const {
    void* found = nullptr;
    if (handle_) check(host.torch.get_data_ptr(handle_, &found));
    return (T*)found;
  }
  int64_t dim() const {
    int64_t found;
    return check(host.torch.get_dim(handle_, &found)), found;
  }
  const int64_t* sizes() const {
    int64_t* found;
    return check(host.torch.get_sizes(handle_, &found)), found;
  }
  int32_t dtype() const {
    int32_t found;
    return check(host.torch.get_dtype(handle_, &found)), found;
  }
  bool is_contiguous() const {
    bool found = true;
    if (handle_) check(host.torch.is_contiguous(handle_, &found));
    return found;
  }

  void make_contiguous() {
    if (is_contiguous()) return;
    Value stack[2] = {release(), Value(uint32_t(host.torch.contiguous_format()))};
    check(host.torch.call_dispatcher("aten::contiguous", "", stack, kVersion));
    handle_ = (Handle)stack[0];
  }
  void convert(int32_t dtype) {
    Value stack[5] = {release(), Value(uint32_t(dtype)), false, false, 0};
    check(host.torch.call_dispatcher("aten::to", "dtype", stack, kVersion));
    handle_ = (Handle)stack[0];
  }

  std::string shape() const {
    std::string text = "[";
    for (int64_t i = 0; i < dim(); ++i) text += (i ? ", " : "") + std::to_string(sizes()[i]);
    return text + "]";
  }

 private:
  Handle handle_;
};

// The type of floating values by torch's number for it, or -1.
inline int64_t type_of(int32_t dtype) {
  const Torch& t = host.torch;
  return dtype == t.bf16() ? kBf16 : dtype == t.f16() ? kF16 : dtype == t.f32() ? kF32 : -1;
}

constexpr const char* kTypeNames[] = {"bfloat16", "float16", "float32"};

struct Named {
  std::string text;
  int64_t integers[3];
  double reals[3];
};

// Owns the string. What is found stays valid for the calling thread's life.
inline const Named& activation_of(Handle string) {
  static thread_local std::vector<std::unique_ptr<Named>> known;
  const char* text = "";
  const bool failed = host.torch.string_c_str(string, &text);
  Named made{text, {-1}, {}};
  host.torch.delete_string(string);
  check(failed);
  for (const auto& one : known)
    if (one->text == made.text) return *one;
  host.decode(made.text.c_str(), made.integers, made.reals);
  if (made.integers[0] < 0) throw std::invalid_argument("unknown activation " + made.text);
  return *known.emplace_back(std::make_unique<Named>(std::move(made)));
}

// What an operator is given; `scales` and `corrections` only where its weights have them.
struct Arguments {
  Tensor x, ids, weights, w13, s13, c13, b13, w2, s2, c2, b2;
  Handle activation;
  int64_t first;

  Arguments(const Value* v, int scales) : x(v[0]), ids(v[1]), weights(v[2]), w13(v[3]), s13(scales > 0 ? v[4] : 0),
      c13(scales > 1 ? v[5] : 0), b13(Tensor::optional(v[4 + scales])), w2(v[5 + scales]), s2(scales > 0 ? v[6 + scales] : 0),
      c2(scales > 1 ? v[7 + scales] : 0), b2(Tensor::optional(v[6 + 2 * scales])), activation((Handle)v[7 + 2 * scales]),
      first(int64_t(v[8 + 2 * scales])) {}
};

// Brings x, ids and weights into a form the kernel reads.
inline void make_readable(Arguments& a) {
  a.x.make_contiguous(), a.ids.make_contiguous(), a.weights.make_contiguous();
  const int32_t ids = a.ids.dtype();
  if (ids != host.torch.int32() && ids != host.torch.int64()) a.ids.convert(host.torch.int64());
  if (type_of(a.weights.dtype()) < 0) a.weights.convert(host.torch.f32());
}

// Refuses what would be read out of bounds or misread.
inline void check_call(const Arguments& a, const Call& c) {
  const int64_t depth = c.format == kInt8 ? 4 : c.format == kWeightF16 || c.format == kWeightF32 ? 1 : 2;
  if (c.x_type < 0) throw std::invalid_argument("x must be bfloat16, float16 or float32");
  if (c.format <= kWeightF32 && c.x_type != c.format)
    throw std::invalid_argument("x is " + std::string(kTypeNames[c.x_type]) + ", the packed weights are " + kTypeNames[c.format] +
                                ": pack weights of x's type");
  const int64_t wide = c.gated ? kPanel / 2 : kPanel;
  if (c.steps13 != (c.hidden + depth - 1) / depth || c.panels2 != (c.hidden + kPanel - 1) / kPanel)
    throw std::invalid_argument("x " + a.x.shape() + " does not fit weights packed as " + a.w13.shape() + " and " + a.w2.shape());
  if (c.panels13 != (c.steps2 * depth + wide - 1) / wide || a.w2.dtype() != a.w13.dtype())
    throw std::invalid_argument("weights packed as " + a.w13.shape() + " and " + a.w2.shape() +
                                " do not belong together: pack both of one layer and type, for the activation of the call");
  for (const Tensor* t : {&a.w13, &a.s13, &a.c13, &a.b13, &a.w2, &a.s2, &a.c2, &a.b2}) {
    if (!t->is_contiguous()) throw std::invalid_argument("packed weights must be contiguous, as they were packed");
    if (*t && t->sizes()[0] != c.experts)
      throw std::invalid_argument("a packed tensor " + t->shape() + " has not the " + std::to_string(c.experts) +
                                  " experts of the others: pack all of one layer");
  }
}

inline void check_shapes(const Arguments& a) {
  const bool two = a.x.dim() == 2 && a.ids.dim() == 2 && a.weights.dim() == 2;
  const int64_t *x = a.x.sizes(), *ids = a.ids.sizes(), *weights = a.weights.sizes();
  if (!two || ids[0] != x[0] || weights[0] != ids[0] || weights[1] != ids[1])
    throw std::invalid_argument("x [T, H], ids [T, K] and weights [T, K] are expected, not " + a.x.shape() + ", " + a.ids.shape() + " and " +
                                a.weights.shape() + ": cut x to the rows that have ids and weights");
}

inline Tensor run(Arguments& a, int64_t format) {
  const Named& act = activation_of(a.activation);
  check_shapes(a);
  make_readable(a);
  const int64_t *x = a.x.sizes(), *w13 = a.w13.sizes(), *w2 = a.w2.sizes();
  const int64_t strides[2] = {x[1], 1};
  const int32_t dtype = a.x.dtype();
  Call c{};
  c.tokens = x[0], c.hidden = x[1], c.top_k = a.ids.sizes()[1], c.experts = w13[0], c.first = a.first;
  c.panels13 = w13[1], c.steps13 = w13[2], c.panels2 = w2[1], c.steps2 = w2[2];
  c.format = format < 0 ? type_of(a.w13.dtype()) : format, c.x_type = type_of(dtype);
  c.ids_int32 = a.ids.dtype() == host.torch.int32(), c.scale_type = type_of(a.weights.dtype());
  c.kind = act.integers[0], c.clamp = act.integers[1], c.gated = act.integers[2];
  check_call(a, c);
  Handle made;
  check(host.torch.empty_strided(2, x, strides, dtype, host.torch.cpu(), 0, &made));
  Tensor out((Value)made);
  c.x = a.x.data<void>(), c.ids = a.ids.data<void>(), c.scale = a.weights.data<void>(), c.out = out.data<void>();
  c.w13 = a.w13.data<uint8_t>(), c.s13 = a.s13.data<float>(), c.c13 = a.c13.data<int32_t>(), c.b13 = a.b13.data<float>();
  c.w2 = a.w2.data<uint8_t>(), c.s2 = a.s2.data<float>(), c.c2 = a.c2.data<int32_t>(), c.b2 = a.b2.data<float>();
  c.limit = act.reals[0], c.alpha = act.reals[1], c.beta = act.reals[2];
  uint32_t threads;
  check(host.torch.get_num_threads(&threads));
  c.threads = threads, c.gomp = host.gomp;
  experts(c);
  return out;
}

struct OutOfMemory : std::bad_alloc {
  const char* what() const noexcept override { return "the CPU kernel of routed experts ran out of memory: take fewer tokens a call"; }
};

// `format` < 0: that of the weights' own type.
template <int64_t format, int scales>
void operate(Value* stack, uint64_t, uint64_t) {
  Arguments arguments(stack, scales);
  try {
    stack[0] = run(arguments, format).release();
  } catch (const std::bad_alloc&) {
    throw OutOfMemory();
  }
}

}  // namespace
