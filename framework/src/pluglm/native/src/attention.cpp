#include "attention.h"

#include <atomic>

#include "attention_worker.h"

namespace pluglm {

namespace {

constexpr int64_t ROWS_PER_CHUNK = 256;  // of new keys and values

// Where blocks of rows end: for bfloat16 where it is fast, for float32 at what may be dropped before them.
template <typename T>
constexpr int STRIDE = std::is_same_v<T, bf16> ? 128 : KEY_TILE;

// Functions of their own: whoever merges, and how a block was shared, the bits are the same.
__attribute__((noinline)) void merge_row(const State& into, const State& from, int row) {
  const Summary a = into.summaries[row], b = from.summaries[row];
  const float top = std::max(a.top, b.top);
  const float keep = power_of_two<float>(splat(a.top - top))[0], add = power_of_two<float>(splat(b.top - top))[0];
  float *to = into.row(row), *more = from.row(row);
  for (int i = 0; i < into.columns; i += LANES) store(to + i, load(to + i) * keep + load(more + i) * add);
  into.summaries[row] = {top, a.total * keep + b.total * add};
}

template <typename T>
__attribute__((noinline)) void write_row(const State& from, int row, int head_dim, T* out) {
  constexpr int STEP = LANES * PER_UNIT<UnitOf<T>>;
  const float factor = 1.0f / from.summaries[row].total;
  const float* sums = from.row(row);
  for (int i = 0; i < head_dim; i += STEP) {
    vec values[STEP / LANES];
    for (int k = 0; k < STEP / LANES; k++) values[k] = load(sums + i + k * LANES) * factor;
    if (i + STEP <= head_dim) {
      store_columns(out + i, values);
      continue;
    }
    T padded[STEP];
    store_columns(padded, values);
    std::memcpy(out + i, padded, (head_dim - i) * sizeof(T));
  }
}

// The blocks of one call, shared among threads: whole ones, and split ones whose spans meet in partial results.
template <typename T>
class Run {
 public:
  Run(const Attention<T>& call, const BlockPlan& plan) : plan_(plan), geometry_(call, plan.most_rows) {}

  void run(Pool& pool, Scratch& scratch) {
    Pieces counted(nullptr);
    Worker<T>(geometry_, counted);
    const int64_t worker_bytes = counted.taken(), partial_bytes = one_partial(nullptr).second;
    const int64_t num_counters = plan_.num_partials ? plan_.blocks.size() : 0;
    const int64_t all_workers = plan_.num_threads * worker_bytes, all_partials = plan_.num_partials * partial_bytes;
    char* memory = (char*)scratch.get(all_workers + all_partials + num_counters * sizeof(int32_t));
    partials_ = memory + all_workers;
    partial_bytes_ = partial_bytes;
    counters_ = (int32_t*)(partials_ + all_partials);
    for (int64_t i = 0; i < num_counters; i++) counters_[i] = plan_.blocks[i].num_spans;
    std::atomic<size_t> next{0};
    pool.run(plan_.num_threads, [&](int index) {
      Pieces pieces(memory + index * worker_bytes);
      Worker<T> worker(geometry_, pieces);
      const size_t num_items = plan_.items.size(), step = plan_.items_at_once;
      auto claim = [&] { return next.fetch_add(step, std::memory_order_relaxed); };
      for (size_t i = claim(), then; i < num_items; i = then) {
        then = claim();
        for (size_t k = i, end = std::min(num_items, i + step); k < end; k++) {
          const size_t follower = k + 1 < end ? k + 1 : then;
          work(plan_.items[k], follower < num_items ? &plan_.items[follower] : nullptr, worker);
        }
      }
    });
  }

 private:
  std::pair<State, int64_t> one_partial(char* start) const {
    Pieces pieces(start);
    State state(pieces, geometry_.rows, geometry_.columns);
    return {state, pieces.taken()};
  }

  State partial(const Block& block, int span) const {
    return one_partial(partials_ + (block.partials + span) * partial_bytes_).first;
  }

  void work(const Item& item, const Item* next, Worker<T>& worker) {
    const Block& block = plan_.blocks[item.block];
    const Block* next_block = next ? &plan_.blocks[next->block] : nullptr;
    const int next_span = next ? std::max(next->span, 0) : 0;
    worker.begin(block);
    if (item.span < 0) {
      for (int span = 0; span < block.num_spans; span++) {
        const bool is_last = span + 1 == block.num_spans;
        const State& to = span ? worker.part : worker.all;
        worker.attend(span, to, is_last ? next_block : &block, is_last ? next_span : span + 1);
        if (span) merge(block, worker.all, worker.part);
      }
      write(block, worker.all);
    } else {
      worker.attend(item.span, partial(block, item.span), next_block, next_span);
      finish(item, block);
    }
    worker.end();
  }

  // Whoever computed a block's last span merges all of them, in order.
  void finish(const Item& item, const Block& block) {
    if (std::atomic_ref(counters_[item.block]).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const State all = partial(block, 0);
    for (int span = 1; span < block.num_spans; span++) merge(block, all, partial(block, span));
    write(block, all);
  }

  void merge(const Block& block, const State& into, const State& from) const {
    for (int row = 0; row < block.num_query * geometry_.group; row++) merge_row(into, from, row);
  }

  void write(const Block& block, const State& from) const {
    const Attention<T>& call = geometry_.call;
    const int64_t first = call.segments[block.segment].query_start + block.query;
    for (int row = 0; row < block.num_query * geometry_.group; row++) {
      const int64_t head = int64_t(block.kv_head) * geometry_.group + row % geometry_.group;
      const int64_t token = first + row / geometry_.group;
      write_row(from, row, call.head_dim, call.out_TNH + (token * call.num_heads + head) * call.head_dim);
    }
  }

  const BlockPlan& plan_;
  const Geometry<T> geometry_;
  char* partials_ = nullptr;
  int64_t partial_bytes_ = 0;
  int32_t* counters_ = nullptr;
};

template <typename T>
void store_rows(Pool& pool, const Attention<T>& call) {
  const size_t bytes = call.head_dim * sizeof(T);
  pool.run(int((call.num_tokens + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK), [&](int chunk) {
    const int64_t begin = chunk * ROWS_PER_CHUNK, end = std::min(call.num_tokens, begin + ROWS_PER_CHUNK);
    for (int64_t token = begin; token < end; token++)
      for (int64_t head = 0; head < call.num_kv_heads; head++) {
        const int64_t slot = call.slots_T[token], from = head * call.head_dim;
        std::memcpy(call.keys_SKH + slot * call.key_slot_stride + head * call.key_head_stride,
                    call.new_keys_TKH + token * call.k_stride + from, bytes);
        std::memcpy(call.values_SKH + slot * call.value_slot_stride + head * call.value_head_stride,
                    call.new_values_TKH + token * call.v_stride + from, bytes);
      }
  });
}

template <typename T>
void run(Pool& pool, Scratch& scratch, const Attention<T>& call) {
  if (call.new_keys_TKH) store_rows(pool, call);
  const int group = call.num_heads / call.num_kv_heads;
  const Shape shape{call.segments, call.num_segments, call.num_kv_heads, group, call.window, STRIDE<T>};
  const BlockPlan plan = plan_blocks(shape, pool.num_threads());
  if (!plan.items.empty()) Run<T>(call, plan).run(pool, scratch);
}

}  // namespace

void attention(Pool& pool, Scratch& scratch, const Attention<float>& call) { run(pool, scratch, call); }
void attention(Pool& pool, Scratch& scratch, const Attention<bf16>& call) { run(pool, scratch, call); }

}  // namespace pluglm
