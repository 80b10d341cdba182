"""The plainest sampler: argmax, nothing else. It refuses what it would have to ignore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pluglm.kernel.core import SampleRow
from pluglm.kernel.errors import RequestError
from pluglm.kernel.interfaces.component import BuildContext, Capabilities, ComponentConfig
from pluglm.kernel.interfaces.sampler import FINAL_ROWS, Sampler
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.admission import unsupported
from pluglm_samplers.drawing import one_hot_rows, pick_best

# R: rows, V: vocabulary


class GreedySampler(Sampler):
    """The most likely token, lowest id on ties. Draws no random number and knows no logits steps."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        pass

    @classmethod
    def capabilities(cls, config: ComponentConfig) -> Capabilities:
        return Capabilities(provides=frozenset({FINAL_ROWS}))

    @classmethod
    def check_early(cls, config: ComponentConfig, params: SamplingParams, parts: Sequence[type[Any]]) -> str | None:
        """All that `check` says."""
        return _problem(params)

    def check(self, params: SamplingParams) -> str | None:
        """Why these params need another sampler: a temperature, or a penalty."""
        return _problem(params)

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """RequestError for a row that `check` refuses; never greedy in silence."""
        self._require_greedy(rows)
        return pick_best(logits_RV)

    def final_rows(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """One-hot rows. RequestError as `sample`."""
        self._require_greedy(rows)
        return one_hot_rows(pick_best(logits_RV), logits_RV)

    def _require_greedy(self, rows: Sequence[SampleRow]) -> None:
        for row in rows:
            reason = self.check(row.params)
            if reason is not None:
                raise RequestError(reason)


def _problem(params: SamplingParams) -> str | None:
    if not params.greedy:
        return f"temperature={params.temperature!r} needs sampling: set temperature: 0 or sampler: chain"
    wanted = unsupported(params, ())
    return f"{wanted} would be ignored by sampler 'greedy': drop it or set sampler: chain" if wanted else None
