// What one thread does for a block of rows and a span of keys: gather, multiply, softmax, multiply.
#pragma once
#include "attention_blocks.h"
#include "attention_few.h"
#include "attention_tiles.h"
#include "tiles.h"

namespace pluglm {

static_assert(FEW_ROWS <= GROUP_ROWS);  // their scores are in memory at once

constexpr int STRETCH = 64;               // keys that are packed at a time if only one group of rows reads them
constexpr int SCORES_STRIDE = SPAN + 32;  // not a power of two, or rows would share few sets of the first cache
static_assert(STRETCH % PANEL == 0 && KEY_TILE % LANES == 0 && SPAN % KEY_TILE == 0);

// Hands out pieces of one allocation, each aligned to 64 bytes. Without one it only counts.
class Pieces {
 public:
  explicit Pieces(char* start) : start_(start) {}
  template <typename Value>
  Value* take(int64_t count) {
    char* piece = start_ ? start_ + taken_ : nullptr;
    taken_ += (count * int64_t(sizeof(Value)) + 63) / 64 * 64;
    return (Value*)piece;
  }
  int64_t taken() const { return taken_; }

 private:
  char* start_;
  int64_t taken_ = 0;
};

// What all blocks of a call have in common. rows: of the largest block, filled up; depth: units of a query or key,
// filled up; columns: of a value, filled up; factor: from products to powers of two.
template <typename T>
struct Geometry {
  using Unit = UnitOf<T>;
  const Attention<T>& call;
  int group, rows, depth, columns;
  float factor;

  Geometry(const Attention<T>& of, int most_rows)
      : call(of),
        group(of.num_heads / of.num_kv_heads),
        rows(round_up(most_rows, GROUP_ROWS)),
        depth(round_up((of.head_dim + PER_UNIT<Unit> - 1) / PER_UNIT<Unit>, LANES)),
        columns(round_up(of.head_dim, LANES * PER_UNIT<Unit>)),
        factor((of.soft_cap || of.scale == 0.0f ? 1.0f : std::abs(of.scale)) * 1.44269504f) {}
};

// Rows of a result before the division by the weights' sum: partial ones can still be merged.
struct State {
  float* sums;
  Summary* summaries;
  int columns;

  State(Pieces& pieces, int rows, int width)
      : sums(pieces.take<float>(int64_t(rows) * width)), summaries(pieces.take<Summary>(rows)), columns(width) {}
  float* row(int index) const { return sums + int64_t(index) * columns; }
};

// c tanh(x / c) of Gemma 2 (arXiv:2408.00118); tanh y = 1 - 2 / (e^2y + 1).
inline vec soft_capped(vec x, float cap) { return cap - 2.0f * cap / (exponential(x * (2.0f / cap)) + 1.0f); }

// The memory that one thread works in, and the block it works on: begin, then attend to spans, then end.
template <typename T>
class Worker {
  using Unit = UnitOf<T>;
  static constexpr bool HAS_PAIRS = std::is_same_v<Unit, Pair>;

 public:
  Worker(const Geometry<T>& geometry, Pieces& pieces)
      : all(pieces, geometry.rows, geometry.columns),
        part(pieces, geometry.rows, geometry.columns),
        geometry_(geometry),
        queries_(pieces.take<Unit>(int64_t(geometry.rows) * geometry.depth)),
        keys_(pieces.take<Unit>(int64_t(SPAN) * geometry.depth)),
        values_(pieces.take<Unit>(int64_t(SPAN) / PER_UNIT<Unit> * geometry.columns)),
        scores_(pieces.take<float>(GROUP_ROWS * SCORES_STRIDE)),
        sights_{Sight(pieces), Sight(pieces)} {}

  void begin(const Block& block) {
    block_ = &block;
    const bool has_tiles = HAS_PAIRS && allow_tiles();
    is_few_ = HAS_PAIRS && suits_few(num_rows(), geometry_.call.head_dim, has_tiles);
    in_tiles_ = has_tiles && !is_few_;
    if (in_tiles_) begin_tiles(num_rows());
    pack_queries();
  }

  // Attention of the block's rows to the keys of one span alone. next: what comes then, whose first keys are asked for.
  void attend(int span, const State& to, const Block* next, int next_span) {
    if (sights_[0].block != block_ || sights_[0].span != span) std::swap(sights_[0], sights_[1]);
    look(*block_, span, sights_[0]);
    first_key_ = sights_[0].first_key;
    num_keys_ = sights_[0].num_keys;
    const Rows<T> keys = keys_of(sights_[0]);
    const Rows<T> values = values_of(sights_[0]);
    if constexpr (HAS_PAIRS)
      if (is_few_) {
        Rows<T> after = keys;
        after.known = 0;
        if (next) look(*next, next_span, sights_[1]), after = keys_of(sights_[1]);
        return attend_few(keys, values, after, to);
      }
    if (num_rows() <= GROUP_ROWS) return attend_group(keys, values, to);
    const Panels<Unit> key_panels = packed_keys(keys), value_panels = packed_values(values);
    for (int row = 0; row < num_rows(); row += GROUP_ROWS) attend_rows(row, key_panels, value_panels, to);
  }

  void end() {
    if (in_tiles_) end_tiles();
  }

  const State all, part;

 private:
  int num_rows() const { return block_->num_query * geometry_.group; }

  // Rows of units, the heads of one query side by side, zeros behind each row's values. The scale's sign goes in.
  void pack_queries() {
    const Attention<T>& call = geometry_.call;
    const int64_t first = call.segments[block_->segment].query_start + block_->query;
    const T* heads = call.q_TNH + int64_t(block_->kv_head) * geometry_.group * call.head_dim;
    Unit* to = queries_;
    for (int query = 0; query < block_->num_query; query++)
      for (int head = 0; head < geometry_.group; head++, to += geometry_.depth)
        pack_query(heads + (first + query) * call.q_stride + head * call.head_dim, to);
  }

  void pack_query(const T* from, Unit* to) const {
    constexpr int STEP = LANES * PER_UNIT<Unit>;
    const float scale = geometry_.call.scale;
    for (int i = 0; i < geometry_.depth * PER_UNIT<Unit>; i += STEP) {
      const int count = geometry_.call.head_dim - i;
      const vec units = count >= STEP ? load_units<Unit>(from + i) : load_units<Unit>(from + i, count);
      store((float*)(to + i / PER_UNIT<Unit>), units);
    }
    if (scale > 0.0f) return;
    using Value = std::conditional_t<HAS_PAIRS, bf16, float>;
    auto* values = (Value*)to;
    for (int i = 0; i < geometry_.call.head_dim; i++) store(values + i, scale < 0.0f ? -widen(values[i]) : 0.0f);
  }

  // The keys of one span, and where they are.
  struct Sight {
    int64_t *keys, *values;  // places, and the last one again for a group of rows that is read whole
    const Block* block = nullptr;
    int span = 0, first_key = 0, num_keys = 0;

    explicit Sight(Pieces& pieces) : keys(pieces.take<int64_t>(SPAN + 16)), values(pieces.take<int64_t>(SPAN + 16)) {}
  };

  void look(const Block& block, int span, Sight& sight) const {
    if (sight.block == &block && sight.span == span) return;
    const Attention<T>& call = geometry_.call;
    sight.block = &block, sight.span = span;
    sight.first_key = block.begin(span), sight.num_keys = block.end(span) - sight.first_key;
    const int64_t key_bytes = call.key_slot_stride * sizeof(T), value_bytes = call.value_slot_stride * sizeof(T);
    const int size = call.block_size;
    const int32_t* table = call.block_tables + call.segments[block.segment].table_start;
    for (int key = 0; key < sight.num_keys;) {
      const int position = sight.first_key + key, offset = position % size;
      const int stop = std::min(sight.num_keys, key + size - offset);
      const int64_t slot = int64_t(table[position / size]) * size + offset - key;
      for (; key < stop; key++) {
        sight.keys[key] = (slot + key) * key_bytes;
        sight.values[key] = (slot + key) * value_bytes;
      }
    }
    if (!sight.num_keys) return;
    std::fill_n(sight.keys + sight.num_keys, 16, sight.keys[sight.num_keys - 1]);
    std::fill_n(sight.values + sight.num_keys, 16, sight.values[sight.num_keys - 1]);
  }

  Rows<T> keys_of(const Sight& sight) const {
    const Attention<T>& call = geometry_.call;
    const T* head = call.keys_SKH + sight.block->kv_head * call.key_head_stride;
    return {head, sight.keys, sight.num_keys, call.head_dim, sight.num_keys};
  }

  Rows<T> values_of(const Sight& sight) const {
    const Attention<T>& call = geometry_.call;
    const T* head = call.values_SKH + sight.block->kv_head * call.value_head_stride;
    return {head, sight.values, sight.num_keys, call.head_dim, sight.num_keys};
  }

  // The span's keys that a query of the block sees.
  int begin_of(int query) const {
    const int window = geometry_.call.window;
    return window ? std::max(0, block_->position + query + 1 - first_key_ - window) : 0;
  }
  int end_of(int query) const { return std::min(num_keys_, block_->position + query + 1 - first_key_); }

  Panels<Unit> packed_keys(const Rows<T>& keys) {
    const Panels<Unit> panels{keys_, geometry_.depth, round_up(keys.count, LANES)};
    pack_keys(keys, panels);
    return panels;
  }

  Panels<Unit> packed_values(const Rows<T>& values) {
    const int units = (values.count + PER_UNIT<Unit> - 1) / PER_UNIT<Unit>;
    const Panels<Unit> panels{values_, in_tiles_ ? round_up(units, TILE_UNITS) : units, geometry_.columns};
    pack_values(values, panels);
    return panels;
  }

  // A group of rows that is not the only one: keys and values are packed already. Both products, over the keys that
  // any of the rows sees, and the weights between them.
  void attend_rows(int row, const Panels<Unit>& keys, const Panels<Unit>& values, const State& to) {
    const int rows = std::min(GROUP_ROWS, num_rows() - row);
    const int from = begin_of(row / geometry_.group) / PANEL * PANEL;
    const int until = end_of((row + rows - 1) / geometry_.group);
    multiply_queries(row, rows, keys, from, until, scores_);
    weigh_rows(row, rows, from, until, to);
    multiply_values(row, rows, values, from, until, (const Unit*)scores_, false, to);
  }

  // A group that is too small for packed keys to pay.
  void attend_few(const Rows<T>& keys, const Rows<T>& values, const Rows<T>& after, const State& to) {
    const int from = begin_of(0) / WEIGHTS<Unit> * WEIGHTS<Unit>, count = num_keys_ - from;
    few_scores(queries_, geometry_.depth, num_rows(), keys.part(from, count), values.part(from, count), scores_ + from,
               SCORES_STRIDE);
    weigh_rows(0, num_rows(), from, num_keys_, to);
    const Unit* weights = (const Unit*)scores_ + from / PER_UNIT<Unit>;
    few_values(weights, SCORES_STRIDE, num_rows(), values.part(from, count), after, to.sums, geometry_.columns);
  }

  // The only group of rows, and then keys and values are used once: a panel of them at a time stays in the first cache.
  void attend_group(const Rows<T>& keys, const Rows<T>& values, const State& to) {
    const int rows = num_rows(), from = begin_of(0) / STRETCH * STRETCH, until = num_keys_;
    for (int key = from; key < until; key += STRETCH) {
      const int count = std::min(STRETCH, until - key);
      multiply_queries(0, rows, packed_keys(keys.part(key, count)), 0, count, scores_ + key);
    }
    values.fetch(from, AHEAD);
    weigh_rows(0, rows, from, until, to);
    for (int key = from; key < until; key += STRETCH) {
      const int count = std::min(STRETCH, until - key);
      const auto* weights = (const Unit*)scores_ + key / PER_UNIT<Unit>;
      multiply_values(0, rows, packed_values(values.part(key, count)), 0, count, weights, key > from, to);
    }
  }

  void multiply_queries(int row, int rows, const Panels<Unit>& keys, int from, int until, float* scores) const {
    const Unit* queries = queries_ + int64_t(row) * geometry_.depth;
    multiply(Product<Unit>{queries, geometry_.depth, rows, keys, 0, geometry_.depth, from, round_up(until, LANES),
                           scores, SCORES_STRIDE},
             in_tiles_);
  }

  void multiply_values(int row, int rows, const Panels<Unit>& values, int from, int until, const Unit* weights,
                       bool goes_on, const State& to) const {
    const int end = (until + PER_UNIT<Unit> - 1) / PER_UNIT<Unit>;
    multiply(Product<Unit>{weights, SCORES_STRIDE, rows, values, from / PER_UNIT<Unit>,
                           in_tiles_ ? round_up(end, TILE_UNITS) : end, 0, geometry_.columns, to.row(row),
                           geometry_.columns, goes_on},
             in_tiles_);
  }

  // Scores of keys from .. until become weights, also beyond, up to a multiple of WEIGHTS.
  void weigh_rows(int row, int rows, int from, int until, const State& to) {
    if (geometry_.call.soft_cap) cap_scores(rows, from, until);
    int query = row / geometry_.group, head = row % geometry_.group;
    for (int i = 0; i < rows; i++) {
      to.summaries[row + i] = weigh<Unit>(scores_ + i * SCORES_STRIDE, begin_of(query), end_of(query), geometry_.factor,
                                          from, round_up(until, WEIGHTS<Unit>));
      if (++head == geometry_.group) head = 0, query++;
    }
  }

  void cap_scores(int rows, int from, int until) {
    const float scale = std::abs(geometry_.call.scale), cap = geometry_.call.soft_cap;
    for (int row = 0; row < rows; row++)
      for (int key = from / LANES * LANES; key < until; key += LANES) {
        float* at = scores_ + row * SCORES_STRIDE + key;
        store(at, soft_capped(load(at) * scale, cap));
      }
  }

  const Geometry<T>& geometry_;
  Unit *queries_, *keys_, *values_;
  float* scores_;  // or weights
  Sight sights_[2];  // the span at work and the next
  const Block* block_ = nullptr;
  bool is_few_ = false, in_tiles_ = false;
  int first_key_ = 0, num_keys_ = 0;
};

}  // namespace pluglm
