// Every operator runs on the kernel of a CPU; its results reach the device's memory as a task (see runtime.h).
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace late {
namespace {

using at::Tensor;
using c10::IValue;

bool ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A Python number that became a tensor does not decide a result's type; it still must not.
void keep_wrapped(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

// The same bytes as a CPU sees them. Only for kernels and tasks: it holds nothing.
Tensor seen_by_host(const Tensor& tensor) {
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }
  Tensor host = at::from_blob(
      reachable(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  keep_wrapped(tensor, host);
  return host;
}

c10::Stream compute(const Tensor& tensor) {
  return stream(tensor.device().index());
}

// Write a result into a tensor's memory, when its stream gets there.
void publish(const Tensor& result, const Tensor& target) {
  if (target.numel() == 0) {
    return;
  }
  const Tensor host = seen_by_host(target);
  if (result.is_contiguous() && host.is_contiguous() && result.scalar_type() == host.scalar_type()) {
    launch(compute(target), [result, to = host.data_ptr(), nbytes = host.nbytes()] {
      memcpy(to, result.const_data_ptr(), nbytes);
    });
  } else {
    launch(compute(target), [result, host] {
      // A task is part of nothing that whoever runs it is in the midst of.
      const c10::impl::ExcludeDispatchKeyGuard outside(c10::DispatchKeySet(
          {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
      at::AutoDispatchBelowADInplaceOrView below;
      at::NoGradGuard no_grad;
      host.copy_(result);
    });
  }
}

Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> place, std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "only strided tensors live on this device");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "only the host's memory can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(place));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> place, std::optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "only strided tensors live on this device");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "only the host's memory can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(place));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The result of a kernel, on the device.
Tensor moved(const Tensor& result, c10::Device place) {
  Tensor target = empty_strided(
      result.sizes(), result.strides(), result.scalar_type(), std::nullopt, place, std::nullopt);
  keep_wrapped(result, target);
  publish(result, target);
  return target;
}

// -- copies -----------------------------------------------------------------------------------------------------------------

bool of_one_piece(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  const Tensor& here = ours(target) ? target : source;
  const c10::DeviceGuard guard(here.device());
  const c10::Stream mine = compute(here);
  if (ours(source) && ours(target) && source.device() != target.device()) {
    finish(compute(source));
  }
  const bool between_host = !(ours(source) && ours(target));
  if (between_host && of_one_piece(source, target)) {
    const Tensor& host = ours(target) ? source : target;
    copy(mine, target.data_ptr(), source.const_data_ptr(), source.nbytes());
    if (!non_blocking || !is_pinned_pointer(host.const_data_ptr())) {
      finish(mine);
    }
    return target;
  }
  finish(mine);
  const Tensor from = ours(source) ? seen_by_host(source) : source;
  if (ours(target)) {
    Tensor result = at::empty_strided(target.sizes(), target.strides(), target.options().device(at::kCPU));
    result.copy_(from);
    publish(result, target);
  } else {
    const_cast<Tensor&>(target).copy_(from);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  finish(compute(self));
  return at::native::_local_scalar_dense_cpu(seen_by_host(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// -- views ------------------------------------------------------------------------------------------------------------------

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

Tensor& set_storage_at(
    Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// -- everything else ----------------------------------------------------------------------------------------------------------

struct Mutated {
  Tensor target;  // on the device
  Tensor result;  // what the kernel writes to
};

// One call of an operator: its arguments as the host sees them, and what became of them.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& schema = op_.schema();
    const size_t first = stack_->size() - schema.arguments().size();
    for (size_t i = first; i < stack_->size(); ++i) {
      look_for_place((*stack_)[i]);
    }
    const c10::Device place = place_.value_or(c10::Device(kType, device()));
    const c10::DeviceGuard guard(place);
    finish(stream(place.index()));
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      IValue& argument = (*stack_)[first + i];
      arguments_.push_back(argument);
      argument = for_host(argument, alias != nullptr && alias->isWrite());
    }
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    for (const Mutated& one : mutated_) {
      if (one.result.sizes() != one.target.sizes()) {
        at::native::resize_(one.target, one.result.sizes());
      }
      publish(one.result, one.target);
    }
    const size_t returned = stack_->size() - schema.returns().size();
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      IValue& value = (*stack_)[returned + i];
      value = from_host(value, place);
    }
  }

 private:
  void look_for_place(const IValue& value) {
    const auto look = [this](const Tensor& tensor) {
      // A number of no dimension may be on another device than the rest.
      if (ours(tensor) && (!place_ || (!dimensions_ && tensor.dim() > 0))) {
        place_ = tensor.device();
        dimensions_ = tensor.dim();
      }
    };
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) {
        look(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        look(tensor.value_or(Tensor()));
      }
    } else if (value.isDevice() && value.toDevice().type() == kType && !place_) {
      place_ = value.toDevice().has_index() ? value.toDevice() : c10::Device(kType, device());
    }
  }

  Tensor for_host(const Tensor& tensor, bool written) {
    if (!ours(tensor)) {
      return tensor;
    }
    if (tensor.device() != *place_ && tensor.dim() > 0) {
      TORCH_CHECK(false, op_.operator_name(), ": tensors are on ", tensor.device(), " and on ", *place_);
    }
    Tensor host = seen_by_host(tensor);
    if (written) {
      for (const Mutated& known : mutated_) {
        if (known.target.is_same(tensor)) {
          return known.result;
        }
      }
      Tensor result;
      if (host.numel() == 0) {
        result = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
      } else {
        result = at::empty_strided(host.sizes(), host.strides(), host.options());
        result.copy_(host);
      }
      mutated_.push_back({tensor, result});
      return result;
    }
    return host;
  }

  IValue for_host(const IValue& value, bool written) {
    if (value.isTensor()) {
      return for_host(value.toTensor(), written);
    }
    if (value.isTensorList()) {
      std::vector<Tensor> tensors = value.toTensorVector();
      for (Tensor& tensor : tensors) {
        tensor = for_host(tensor, written);
      }
      return c10::List<Tensor>(std::move(tensors));
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor ? std::optional<Tensor>(for_host(*tensor, written)) : std::nullopt);
      }
      return tensors;
    }
    if (value.isDevice()) {
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  Tensor from_host(const Tensor& tensor, c10::Device place) {
    if (!tensor.defined() || !tensor.is_cpu()) {
      return tensor;
    }
    for (const Mutated& one : mutated_) {
      if (one.result.is_same(tensor)) {
        return one.target;
      }
    }
    for (const IValue& argument : arguments_) {  // given back as it came: on the CPU, or as a view of device memory
      if (argument.isTensor() && argument.toTensor().defined()) {
        const Tensor& given = argument.toTensor();
        if (given.is_same(tensor)) {
          return given;
        }
        if (ours(given) && given.numel() > 0 && tensor.numel() > 0 &&
            tensor.const_data_ptr() == reachable(given.const_data_ptr())) {
          return at::as_strided(given, tensor.sizes(), tensor.strides(), given.storage_offset());
        }
      }
    }
    return moved(tensor, place);
  }

  IValue from_host(const IValue& value, c10::Device place) {
    if (value.isTensor()) {
      return from_host(value.toTensor(), place);
    }
    if (value.isTensorList()) {
      std::vector<Tensor> tensors = value.toTensorVector();
      for (Tensor& tensor : tensors) {
        tensor = from_host(tensor, place);
      }
      return c10::List<Tensor>(std::move(tensors));
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::optional<c10::Device> place_;
  int64_t dimensions_ = 0;
  std::vector<IValue> arguments_;
  std::vector<Mutated> mutated_;
};

// -- operators that a CPU has under another name, or not for every type -----------------------------------------------------

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  const c10::DeviceGuard guard(input.device());
  finish(compute(input));
  const auto host_bias = bias && bias->defined() ? std::optional<Tensor>(seen_by_host(*bias)) : std::nullopt;
  at::AutoDispatchBelowADInplaceOrView below;
  return moved(
      at::convolution_symint(
          seen_by_host(input), seen_by_host(weight), host_bias, stride, padding, dilation, transposed, output_padding,
          groups),
      input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  const c10::DeviceGuard guard(input.device());
  finish(compute(input));
  at::AutoDispatchBelowADInplaceOrView below;
  const c10::SymInt channels = grad.sym_size(1);
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      seen_by_host(grad), seen_by_host(input), seen_by_host(weight), c10::SymIntArrayRef(&channels, 1), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  const auto back = [&](const Tensor& result) { return result.defined() ? moved(result, input.device()) : result; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  const c10::DeviceGuard guard(self.device());
  finish(compute(self));
  at::AutoDispatchBelowADInplaceOrView below;
  return moved(at::histc(seen_by_host(self).to(at::kFloat), bins, low, high).to(self.scalar_type()), self.device());
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("histc", histc);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

}  // namespace
}  // namespace late
