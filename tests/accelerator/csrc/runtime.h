// A device that behaves worse than a GPU. Streams do their work as late as events allow, or in an order that a seed
// decides; device memory is out of the host's reach; what is freed is poisoned in stream order; what no thread has set a
// device for fails.
//
// Note: when work is done
//     A task (a copy, the publication of a kernel's results, an event) is put into its stream's queue. It is done when
//     somebody has to wait for it, or when the seed says so: at each call, tasks of random streams whose turn it is are
//     done. No thread works on queues, so a run with one thread is the same whenever its seed is.
//
// Note: kernels
//     The kernel of a CPU computes the result when it is launched, on what is in memory once its stream's queue is done.
//     What it computed is written to the device's memory later, as a task. Whoever reads without waiting reads poison, or
//     the bytes of before.
//
// Note: addresses
//     A device's memory is one file mapped twice. Tensors point into a mapping that nobody may touch; tasks use the other.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace late {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

// Devices and streams of the calling thread.
c10::DeviceIndex device();
void set_device(c10::DeviceIndex index);
c10::Stream stream(c10::DeviceIndex index);
c10::Stream set_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex index);

// Work.
using Work = std::function<void()>;
void launch(c10::Stream stream, Work work);
// A copy between host and device, or within a device; pinned host memory stays mapped until it is done.
void copy(c10::Stream stream, void* target, const void* source, size_t nbytes);
bool idle(c10::Stream stream);
void finish(c10::Stream stream);
void finish_device(c10::DeviceIndex index);

struct Event;
using EventPtr = std::shared_ptr<Event>;
EventPtr make_event();
void record(const EventPtr& event, c10::Stream stream);
void block(const EventPtr& event, c10::Stream stream);
bool happened(const EventPtr& event);
void finish(const EventPtr& event);
double milliseconds_between(const EventPtr& first, const EventPtr& second);

// Memory.
c10::DeviceAllocator* device_allocator();
at::HostAllocator* host_allocator();
bool is_device_pointer(const void* pointer);
bool is_pinned_pointer(const void* pointer);
c10::DeviceIndex device_of(const void* pointer);
// Where tasks and kernels find what a tensor's address means.
void* reachable(const void* pointer);

// For tests.
void set_capturing(bool capturing);
bool capturing();
// A negative pace lets the seed choose one for each stream; 0 is as late as can be, 1 at once.
void reseed(uint64_t seed, double pace);
void set_capacity(c10::DeviceIndex index, size_t nbytes);
void fail_allocation(int64_t after);
void fail_pinning(bool fail);
size_t pinned_bytes();
size_t tasks_waiting();
std::vector<std::string> violations();

}  // namespace late
