// How a batch is cut into blocks of rows and a block's keys into spans. Knows no values.
#pragma once
#include <vector>

#include "attention.h"

namespace pluglm {

constexpr int SPAN = 512;      // keys whose scores are in memory at once; a softmax each, merged in order
constexpr int GROUP_ROWS = 32;  // rows whose scores are in memory at once
constexpr int KEY_TILE = 64;   // spans begin at multiples of it
constexpr int MOST_ROWS = 384;  // of a block; more reuse of packed keys, until the rows leave the second cache

// What the batch looks like to one layer. stride: blocks end at positions that are multiples of it.
struct Shape {
  const AttentionSegment* segments;
  int64_t num_segments;
  int num_kv_heads, group, window, stride;  // group: query heads of a kv head
};

// Queries query .. + num_query of a segment, with the query heads of one kv head: num_query * group rows.
// Spans are counted backwards from the multiple of `stride` that follows `position`, so that where a span ends does not
// depend on the other rows of the batch, nor on how many tokens were dropped before the ones in sight.
struct Block {
  int segment, kv_head, query, num_query;
  int position;      // of the first query
  int first_key;     // that it sees, rounded down to KEY_TILE
  int spans_end;     // the multiple of stride
  int num_spans;
  int64_t partials;  // index of its first partial result, or -1 when one thread computes it all

  int num_keys() const { return position + num_query; }
  int begin(int span) const { return std::max(first_key, spans_end - (span + 1) * SPAN); }
  int end(int span) const { return std::min(num_keys(), spans_end - span * SPAN); }
};

// Part of a block: one span, or all of them when span is -1.
struct Item {
  int block, span;
};

struct BlockPlan {
  std::vector<Block> blocks;
  std::vector<Item> items;  // those of later blocks first, which see more keys
  int items_at_once = 1;    // that a thread had best take
  int most_rows = 0;
  int64_t num_partials = 0;
  int num_threads = 1;  // of those there are, how many are worth waking
};

BlockPlan plan_blocks(const Shape& shape, int num_threads);

}  // namespace pluglm
