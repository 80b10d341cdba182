"""Collects the hidden states of texts from a run itself: a drafter that proposes nothing, and keeps what it is lent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pluglm import Engine, SamplingParams
from pluglm.kernel.errors import ConfigError, PluginError
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, DraftRequest, Proposal

# n: tokens of a text, D: hidden size

_LEAST_TOKENS = 3  # the last two of an output come without a proposal, so without their states


@dataclass(slots=True)
class Trace:
    """A text and the target's features of all its tokens but the last, features_nD [n - 1, D], in the run's dtype."""

    token_ids: list[int]
    features_nD: torch.Tensor


class StateCollector(Drafter):
    """traces: by sequence, of texts whose hidden states are there from the first token."""

    interface_version = 2
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: BuildContext) -> None:
        if context.target is None:
            raise PluginError("there is no target in this context to collect hidden states of")
        self.traces: dict[int, Trace] = {}
        self._target = context.target
        self._target.use_hidden_states()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for one in requests:
            self._collect(one)
        return [Proposal([]) for _ in requests]

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Nothing to learn: nothing was drafted."""

    def release(self, sequence_id: int) -> None:
        """Traces are kept until they are read."""

    def _collect(self, request: DraftRequest) -> None:
        found = self._target.take_hidden(request.sequence_id, len(request.token_ids) - 1)
        trace = self.traces.get(request.sequence_id)
        if found is None or found.start != (0 if trace is None else len(trace.features_nD)):
            return
        rows_nD = found.rows_nD if trace is None else torch.cat((trace.features_nD, found.rows_nD))
        self.traces[request.sequence_id] = Trace(list(request.token_ids), rows_nD)


def collect_traces(config: Mapping[str, Any], prompts: Iterable[Any], params: SamplingParams) -> list[Trace]:
    """Runs the prompts and returns a trace of each text, its output included but for the last two tokens.

    config: of a run, as RunConfig takes it, with a KV manager that reuses no prefixes.
    Raises ConfigError for a config with a drafter, for params of fewer than 3 tokens, or when a prompt gave no trace.
    """
    if params.max_tokens is not None and params.max_tokens < _LEAST_TOKENS:
        raise ConfigError(
            f"max_tokens is {params.max_tokens}, and states are collected from {_LEAST_TOKENS} on; raise it"
        )
    if config.get("drafter") is not None:
        raise ConfigError("traces are of plain decoding; leave drafter out of the config")
    drafter = f"{StateCollector.__module__}:{StateCollector.__qualname__}"
    with Engine.from_config({**config, "drafter": {"use": drafter}}) as engine:
        outputs = engine.generate(list(prompts), params)
        traces: dict[int, Trace] = engine.core.parts.drafter.traces  # type: ignore[union-attr]
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None or len(traces) < len(outputs):
        raise ConfigError(
            f"states were collected of {len(traces)} of {len(outputs)} texts: {failed or 'some ended early'}"
        )
    return [traces[sequence_id] for sequence_id in sorted(traces)]
