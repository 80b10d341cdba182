"""Penalties for tokens already seen. Repetition (Keskar et al., "CTRL", 2019) looks at prompt and output; frequency
and presence (OpenAI API reference: mu - count * frequency - [count > 0] * presence) at the output only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, StrictInt

from pluglm.kernel.core import SampleRow
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.sampler import LogitsStep
from pluglm.kernel.sampling_params import SamplingParams
from pluglm_samplers.blocks import on_host
from pluglm_samplers.columns import FLOAT32, keep_finite, require_ids
from pluglm_samplers.histories import Ids, outputs, texts

# R: rows, V: vocabulary, n: tokens of all histories, row after row. One that comes twice is read before it is written,
# so that it comes to the same; where its number counts, it comes once.


class RepetitionConfig(ComponentConfig):
    """window: how many of the last tokens of prompt and output count; null is all of them. exclude_ids: tokens that are
    never penalised, such as those of a chat template."""

    window: StrictInt | None = Field(default=None, ge=1)
    exclude_ids: tuple[StrictInt, ...] = ()


class _Penalty(LogitsStep, ABC):
    """What penalties share: where they read and write, on the host and elsewhere. The formulas are in float32."""

    interface_version = 1
    argmax_invariant = False
    least = float(FLOAT32.min)  # of the parameter

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        rows_n, ids_n, counts_n = self._tokens(rows, logits_RV.shape[1])
        penalty_R = np.array([getattr(row.params, self.parameters[0]) for row in rows])
        penalty_R = np.clip(penalty_R, self.least, FLOAT32.max).astype(np.float32)
        if on_host(logits_RV):
            penalty = penalty_R[0] if (penalty_R == penalty_R[0]).all() else penalty_R[rows_n]
            logits_RV = logits_RV.contiguous()  # else the flat array would be a copy
            flat = logits_RV.numpy().reshape(-1)  # one index is found in half the time of two
            rows_n *= logits_RV.shape[1]
            rows_n += ids_n
            before_n = flat.take(rows_n)
            with np.errstate(all="ignore"):  # what overflows is clipped, what is masked or NaN stays
                changed_n = self._changed(np, before_n, penalty, counts_n).clip(FLOAT32.min, FLOAT32.max)
            flat[rows_n] = np.where(np.isfinite(before_n), changed_n, before_n)
            return logits_RV
        index = tuple(torch.from_numpy(one).to(logits_RV.device) for one in (rows_n, ids_n))
        factors = (torch.from_numpy(one).to(logits_RV.device) for one in (penalty_R[rows_n], counts_n))
        before = logits_RV[index]
        return logits_RV.index_put_(index, keep_finite(self._changed(torch, before, *factors), before))

    @abstractmethod
    def _tokens(self, rows: Sequence[SampleRow], vocab_size: int) -> tuple[Ids, Ids, NDArray[np.float32]]:
        """(rows_n, ids_n, counts_n) of the tokens to penalise; rows_n may be written to."""

    @abstractmethod
    def _changed(self, library: Any, before_n: Any, penalty_n: Any, counts_n: Any) -> Any:
        """The new logits by numpy or torch, as the arguments are."""


class RepetitionPenalty(_Penalty):
    """Logits of tokens in prompt or output, each once: positive ones are divided by r, others multiplied by it."""

    Config = RepetitionConfig
    parameters = ("repetition_penalty",)
    least = float(FLOAT32.tiny)

    def __init__(self, config: RepetitionConfig, vocab_size: int) -> None:
        self._window = config.window
        self._exclude = np.array(config.exclude_ids, dtype=np.int64)

    def is_active(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0

    def _tokens(self, rows: Sequence[SampleRow], vocab_size: int) -> tuple[Ids, Ids, NDArray[np.float32]]:
        rows_n, ids_n = place_tokens(texts(rows, self, self._window), vocab_size)
        if len(self._exclude):
            is_meant_n = ~np.isin(ids_n, self._exclude)
            rows_n, ids_n = rows_n[is_meant_n], ids_n[is_meant_n]
        return rows_n, ids_n, np.ones(len(ids_n), dtype=np.float32)

    def _changed(self, library: Any, before_n: Any, penalty_n: Any, counts_n: Any) -> Any:
        return library.where(before_n > 0, before_n / penalty_n, before_n * penalty_n)


class FrequencyPenalty(_Penalty):
    """l - f * (occurrences in the output)."""

    Config = ComponentConfig
    parameters = ("frequency_penalty",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0

    def _tokens(self, rows: Sequence[SampleRow], vocab_size: int) -> tuple[Ids, Ids, NDArray[np.float32]]:
        return count_tokens(outputs(rows), vocab_size)

    def _changed(self, library: Any, before_n: Any, penalty_n: Any, counts_n: Any) -> Any:
        return before_n - counts_n * penalty_n


class PresencePenalty(_Penalty):
    """l - p for every token that occurs in the output."""

    Config = ComponentConfig
    parameters = ("presence_penalty",)

    def __init__(self, config: ComponentConfig, vocab_size: int) -> None:
        pass

    def is_active(self, params: SamplingParams) -> bool:
        return params.presence_penalty != 0.0

    def _tokens(self, rows: Sequence[SampleRow], vocab_size: int) -> tuple[Ids, Ids, NDArray[np.float32]]:
        rows_n, ids_n = place_tokens(outputs(rows), vocab_size)
        return rows_n, ids_n, np.ones(len(ids_n), dtype=np.float32)

    def _changed(self, library: Any, before_n: Any, penalty_n: Any, counts_n: Any) -> Any:
        return before_n - penalty_n


def place_tokens(histories: Sequence[Ids], vocab_size: int) -> tuple[Ids, Ids]:
    """(rows_n, ids_n), a token as often as it occurs. ValueError for an id outside the vocabulary, -1 included."""
    ids_n = np.concatenate(histories)
    require_ids(ids_n, vocab_size)
    return np.arange(len(histories)).repeat([len(one) for one in histories]), ids_n


def count_tokens(histories: Sequence[Ids], vocab_size: int) -> tuple[Ids, Ids, NDArray[np.float32]]:
    """`place_tokens` with each token of each row once, and how often it occurs: counts_n, exact to 2**24."""
    rows_n, ids_n = place_tokens(histories, vocab_size)
    places_n, counts_n = np.unique(rows_n * vocab_size + ids_n, return_counts=True)
    return places_n // vocab_size, places_n % vocab_size, counts_n.astype(np.float32)
