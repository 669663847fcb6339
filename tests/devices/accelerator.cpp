// One device behind torch's common interface of accelerators, as a vendor adds one: streams are threads that work late.
//
// Its memory is the host's. What is freed is filled with 0xff behind the work that is queued on the default stream.

#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;
const c10::Device device(kind, 0);

struct Flag {
  std::mutex lock;
  std::condition_variable changed;
  bool set = false;
  void raise() {
    std::lock_guard<std::mutex> hold(lock);
    set = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [this] { return set; });
  }
  bool raised() {
    std::lock_guard<std::mutex> hold(lock);
    return set;
  }
};
using FlagPtr = std::shared_ptr<Flag>;

std::atomic<int> delay_us{0};

class Queue {
 public:
  Queue() {
    std::thread([this] { run(); }).detach();
  }
  void put(std::function<void()> work) {
    std::lock_guard<std::mutex> hold(lock_);
    todo_.push_back(std::move(work));
    changed_.notify_one();
  }
  FlagPtr mark() {
    auto flag = std::make_shared<Flag>();
    put([flag] { flag->raise(); });
    return flag;
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> hold(lock_);
        changed_.wait(hold, [this] { return !todo_.empty(); });
        work = std::move(todo_.front());
        todo_.pop_front();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us.load()));
      work();
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> todo_;
};

std::mutex making;
std::vector<Queue*>& queues() {
  static auto* all = new std::vector<Queue*>{new Queue()};  // kept: threads outlive static objects
  return *all;
}
Queue& queue(c10::StreamId id) {
  std::lock_guard<std::mutex> hold(making);
  return *queues().at(id);
}
thread_local c10::StreamId current = 0;

// -- memory ------------------------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t nbytes;
};

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  queue(0).put([block] {
    std::memset(block->data, 0xff, block->nbytes);  // somebody else's now; never freed, so that it can be looked at
    delete block;
  });
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(nbytes ? nbytes : 1);
    return {data, new Block{data, nbytes}, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory);

// -- streams and events ------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    std::lock_guard<std::mutex> hold(making);
    queues().push_back(new Queue());
    return stream(static_cast<c10::StreamId>(queues().size()) - 1);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current);
    current = next.id();
    return before;
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new FlagPtr();
    *static_cast<FlagPtr*>(*event) = queue(on.id()).mark();
  }
  void block(void* event, const c10::Stream& on) const override {
    FlagPtr flag = *static_cast<FlagPtr*>(event);
    queue(on.id()).put([flag] { flag->wait(); });
  }
  bool queryEvent(void* event) const override { return event == nullptr || (*static_cast<FlagPtr*>(event))->raised(); }
  void synchronizeEvent(void* event) const override { (*static_cast<FlagPtr*>(event))->wait(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<FlagPtr*>(event); }
  bool queryStream(const c10::Stream& on) const override { return queue(on.id()).mark()->raised(); }
  void synchronizeStream(const c10::Stream& on) const override { queue(on.id()).mark()->wait(); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    size_t count;
    {
      std::lock_guard<std::mutex> hold(making);
      count = queues().size();
    }
    for (size_t id = 0; id < count; ++id) queue(static_cast<c10::StreamId>(id)).mark()->wait();
  }

 private:
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
struct Registration {
  Registration() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} registration;

// -- operators ---------------------------------------------------------------------------------------------------

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

// A tensor's bytes as they are when the device comes to it. Keeps nothing alive, as a real queue doesn't.
at::Tensor bytes_of(void* data, const std::vector<int64_t>& size, const std::vector<int64_t>& stride, at::ScalarType type) {
  return at::from_blob(data, size, stride, at::TensorOptions().dtype(type));
}

struct Late {
  explicit Late(const at::Tensor& of)
      : data(of.data_ptr()), size(of.sizes().vec()), stride(of.strides().vec()), type(of.scalar_type()) {}
  at::Tensor tensor() const { return bytes_of(data, size, stride, type); }
  void* data;
  std::vector<int64_t> size, stride;
  at::ScalarType type;
};

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  Late source(self), place(to);
  queue(current).put([source, place] { place.tensor().copy_(source.tensor()); });
  if (!non_blocking) queue(current).mark()->wait();
  return to;
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  Late place(self);
  queue(current).put([place, value] { place.tensor().fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Tensor& add(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (other.device().type() == kind) {
    Late place(self), more(other);
    queue(current).put([place, more, alpha] { place.tensor().add_(more.tensor(), alpha); });
  } else {
    Late place(self);
    auto value = other.item().toDouble() * alpha.toDouble();
    queue(current).put([place, value] { place.tensor().add_(value); });
  }
  return self;
}

at::Tensor& cat(const at::ITensorListRef& parts, int64_t dim, at::Tensor& to) {
  std::vector<Late> sources;
  for (const at::Tensor& part : parts) sources.emplace_back(part);
  Late place(to);
  queue(current).put([sources, place, dim] {
    std::vector<at::Tensor> found;
    for (const auto& source : sources) found.push_back(source.tensor());
    auto out = place.tensor();
    at::cat_out(out, found, dim);
  });
  return to;
}

at::Tensor& sum(const at::Tensor& self, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType> type, at::Tensor& to) {
  Late source(self), place(to);
  queue(current).put([source, place, type] { place.tensor().copy_(source.tensor().sum(type)); });
  return to;
}

void record_stream(at::Tensor& self, c10::Stream on) {
  auto storage = self.storage();
  queue(on.id()).put([storage] {});  // given back once this stream has come here
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_copy_from", &copy_from);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("add_.Tensor", &add);
  m.impl("cat.out", &cat);
  m.impl("sum.IntList_out", &sum);
  m.impl("record_stream", &record_stream);
}

}  // namespace

// -- for the tests -----------------------------------------------------------------------------------------------

namespace {
std::vector<FlagPtr> held;
}

extern "C" void set_delay(int microseconds) { delay_us = microseconds; }

// The current stream stands still until release().
extern "C" void stick() {
  auto flag = std::make_shared<Flag>();
  held.push_back(flag);
  queue(current).put([flag] { flag->wait(); });
}

// All streams that there are stand still until release(): the device can't be read.
extern "C" void jam() {
  auto flag = std::make_shared<Flag>();
  held.push_back(flag);
  std::lock_guard<std::mutex> hold(making);
  for (auto* one : queues()) one->put([flag] { flag->wait(); });
}

extern "C" void release() {
  for (auto& flag : held) flag->raise();
  held.clear();
}
