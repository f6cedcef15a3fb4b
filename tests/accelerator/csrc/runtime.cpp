#include "runtime.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <unordered_map>

namespace late {

using c10::DeviceIndex;
using c10::StreamId;

struct Stream;

struct Event {
  uint64_t recorded = 0;              // how often it was put into a queue
  std::map<uint64_t, Stream*> open;   // those times that it was not reached yet
  int asked = 0;                      // how often in vain whether it was
  std::chrono::steady_clock::time_point time;
};

namespace {

constexpr size_t kReach = size_t(64) << 30;  // address space of a device
constexpr size_t kPage = 4096;
constexpr size_t kRounding = 512;
constexpr int kPatience = 20;  // questions whether an event has happened
constexpr int kPoison = 0xFF;  // NaN in every floating point format, -1 in every integer

size_t rounded(size_t nbytes, size_t to) {
  return (nbytes + to - 1) / to * to;
}

enum class Kind { kWork, kRecord, kWait };

struct Task {
  Kind kind;
  Work work;
  EventPtr event;  // to record, or to wait for
  uint64_t version = 0;
};

}  // namespace

struct Stream {
  DeviceIndex device;
  StreamId id;
  std::deque<Task> queue;
  double pace;          // the chance that its next task is done at a call
  uint64_t queued = 0;  // tasks ever
  uint64_t done = 0;
};

namespace {

struct Block {
  char* address;
  size_t segment;  // bytes of whole pages
  size_t counted;  // bytes asked for, rounded
  Stream* stream;
  std::set<Stream*> users;
};

struct Memory {
  char* tensors = nullptr;    // what tensors point to: not to be touched
  char* reachable = nullptr;  // the same pages, for tasks
  int file = -1;
  size_t capacity = kReach;
  size_t end = 0;                         // of what was ever handed out
  std::multimap<size_t, char*> unmapped;  // pages given back, by size
  std::unordered_map<void*, Block> live;
  std::list<std::pair<std::vector<EventPtr>, Block>> leaving;  // freed while other streams used it
  std::list<Block> cached;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct Pinned {
  char* address;
  size_t nbytes;
  int copies = 0;
  bool freed = false;
};

struct Thread {
  DeviceIndex device = -1;
  std::array<Stream*, kDevices> streams{};
};

thread_local Thread thread;

class Backend {
 public:
  // Tasks run with it held; they never call back into the backend's public functions, nor into Python.
  std::mutex lock;
  std::array<Memory, kDevices> memory;
  std::deque<Stream> streams;  // 0 and 1 are the devices' default streams
  std::map<const char*, Pinned> pinned;
  size_t pinned_bytes = 0;
  std::mt19937_64 random{0};
  double fixed_pace = -1;  // of all streams, if not negative
  int64_t allocations_until_failure = -1;
  bool pinning_fails = false;
  std::atomic<bool> capturing = false;
  std::vector<std::string> violations;

  Backend() {
    for (DeviceIndex index = 0; index < kDevices; ++index) {
      Memory& m = memory[index];
      m.file = memfd_create("late-device", MFD_CLOEXEC);
      TORCH_CHECK(m.file >= 0 && ftruncate(m.file, kReach) == 0, "no file for a device's memory");
      m.tensors = map(PROT_NONE, m.file);
      m.reachable = map(PROT_READ | PROT_WRITE, m.file);
      add_stream(index);
    }
  }

  static char* map(int protection, int file) {
    void* address = mmap(nullptr, kReach, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(address != MAP_FAILED, "no address space for a device's memory");
    return static_cast<char*>(address);
  }

  [[noreturn]] void violated(const std::string& what) {
    violations.push_back(what);
    TORCH_CHECK(false, what);
  }

  // -- work -----------------------------------------------------------------------------------------------------------

  Stream& at(c10::Stream stream) {
    return streams.at(stream.id());
  }

  void put(Stream& stream, Task task) {
    stream.queue.push_back(std::move(task));
    ++stream.queued;
  }

  void put(Stream& stream, Work work) {
    put(stream, Task{Kind::kWork, std::move(work), nullptr});
  }

  void put_record(Stream& stream, const EventPtr& event) {
    event->open[++event->recorded] = &stream;
    put(stream, Task{Kind::kRecord, {}, event, event->recorded});
  }

  static bool can_go_on(const Stream& stream) {
    if (stream.queue.empty()) {
      return false;
    }
    const Task& head = stream.queue.front();
    return head.kind != Kind::kWait || head.event->open.count(head.version) == 0;
  }

  void do_one(Stream& stream) {
    Task task = std::move(stream.queue.front());
    stream.queue.pop_front();
    ++stream.done;
    if (task.kind == Kind::kWork) {
      // Whoever happens to be asked when a task is done, it is none of his: modes of Python's see nothing of it.
      const c10::impl::ExcludeDispatchKeyGuard unseen(
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
      task.work();
    } else if (task.kind == Kind::kRecord) {
      task.event->open.erase(task.version);
      task.event->time = std::chrono::steady_clock::now();
    }
  }

  // Do the first `until` tasks of a stream, and whatever of other streams they wait for: no more than that.
  void force(Stream& stream, uint64_t until) {
    while (stream.done < until) {
      const Task& head = stream.queue.front();
      if (head.kind == Kind::kWait) {
        force(head.event, head.version);
      }
      do_one(stream);
    }
  }

  void force(EventPtr event, uint64_t version) {
    for (auto at = event->open.find(version); at != event->open.end(); at = event->open.find(version)) {
      force(*at->second, at->second->done + 1);
    }
  }

  void force_all(DeviceIndex index) {
    for (Stream& stream : streams) {
      if (stream.device == index) {
        force(stream, stream.queued);
      }
    }
  }

  // What a seed says is done now. Each stream has a pace of its own; some do nothing of themselves.
  void play() {
    for (size_t turn = random() % streams.size(), i = 0; i < streams.size(); ++i) {
      Stream& stream = streams[(turn + i) % streams.size()];
      while (can_go_on(stream) && chance() < stream.pace) {
        do_one(stream);
      }
    }
  }

  double chance() {
    return std::uniform_real_distribution<double>(0, 1)(random);
  }

  double some_pace() {
    constexpr double kPaces[] = {0, 0.1, 0.5, 0.9};
    return fixed_pace < 0 ? kPaces[random() % 4] : fixed_pace;
  }

  Stream& add_stream(DeviceIndex index) {
    streams.push_back(Stream{index, StreamId(streams.size()), {}, some_pace()});
    return streams.back();
  }

  // -- memory ---------------------------------------------------------------------------------------------------------

  void* reach(const void* pointer) {
    const char* address = static_cast<const char*>(pointer);
    for (Memory& m : memory) {
      if (address >= m.tensors && address < m.tensors + kReach) {
        return m.reachable + (address - m.tensors);
      }
    }
    return const_cast<void*>(pointer);
  }

  int device_of(const void* pointer) {
    const char* address = static_cast<const char*>(pointer);
    for (int index = 0; index < kDevices; ++index) {
      if (address >= memory[index].tensors && address < memory[index].tensors + kReach) {
        return index;
      }
    }
    return -1;
  }

  Pinned* pinned_at(const void* pointer) {
    auto found = pinned.upper_bound(static_cast<const char*>(pointer));
    if (found == pinned.begin()) {
      return nullptr;
    }
    Pinned& block = std::prev(found)->second;
    return static_cast<const char*>(pointer) < block.address + block.nbytes ? &block : nullptr;
  }

  void unpin(Pinned& block) {
    munmap(block.address, block.nbytes);  // whoever still uses it crashes
    pinned.erase(block.address);
  }

  void end_copy(const void* pointer) {
    Pinned* block = pinned_at(pointer);
    if (block != nullptr && --block->copies == 0 && block->freed) {
      unpin(*block);
    }
  }

  void poison(const Block& block) {
    char* address = static_cast<char*>(reach(block.address));
    const size_t nbytes = block.segment;
    put(*block.stream, [address, nbytes] { memset(address, kPoison, nbytes); });
  }

  // Blocks whose other users have gone are free for the stream that allocated them.
  void collect(Memory& m) {
    for (auto it = m.leaving.begin(); it != m.leaving.end();) {
      const auto& events = it->first;
      if (std::all_of(events.begin(), events.end(), [](const EventPtr& e) { return e->open.empty(); })) {
        poison(it->second);
        m.cached.push_back(it->second);
        it = m.leaving.erase(it);
      } else {
        ++it;
      }
    }
  }

  void release_cached(DeviceIndex index) {
    Memory& m = memory[index];
    force_all(index);
    collect(m);
    force_all(index);
    for (const Block& block : m.cached) {
      const off_t offset = block.address - m.tensors;
      fallocate(m.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, block.segment);
      m.unmapped.emplace(block.segment, block.address);
      m.stats.reserved_bytes[0].decrease(block.segment);
    }
    m.cached.clear();
  }

  bool room_for(const Memory& m, size_t segment) {
    return size_t(m.stats.reserved_bytes[0].current) + segment <= m.capacity && m.end + segment <= kReach;
  }

  void* allocate(DeviceIndex index, Stream* stream, size_t nbytes) {
    Memory& m = memory[index];
    const size_t counted = rounded(nbytes, kRounding);
    const size_t segment = rounded(counted, kPage);
    bool fails = false;
    if (allocations_until_failure >= 0 && allocations_until_failure-- == 0) {
      fails = true;
    }
    collect(m);
    auto best = m.cached.end();
    for (auto it = m.cached.begin(); it != m.cached.end(); ++it) {
      const bool fits = it->stream == stream && it->segment >= segment && it->segment <= segment + segment / 4;
      if (fits && (best == m.cached.end() || it->segment < best->segment)) {
        best = it;
      }
    }
    Block block{nullptr, segment, counted, stream, {}};
    if (best != m.cached.end() && !fails) {
      block.address = best->address;
      block.segment = best->segment;
      m.cached.erase(best);
    } else {
      if (!room_for(m, segment)) {
        ++m.stats.num_alloc_retries;
        release_cached(index);
      }
      if (fails || !room_for(m, segment)) {
        ++m.stats.num_ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "Tried to allocate ", nbytes, " bytes on device ", int(index), " with ",
            m.stats.reserved_bytes[0].current, " of ", m.capacity, " bytes reserved");
      }
      auto known = m.unmapped.find(segment);
      if (known != m.unmapped.end()) {
        block.address = known->second;
        m.unmapped.erase(known);
      } else {
        block.address = m.tensors + m.end;
        m.end += segment;
      }
      m.stats.reserved_bytes[0].increase(segment);
      // Not in stream order: nothing is queued that could read what was never handed out, or was given back.
      memset(reach(block.address), kPoison, segment);
    }
    m.stats.allocated_bytes[0].increase(counted);
    m.stats.active_bytes[0].increase(counted);
    m.stats.requested_bytes[0].increase(nbytes);
    m.stats.allocation[0].increase(1);
    void* address = block.address;
    m.live.emplace(address, std::move(block));
    return address;
  }

  void free(void* address) {
    const int index = device_of(address);
    Memory& m = memory[index];
    auto found = m.live.find(address);
    Block block = std::move(found->second);
    m.live.erase(found);
    m.stats.allocated_bytes[0].decrease(block.counted);
    m.stats.active_bytes[0].decrease(block.counted);
    m.stats.allocation[0].decrease(1);
    if (block.users.empty()) {
      poison(block);
      m.cached.push_back(std::move(block));
    } else {
      std::vector<EventPtr> events;
      for (Stream* user : block.users) {
        events.push_back(make_event());
        put_record(*user, events.back());
      }
      m.leaving.emplace_back(std::move(events), std::move(block));
    }
  }
};

// Never destroyed: tensors outlive it at the end of a process.
Backend& backend() {
  static Backend* one = [] {
    thread.device = 0;  // the thread that loads the backend is the main one
    return new Backend();
  }();
  return *one;
}

using Guard = std::lock_guard<std::mutex>;

Stream*& current(DeviceIndex index) {
  Stream*& stream = thread.streams.at(index);
  if (stream == nullptr) {
    stream = &backend().streams[index];
  }
  return stream;
}

c10::Stream public_stream(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, stream.device), stream.id);
}

}  // namespace

// -- devices and streams ------------------------------------------------------------------------------------------------

DeviceIndex device() {
  Backend& b = backend();
  if (thread.device < 0) {
    Guard guard(b.lock);
    b.violated("A thread that has set no device asked for its device: on CUDA it would use, and wake, device 0.");
  }
  return thread.device;
}

void set_device(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "There is no device ", int(index), ": there are ", kDevices, ".");
  thread.device = index;
}

c10::Stream stream(DeviceIndex index) {
  Guard guard(backend().lock);
  return public_stream(*current(index < 0 ? thread.device : index));
}

c10::Stream set_stream(c10::Stream stream) {
  Backend& b = backend();
  Guard guard(b.lock);
  Stream*& mine = current(stream.device_index());
  const c10::Stream before = public_stream(*mine);
  mine = &b.at(stream);
  return before;
}

c10::Stream new_stream(DeviceIndex index) {
  Backend& b = backend();
  Guard guard(b.lock);
  return public_stream(b.add_stream(index));
}

// -- work -----------------------------------------------------------------------------------------------------------------

void launch(c10::Stream stream, Work work) {
  Backend& b = backend();
  Guard guard(b.lock);
  b.put(b.at(stream), std::move(work));
  b.play();
}

void copy(c10::Stream stream, void* target, const void* source, size_t nbytes) {
  Backend& b = backend();
  Guard guard(b.lock);
  for (const void* end : {static_cast<const void*>(target), source}) {
    if (Pinned* block = b.pinned_at(end)) {
      ++block->copies;
    }
  }
  b.put(b.at(stream), [&b, target, source, nbytes] {
    memmove(b.reach(target), b.reach(source), nbytes);
    b.end_copy(target);
    b.end_copy(source);
  });
  b.play();
}

bool idle(c10::Stream stream) {
  Backend& b = backend();
  Guard guard(b.lock);
  b.play();
  return b.at(stream).queue.empty();
}

void finish(c10::Stream stream) {
  Backend& b = backend();
  Guard guard(b.lock);
  b.force(b.at(stream), b.at(stream).queued);
}

void finish_device(DeviceIndex index) {
  Backend& b = backend();
  Guard guard(b.lock);
  b.force_all(index);
}

EventPtr make_event() {
  return std::make_shared<Event>();
}

void record(const EventPtr& event, c10::Stream stream) {
  Backend& b = backend();
  Guard guard(b.lock);
  if (thread.device < 0) {
    b.violated("A thread that has set no device recorded an event: on CUDA that wakes device 0.");
  }
  b.put_record(b.at(stream), event);
  b.play();
}

void block(const EventPtr& event, c10::Stream stream) {
  Backend& b = backend();
  Guard guard(b.lock);
  if (event->recorded != 0) {
    b.put(b.at(stream), Task{Kind::kWait, {}, event, event->recorded});
  }
  b.play();
}

bool happened(const EventPtr& event) {
  Backend& b = backend();
  Guard guard(b.lock);
  b.play();
  if (event->open.count(event->recorded) != 0 && ++event->asked > kPatience) {
    b.force(event, event->recorded);  // a device gets there in the end
  }
  return event->open.count(event->recorded) == 0;
}

void finish(const EventPtr& event) {
  Backend& b = backend();
  Guard guard(b.lock);
  b.force(event, event->recorded);
}

double milliseconds_between(const EventPtr& first, const EventPtr& second) {
  Guard guard(backend().lock);
  for (const EventPtr& event : {first, second}) {
    TORCH_CHECK(event->recorded > 0 && event->open.empty(), "Events that have not happened have no time between them.");
  }
  return std::chrono::duration<double, std::milli>(second->time - first->time).count();
}

// -- memory ---------------------------------------------------------------------------------------------------------------

namespace {

void free_device(void* address) {
  Backend& b = backend();
  Guard guard(b.lock);
  b.free(address);
  b.play();
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const DeviceIndex index = device();
    Backend& b = backend();
    Guard guard(b.lock);
    void* address = nbytes == 0 ? nullptr : b.allocate(index, current(index), nbytes);
    b.play();
    return {address, address, &free_device, c10::Device(kType, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    late::copy(stream(device()), target, source, nbytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    Backend& b = backend();
    Guard guard(b.lock);
    for (DeviceIndex index = 0; index < kDevices; ++index) {
      b.release_cached(index);
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream user) override {
    Backend& b = backend();
    Guard guard(b.lock);
    const int index = b.device_of(pointer.get());
    if (index < 0) {
      return;
    }
    auto found = b.memory[index].live.find(pointer.get());
    if (found != b.memory[index].live.end() && &b.at(user) != found->second.stream) {
      found->second.users.insert(&b.at(user));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    Guard guard(backend().lock);
    return backend().memory.at(index).stats;
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    Guard guard(backend().lock);
    auto& stats = backend().memory.at(index).stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*array)[0].reset_accumulated();
    }
  }
  void resetPeakStats(DeviceIndex index) override {
    Guard guard(backend().lock);
    auto& stats = backend().memory.at(index).stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*array)[0].reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    Guard guard(backend().lock);
    const Memory& m = backend().memory.at(index);
    return {m.capacity - size_t(m.stats.reserved_bytes[0].current), m.capacity};
  }
};

void free_pinned(void* address) {
  Backend& b = backend();
  Guard guard(b.lock);
  Pinned& block = b.pinned.at(static_cast<const char*>(address));
  b.pinned_bytes -= block.nbytes;
  block.freed = true;
  if (block.copies == 0) {
    b.unpin(block);
  }
}

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Backend& b = backend();
    Guard guard(b.lock);
    TORCH_CHECK(!b.pinning_fails, "no memory can be pinned");
    if (nbytes == 0) {
      return {nullptr, c10::DeviceType::CPU};
    }
    const size_t size = rounded(nbytes, kPage);
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "no memory to pin");
    memset(address, kPoison, size);
    b.pinned[static_cast<const char*>(address)] = Pinned{static_cast<char*>(address), size};
    b.pinned_bytes += size;
    return {address, address, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    memcpy(target, source, nbytes);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;  // every copy holds its pinned memory
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::DeviceAllocator* device_allocator() {
  static DeviceAllocator* one = new DeviceAllocator();
  return one;
}

at::HostAllocator* host_allocator() {
  static HostAllocator* one = new HostAllocator();
  return one;
}

bool is_device_pointer(const void* pointer) {
  return backend().device_of(pointer) >= 0;
}

bool is_pinned_pointer(const void* pointer) {
  Backend& b = backend();
  Guard guard(b.lock);
  const Pinned* block = b.pinned_at(pointer);
  return block != nullptr && !block->freed;
}

DeviceIndex device_of(const void* pointer) {
  return backend().device_of(pointer);
}

void* reachable(const void* pointer) {
  return backend().reach(pointer);
}

// -- for tests ------------------------------------------------------------------------------------------------------------

void reseed(uint64_t seed, double pace) {
  Backend& b = backend();
  Guard guard(b.lock);
  b.random.seed(seed);
  b.fixed_pace = pace;
  for (Stream& stream : b.streams) {
    stream.pace = b.some_pace();
  }
}

void set_capacity(DeviceIndex index, size_t nbytes) {
  Guard guard(backend().lock);
  backend().memory.at(index).capacity = std::min(nbytes, kReach);
}

void fail_allocation(int64_t after) {
  Guard guard(backend().lock);
  backend().allocations_until_failure = after;
}

void set_capturing(bool capturing) {
  backend().capturing = capturing;
}

bool capturing() {
  return backend().capturing;
}

void fail_pinning(bool fail) {
  Guard guard(backend().lock);
  backend().pinning_fails = fail;
}

size_t pinned_bytes() {
  Guard guard(backend().lock);
  return backend().pinned_bytes;
}

size_t tasks_waiting() {
  Guard guard(backend().lock);
  size_t count = 0;
  for (const Stream& stream : backend().streams) {
    count += stream.queue.size();
  }
  return count;
}

std::vector<std::string> violations() {
  Guard guard(backend().lock);
  return std::exchange(backend().violations, {});
}

}  // namespace late
