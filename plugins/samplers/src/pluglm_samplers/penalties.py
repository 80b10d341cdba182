"""Penalties for tokens already seen. Repetition (Keskar et al., "CTRL", 2019) looks at prompt and output; frequency
and presence (OpenAI API reference: mu - count * frequency - [count > 0] * presence) at the output only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import FLOAT32, column, keep_finite

# R: rows, V: vocabulary, n: tokens of all histories, one after another


class RepetitionPenalty(LogitsStep):
    """Logits of tokens in prompt or output, each once: positive ones are divided by r, others multiplied by it."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    parameters = ("repetition_penalty",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        histories = [(*row.prompt_token_ids, *row.output_token_ids) for row in rows]
        seen_RV = count_tokens(histories, logits_RV) > 0
        penalty_R1 = column((row.params.repetition_penalty for row in rows), logits_RV.device).clamp_(FLOAT32.tiny)
        changed_RV = torch.where(logits_RV > 0, logits_RV / penalty_R1, logits_RV * penalty_R1)
        return torch.where(seen_RV, keep_finite(changed_RV, logits_RV), logits_RV)


class FrequencyPenalty(LogitsStep):
    """l - f * (occurrences in the output)."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    parameters = ("frequency_penalty",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        counts_RV = count_tokens([row.output_token_ids for row in rows], logits_RV)
        penalty_R1 = column((row.params.frequency_penalty for row in rows), logits_RV.device)
        return keep_finite(logits_RV - counts_RV * penalty_R1, logits_RV)


class PresencePenalty(LogitsStep):
    """l - p for every token that occurs in the output."""

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    parameters = ("presence_penalty",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.presence_penalty != 0.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        present_RV = count_tokens([row.output_token_ids for row in rows], logits_RV) > 0
        penalty_R1 = column((row.params.presence_penalty for row in rows), logits_RV.device)
        return keep_finite(logits_RV - present_RV * penalty_R1, logits_RV)


def count_tokens(histories: Sequence[Sequence[int]], logits_RV: torch.Tensor) -> torch.Tensor:
    """counts_RV float32 (exact up to 2**24). ValueError for an id outside the vocabulary, -1 included."""
    counts_RV = torch.zeros_like(logits_RV)
    num_rows, vocab_size = counts_RV.shape
    ids_n = torch.tensor(list(chain.from_iterable(histories)), dtype=torch.int64, device=counts_RV.device)
    if ids_n.numel() == 0:
        return counts_RV
    if int(ids_n.min()) < 0 or int(ids_n.max()) >= vocab_size:
        raise ValueError(f"token ids {int(ids_n.min())}..{int(ids_n.max())} leave the vocabulary of {vocab_size}")
    lengths_R = torch.tensor([len(history) for history in histories], device=counts_RV.device)
    rows_n = torch.arange(num_rows, device=counts_RV.device).repeat_interleave(lengths_R)
    return counts_RV.index_put_((rows_n, ids_n), counts_RV.new_ones(()), accumulate=True)
