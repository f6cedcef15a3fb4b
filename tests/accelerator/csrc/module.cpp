// What PyTorch asks of a device, and what tests ask of this one.
#include "runtime.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace late {
namespace {

using c10::Device;
using c10::DeviceIndex;

EventPtr& event_of(void* handle) {
  return *static_cast<EventPtr*>(handle);
}

struct DeviceGuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  Device exchangeDevice(Device next) const override {
    const Device before = getDevice();
    set_device(next.index());
    return before;
  }
  Device getDevice() const override {
    return Device(kType, device());
  }
  void setDevice(Device next) const override {
    set_device(next.index());
  }
  void uncheckedSetDevice(Device next) const noexcept override {
    set_device(next.index());
  }
  c10::Stream getStream(Device of) const override {
    return stream(of.index());
  }
  c10::Stream getDefaultStream(Device of) const override {
    return c10::Stream(c10::Stream::UNSAFE, of, of.index());
  }
  c10::Stream getStreamFromGlobalPool(Device of, bool) const override {
    return new_stream(of.index());
  }
  c10::Stream getNewStream(Device of, int) const override {
    return new_stream(of.has_index() ? of.index() : device());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return set_stream(next);
  }
  void destroyEvent(void* handle, DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(handle);
  }
  void record(void** handle, const c10::Stream& on, DeviceIndex, c10::EventFlag) const override {
    if (*handle == nullptr) {
      *handle = new EventPtr(make_event());
    }
    late::record(event_of(*handle), on);
  }
  void block(void* handle, const c10::Stream& on) const override {
    if (handle != nullptr) {
      late::block(event_of(handle), on);
    }
  }
  bool queryEvent(void* handle) const override {
    return handle == nullptr || happened(event_of(handle));
  }
  void synchronizeEvent(void* handle) const override {
    if (handle != nullptr) {
      finish(event_of(handle));
    }
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events have to be recorded.");
    return milliseconds_between(event_of(first), event_of(second));
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  bool queryStream(const c10::Stream& of) const override {
    return idle(of);
  }
  bool isStreamCapturing(const c10::Stream&) const override {
    return capturing();
  }
  void synchronizeStream(const c10::Stream& of) const override {
    finish(of);
  }
  void synchronizeDevice(DeviceIndex index) const override {
    finish_device(index < 0 ? device() : index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& user) const override {
    device_allocator()->recordStream(pointer, user);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    set_device(index);
  }
  DeviceIndex getCurrentDevice() const override {
    return device();
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = device();
    set_device(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? -1 : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned_pointer(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return host_allocator();
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    TORCH_CHECK(is_device_pointer(pointer), "not an address of this device");
    return Device(kType, late::device_of(pointer));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr bytes = device_allocator()->allocate(nbytes);
    const size_t both = std::min(nbytes, storage.nbytes());
    if (both > 0) {
      copy(stream(storage.device().index()), bytes.get(), storage.data(), both);
    }
    storage.set_data_ptr_noswap(std::move(bytes));
    storage.set_nbytes(nbytes);
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuardImpl)

}  // namespace late

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace late;
  device();  // the importing thread is the main one
  c10::SetAllocator(kType, device_allocator());
  at::setHostAllocator(kType, host_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("reseed", &reseed, py::arg("seed"), py::arg("pace") = -1.0);
  m.def("set_capacity", [](int index, size_t nbytes) { set_capacity(c10::DeviceIndex(index), nbytes); });
  m.def("fail_allocation", &fail_allocation, "Let an allocation fail after so many others; -1: none.");
  m.def("fail_pinning", &fail_pinning);
  m.def("set_capturing", &set_capturing, "Whether streams say that they become part of a graph.");
  m.def("pinned_bytes", &pinned_bytes);
  m.def("tasks_waiting", &tasks_waiting);
  m.def("violations", &violations, "What was done that must not be; the list is empty afterwards.");
}
