// The machine behind cuda_on_cpu.h: fibers, the barriers they wait at, and a block's shared memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda_on_cpu/cuda_on_cpu.h"

#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulated CUDA kernels need Linux on x86-64: fibers change places by machine code"
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

// Saves the callee-saved registers on the stack it leaves, *from, and takes those of the stack
// `to`.
extern "C" void fastbert_change_stack(void** from, void* to);
asm(R"(
.text
.globl fastbert_change_stack
.hidden fastbert_change_stack
.type fastbert_change_stack, @function
fastbert_change_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fastbert_change_stack, .-fastbert_change_stack
)");

namespace fastbert::cuda_on_cpu {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kMostShared = 227 << 10;  // of a block, from sm_90 on
constexpr size_t kGuard = 64;              // bytes between allocations that belong to none
constexpr size_t kGranule = 2;             // bytes that one entry of the shadow stands for

// --- fibers
// ---------------------------------------------------------------------------------------

enum class State { kReady, kAtBarrier, kInWarp, kEnded };

struct PendingCopy {
  void* to;
  const void* from;
  size_t bytes, valid;
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // the address sanitizer's
  int number = 0;
  dim3 index;
  State state = State::kReady;
  const char* waits_for = "";
  Site site{"the beginning of the kernel", 0};  // where it waits, or waited last
  uint32_t mask = 0;
  void* operands = nullptr;
  uint32_t block_epoch = 0;  // barriers passed, of the block and of the warp
  uint32_t warp_epoch = 0;
  std::vector<std::vector<PendingCopy>> groups;  // of asynchronous copies; the last is open

  int warp() const { return number / kWarp; }
  int lane() const { return number % kWarp; }
};

// --- shared memory
// --------------------------------------------------------------------------------

constexpr int kNobody = -1;
constexpr int kSeveral = -2;

// The last access to a granule. Several readers are remembered as such, of one warp or of many.
struct Access {
  int warp = kNobody, lane = kNobody;
  uint32_t block_epoch = 0, warp_epoch = 0;

  bool before(const Fiber& f) const {
    if (warp == kNobody || block_epoch < f.block_epoch) return true;
    return warp == f.warp() && (lane == f.lane() || warp_epoch < f.warp_epoch);
  }
};

struct Granule {
  Access writer, reader;
};

struct Allocation {
  const void* key;
  size_t begin, end;
  std::string name;
};

uint64_t seed_of_environment() {
  const char* seed = std::getenv("FASTBERT_EMULATION_SEED");
  return seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10);
}

class Machine {
 public:
  void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);
  void wait(State state, const char* waits_for, Site site);
  void block_barrier(Site site);
  void warp_collective(const char* name, uint32_t mask, void* own, Combine combine, Site site,
                       bool orders_memory);
  void* allocate(const void* key, size_t bytes, size_t alignment, const std::string& name);
  void check(const void* at, size_t bytes, size_t alignment, bool write);
  void fiber_main();

  Fiber& current() { return *current_; }
  bool running() const { return current_ != nullptr; }

  std::mutex one_launch;
  uint64_t seed = seed_of_environment();

 private:
  void run_block(dim3 block);
  void begin_block(unsigned threads, dim3 block);
  void prepare(Fiber& f);
  void resume(Fiber& f);
  Fiber& take_ready();
  void release(Fiber& f);
  [[noreturn]] void report_stuck();
  void note_read(Granule& g, const Fiber& f);
  [[noreturn]] void report_race(const Access& earlier, bool wrote, size_t offset, bool write);
  std::string place(size_t offset) const;

  std::vector<Fiber> fibers_;
  std::vector<Fiber*> ready_;
  unsigned threads_ = 0, at_barrier_ = 0;
  Fiber* current_ = nullptr;
  void* scheduler_ = nullptr;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_size_ = 0;
  const std::function<void()>* thread_ = nullptr;
  std::exception_ptr error_;
  std::mt19937_64 random_;

  alignas(128) char arena_[kMostShared + (64 << 10)];
  std::vector<Granule> shadow_ = std::vector<Granule>(sizeof(arena_) / kGranule);
  std::vector<Allocation> allocations_;
  size_t arena_end_ = 0, dynamic_bytes_ = 0, static_bytes_ = 0;
};

Machine& machine() {
  static Machine the_machine;
  return the_machine;
}

std::string text(Site site) {
  return site.line == 0 ? site.file : std::string(site.file) + ":" + std::to_string(site.line);
}

bool same(Site a, Site b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

// A stack between two pages that may not be touched.
char* new_stack() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + 2 * page, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  char* stack = static_cast<char*>(memory) + page;
  mprotect(stack, kStackBytes, PROT_READ | PROT_WRITE);
  return stack;
}

void enter_fiber() { machine().fiber_main(); }

// --- running
// --------------------------------------------------------------------------------------

void check_launch(dim3 grid, dim3 block, size_t shared_bytes) {
  const auto shown = [](dim3 d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) +
           ")";
  };
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.x > 0x7FFFFFFFu || grid.y == 0 || grid.y > 65535 || grid.z == 0 ||
      grid.z > 65535) {
    fail("a grid of " + shown(grid) + " blocks cannot be launched");
  }
  if (threads == 0 || threads > kMostThreads || threads % kWarp != 0) {
    fail("a block of " + shown(block) + " threads: 32 to 1024, in whole warps, are taken");
  }
  if (shared_bytes > kMostShared) {
    fail(std::to_string(shared_bytes) + " bytes of shared memory asked for, a block has at most " +
         std::to_string(kMostShared));
  }
}

void Machine::run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread) {
  check_launch(grid, block, shared_bytes);
  const std::lock_guard<std::mutex> lock(one_launch);
  threads_ = block.x * block.y * block.z;
  thread_ = &thread;
  dynamic_bytes_ = shared_bytes;
  random_.seed(seed);
  gridDim = grid;
  blockDim = block;
  if (fibers_.size() < threads_) fibers_.resize(threads_);
  std::vector<uint64_t> order(uint64_t{grid.x} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  if (seed != 0) std::shuffle(order.begin(), order.end(), random_);
  for (const uint64_t i : order) {
    blockIdx = dim3(static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                    static_cast<unsigned>(i / grid.x / grid.y));
    run_block(block);
  }
}

void Machine::begin_block(unsigned threads, dim3 block) {
  ready_.clear();
  at_barrier_ = 0;
  error_ = nullptr;
  allocations_.clear();
  arena_end_ = static_bytes_ = 0;
  allocate(nullptr, dynamic_bytes_, 128, "dynamic shared memory");
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = fibers_[i];
    char* stack = f.stack == nullptr ? new_stack() : f.stack;
    f = Fiber();
    f.stack = stack;
    f.number = static_cast<int>(i);
    f.index = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y);
    prepare(f);
    ready_.push_back(&f);
  }
}

// As if fastbert_change_stack had been called by nobody just before enter_fiber.
void Machine::prepare(Fiber& f) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(f.stack, kStackBytes);  // of a thread that never ended
#endif
  void** top = reinterpret_cast<void**>(f.stack + kStackBytes);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(&enter_fiber);
  std::fill(top - 8, top - 2, nullptr);
  f.stack_pointer = top - 8;
}

void Machine::run_block(dim3 block) {
  begin_block(threads_, block);
  unsigned ended = 0;
  while (ended < threads_) {
    if (ready_.empty()) report_stuck();
    Fiber& f = take_ready();
    resume(f);
    if (error_) std::rethrow_exception(error_);
    ended += f.state == State::kEnded;
  }
}

Fiber& Machine::take_ready() {
  size_t place = 0;
  if (seed != 0) place = std::uniform_int_distribution<size_t>(0, ready_.size() - 1)(random_);
  Fiber* f = ready_[place];
  ready_.erase(ready_.begin() + static_cast<ptrdiff_t>(place));
  return *f;
}

void Machine::resume(Fiber& f) {
  current_ = &f;
  threadIdx = f.index;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, f.stack, kStackBytes);
#endif
  fastbert_change_stack(&scheduler_, f.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
  current_ = nullptr;
}

void Machine::wait(State state, const char* waits_for, Site site) {
  Fiber& f = *current_;
  f.state = state;
  f.waits_for = waits_for;
  f.site = site;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(state == State::kEnded ? nullptr : &f.fake_stack,
                                 scheduler_bottom_, scheduler_size_);
#endif
  fastbert_change_stack(&f.stack_pointer, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(f.fake_stack, &scheduler_bottom_, &scheduler_size_);
#endif
}

void Machine::fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom_, &scheduler_size_);
#endif
  try {
    (*thread_)();
  } catch (...) {
    error_ = std::current_exception();
  }
  wait(State::kEnded, "", current_->site);
  std::abort();  // nobody resumes a thread that has ended
}

void Machine::release(Fiber& f) {
  f.state = State::kReady;
  ready_.push_back(&f);
}

// "32 of 64 threads, the first thread 0, wait for __syncthreads at a.cu:7; 32 of 64 threads, the
// first thread 32, have ended".
void Machine::report_stuck() {
  const auto alike = [](const Fiber& f, const Fiber& g) {
    return f.state == g.state && (f.state == State::kEnded || same(f.site, g.site));
  };
  const auto end = fibers_.begin() + threads_;
  std::string what;
  for (auto f = fibers_.begin(); f != end; ++f) {
    const auto like_f = [&](const Fiber& g) { return alike(*f, g); };
    if (std::any_of(fibers_.begin(), f, like_f)) continue;
    what += what.empty() ? "divergent threads: " : "; ";
    what += std::to_string(std::count_if(f, end, like_f)) + " of " + std::to_string(threads_) +
            " threads, the first thread " + std::to_string(f->number) + ", ";
    what += f->state == State::kEnded
                ? "have ended"
                : std::string("wait for ") + f->waits_for + " at " + text(f->site);
  }
  fail(what);
}

// --- barriers
// -------------------------------------------------------------------------------------

void Machine::block_barrier(Site site) {
  for (unsigned i = 0; at_barrier_ > 0 && i < threads_; ++i) {
    const Fiber& other = fibers_[i];
    if (other.state != State::kAtBarrier) continue;
    if (!same(other.site, site)) {
      fail("divergent __syncthreads: thread " + std::to_string(current_->number) + " at " +
           text(site) + ", thread " + std::to_string(other.number) + " at " + text(other.site));
    }
    break;
  }
  current_->state = State::kAtBarrier;
  if (++at_barrier_ == threads_) {
    at_barrier_ = 0;
    for (unsigned i = 0; i < threads_; ++i) {
      ++fibers_[i].block_epoch;
      release(fibers_[i]);
    }
    wait(State::kReady, "", site);
    return;
  }
  wait(State::kAtBarrier, "__syncthreads", site);
}

void Machine::warp_collective(const char* name, uint32_t mask, void* own, Combine combine,
                              Site site, bool orders_memory) {
  Fiber& f = *current_;
  if (!(mask >> f.lane() & 1)) {
    fail(std::string(name) + " at " + text(site) + ": lane " + std::to_string(f.lane()) +
         " is not in its own mask");
  }
  f.mask = mask;
  f.operands = own;
  void* lanes[kWarp] = {};
  uint32_t here = 1u << f.lane();
  lanes[f.lane()] = own;
  Fiber* warp = &fibers_[static_cast<size_t>(f.warp()) * kWarp];
  for (int i = 0; i < kWarp; ++i) {
    const Fiber& other = warp[i];
    if (other.state != State::kInWarp || !(mask >> i & 1)) continue;
    if (other.mask != mask || !same(other.site, site)) {
      if (!(other.mask >> f.lane() & 1)) continue;  // it will come when its own group has met
      fail(std::string("divergent warp: lane ") + std::to_string(f.lane()) + " at " + name + ", " +
           text(site) + ", lane " + std::to_string(i) + " at " + other.waits_for + ", " +
           text(other.site));
    }
    here |= 1u << i;
    lanes[i] = other.operands;
  }
  if (here != mask) {
    wait(State::kInWarp, name, site);
    return;
  }
  if (combine != nullptr) combine(lanes, mask);
  for (int i = 0; i < kWarp; ++i) {
    if (!(mask >> i & 1)) continue;
    if (orders_memory && mask == 0xFFFFFFFFu) ++warp[i].warp_epoch;
    release(warp[i]);
  }
  wait(State::kReady, "", site);
}

// --- shared memory
// --------------------------------------------------------------------------------

void* Machine::allocate(const void* key, size_t bytes, size_t alignment, const std::string& name) {
  for (const Allocation& a : allocations_) {
    if (a.key == key) return arena_ + a.begin;
  }
  const size_t begin = (arena_end_ + kGuard + alignment - 1) / alignment * alignment;
  static_bytes_ += key == nullptr ? 0 : bytes;
  if (static_bytes_ > (48 << 10) || begin + bytes > sizeof(arena_)) {
    fail("shared memory is full: " + name + " asks for " + std::to_string(bytes) + " bytes more");
  }
  allocations_.push_back({key, begin, begin + bytes, name});
  arena_end_ = begin + bytes;
  std::memset(arena_ + begin, 0xFF, bytes);
  std::fill(shadow_.begin() + static_cast<ptrdiff_t>(begin / kGranule),
            shadow_.begin() + static_cast<ptrdiff_t>((begin + bytes) / kGranule + 1), Granule());
  return arena_ + begin;
}

std::string Machine::place(size_t offset) const {
  for (const Allocation& a : allocations_) {
    if (a.begin <= offset && offset < a.end) {
      return "byte " + std::to_string(offset - a.begin) + " of " + a.name;
    }
  }
  return "byte " + std::to_string(offset) + " of shared memory, which no array holds";
}

void Machine::report_race(const Access& earlier, bool wrote, size_t offset, bool write) {
  const Fiber& f = *current_;
  std::string other = "several threads";
  if (earlier.warp >= 0) {
    other = earlier.lane >= 0 ? "thread " + std::to_string(earlier.warp * kWarp + earlier.lane)
                              : "threads of warp " + std::to_string(earlier.warp);
  }
  fail("race: thread " + std::to_string(f.number) + (write ? " writes " : " reads ") +
       place(offset) + ", which " + other + (wrote ? " wrote" : " read") +
       " with no barrier between them; thread " + std::to_string(f.number) + " last waited at " +
       text(f.site));
}

void Machine::note_read(Granule& g, const Fiber& f) {
  Access& r = g.reader;
  const Access own{f.warp(), f.lane(), f.block_epoch, f.warp_epoch};
  if (r.before(f)) {
    r = own;
  } else if (r.warp == f.warp()) {
    r.lane = kSeveral;
  } else {
    r.warp = kSeveral;
  }
}

void Machine::check(const void* at, size_t bytes, size_t alignment, bool write) {
  const Fiber& f = *current_;
  const char* byte = static_cast<const char*>(at);
  const size_t offset = static_cast<size_t>(byte - arena_);
  const auto holds = [&](const Allocation& a) {
    return a.begin <= offset && offset + bytes <= a.end;
  };
  if (byte < arena_ || std::none_of(allocations_.begin(), allocations_.end(), holds)) {
    fail("thread " + std::to_string(f.number) + (write ? " writes " : " reads ") +
         std::to_string(bytes) + " bytes outside of shared memory, at " + place(offset) +
         "; it last waited at " + text(f.site));
  }
  check_aligned(at, alignment);
  for (size_t i = offset / kGranule; i < (offset + bytes + kGranule - 1) / kGranule; ++i) {
    Granule& g = shadow_[i];
    if (!g.writer.before(f)) report_race(g.writer, true, i * kGranule, write);
    if (!write) {
      note_read(g, f);
      continue;
    }
    if (!g.reader.before(f)) report_race(g.reader, false, i * kGranule, write);
    g.writer = {f.warp(), f.lane(), f.block_epoch, f.warp_epoch};
  }
}

void count_votes(void* const* lanes, uint32_t mask) {
  uint32_t votes = 0;
  for (int i = 0; i < kWarp; ++i) {
    if (mask >> i & 1) votes |= (*static_cast<uint32_t*>(lanes[i]) & 1u) << i;
  }
  for (int i = 0; i < kWarp; ++i) {
    if (mask >> i & 1) *static_cast<uint32_t*>(lanes[i]) = votes;
  }
}

}  // namespace

// --- what the header declares
// ---------------------------------------------------------------------

void fail(const std::string& what) { throw std::runtime_error("emulated CUDA: " + what); }

void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread) {
  machine().run(grid, block, shared_bytes, thread);
}

uint64_t set_schedule(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(machine().one_launch);
  return std::exchange(machine().seed, seed);
}

void block_barrier(Site site) { machine().block_barrier(site); }

void warp_barrier(uint32_t mask, Site site) {
  machine().warp_collective("__syncwarp", mask, nullptr, nullptr, site, /*orders_memory=*/true);
}

void warp_collective(const char* name, uint32_t mask, void* own, Combine combine, Site site) {
  machine().warp_collective(name, mask, own, combine, site, /*orders_memory=*/false);
}

uint32_t vote(const char* name, uint32_t mask, bool value, Site site) {
  uint32_t ballot = value;
  warp_collective(name, mask, &ballot, count_votes, site);
  return ballot;
}

int lane_of_thread() { return machine().current().lane(); }

void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name, Site site) {
  return machine().allocate(key, bytes, alignment, std::string(name) + " (" + text(site) + ")");
}

void* dynamic_shared() {
  return machine().allocate(nullptr, 0, 128, "");  // made when the block began
}

void check_shared(const void* at, size_t bytes, size_t alignment, bool write) {
  machine().check(at, bytes, alignment, write);
}

void check_aligned(const void* at, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(at) % alignment != 0) {
    fail("thread " + std::to_string(machine().current().number) + " reaches for " +
         std::to_string(alignment) + " aligned bytes at an address that is not a multiple of them");
  }
}

void check_index(int64_t index, int64_t size) {
  if (index < 0 || index >= size) {
    fail("thread " + std::to_string(machine().current().number) + " uses index " +
         std::to_string(index) + ", which is outside the " + std::to_string(size) + " rows");
  }
}

void copy_async(void* to, const void* from, size_t bytes, size_t valid) {
  check_shared(to, bytes, bytes, /*write=*/true);
  check_aligned(from, bytes);
  std::memset(to, 0xFF, bytes);
  auto& groups = machine().current().groups;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({to, from, bytes, valid});
}

void copy_async_commit() {
  auto& groups = machine().current().groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

void copy_async_wait(int groups_in_flight) {
  auto& groups = machine().current().groups;
  while (static_cast<int>(groups.size()) - 1 > groups_in_flight) {
    for (const PendingCopy& copy : groups.front()) {
      check_shared(copy.to, copy.bytes, copy.bytes, /*write=*/true);
      std::memset(copy.to, 0, copy.bytes);
      std::memcpy(copy.to, copy.from, copy.valid);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace fastbert::cuda_on_cpu
