// What one thread does for a block of rows and a span of keys: gather, multiply, softmax, multiply.
#pragma once
#include "attention_blocks.h"
#include "attention_tiles.h"

namespace pluglm {

constexpr int GROUP_ROWS = 16;      // rows whose scores are in memory at once
constexpr int LEAST_TILE_ROWS = 8;  // of a block, for matrix tiles

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
        scores_(pieces.take<float>(GROUP_ROWS * SPAN)),
        weights_(HAS_PAIRS ? pieces.take<Unit>(GROUP_ROWS * SPAN / 2) : (Unit*)scores_),
        slots_(pieces.take<int32_t>(SPAN)) {}

  void begin(const Block& block) {
    block_ = &block;
    in_tiles_ = HAS_PAIRS && block.num_query * geometry_.group >= LEAST_TILE_ROWS && allow_tiles();
    if (in_tiles_) begin_tiles();
    pack_queries();
  }

  // The block's rows over the keys of one span.
  void attend(int span, const State& to) {
    const Attention<T>& call = geometry_.call;
    first_key_ = block_->begin(span);
    num_keys_ = block_->end(span) - first_key_;
    find_slots();
    const int units = (num_keys_ + PER_UNIT<Unit> - 1) / PER_UNIT<Unit>;
    const Panels<Unit> keys{keys_, geometry_.depth, round_up(num_keys_, LANES)};
    const Panels<Unit> values{values_, in_tiles_ ? round_up(units, TILE_UNITS) : units, geometry_.columns};
    const T* key_head = call.keys_SKH + block_->kv_head * call.key_head_stride;
    const T* value_head = call.values_SKH + block_->kv_head * call.value_head_stride;
    pack_keys(Rows<T>{key_head, call.key_slot_stride, slots_, num_keys_, call.head_dim}, keys);
    pack_values(Rows<T>{value_head, call.value_slot_stride, slots_, num_keys_, call.head_dim}, values);
    for (int row = 0; row < num_rows(); row += GROUP_ROWS) attend_rows(row, keys, values, to);
  }

  void end() {
    if (in_tiles_) end_tiles();
  }

  const State all, part;

 private:
  int num_rows() const { return block_->num_query * geometry_.group; }

  // Rows of units, the heads of one query side by side, zeros behind each row's values. The scale's sign goes in.
  void pack_queries() {
    using Value = std::conditional_t<HAS_PAIRS, bf16, float>;
    const Attention<T>& call = geometry_.call;
    const float sign = call.scale > 0.0f ? 1.0f : call.scale < 0.0f ? -1.0f : 0.0f;
    const int64_t first = call.segments[block_->segment].query_start + block_->query;
    for (int row = 0; row < num_rows(); row++) {
      const int64_t head = int64_t(block_->kv_head) * geometry_.group + row % geometry_.group;
      const T* from = call.q_TNH + (first + row / geometry_.group) * call.q_stride + head * call.head_dim;
      auto* to = (Value*)(queries_ + int64_t(row) * geometry_.depth);
      for (int i = 0; i < call.head_dim; i++) store(to + i, sign * widen(from[i]));
      std::memset(to + call.head_dim, 0, geometry_.depth * sizeof(Unit) - call.head_dim * sizeof(Value));
    }
  }

  void find_slots() {
    const int size = geometry_.call.block_size;
    const int32_t* table = geometry_.call.block_tables + geometry_.call.segments[block_->segment].table_start;
    for (int key = 0; key < num_keys_;) {
      const int position = first_key_ + key, offset = position % size, stop = std::min(num_keys_, key + size - offset);
      const int32_t slot = table[position / size] * size + offset - key;
      for (; key < stop; key++) slots_[key] = slot + key;
    }
  }

  // Which of the span's keys a row sees.
  int begin_of(int row) const {
    const int window = geometry_.call.window, seen = block_->position + row / geometry_.group + 1 - first_key_;
    return window ? std::max(0, seen - window) : 0;
  }
  int end_of(int row) const { return std::min(num_keys_, block_->position + row / geometry_.group + 1 - first_key_); }

  // Both products of up to GROUP_ROWS rows, over the keys that any of them sees, and the weights between.
  void attend_rows(int row, const Panels<Unit>& keys, const Panels<Unit>& values, const State& to) {
    const int rows = std::min(GROUP_ROWS, num_rows() - row), step = in_tiles_ ? 2 * TILE_UNITS : LANES;
    const int from = begin_of(row) / step * step, until = end_of(row + rows - 1), weights_end = round_up(until, step);
    const int64_t stride = SPAN / PER_UNIT<Unit>;
    multiply(Product<Unit>{queries_ + int64_t(row) * geometry_.depth, geometry_.depth, rows, keys, 0, geometry_.depth,
                          from / PANEL * PANEL, round_up(until, LANES), scores_, SPAN},
             in_tiles_);
    if (geometry_.call.soft_cap) cap_scores(rows, from, until);
    for (int i = 0; i < rows; i++)
      to.summaries[row + i] = weigh(scores_ + i * SPAN, begin_of(row + i), end_of(row + i), geometry_.factor,
                                    weights_ + i * stride, from, weights_end);
    const int first_unit = from / PER_UNIT<Unit>, last_unit = in_tiles_ ? weights_end / 2 : (until + PER_UNIT<Unit> - 1) / PER_UNIT<Unit>;
    multiply(Product<Unit>{weights_, stride, rows, values, first_unit, last_unit, 0, geometry_.columns, to.row(row),
                          geometry_.columns},
             in_tiles_);
  }

  void cap_scores(int rows, int from, int until) {
    const float scale = std::abs(geometry_.call.scale), cap = geometry_.call.soft_cap;
    for (int row = 0; row < rows; row++)
      for (int key = from / LANES * LANES; key < until; key += LANES) {
        float* at = scores_ + row * SPAN + key;
        store(at, soft_capped(load(at) * scale, cap));
      }
  }

  const Geometry<T>& geometry_;
  Unit *queries_, *keys_, *values_;
  float* scores_;
  Unit* weights_;
  int32_t* slots_;
  const Block* block_ = nullptr;
  bool in_tiles_ = false;
  int first_key_ = 0, num_keys_ = 0;
};

}  // namespace pluglm
