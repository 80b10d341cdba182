"""Softmax over keys that come a tile at a time, in float32. Knows neither positions nor storage."""

from __future__ import annotations

import torch

from pluglm.kernel.interfaces.model import LayerSpec

# B: products at once (kv heads, of several sequences maybe), M: rows of one product, S: keys of a tile, H: head dim

# Below every score and finite: a row that has seen no key yet then scales by exp(0), not by exp(-inf + inf).
LOWEST = -1e30


def scaled_queries(layer: LayerSpec, q: torch.Tensor) -> torch.Tensor:
    """q in float32, times what `scores_of` leaves out: the layer's scale, over the soft cap where there is one."""
    return q.to(torch.float32) * (layer.scale if layer.soft_cap is None else layer.scale / layer.soft_cap)


def scores_of(layer: LayerSpec, q_BMH: torch.Tensor, k_BSH: torch.Tensor) -> torch.Tensor:
    """scores_BMS of scaled queries and float32 keys, capped as in Gemma 2 (2024, arXiv:2408.00118, section 2)."""
    scores_BMS = torch.bmm(q_BMH, k_BSH.transpose(1, 2))
    return scores_BMS if layer.soft_cap is None else scores_BMS.tanh_().mul_(layer.soft_cap)


class OnlineSoftmax:
    """The mean of values weighted by softmax, of the keys so far (Milakov and Gimelshein, 2018, arXiv:1805.02867).

    The mean is divided by the total weight at the end only, as in FlashAttention-2 (arXiv:2307.08691).
    """

    def __init__(self, q_BMH: torch.Tensor) -> None:
        self.top_BM1 = q_BMH.new_full((*q_BMH.shape[:2], 1), LOWEST)
        self.total_BM1 = torch.zeros_like(self.top_BM1)
        self.sum_BMH = q_BMH.new_zeros(q_BMH.shape)

    def add(self, scores_BMS: torch.Tensor, v_BSH: torch.Tensor) -> None:
        """Takes in a tile of keys; -inf hides one. Overwrites the scores."""
        top_BM1 = torch.maximum(self.top_BM1, scores_BMS.amax(dim=-1, keepdim=True))
        weights_BMS = scores_BMS.sub_(top_BM1).exp_()
        shrink_BM1 = self.top_BM1.sub_(top_BM1).exp_()
        self.total_BM1.mul_(shrink_BM1).add_(weights_BMS.sum(dim=-1, keepdim=True))
        self.sum_BMH.mul_(shrink_BM1).baddbmm_(weights_BMS, v_BSH)
        self.top_BM1 = top_BM1

    def result(self) -> torch.Tensor:
        """out_BMH float32. Every row must have seen a key."""
        return self.sum_BMH / self.total_BM1
