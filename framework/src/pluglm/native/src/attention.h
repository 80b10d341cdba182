// Causal attention of a flat batch over paged keys and values: tiles of both products, never a whole score matrix.
#pragma once
#include "linear.h"

namespace pluglm {

// T: tokens of the batch, N: query heads, K: kv heads, H: head dim, S: slots of the store

// Rows query_start .. + num_query of the batch are positions num_context .. of a sequence; table_start is where its
// blocks begin among block_tables.
struct AttentionSegment {
  int32_t query_start, num_query, num_context, table_start;
};

// Strides count values. Heads of q, k and v lie side by side, tokens q_stride, k_stride and v_stride apart; out is
// contiguous. window 0: none, soft_cap 0: none. With new_keys, those rows are first stored at slots_T.
template <typename T>
struct Attention {
  const T* q_TNH;
  T* out_TNH;
  T *keys_SKH, *values_SKH;
  const T *new_keys_TKH, *new_values_TKH;
  const int64_t* slots_T;
  const AttentionSegment* segments;
  const int32_t* block_tables;
  int64_t num_segments, num_tokens, q_stride, k_stride, v_stride;
  int64_t key_slot_stride, key_head_stride, value_slot_stride, value_head_stride;
  int32_t block_size, num_heads, num_kv_heads, head_dim, window;
  float scale, soft_cap;
};

// Query head n reads kv head n / (N / K). A row in no segment is left as it is. In float32 the bits of a row depend on
// nothing but the keys and values it sees, and not on multiples of 64 tokens before all of those being left out.
void attention(Pool& pool, Scratch& scratch, const Attention<float>& call);
void attention(Pool& pool, Scratch& scratch, const Attention<bf16>& call);

}  // namespace pluglm
