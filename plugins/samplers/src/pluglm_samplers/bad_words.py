"""Bans runs of tokens. Whoever has text encodes it, with and without a space before it, and bans both runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import PerParams, places

# R: rows, V: vocabulary, n: banned tokens of all rows

Endings = dict[int, dict[tuple[int, ...], list[int]]]  # length of what comes before -> it -> ids banned behind it


class BadWords(LogitsStep):
    """The last token of each of `bad_words_ids` goes to -inf where the output ends with the others.

    A run of one token is always banned. The prompt does not count: what it ends with may be completed.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    hard_mask = True
    parameters = ("bad_words_ids",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        self._endings = PerParams(_endings)

    def is_active(self, params: SamplingParams) -> bool:
        return bool(params.bad_words_ids)

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        banned = [torch.tensor(self._banned(row), dtype=torch.int64) for row in rows]
        return logits_RV.index_put_(places(banned, logits_RV), logits_RV.new_tensor(-torch.inf))

    def _banned(self, row: SampleRow) -> list[int]:
        output, found = row.output_token_ids, list[int]()
        for length, endings in self._endings(row.params).items():
            if length <= len(output):
                found += endings.get(tuple(output[len(output) - length :]), ())
        return found


def _endings(params: SamplingParams) -> Endings:
    endings: Endings = {}
    for *before, last in params.bad_words_ids:
        endings.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)
    return endings
