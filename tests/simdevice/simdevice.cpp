// A simulated CUDA device for a CPU build of torch. Kernels run on the CPU by way of copies; the memory of the device
// is not accessible at the addresses that tensors report; non-blocking copies happen when they are waited for. Kernels
// happen at once, and what a stream has not waited for is found by vector clocks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
#ifdef SIMDEVICE_NPU  // the device of an extension, which names torch's PrivateUse1, instead of CUDA
constexpr DeviceType KIND = DeviceType::PrivateUse1;
constexpr auto VISIBLE = "ASCEND_RT_VISIBLE_DEVICES";
#define KEY PrivateUse1
#else
constexpr DeviceType KIND = DeviceType::CUDA;
constexpr auto VISIBLE = "CUDA_VISIBLE_DEVICES";
#define KEY CUDA
#endif

namespace {
// Of everything here. Other threads wait for it while they have the GIL, so who holds it must never need the GIL.
// Destroying a tensor does, if Python had it too: what has been done is kept until the lock is free.
std::recursive_mutex lock;
thread_local int holds = 0;
thread_local std::list<std::function<void()>> finished;
struct Hold {
  explicit Hold(std::recursive_mutex&) {
    lock.lock();
    ++holds;
  }
  ~Hold() {
    std::list<std::function<void()>> over;
    if (!--holds) over.swap(finished);
    lock.unlock();
  }
};

size_t env(const char* name, size_t otherwise) {
  auto* v = getenv(name);
  return v ? strtoull(v, nullptr, 10) : otherwise;
}
const size_t TOTAL = env("SIMDEVICE_BYTES", size_t(8) << 30);
const bool LAZY = env("SIMDEVICE_LAZY", 1), STRICT = env("SIMDEVICE_STRICT", 1);
thread_local DeviceIndex the_device = 0;
thread_local int inside = 0;            // a kernel: copies happen at once
std::map<std::string, int64_t> counts;  // copies, host reads
std::map<std::string, int64_t> moved;   // bytes by kind of copy
std::vector<std::string> faults;
void happened(const std::string& kind) {
  Hold hold(lock);
  counts[kind]++;
}
void copied(const std::string& kind, size_t nbytes) {
  Hold hold(lock);
  counts[kind]++;
  moved[kind] += nbytes;
}

// A folder of all processes of one run: what they have reserved on each device, and their faults.
std::string session_file(const std::string& name) {
  auto* folder = getenv("SIMDEVICE_SESSION");
  if (!folder) return "";
  mkdir(folder, 0700);
  return std::string(folder) + "/" + name;
}
void fault(const std::string& what) {
  Hold hold(lock);
  faults.push_back(what);
  int fd = ::open(session_file("faults").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  auto line = what + "\n";
  (void)!write(fd, line.data(), line.size());
  close(fd);
}

// The ids of the devices that this process sees. As in CUDA, the list is fixed when memory is first allocated.
std::vector<std::string> the_ids;
bool ids_are_fixed = false;
const std::vector<std::string>& ids() {
  Hold hold(lock);
  if (ids_are_fixed) return the_ids;
  the_ids.clear();
  if (auto* list = getenv(VISIBLE)) {
    std::stringstream in(list);
    for (std::string id; std::getline(in, id, ',');)
      if (!id.empty() && id != "-1") the_ids.push_back(id);
  } else
    for (size_t i = 0; i < env("SIMDEVICE_DEVICES", 16); ++i) the_ids.push_back(std::to_string(i));
  return the_ids;
}
DeviceIndex count() { return (DeviceIndex)ids().size(); }

// ---- memory
struct Region {
  char *base, *shadow;
  size_t size;
  DeviceIndex device;
  int fd;
};
std::list<Region> regions;

Region* region_of(const void* p) {
  Hold hold(lock);
  for (auto& r : regions)
    if ((char*)p >= r.base && (char*)p < r.base + r.size) return &r;
  return nullptr;
}
char* host(const void* p) {
  if (!p) return nullptr;
  Hold hold(lock);
  auto* r = region_of(p);
  TORCH_CHECK(r, "CUDA error: an illegal memory access was encountered (no device memory at ", p, ")");
  return r->shadow + ((char*)p - r->base);
}
Region& new_region(int fd, size_t begin, size_t size, DeviceIndex device) {
  auto* base = (char*)mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  auto* shadow = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, begin);
  TORCH_CHECK(base != MAP_FAILED && shadow != MAP_FAILED, "mmap: ", strerror(errno));
  Hold hold(lock);
  return regions.emplace_back(Region{base, shadow, size, device, fd});
}

// ---- streams
struct Queue;
using Clock = std::map<Queue*, uint64_t>;  // of each stream, the number of its last operation that came before
struct Queue {
  std::deque<std::function<void()>> todo;
  uint64_t added = 0, done = 0;
  Clock before;  // what this stream has waited for
};
std::map<std::pair<DeviceIndex, c10::StreamId>, Queue> queues;
thread_local std::map<DeviceIndex, c10::StreamId> current;
c10::StreamId next_stream = 1;
Stream stream_of(DeviceIndex d) {
  if (d < 0) d = the_device;
  return Stream(Stream::UNSAFE, Device(KIND, d), current[d]);
}
Queue& queue_of(const Stream& s) {
  Hold hold(lock);
  return queues[{s.device_index(), s.id()}];
}
void drain(Queue& q, uint64_t until) {
  Hold hold(lock);
  while (q.done < until && !q.todo.empty()) {
    auto& work = finished.emplace_back(std::move(q.todo.front()));
    q.todo.pop_front();
    ++q.done;
    work();
  }
}
void drain(const Stream& s) {
  Hold hold(lock);
  auto& q = queue_of(s);
  drain(q, q.added);
}
void drain_device(DeviceIndex d) {
  Hold hold(lock);
  for (auto& [key, q] : queues)
    if (key.first == d || d < 0) drain(q, q.added);
}
void enqueue(const Stream& s, std::function<void()> work) {
  Hold hold(lock);
  auto& q = queue_of(s);
  q.todo.push_back(std::move(work));
  ++q.added;
  if (!LAZY) drain(s);
}
struct Event {
  Queue* queue = nullptr;
  uint64_t until = 0;
  double time = 0;
  Clock before;
};

// ---- order. An operation comes after another one of the same stream, after what its stream has waited for by events,
// and after what the host had waited for. Two that use the same memory, of which one writes, must be ordered.
Clock host_before;
void join(Clock& clock, const Clock& other) {
  for (auto& [queue, number] : other) clock[queue] = std::max(clock[queue], number);
}
Event reached(Queue& q) { return {&q, q.added, 0, q.before}; }
void join(Clock& clock, const Event& e) {
  if (!e.queue) return;
  join(clock, e.before);
  clock[e.queue] = std::max(clock[e.queue], e.until);
}
void host_waits(const Stream& s) {
  Hold hold(lock);
  drain(s);
  join(host_before, reached(queue_of(s)));
}
void host_waits_for_device(DeviceIndex d) {
  Hold hold(lock);
  drain_device(d);
  for (auto& [key, q] : queues)
    if (key.first == d || d < 0) join(host_before, reached(q));
}
std::string name_of(Queue* queue) {
  for (auto& [key, q] : queues)
    if (&q == queue)
      return (key.second < 0 ? "process group " : "stream ") + std::to_string(std::abs(key.second)) + " of device " +
             std::to_string(key.first);
  return "?";
}
struct Use {
  size_t begin, end;  // bytes of the region
  Queue* queue;
  uint64_t number;
  bool writes;
  std::string what;
};
// Compare the last operation of a stream with the earlier uses of a block, and add it to them. What it makes superfluous
// is dropped: whoever waits for it has waited for that too.
void add_use(std::vector<Use>& uses, Use mine) {
  auto after = [&](const Clock& clock, const Use& u) {
    auto it = clock.find(u.queue);
    return it != clock.end() && it->second >= u.number;
  };
  std::vector<Use> kept;
  for (auto& u : uses) {
    if (after(host_before, u)) continue;
    const bool ordered = u.queue == mine.queue || after(mine.queue->before, u);
    if (!ordered && u.begin < mine.end && mine.begin < u.end && (u.writes || mine.writes))
      fault(mine.what + " on " + name_of(mine.queue) + (mine.writes ? " writes" : " reads") + " memory that " + u.what +
            " on " + name_of(u.queue) + (u.writes ? " writes" : " reads") + ", and has not waited for it");
    const bool covered = mine.begin <= u.begin && u.end <= mine.end && (mine.writes || !u.writes);
    if (!ordered || !covered) kept.push_back(u);
  }
  kept.push_back(std::move(mine));
  uses = std::move(kept);
}

// ---- allocator: per device a region; freed blocks are kept for the stream that allocated them
struct Block {
  size_t size;
  Stream stream;
  std::vector<Event> users;
};
struct Pool {
  Region* region = nullptr;
  std::map<size_t, size_t> gaps;  // offset -> size, never allocated or given back
  std::map<std::pair<c10::StreamId, size_t>, std::vector<size_t>> cached;
  std::map<size_t, Block> used;
  std::vector<std::pair<size_t, Block>> limbo;
  std::map<size_t, std::vector<Use>> uses;  // by the offset of the block; they outlive it, until its memory is given back
  uint64_t* shared = nullptr;               // what each process has reserved; see `reserve`
  int file = -1, slot = -1;
  size_t allocated = 0, reserved = 0, peak = 0, peak_reserved = 0;
  pid_t owner = 0;
};
std::map<DeviceIndex, Pool> pools;

// All processes of a run share the memory of a device: each writes what it has reserved into a slot of a file, on which
// it holds a lock for as long as it lives.
constexpr int SLOTS = 1024;
bool locked(int fd, int how, int slot) {
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_start = slot;
  range.l_len = 1;
  return fcntl(fd, how, &range) == 0 && (how != F_GETLK || range.l_type != F_UNLCK);
}
void open_shared(Pool& p, const std::string& id) {
  p.file = ::open(session_file("device-" + id).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (p.file < 0 || ftruncate(p.file, SLOTS * sizeof(uint64_t))) return;
  p.shared = (uint64_t*)mmap(nullptr, SLOTS * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, p.file, 0);
  TORCH_CHECK(p.shared != MAP_FAILED, "mmap: ", strerror(errno));
  for (p.slot = 0; p.slot < SLOTS && !locked(p.file, F_SETLK, p.slot);) ++p.slot;
  TORCH_CHECK(p.slot < SLOTS, "too many processes use device ", id);
  p.shared[p.slot] = 0;
}
size_t reserved_by_others(Pool& p) {
  size_t sum = 0;
  for (int slot = 0; p.shared && slot < SLOTS; ++slot) {
    if (slot == p.slot || !p.shared[slot]) continue;
    if (locked(p.file, F_GETLK, slot))
      sum += p.shared[slot];
    else
      p.shared[slot] = 0;  // that process has ended
  }
  return sum;
}
bool reserve(Pool& p, size_t size) {
  if (p.shared) locked(p.file, F_SETLKW, SLOTS);
  const bool free = reserved_by_others(p) + p.reserved + size <= TOTAL;
  if (free) p.peak_reserved = std::max(p.peak_reserved, p.reserved += size);
  if (p.shared) {
    p.shared[p.slot] = p.reserved;
    struct flock range {};
    range.l_type = F_UNLCK;
    range.l_start = SLOTS;
    range.l_len = 1;
    fcntl(p.file, F_SETLK, &range);
  }
  return free;
}
size_t free_memory(Pool& p) {
  const size_t used = p.reserved + reserved_by_others(p);
  return used < TOTAL ? TOTAL - used : 0;
}
size_t rounded(size_t n) { return std::max<size_t>(512, (n + 511) / 512 * 512); }

Pool& pool_of(DeviceIndex d) {
  auto& p = pools[d];
  if (!p.region || p.owner != getpid()) {  // a forked process has a device of its own
    p = Pool{};
    ids_are_fixed = ids_are_fixed || !ids().empty();
    p.owner = getpid();
    int fd = memfd_create("simdevice", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && !ftruncate(fd, TOTAL), "memfd: ", strerror(errno));
    p.region = &new_region(fd, 0, TOTAL, d);
    p.gaps[0] = TOTAL;
    open_shared(p, ids()[d]);
  }
  return p;
}
void give_back(Pool& p, size_t at, size_t size) {
  const size_t end = at + size;
  size_t begin = at, rest = size;
  auto next = p.gaps.lower_bound(at);
  if (next != p.gaps.end() && end == next->first) {
    rest += next->second;
    next = p.gaps.erase(next);
  }
  if (next != p.gaps.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == at) {
      begin = before->first;
      rest += before->second;
    }
  }
  p.gaps[begin] = rest;
  // madvise clears whole pages, and a page may have other blocks: only pages that are all free
  auto down = [](size_t n) { return n / 4096 * 4096; };
  auto up = [&](size_t n) { return down(n + 4095); };
  const size_t from = std::max(down(at), up(begin)), to = std::min(up(end), down(begin + rest));
  if (from < to) madvise(p.region->shadow + from, to - from, MADV_REMOVE);
}
void release(void* ptr) {
  if (!ptr) return;
  Hold hold(lock);
  auto* r = region_of(ptr);
  if (!r) return;
  auto& p = pools[r->device];
  size_t at = (char*)ptr - r->base;
  auto it = p.used.find(at);
  if (it == p.used.end()) return;
  p.allocated -= it->second.size;
  auto block = std::move(it->second);
  p.used.erase(it);
  if (block.users.empty())
    p.cached[{block.stream.id(), block.size}].push_back(at);
  else
    p.limbo.emplace_back(at, std::move(block));
}
void settle(Pool& p, bool wait) {
  auto limbo = std::move(p.limbo);
  p.limbo.clear();
  for (auto& [at, block] : limbo) {
    bool over = true;
    for (auto& e : block.users) {
      if (wait) drain(*e.queue, e.until);
      over = over && e.queue->done >= e.until;
    }
    for (auto& e : block.users)
      if (over) join(host_before, e);
    if (over)
      p.cached[{block.stream.id(), block.size}].push_back(at);
    else
      p.limbo.emplace_back(at, block);
  }
}
void empty_cache(DeviceIndex d) {
  host_waits_for_device(d);  // with a lock of its own, so that what has been done has given its memory back
  Hold hold(lock);
  auto& p = pool_of(d);
  settle(p, true);
  for (auto& [key, list] : p.cached)
    for (auto at : list) {
      give_back(p, at, key.second);
      p.uses.erase(at);
      p.reserved -= key.second;
    }
  p.cached.clear();
  reserve(p, 0);
}
void* take_now(size_t size, DeviceIndex d) {  // null if there is no room
  Hold hold(lock);
  auto& p = pool_of(d);
  auto s = stream_of(d);
  size_t at = SIZE_MAX;
  settle(p, false);
  auto& list = p.cached[{s.id(), size}];
  if (!list.empty()) {
    at = list.back();
    list.pop_back();
  } else
    for (auto& [begin, room] : p.gaps)
      if (room >= size) {
        if (!reserve(p, size)) break;
        at = begin;
        auto rest = room - size;
        p.gaps.erase(begin);
        if (rest) p.gaps[at + size] = rest;
        break;
      }
  if (at == SIZE_MAX) return nullptr;
  p.used.emplace(at, Block{size, s, {}});
  p.allocated += size;
  p.peak = std::max(p.peak, p.allocated);
  char* shadow = p.region->shadow + at;
  if (inside)
    memset(shadow, 0xFF, size);
  else
    enqueue(s, [shadow, size] { memset(shadow, 0xFF, size); });  // NaN: what nobody wrote is noticed
  auto& q = queue_of(s);
  add_use(p.uses[at], {at, at + size, &q, q.added, true, "an allocation"});
  return p.region->base + at;
}
void* take(size_t n, DeviceIndex d) {
  if (!n) return nullptr;
  if (auto* memory = take_now(rounded(n), d)) return memory;
  empty_cache(d);
  if (auto* memory = take_now(rounded(n), d)) return memory;
  Hold hold(lock);
  auto& p = pool_of(d);
  auto mib = [](size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
  C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory. Tried to allocate " + mib(n) + ". GPU " + std::to_string(d) +
                                        " has a total capacity of " + mib(TOTAL) + " of which " + mib(free_memory(p)) +
                                        " is free. This process has " + mib(p.reserved) + " memory in use. (simulated)");
}
struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    auto* p = take(n, the_device);
    return {p, p, &release, Device(KIND, the_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(host(to), host(from), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(the_device); }
  void recordStream(const c10::DataPtr& p, Stream s) override {
    Hold hold(lock);
    auto* r = region_of(p.get());
    if (!r) return;
    auto& pool = pools[r->device];
    auto it = pool.used.find((char*)p.get() - r->base);
    if (it != pool.used.end() && it->second.stream.id() != s.id()) {
      auto& q = queue_of(s);
      it->second.users.push_back({&q, UINT64_MAX});
      it->second.users.back().until = q.added;
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override {
    Hold hold(lock);
    auto& p = pool_of(d);
    p.peak = p.allocated;
    p.peak_reserved = p.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override { 
    Hold hold(lock);
    return {free_memory(pool_of(d)), TOTAL};
  }
} allocator;

// ---- pinned memory
std::map<char*, size_t> pinned;
std::set<char*> registered;
bool is_pinned(const void* p) {
  Hold hold(lock);
  auto it = pinned.upper_bound((char*)p);
  if (it == pinned.begin()) return false;
  --it;
  return (char*)p < it->first + it->second;
}
bool is_registered(const void* p) {
  Hold hold(lock);
  auto it = pinned.upper_bound((char*)p);
  if (it == pinned.begin()) return false;
  --it;
  return (char*)p < it->first + it->second && registered.count(it->first);
}
void unpin(void* p) {
  {
    Hold hold(lock);
    pinned.erase((char*)p);
  }
  free(p);
}
struct SimHostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(DeviceType::CPU)};
    void* p = nullptr;
    TORCH_CHECK(!posix_memalign(&p, 4096, n));
    memset(p, 0xFF, n);
    Hold hold(lock);
    pinned[(char*)p] = n;
    return {p, p, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} host_allocator;

// ---- random numbers
struct SimGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  SimGenerator(DeviceIndex d, at::Generator g)
      : c10::GeneratorImpl(Device(KIND, d), c10::DispatchKeySet(c10::DispatchKey::KEY)), inner(std::move(g)) {}
  void set_current_seed(uint64_t s) override { inner.set_current_seed(s); }
  void set_offset(uint64_t o) override { inner.set_offset(o); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override { return new SimGenerator(device().index(), inner.clone()); }
  static DeviceType device_type() { return KIND; }
};
at::Generator new_generator(DeviceIndex d) {
  return at::make_generator<SimGenerator>(d, at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
}
const at::Generator& default_generator(DeviceIndex d) {
  static std::map<DeviceIndex, at::Generator> all;
  Hold hold(lock);
  if (d < 0) d = the_device;
  auto it = all.find(d);
  if (it == all.end()) it = all.emplace(d, new_generator(d)).first;
  return it->second;
}

// ---- torch's view of the device
#ifdef SIMDEVICE_NPU
void resize_storage(c10::StorageImpl* s, size_t n);
struct Hooks final : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    resize_storage(s.unsafeGetStorageImpl(), n);
  }
#else
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return count() > 0; }
  int getNumGPUs() const override { return count(); }
  DeviceIndex current_device() const override { return the_device; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(DeviceIndex d) const override { host_waits_for_device(d); }
  std::string showConfig() const override { return "simulated"; }
#endif
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count(); }
  DeviceIndex getCurrentDevice() const override { return the_device; }
  void setCurrentDevice(DeviceIndex d) const override { the_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = the_device;
    if (d >= 0) the_device = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  Device getDeviceFromPtr(void* p) const override {
    auto* r = region_of(p);
    return r ? Device(KIND, r->device) : Device(DeviceType::CPU);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d < 0 ? the_device : d); }
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device d) const override {
    auto old = the_device;
    if (d.index() >= 0) the_device = d.index();
    return Device(KIND, old);
  }
  Device getDevice() const override { return Device(KIND, the_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < count(), "CUDA error: invalid device ordinal");
    if (d.index() >= 0) the_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) the_device = d.index();
  }
  Stream getStream(Device d) const override { return stream_of(d.index()); }
  Stream getDefaultStream(Device d) const override {
    return Stream(Stream::UNSAFE, Device(KIND, d.index() < 0 ? the_device : d.index()), 0);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    Hold hold(lock);
    return Stream(Stream::UNSAFE, Device(KIND, d.index() < 0 ? the_device : d.index()), next_stream++);
  }
  Stream exchangeStream(Stream s) const override {
    auto old = stream_of(s.device_index());
    current[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return (void*)s.id(); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Hold hold(lock);
    auto& q = queue_of(s);
    if (!*e) *e = new Event;
    *(Event*)*e = reached(q);
    ((Event*)*e)->time = (double)clock() / CLOCKS_PER_SEC * 1e3;
  }
  void block(void* e, const Stream& s) const override {
    if (!e) return;
    Event copy = *(Event*)e;
    if (!copy.queue || copy.queue == &queue_of(s)) return;
    Hold hold(lock);
    enqueue(s, [copy] { drain(*copy.queue, copy.until); });
    join(queue_of(s).before, copy);
  }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    Hold hold(lock);
    auto* v = (Event*)e;
    if (v->queue->done < v->until) return false;
    join(host_before, *v);
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  bool queryStream(const Stream& s) const override {
    Hold hold(lock);
    auto& q = queue_of(s);
    if (q.done < q.added) return false;
    join(host_before, reached(q));
    return true;
  }
  void synchronizeStream(const Stream& s) const override {
    happened("sync:stream");
    host_waits(s);
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    happened("sync:event");
    auto v = *(Event*)e;
    Hold hold(lock);
    drain(*v.queue, v.until);
    join(host_before, v);
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    happened("sync:device");
    host_waits_for_device(d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { allocator.recordStream(p, s); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return ((Event*)b)->time - ((Event*)a)->time;
  }
};

const bool installed = [] {  // when the file is loaded: torch asks for the hooks once, while it is imported
#ifdef SIMDEVICE_NPU
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#else
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs a) -> std::unique_ptr<at::CUDAHooksInterface> {
    return std::make_unique<Hooks>(a);
  });
#endif
  c10::impl::DeviceGuardImplRegistrar registrar(KIND, new Guard);
  c10::SetAllocator(KIND, &allocator, 1);
  at::setHostAllocator(KIND, &host_allocator, 1);
  return true;
}();

// ---- operators
struct Below {  // plain CPU operators, whatever modes the caller is in
  c10::impl::ExcludeDispatchKeyGuard python{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize})};
  at::AutoDispatchBelowADInplaceOrView autograd;
};
at::Tensor seen(const at::Tensor& t) {  // the same memory as a CPU tensor
  if (!t.defined() || t.device().type() != KIND) return t;
  auto a = at::from_blob(host(t.const_data_ptr()), t.sizes(), t.strides(),
                         t.options().device(at::kCPU).pinned_memory(false).requires_grad(false));
  if (t.is_conj()) a._set_conj(true);
  if (t.is_neg()) a._set_neg(true);
  return a;
}
void use(const at::Tensor& t, Queue& q, bool writes, const std::string& what) {  // by the last operation of a stream
  if (!t.defined() || t.device().type() != KIND || t.layout() != at::kStrided || !t.has_storage() || !t.numel()) return;
  Hold hold(lock);
  auto* first = (char*)t.const_data_ptr();
  auto* r = region_of(first);
  if (!r) return;
  auto& p = pools[r->device];
  if (p.region != r) return;  // memory of another process
  size_t elements = 1, at = first - r->base;
  for (int64_t i = 0; i < t.dim(); ++i) elements += (t.size(i) - 1) * t.stride(i);
  auto block = p.used.upper_bound(at);
  if (block == p.used.begin()) return;
  --block;
  add_use(p.uses[block->first], {at, at + elements * t.itemsize(), &q, q.added, writes, what});
}
Queue& start_at_once(const Stream& s) {  // an operation that happens now, after what its stream has to do before
  Hold hold(lock);
  drain(s);
  auto& q = queue_of(s);
  ++q.added;
  ++q.done;
  return q;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src) || !self.numel()) return self;
  const bool to = self.device().type() == KIND, from = src.device().type() == KIND;
  if (src.device().type() == DeviceType::Meta) return self;
  TORCH_CHECK(self.device().type() != DeviceType::Meta, "copy_ to meta");
  auto s = stream_of(to ? self.device().index() : src.device().index());
  Below below;
  if (inside) {
    seen(self).copy_(seen(src));
    return self;
  }
  if (to && from) {
    Hold hold(lock);
    const bool peers = src.device() != self.device();
    auto there = stream_of(src.device().index());
    if (peers) {  // the two streams wait for each other, before and after
      drain(there);
      join(queue_of(s).before, reached(queue_of(there)));
      copied("copy:p2p", self.nbytes());
    } else
      moved["copy:d2d"] += self.nbytes();
    auto& q = start_at_once(s);
    use(src, q, false, "a copy");
    use(self, q, true, "a copy");
    if (peers) join(queue_of(there).before, reached(q));
    seen(self).copy_(seen(src));
    return self;
  }
  const bool plain = self.dtype() == src.dtype() && self.sizes() == src.sizes() && self.strides() == src.strides() &&
                     self.is_non_overlapping_and_dense() && !src.is_conj() && !src.is_neg();
  const auto& there = to ? src : self;
  const bool pin = is_pinned(there.const_data_ptr());
  if (to) {
    if (non_blocking && plain && pin) {
      copied("copy:h2d async", self.nbytes());
      char* d = host(self.data_ptr());
      const void* p = src.const_data_ptr();
      size_t n = src.numel() * src.itemsize();
      if (is_registered(p)) {  // torch does not know this memory: nothing keeps it until the copy is done
        auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>(src.storage().getWeakStorageImpl());
        enqueue(s, [d, p, n] {
          if (!is_pinned(p)) {
            fault("h2d copy from host memory that was freed before the copy was done");
            return;
          }
          memcpy(d, p, n);
        });
      } else {
        auto keep = src.storage();
        enqueue(s, [d, p, n, keep] { memcpy(d, p, n); });
      }
      use(self, queue_of(s), true, "a copy from the host");
    } else {
      copied(non_blocking ? "copy:h2d staged" : "copy:h2d sync", self.nbytes());
      auto tmp =
          at::empty_strided(self.sizes(), self.strides(), src.options().dtype(self.dtype()).pinned_memory(false));
      tmp.copy_(src.expand_as(self));
      auto a = seen(self);
      enqueue(s, [a, tmp]() mutable {
        Below b;
        a.copy_(tmp);
      });
      use(self, queue_of(s), true, "a copy from the host");
      if (!non_blocking) host_waits(s);
    }
    return self;
  }
  if (non_blocking && plain && pin) {
    copied("copy:d2h async", self.nbytes());
    void* p = self.data_ptr();
    char* d = host(src.const_data_ptr());
    size_t n = src.numel() * src.itemsize();
    if (is_registered(p))
      enqueue(s, [d, p, n] {
        if (!is_pinned(p)) {
          fault("d2h copy to host memory that was freed before the copy was done");
          return;
        }
        memcpy(p, d, n);
      });
    else {
      auto keep = self.storage();
      enqueue(s, [d, p, n, keep] { memcpy(p, d, n); });
    }
    use(src, queue_of(s), false, "a copy to the host");
    return self;
  }
  copied(non_blocking ? "copy:d2h non_blocking but waits" : "copy:d2h sync", self.nbytes());
  use(src, start_at_once(s), false, "a copy to the host");
  host_waits(s);
  self.copy_(seen(src));
  return self;
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto d = dst;
  copy_(d, self, non_blocking);
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  auto d = dst;
  copy_(d, self, false);
  return dst;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  auto d = c10::device_or_default(device);
  c10::DeviceGuard guard(d);
  TORCH_CHECK(d.index() < count(), "CUDA error: invalid device ordinal");
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::KEY),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  auto d = c10::device_or_default(device);
  c10::DeviceGuard guard(d);
  TORCH_CHECK(d.index() < count(), "CUDA error: invalid device ordinal");
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::KEY),
                                           c10::dtype_or_default(dtype));
}
void resize_storage(c10::StorageImpl* s, size_t n) {
  c10::DeviceGuard guard(s->device());
  auto old = s->nbytes();
  auto data = allocator.allocate(n);
  if (auto size = std::min(old, n)) {
    start_at_once(stream_of(s->device().index()));
    memcpy(host(data.get()), host(s->data()), size);
  }
  s->set_data_ptr_noswap(std::move(data));
  s->set_nbytes(n);
}
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() == size) return self;
  impl->set_sizes_contiguous(size);
  size_t need = self.numel() ? (self.numel() + self.storage_offset()) * self.itemsize() : 0;
  if (self.storage().nbytes() < need) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}
at::Scalar local_scalar(const at::Tensor& self) {
  if (!inside) {
    happened("host read: item()");
    auto s = stream_of(self.device().index());
    use(self, start_at_once(s), false, "item()");
    host_waits(s);
  }
  Below below;
  return seen(self).item();
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, source, 0, n, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(),
                                      source.strides());
}
at::Tensor& set_none(at::Tensor& self) {
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, &allocator, true);
  return at::native::set_storage_cpu_(self, s, 0, {0}, {});
}

const std::set<std::string> MIXED = {"aten::index.Tensor",        "aten::index_put_", "aten::_index_put_impl_",
                                     "aten::_index_put_impl.out", "aten::index_put",  "aten::_unsafe_index.Tensor",
                                     "aten::index.Tensor_out"};
const std::set<std::string> WAITS = {
    "aten::nonzero",    "aten::masked_select", "aten::_unique2", "aten::unique_consecutive",
    "aten::unique_dim", "aten::equal",         "aten::bincount", "aten::repeat_interleave.Tensor",
    "aten::is_nonzero"};

// Before it writes, CUDA looks for the true places of masks, and copies indices and a number from pageable memory: the
// host waits. (To read, torch itself does so in the operators that it calls first.)
void count_waits_of_index_put(at::ArrayRef<c10::IValue> args) {
  const auto &self = args[0].toTensor(), &value = args[2].toTensor();
  const bool number = value.numel() == 1 && !args[3].toBool();
  bool masks = true;
  int copied = 0, searched = 0;
  for (std::optional<at::Tensor> t : args[1].toOptionalTensorList()) {
    if (!t || !t->defined()) continue;
    const bool mask = t->scalar_type() == at::kBool || t->scalar_type() == at::kByte;
    const bool here = t->device() == self.device();
    masks = masks && mask;
    searched += mask && here;
    copied += !here;
  }
  if (number && masks) return;  // it is masked_fill_
  copied += value.dim() == 0 && value.device() != self.device();
  if (searched) counts["host read: index_put by a mask"] += searched;
  if (copied) counts["copy:h2d sync"] += copied;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  auto args = torch::jit::last(stack, n);
  std::string name = op.operator_name().name;
  if (!op.operator_name().overload_name.empty()) name += "." + op.operator_name().overload_name;
  std::optional<Device> first;
  auto look = [&](const at::Tensor& t) {
    if (t.defined() && t.device().type() == KIND && !first) first = t.device();
  };
  auto check = [&](const at::Tensor& t) {
    if (!t.defined() || !first || t.device() == *first || t.dim() == 0) return;
    if (t.device().type() == DeviceType::CPU && (MIXED.count(name) || MIXED.count(op.operator_name().name))) return;
    TORCH_CHECK(!STRICT, "Expected all tensors to be on the same device, but found at least two devices, ", *first,
                " and ", t.device(), "! (", name, ")");
  };
  auto each = [](at::ArrayRef<c10::IValue> args, auto f) {
    for (const auto& v : args) {
      if (v.isTensor())
        f(v.toTensor());
      else if (v.isTensorList())
        for (const at::Tensor& t : v.toTensorList()) f(t);
      else if (v.isOptionalTensorList())
        for (std::optional<at::Tensor> t : v.toOptionalTensorList()) {
          if (t) f(*t);
        }
    }
  };
  each(args, look);
  if (!inside) each(args, check);
  auto s = stream_of(first ? first->index() : the_device);
  if (!inside) {
    Hold hold(lock);
    auto& q = start_at_once(s);
    for (size_t i = 0; i < n; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      bool writes = alias && alias->isWrite();
      if (alias)
        for (auto& inner : alias->containedTypes()) writes = writes || inner.isWrite();
      each(args.slice(i, 1), [&](const at::Tensor& t) { use(t, q, writes, name); });
    }
    counts["kernels"]++;
    const bool told = name == "aten::repeat_interleave.Tensor" && !args[1].isNone();  // its output's size
    if (WAITS.count(name) && !told) {
      counts["host read: " + name]++;
      host_waits(s);
    }
    if (name == "aten::_index_put_impl_") count_waits_of_index_put(args);
  }
  std::optional<at::ScalarType> counted;  // CUDA counts integers, the CPU does not
  if (name == "aten::histc" && c10::isIntegralType(args[0].toTensor().scalar_type(), false)) {
    counted = args[0].toTensor().scalar_type();
    (*stack)[stack->size() - n] = args[0].toTensor().to(at::kDouble);
  }
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  bool given = false;
  const auto begin = stack->size() - n;
  for (size_t i = 0; random && i < n; ++i) {
    auto& v = (*stack)[begin + i];
    if (v.isGenerator()) {
      auto g = v.toGenerator();
      given = true;
      TORCH_CHECK(g.device().type() == KIND, "Expected a 'cuda' device type for generator but found '",
                  g.device().type(), "'");
      v = c10::IValue(static_cast<SimGenerator*>(g.unsafeGetGeneratorImpl())->inner);
    }
  }
  struct In {
    In() { ++inside; }
    ~In() { --inside; }
  } in;
  if (random && !given) {
    auto mine = static_cast<SimGenerator*>(default_generator(s.device_index()).unsafeGetGeneratorImpl())->inner;
    auto cpu = at::detail::getDefaultCPUGenerator();
    auto saved = cpu.get_state();
    cpu.set_state(mine.get_state());
    at::native::cpu_fallback(op, stack, false);
    mine.set_state(cpu.get_state());
    cpu.set_state(saved);
  } else
    at::native::cpu_fallback(op, stack, false);
  if (counted) stack->back() = stack->back().toTensor().to(*counted);
}

// ---- nccl: gloo, which works on copies. What a collective writes is in device memory when it is waited for, and garbage
// before. Each group has a stream of its own.
struct SimNccl;
struct Done : c10d::Work {
  c10::intrusive_ptr<c10d::Work> inner;
  std::vector<at::Tensor> outputs, inputs;  // the inputs are kept until it is waited for, as nccl's are
  Device device;
  Event end;
  Done(std::vector<at::Tensor> outputs, Stream stream) : outputs(std::move(outputs)), device(stream.device()) {
    Hold hold(lock);
    end = reached(queue_of(stream));
  }
  bool isCompleted() override {
    if (inner && !inner->isCompleted()) return false;
    Hold hold(lock);
    drain(*end.queue, end.until);
    join(host_before, end);
    return true;
  }
  bool isSuccess() const override { return true; }  // as nccl's, which only the group's error says
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto f = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                      std::vector<Device>{device});
    f->markCompleted(c10::IValue(outputs));
    return f;
  }
};
struct SimNccl : c10d::Backend {
  struct Opts : c10d::Backend::Options {
    explicit Opts() : Options("nccl") {}
    bool is_high_priority_stream = false;
  };
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Opts> opts;
  uint64_t number = 0;
  const c10::StreamId stream = [] {
    static std::atomic<c10::StreamId> last{0};
    return --last;
  }();
  const bool only_reports;  // TORCH_NCCL_ASYNC_ERROR_HANDLING=2: an error ends nothing, and the group has it
  std::shared_ptr<std::atomic<bool>> failed = std::make_shared<std::atomic<bool>>(false);
  bool aborted = false;
  SimNccl(c10::intrusive_ptr<c10d::Backend> g, int rank, int size, c10::intrusive_ptr<Opts> o)
      : Backend(rank, size),
        gloo(std::move(g)),
        opts(std::move(o)),
        only_reports(env("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3) == 2) {}
  using W = c10::intrusive_ptr<c10d::Work>;
  using T = at::Tensor;
  using Ts = std::vector<T>;
  using Tss = std::vector<Ts>;
  const std::string getBackendName() const override { return "nccl"; }
  Stream stream_on(Device d) const { return Stream(Stream::UNSAFE, d, stream); }
  W done(Ts t) { return c10::make_intrusive<Done>(t, stream_on(t[0].device())); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return opts; }
  void setTimeout(std::chrono::milliseconds t) override { opts->timeout = t; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number; }
  void abort() override {
    aborted = true;
    gloo->abort();
  }
  T in(const T& t) {
    TORCH_CHECK(!aborted, "NCCL communicator was aborted");
    TORCH_CHECK(t.device().type() == KIND, "No backend type associated with device type ", t.device().type());
    TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
    drain(stream_of(t.device().index()));
    Below below;
    return seen(t).clone();
  }
  Ts in(const Ts& ts) {
    Ts r;
    for (auto& t : ts) r.push_back(in(t));
    return r;
  }
  static Ts flat(const Tss& lists) {
    Ts r;
    for (auto& l : lists) r.insert(r.end(), l.begin(), l.end());
    return r;
  }
  // Results are written when the comm stream is waited for; `late` computes them from what gloo has made.
  struct Once : c10d::Work {  // gloo's sends and receives can be waited for only once
    W inner;
    std::mutex mutex;  // of the rest
    bool waited = false;
    std::exception_ptr error;
    explicit Once(W w) : inner(std::move(w)) {}
    bool isCompleted() override { return inner->isCompleted(); }
    bool wait(std::chrono::milliseconds t) override {
      std::lock_guard<std::mutex> one(mutex);
      if (!waited) try {
          inner->wait(t);
        } catch (...) {
          error = std::current_exception();
        }
      waited = true;
      if (error) std::rethrow_exception(error);
      return true;
    }
  };
  W start(W given, const Ts& outputs, const Ts& results, Ts inputs, std::function<void()> late = {}) {
    ++number;
    W work = c10::make_intrusive<Once>(std::move(given));
    auto device = (outputs.empty() ? inputs : outputs)[0].device();
    auto stream = stream_on(device);
    Hold hold(lock);
    auto& q = queue_of(stream);
    join(q.before, reached(queue_of(stream_of(device.index()))));
    {
      Below below;
      for (auto& t : outputs)
        if (t.numel()) memset(seen(t).data_ptr(), 0xFF, t.nbytes());
    }
    enqueue(stream, [work, outputs, results, late, failed = failed] {
      try {
        work->wait(kNoTimeout);
      } catch (const std::exception&) {
        *failed = true;  // and the outputs stay garbage
        return;
      }
      Below below;
      if (late) late();
      for (size_t i = 0; i < outputs.size(); ++i) seen(outputs[i]).copy_(results[i].view(outputs[i].sizes()));
    });
    size_t nbytes = 0;
    for (auto& t : inputs) use(t, q, false, "a collective");
    for (auto& t : outputs) use(t, q, true, "a collective");
    for (auto& t : outputs.empty() ? inputs : outputs) nbytes += t.nbytes();
    copied("collective", nbytes);
    auto done = c10::make_intrusive<Done>(outputs, stream);
    done->inner = only_reports ? W(c10::make_intrusive<Reported>(work)) : work;
    done->inputs = std::move(inputs);
    return done;
  }
  struct Reported : c10d::Work {  // completes on failure as well
    W inner;
    explicit Reported(W w) : inner(std::move(w)) {}
    bool isCompleted() override { return inner->isCompleted(); }
    bool wait(std::chrono::milliseconds t) override {
      try {
        inner->wait(t);
      } catch (const std::exception&) {
      }
      return true;
    }
  };
  template <class O>
  bool average(O& o) {  // what gloo lacks
    if (o.reduceOp == c10d::ReduceOp::AVG) {
      o.reduceOp = c10d::ReduceOp::SUM;
      return true;
    }
    TORCH_CHECK(!(o.reduceOp == c10d::ReduceOp::PREMUL_SUM), "premul");
    return false;
  }
  std::function<void()> scaled(bool avg, Ts results) {
    if (!avg) return {};
    return [results, size = size_] {
      for (auto t : results) t.div_(size);
    };
  }
  W broadcast(Ts& t, const c10d::BroadcastOptions& o) override {
    auto x = in(t);
    if (rank_ == o.rootRank) return start(gloo->broadcast(x, o), {}, {}, t);
    return start(gloo->broadcast(x, o), t, x, {});
  }
  W allreduce(Ts& t, const c10d::AllreduceOptions& given) override {
    auto o = given;
    bool avg = average(o);
    auto x = in(t);
    return start(gloo->allreduce(x, o), t, x, t, scaled(avg, x));
  }
  W allreduce_coalesced(Ts& t, const c10d::AllreduceCoalescedOptions& o) override {
    for (auto& x : t) {
      Ts one{x};
      allreduce(one, o);
    }
    return done(t);
  }
  W reduce(Ts& t, const c10d::ReduceOptions& given) override {
    auto o = given;
    bool avg = average(o);
    auto x = in(t);
    if (rank_ != o.rootRank) return start(gloo->reduce(x, o), {}, {}, t);
    return start(gloo->reduce(x, o), t, x, t, scaled(avg, x));
  }
  W allgather(Tss& out, Ts& t, const c10d::AllgatherOptions& o) override {
    auto x = in(t);
    Tss y;
    for (auto& l : out) y.push_back(in(l));
    return start(gloo->allgather(y, x, o), flat(out), flat(y), t);
  }
  W _allgather_base(T& out, T& t, const c10d::AllgatherOptions& o) override {
    auto x = in(t), y = in(out);
    if (x.numel() * size_ == 0) return done({out});
    return start(gloo->_allgather_base(y, x, o), {out}, {y}, {t});
  }
  W allgather_into_tensor_coalesced(Ts& out, Ts& t, const c10d::AllgatherOptions& o) override {
    for (size_t i = 0; i < t.size(); ++i) _allgather_base(out[i], t[i], o);
    return done(out);
  }
  W gather(Tss& out, Ts& t, const c10d::GatherOptions& o) override {
    auto x = in(t);
    Tss y;
    for (auto& l : out) y.push_back(in(l));
    return start(gloo->gather(y, x, o), flat(out), flat(y), t);
  }
  W scatter(Ts& out, Tss& t, const c10d::ScatterOptions& o) override {
    auto y = in(out);
    Tss x;
    for (auto& l : t) x.push_back(in(l));
    return start(gloo->scatter(y, x, o), out, y, flat(t));
  }
  W _reduce_scatter_base(T& out, T& t, const c10d::ReduceScatterOptions& given) override {
    auto x = in(t);
    in(out);
    return sum_scattered(out, x, given, {t});
  }
  W sum_scattered(T& out, T x, const c10d::ReduceScatterOptions& given, Ts inputs) {
    c10d::AllreduceOptions o;
    o.reduceOp = given.reduceOp;
    bool avg = average(o);
    Below below;
    Ts sums{x.clone()};
    auto mine = sums[0].view(-1).narrow(0, out.numel() * rank_, out.numel());
    return start(gloo->allreduce(sums, o), {out}, {mine}, inputs, scaled(avg, {mine}));
  }
  W reduce_scatter(Ts& out, Tss& t, const c10d::ReduceScatterOptions& o) override {
    Ts parts;
    for (auto& x : in(t[0])) parts.push_back(x.view(-1));
    Below below;
    return sum_scattered(out[0], at::cat(parts), o, t[0]);
  }
  W reduce_scatter_tensor_coalesced(Ts& out, Ts& t, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < t.size(); ++i) _reduce_scatter_base(out[i], t[i], o);
    return done(out);
  }
  W alltoall_base(T& out, T& t, std::vector<int64_t>& a, std::vector<int64_t>& b,
                  const c10d::AllToAllOptions& o) override {
    auto y = in(out), x = in(t);
    return start(gloo->alltoall_base(y, x, a, b, o), {out}, {y}, {t});
  }
  W alltoall(Ts& out, Ts& t, const c10d::AllToAllOptions& o) override {
    Ts parts, results;
    std::vector<int64_t> a, b;
    for (auto& x : in(t)) {
      parts.push_back(x.view(-1));
      b.push_back(x.numel());
    }
    int64_t n = 0;
    for (auto& y : out) {
      a.push_back(y.numel());
      n += y.numel();
    }
    Below below;
    auto x = at::cat(parts);
    auto y = at::empty({n}, x.options());
    n = 0;
    for (auto size : a) {
      results.push_back(y.narrow(0, n, size));
      n += size;
    }
    return start(gloo->alltoall_base(y, x, a, b, o), out, results, t);
  }
  W send(Ts& t, int to, int tag) override {
    auto x = in(t);
    return start(gloo->send(x, to, tag), {}, {}, t);
  }
  W recv(Ts& t, int from, int tag) override {
    auto x = in(t);
    return start(gloo->recv(x, from, tag), t, x, {});
  }
  W barrier(const c10d::BarrierOptions& o) override {
    host_waits_for_device(the_device);
    gloo->barrier(o)->wait(kNoTimeout);
    return c10::make_intrusive<Done>(Ts{}, stream_on(Device(KIND, the_device)));
  }
};
bool Done::wait(std::chrono::milliseconds timeout) {
  if (inner) inner->wait(timeout);
  std::vector<at::Tensor> over;  // destroyed without the lock
  Hold hold(lock);
  auto here = stream_of(device.index());
  enqueue(here, [queue = end.queue, until = end.until] { drain(*queue, until); });
  join(queue_of(here).before, end);
  over.swap(inputs);
  return true;
}
}  // namespace

TORCH_LIBRARY_IMPL(_, KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, KEY, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_none);
  m.impl("record_stream",
         [](at::Tensor& t, Stream s) { allocator.recordStream(t.storage().data_ptr(), s); });
#ifdef SIMDEVICE_NPU  // as extensions do, so that a tensor may take the memory of one on the CPU, and the reverse
  m.impl("_has_compatible_shallow_copy_type", [](const at::Tensor&, const at::Tensor&) { return true; });
#endif
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("installed", [] {
    return dynamic_cast<const Hooks*>(&at::globalContext().getAcceleratorHooksInterface(KIND)) != nullptr;
  });
  m.def("init", [] { at::globalContext().lazyInitDevice(KIND); });  // before it, no memory is pinned for torch
  m.def("ids", [] { return ids(); });
  m.def("device", [] { return (int)the_device; });
  m.def("set_device", [](int d) {
    TORCH_CHECK(d < count(), "CUDA error: invalid device ordinal");
    if (d >= 0) the_device = d;
  });
  m.def("exchange_device", [](int d) {
    int old = the_device;
    if (d >= 0) the_device = d;
    return old;
  });
  m.def("stream", [](int d) {
    auto s = stream_of(d);
    return std::make_tuple((int64_t)s.id(), (int)s.device_index());
  });
  m.def("set_stream", [](int64_t id, int d) { current[d] = id; });
  m.def(
      "synchronize",
      [](int d) {
        happened("sync:device");
        host_waits_for_device(d);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("empty_cache", [] { empty_cache(the_device); }, py::call_guard<py::gil_scoped_release>());
  m.def("memory", [](int d) {
    Hold hold(lock);
    auto& p = pool_of(d);
    return std::map<std::string, size_t>{{"allocated", p.allocated}, {"reserved", p.reserved},
                                         {"peak", p.peak},           {"peak_reserved", p.peak_reserved},
                                         {"total", TOTAL},           {"free", free_memory(p)}};
  });
  m.def("reset_peak", [](int d) { allocator.resetPeakStats(d); });
  m.def("generator", [](int d) { return default_generator(d); });
  m.def("resize_storage", [](const c10::Storage& s, size_t n) { resize_storage(s.unsafeGetStorageImpl(), n); });
  m.def("counts", [](bool reset) {
    Hold hold(lock);
    auto c = counts;
    if (reset) counts.clear();
    return c;
  });
  m.def("moved", [](bool reset) {
    Hold hold(lock);
    auto m = moved;
    if (reset) moved.clear();
    return m;
  });
  m.def("faults", [] {
    Hold hold(lock);
    return faults;
  });
  m.def("opened", [] {  // regions of other processes
    Hold hold(lock);
    return std::count_if(regions.begin(), regions.end(), [](const Region& r) {
      auto p = pools.find(r.device);
      return p == pools.end() || p->second.region != &r;
    });
  });
  m.def("pin", [](size_t p, size_t n) {
    Hold hold(lock);
    if (pinned.count((char*)p)) return 712;
    pinned[(char*)p] = n;
    registered.insert((char*)p);
    return 0;
  });
  m.def("unpin", [](size_t p) {
    Hold hold(lock);
    registered.erase((char*)p);
    return pinned.erase((char*)p) ? 0 : 713;
  });
  m.def("is_device_pointer", [](size_t p) { return region_of((void*)p) != nullptr; });
  m.def("share", [](const c10::Storage& s) {
    auto* r = region_of(s.data());
    TORCH_CHECK(r, "no device memory");
    auto& p = pools[r->device];
    TORCH_CHECK(p.region == r, "memory of another process cannot be shared again");
    drain(stream_of(r->device));  // the real one records an event, which the other process waits for
    return std::make_tuple((int)r->device, (int)getpid(), r->fd, (size_t)((char*)s.data() - r->base), s.nbytes());
  });
  m.def("open", [](int pid, int fd, size_t at, size_t n, int device, py::object tensor_dtype) {
    auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    size_t begin = at / 4096 * 4096;
    int mine = ::open(path.c_str(), O_RDWR);
    TORCH_CHECK(mine >= 0, path, ": ", strerror(errno));
    auto* r = &new_region(mine, begin, std::max<size_t>(at - begin + n, 1), device);
    c10::DataPtr data(
        r->base + (at - begin), r,
        [](void* v) {
          Hold hold(lock);
          auto* r = (Region*)v;
          munmap(r->base, r->size);
          munmap(r->shadow, r->size);
          close(r->fd);
          regions.remove_if([&](Region& x) { return &x == r; });
        },
        Device(KIND, device));
    c10::Storage s(c10::Storage::use_byte_size_t(), n, std::move(data), &allocator, false);
    auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(c10::DispatchKey::KEY),
                                                      caffe2::TypeMeta::Make<uint8_t>());
    t.unsafeGetTensorImpl()->set_sizes_contiguous({(int64_t)n});
    return t;
  });
  py::class_<SimNccl::Opts, c10::intrusive_ptr<SimNccl::Opts>, c10d::Backend::Options>(m, "Options")
      .def(py::init([](bool high) {
             auto o = c10::make_intrusive<SimNccl::Opts>();
             o->is_high_priority_stream = high;
             return o;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &SimNccl::Opts::is_high_priority_stream);
  py::class_<SimNccl, c10::intrusive_ptr<SimNccl>, c10d::Backend>(m, "ProcessGroupNCCL", py::dynamic_attr())
      .def(py::init([](py::object store, int rank, int size, py::object options) {
        auto dist = py::module::import("torch.distributed");
        auto gloo = dist.attr("ProcessGroupGloo")(store, rank, size, options.attr("_timeout"));
        return c10::make_intrusive<SimNccl>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), rank, size,
                                            options.cast<c10::intrusive_ptr<SimNccl::Opts>>());
      }))
      .def_property_readonly("options", [](SimNccl& s) { return s.opts; })
      .def("_failed", [](SimNccl& s) { return s.failed->load(); })
      .def("_abort", [](SimNccl& s) { s.abort(); })
      .def("_shutdown", [](SimNccl& s) { s.aborted = true; });
}
