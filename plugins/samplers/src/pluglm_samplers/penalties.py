"""Penalties for tokens already seen. Repetition (Keskar et al., "CTRL", 2019) looks at prompt and output; frequency
and presence (OpenAI API reference: mu - count * frequency - [count > 0] * presence) at the output only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from pydantic import Field, StrictInt

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import FLOAT32, column, keep_finite, require_ids

# R: rows, V: vocabulary, n: distinct tokens of all histories, row after row


class RepetitionConfig(ComponentConfig):
    """window: how many of the last tokens of prompt and output count; null is all of them. exclude_ids: tokens that are
    never penalised, such as those of a chat template."""

    window: StrictInt | None = Field(default=None, ge=1)
    exclude_ids: tuple[StrictInt, ...] = ()


class RepetitionPenalty(LogitsStep):
    """Logits of tokens in prompt or output, each once: positive ones are divided by r, others multiplied by it."""

    interface_version = 1
    Config = RepetitionConfig
    argmax_invariant = False
    parameters = ("repetition_penalty",)

    def __init__(self, config: RepetitionConfig, vocab_size: int) -> None:
        self._start = -config.window if config.window is not None else None
        self._exclude = torch.tensor(config.exclude_ids, dtype=torch.int64)

    def is_active(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        histories = [(*row.prompt_token_ids, *row.output_token_ids)[self._start :] for row in rows]
        index, _ = count_tokens(histories, logits_RV)
        if len(self._exclude):
            is_meant_n = ~torch.isin(index[1], self._exclude.to(logits_RV.device))
            index = index[0][is_meant_n], index[1][is_meant_n]
        penalty_R1 = column((row.params.repetition_penalty for row in rows), logits_RV.device).clamp_(FLOAT32.tiny)
        before_n, penalty_n = logits_RV[index], penalty_R1[index[0], 0]
        changed_n = torch.where(before_n > 0, before_n / penalty_n, before_n * penalty_n)
        return logits_RV.index_put_(index, keep_finite(changed_n, before_n))


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
        index, counts_n = count_tokens([row.output_token_ids for row in rows], logits_RV)
        penalty_R1 = column((row.params.frequency_penalty for row in rows), logits_RV.device)
        before_n = logits_RV[index]
        return logits_RV.index_put_(index, keep_finite(before_n - counts_n * penalty_R1[index[0], 0], before_n))


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
        index, _ = count_tokens([row.output_token_ids for row in rows], logits_RV)
        penalty_R1 = column((row.params.presence_penalty for row in rows), logits_RV.device)
        before_n = logits_RV[index]
        return logits_RV.index_put_(index, keep_finite(before_n - penalty_R1[index[0], 0], before_n))


def count_tokens(
    histories: Sequence[Sequence[int]], logits_RV: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(rows_n, ids_n), each distinct token of each row once, and how often it occurs: counts_n float32, exact to 2**24.

    ValueError for an id outside the vocabulary, -1 included.
    """
    num_rows, vocab_size = logits_RV.shape
    ids = torch.tensor(list(chain.from_iterable(histories)), dtype=torch.int64)
    require_ids(ids, vocab_size)
    rows = torch.arange(num_rows).repeat_interleave(torch.tensor([len(history) for history in histories]))
    places_n, counts_n = torch.unique(rows * vocab_size + ids, return_counts=True)
    places_n = places_n.to(logits_RV.device)
    return (places_n // vocab_size, places_n % vocab_size), counts_n.to(logits_RV.device, torch.float32)
