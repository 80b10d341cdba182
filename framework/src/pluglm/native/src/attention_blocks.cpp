#include "attention_blocks.h"

#include <algorithm>

namespace pluglm {

namespace {

constexpr int64_t KEY_COST = 8;         // of packing a key, in rows that it is multiplied with
constexpr int64_t LEAST_SHARED = 6000;  // keys x rows: below it another thread comes too late
constexpr int64_t PARTS_PER_THREAD = 4;  // a block that is more than such a part of the work is split

int64_t cost(const Block& block, int group) {
  return int64_t(block.num_keys() - block.first_key) * (block.num_query * group + KEY_COST);
}

void add_blocks(const Shape& shape, int segment, std::vector<Block>& blocks) {
  const AttentionSegment& of = shape.segments[segment];
  const int most_queries = std::max(1, MOST_ROWS / shape.group);
  for (int query = 0; query < of.num_query;) {
    Block block;
    block.segment = segment;
    block.query = query;
    block.position = of.num_context + query;
    block.spans_end = (block.position / shape.stride + 1) * shape.stride;
    block.num_query = std::min({of.num_query - query, most_queries, block.spans_end - block.position});
    block.first_key = shape.window ? std::max(0, block.position - shape.window + 1) / KEY_TILE * KEY_TILE : 0;
    block.num_spans = (block.spans_end - block.first_key + SPAN - 1) / SPAN;
    block.partials = -1;
    for (block.kv_head = 0; block.kv_head < shape.num_kv_heads; block.kv_head++) blocks.push_back(block);
    query += block.num_query;
  }
}

// Items of the blocks index .. + num_kv_heads, which differ in the kv head alone. Keys of one head lie between those of
// the others, so one thread had best come by for all of them while it has their pages at hand.
void add_items(BlockPlan& plan, const Shape& shape, int index, bool is_split) {
  const int num_spans = plan.blocks[index].num_spans;
  for (int span = 0; span < (is_split ? num_spans : 1); span++)
    for (int head = 0; head < shape.num_kv_heads; head++) plan.items.push_back({index + head, is_split ? span : -1});
  if (!is_split) return;
  for (int head = 0; head < shape.num_kv_heads; head++, plan.num_partials += num_spans)
    plan.blocks[index + head].partials = plan.num_partials;
}

}  // namespace

BlockPlan plan_blocks(const Shape& shape, int num_threads) {
  BlockPlan plan;
  for (int64_t segment = 0; segment < shape.num_segments; segment++) add_blocks(shape, int(segment), plan.blocks);
  int64_t total = 0;
  for (const Block& block : plan.blocks) {
    total += cost(block, shape.group);
    plan.most_rows = std::max(plan.most_rows, block.num_query * shape.group);
  }
  plan.num_threads = total < LEAST_SHARED ? 1 : num_threads;
  for (int index = int(plan.blocks.size()) - shape.num_kv_heads; index >= 0; index -= shape.num_kv_heads) {
    const Block& block = plan.blocks[index];
    const bool is_long = cost(block, shape.group) * PARTS_PER_THREAD * plan.num_threads > total;
    const bool pays = block.num_query * shape.group <= GROUP_ROWS || (is_long && plan.num_threads > 1);
    add_items(plan, shape, index, block.num_spans > 1 && pays);
  }
  const bool by_heads = int64_t(plan.items.size()) >= PARTS_PER_THREAD * plan.num_threads * shape.num_kv_heads;
  plan.items_at_once = by_heads ? shape.num_kv_heads : 1;
  return plan;
}

}  // namespace pluglm
