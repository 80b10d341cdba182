"""Keeps the output from ending too early: no EOS and no stop token before `min_tokens` output tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.columns import PerParams, id_tensor, places

# R: rows, V: vocabulary


class MinTokens(LogitsStep):
    """Every EOS of the run and the request's stop_token_ids go to -inf while the output is shorter than min_tokens.

    The prompt does not count. ignore_eos changes nothing here: EOS would be text in an output that must not end.
    """

    interface_version = 1
    Config = ComponentConfig
    argmax_invariant = False
    hard_mask = True
    parameters = ("min_tokens", "stop_token_ids")

    def __init__(self, config: ComponentConfig, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        eos = [token for token in eos_token_ids if 0 <= token < vocab_size]  # a tokenizer may have more ids than a head
        self._ids = PerParams(lambda params: id_tensor([*eos, *params.stop_token_ids]))

    @classmethod
    def from_context(cls, config: ComponentConfig, context: BuildContext) -> MinTokens:
        return cls(config, context.spec.vocab_size, context.eos_token_ids)

    def is_active(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        nothing = torch.empty(0, dtype=torch.int64)
        too_short = [len(row.output_token_ids) < row.params.min_tokens for row in rows]
        banned = [self._ids(row.params) if short else nothing for row, short in zip(rows, too_short, strict=True)]
        return logits_RV.index_put_(places(banned, logits_RV), logits_RV.new_tensor(-torch.inf))
