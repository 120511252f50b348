// Takes each operation on CUDA tensors to the CPU's kernel, on the same memory: that of the stand-in's devices is the
// host's (cudart.c). Allocations, views and copies of storages stay torch's own.
//
// As on a GPU, an operation that is given tensors of both devices is refused, unless it is one that takes both.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;

namespace {

std::mutex guard;
std::map<std::string, long> without_kernel;  // operations that the CPU has no kernel for -> calls
std::map<int64_t, long> attention;           // what torch would have taken on this GPU (sdp::SDPBackend) -> calls

// Operations that take an index or a source on the host beside tensors on the device.
const std::set<std::string> OF_BOTH_DEVICES = {
    "aten::copy_",           "aten::_foreach_copy_", "aten::index.Tensor",      "aten::index.Tensor_out",
    "aten::_unsafe_index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::set_.source_Tensor"};

// A CPU tensor on the memory of a CUDA tensor.
Tensor on_host(const Tensor& cuda) {
  auto storage = cuda.storage();
  c10::Storage host(
      c10::Storage::use_byte_size_t(), storage.nbytes(), at::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)),
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(DispatchKey::CPU), cuda.dtype());
  auto* implementation = made.unsafeGetTensorImpl();
  implementation->set_sizes_and_strides(cuda.sizes(), cuda.strides(), cuda.storage_offset());
  if (cuda.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
  return made;
}

// A copy of a CPU tensor, with its strides, on the device.
Tensor on_device(const Tensor& host, c10::Device device) {
  auto made = at::empty_strided(host.sizes(), host.strides(), host.options().device(device));
  if (host.numel()) {
    size_t elements = 1;
    for (int64_t i = 0; i < host.dim(); i++) elements += (host.size(i) - 1) * host.stride(i);
    memcpy(made.data_ptr(), host.data_ptr(), elements * host.element_size());
  }
  return made;
}

// The arguments and results of one call, taken to the host and back.
class Call {
 public:
  IValue to_host(const IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isTensorList()) return list<Tensor>(value.toTensorVector());
    if (value.isList() && is_list_of_optional_tensors(value)) {
      c10::List<std::optional<Tensor>> made;
      for (const IValue& element : value.toListRef())
        made.push_back(element.isNone() ? std::nullopt : std::make_optional(to_host(element.toTensor())));
      return made;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      note(value.toDevice());
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator()) return IValue();  // the CPU's own
    return value;
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(to_device(tensor));
    return made;
  }

  bool has_both_devices() const { return host_only_ && !pairs_.empty(); }

  // An operation may have given a tensor (`out=`) another size, or other memory.
  void take_over_sizes() {
    for (auto& [cuda, host] : pairs_) {
      bool moved = host.storage().data() != cuda.storage().data();
      if (!moved && host.sizes().equals(cuda.sizes())) continue;
      cuda.resize_(host.sizes());
      if (moved && host.numel()) memcpy(cuda.data_ptr(), host.contiguous().data_ptr(), host.nbytes());
    }
  }

 private:
  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host_only_ |= tensor.is_cpu() && tensor.dim() > 0;  // CUDA takes numbers from the host
      return tensor;
    }
    note(tensor.device());
    for (auto& [cuda, host] : pairs_)
      if (cuda.is_same(tensor)) return host;
    pairs_.emplace_back(tensor, on_host(tensor));
    return pairs_.back().second;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [cuda, host] : pairs_)
      if (host.is_same(tensor)) return cuda;
    for (auto& [cuda, host] : pairs_)
      if (tensor.numel() && host.storage().data() == tensor.storage().data())
        return cuda.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return on_device(tensor, device_.value_or(c10::Device(c10::kCUDA, 0)));
  }

  template <typename Element, typename Elements>
  c10::List<Element> list(const Elements& elements) {
    c10::List<Element> made;
    for (const auto& element : elements) made.push_back(to_host(element));
    return made;
  }

  static bool is_list_of_optional_tensors(const IValue& value) {
    auto optional = value.toList().elementType()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::TensorType;
  }

  void note(c10::Device device) {
    if (!device_) device_ = device;
  }

  std::vector<std::pair<Tensor, Tensor>> pairs_;  // (CUDA tensor, CPU tensor on the same memory)
  std::optional<c10::Device> device_;
  bool host_only_ = false;
};

bool cpu_has(const c10::OperatorHandle& operation) {
  for (auto key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd,
                   DispatchKey::CompositeExplicitAutogradNonFunctional})
    if (operation.hasKernelForDispatchKey(key)) return true;
  return false;
}

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  Call call;
  for (auto& value : torch::jit::last(*stack, schema.arguments().size()).vec()) stack->push_back(call.to_host(value));
  stack->erase(stack->end() - 2 * schema.arguments().size(), stack->end() - schema.arguments().size());
  TORCH_CHECK(
      !call.has_both_devices() || OF_BOTH_DEVICES.count(name), "fake CUDA: ", name,
      ": Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!");
  if (!cpu_has(operation)) {
    std::lock_guard<std::mutex> locked(guard);
    without_kernel[name]++;
  }
  operation.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  call.take_over_sizes();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = call.to_device((*stack)[i]);
}

// Attention is computed by its formula; which kernel torch would have taken is asked of torch, and noted.
int64_t formula(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto chosen = at::native::_fused_sdp_choice_cuda(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  std::lock_guard<std::mutex> locked(guard);
  attention[chosen]++;
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// torch warns where a kernel takes the place of its own, which is what this library is for.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void install(const std::vector<std::string>& operations) {
  NoWarnings handler;
  c10::WarningUtils::WarningHandlerGuard quiet(&handler);
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : operations)
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&formula);
}

template <typename Map>
Map copy_of(const Map& map) {
  std::lock_guard<std::mutex> locked(guard);
  return map;
}

}  // namespace

PYBIND11_MODULE(redirect, module) {
  module.def("install", &install);
  module.def("without_kernel", [] { return copy_of(without_kernel); });
  module.def("attention", [] { return copy_of(attention); });
}
