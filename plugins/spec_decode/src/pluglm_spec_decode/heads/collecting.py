"""Collects the hidden states of texts from a run itself: a drafter that proposes nothing, and keeps what it is lent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.arguments import as_list
from pluglm.assembly.resolving import resolve
from pluglm.kernel.config import Slot
from pluglm.kernel.errors import ConfigError, PluginError
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, DraftRequest, Proposal
from pluglm.kernel.interfaces.kv import PrefixCache
from pluglm.outputs import Prompt

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


def collect_traces(
    config: RunConfig | Mapping[str, Any] | str | Path, prompts: Prompt | Iterable[Prompt], params: SamplingParams
) -> list[Trace]:
    """Runs the prompts and returns a trace of each text, its output included but for the last two tokens.

    config: as Engine.from_config takes it, without a drafter and with a KV manager that reuses no prefixes. prompts: as
    Engine.generate takes them, so a string is one. All traces are in memory, on the run's device. Raises ConfigError
    for another config, for params of fewer than 3 tokens or of several outputs, or when a prompt gave no trace.
    """
    _require_traceable(params)
    run, asked = _collecting_run(config), as_list(prompts)
    with Engine.from_config(run) as engine:
        outputs = engine.generate(asked, params)
        traces: dict[int, Trace] = engine.core.parts.drafter.traces  # type: ignore[union-attr]
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None or len(traces) < len(outputs):
        raise ConfigError(
            f"states were collected of {len(traces)} of {len(outputs)} texts: {failed or 'some ended early'}"
        )
    return [traces[sequence_id] for sequence_id in sorted(traces)]


def _require_traceable(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens < _LEAST_TOKENS:
        raise ConfigError(
            f"max_tokens is {params.max_tokens}, and states are collected from {_LEAST_TOKENS} on; raise it"
        )
    for name, count in (("n", params.n), ("best_of", params.best_of)):
        if count is not None and count > 1:
            raise ConfigError(f"{name} is {count}, and a trace is of the one output of a prompt; leave {name} out")


def _collecting_run(config: RunConfig | Mapping[str, Any] | str | Path) -> RunConfig:
    """With a collector in place of a drafter."""
    if isinstance(config, str | Path):
        config = RunConfig.from_file(config)
    elif not isinstance(config, RunConfig):
        config = RunConfig.from_dict(config)
    if config.drafter is not None:
        raise ConfigError(f"{config.source}: traces are of plain decoding; leave drafter out of the config")
    collector = Slot(use=f"{StateCollector.__module__}:{StateCollector.__qualname__}")
    run = config.model_copy(update={"drafter": collector})
    kv = resolve(run).slots["kv"]
    if issubclass(kv.cls, PrefixCache):
        raise ConfigError(
            f"{run.source}: {kv.entry} reuses prefixes, whose states nobody computes again; use kv: paged"
        )
    return run
