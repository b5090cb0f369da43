// The pool behind Workspace: a short list of free blocks, the smallest that fits first.
#include "cpu/workspace.h"

#include <ATen/Context.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

namespace fastbert {
namespace {

struct Block {
  void* data;
  size_t size;
};

struct Pool {
  std::mutex mutex;
  std::vector<Block> free;
  size_t bytes = 0;
};

constexpr size_t kMostBytes = size_t{1} << 30;  // kept for later; beyond it blocks are freed
constexpr size_t kStep = size_t{1} << 16;       // sizes are rounded up to this

// Never destroyed: threads may still give blocks back while the process ends.
Pool& pool() {
  static Pool* instance = new Pool;
  return *instance;
}

Block take(size_t size) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  auto best = p.free.end();
  for (auto block = p.free.begin(); block != p.free.end(); ++block) {
    // A block four times too large would be missed elsewhere.
    if (block->size < size || block->size > 4 * size) continue;
    if (best == p.free.end() || block->size < best->size) best = block;
  }
  if (best == p.free.end()) return {nullptr, 0};
  const Block found = *best;
  p.free.erase(best);
  p.bytes -= found.size;
  return found;
}

void give_back(Block block) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  if (p.bytes + block.size > kMostBytes) return std::free(block.data);
  p.free.push_back(block);
  p.bytes += block.size;
}

// Beyond this an allocator gives memory back to the system at once, and its next use faults.
constexpr int64_t kLarge = int64_t{1} << 21;

constexpr size_t kHugePage = size_t{1} << 21;

// New memory, in huge pages as far as it fills them and the system gives them where asked: packed
// weights are read from end to end, and each small page would be looked for.
void* allocate(size_t size) {
#if defined(MADV_HUGEPAGE)
  if (size >= kHugePage) {
    void* data = nullptr;
    if (posix_memalign(&data, kHugePage, size) != 0) return nullptr;
    madvise(data, size / kHugePage * kHugePage, MADV_HUGEPAGE);
    return data;
  }
#endif
  return std::aligned_alloc(64, size);
}

}  // namespace

Workspace::Workspace(int64_t bytes) {
  const size_t size =
      (static_cast<size_t>(std::max<int64_t>(bytes, 1)) + kStep - 1) / kStep * kStep;
  Block block = take(size);
  if (block.data == nullptr) {
    block = {allocate(size), size};
    if (block.data == nullptr) throw std::bad_alloc();
  }
  data_ = block.data;
  size_ = block.size;
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) {
    // All bits set is a NaN in every float dtype.
    std::memset(data_, 0xFF, size_);
  }
}

Workspace::~Workspace() { give_back({data_, size_}); }

void empty_pool() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  for (const Block& block : p.free) std::free(block.data);
  p.free.clear();
  p.bytes = 0;
}

at::Tensor empty_from_pool(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  if (bytes < kLarge) return at::empty(sizes, options);
  auto* memory = new Workspace(bytes);
  return at::from_blob(memory->as<void>(), sizes, [memory](void*) { delete memory; }, options);
}

}  // namespace fastbert
