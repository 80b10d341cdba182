"""Whether the components honour a config's own sampling parameters, told before anything is built."""

from __future__ import annotations

from typing import Any

from pluglm.assembly.locating import locate
from pluglm.assembly.registry import load
from pluglm.assembly.resolving import Resolved, ResolvedRun
from pluglm.kernel.errors import ConfigError, PluginError, describe
from pluglm.kernel.interfaces.component import ComponentUser
from pluglm.kernel.interfaces.sampler import EarlyParamsChecker, FinalRows
from pluglm.params import SamplingParams


def check_default_params(run: ResolvedRun) -> None:
    """Raises ConfigError when requests that bring no parameters of their own would all be refused.

    What only built components or the model can tell shows when a request comes.
    """
    params, sampler = run.config.sampling, run.slots["sampler"]
    where = f"{run.config.source}: sampling"
    for slot, example in (("search", "beam"), ("grammar", "llguidance")):
        if getattr(params, slot) is not None and slot not in run.slots:
            raise ConfigError(f"{where}.{slot}: no {slot} is configured; add `{slot}: {{use: {example}}}`")
    if params.search is not None and not params.greedy:
        raise ConfigError(f"{where}.search: a search draws nothing; set sampling.temperature to 0")
    if params.logprobs_mode == "processed" and not issubclass(sampler.cls, FinalRows):
        raise ConfigError(f"{where}.logprobs_mode: {sampler.entry} has no final rows; leave it raw")
    if issubclass(sampler.cls, EarlyParamsChecker) and (problem := _problem(run, sampler, params)):
        raise ConfigError(f"{where}: {problem}")


def _problem(run: ResolvedRun, sampler: Resolved, params: SamplingParams) -> object:
    cls: Any = sampler.cls
    uses = cls.uses(sampler.config) if isinstance(cls, ComponentUser) else ()
    parts = [load(locate((kind,), name, run.config.folder)) for kind, name, _ in uses]
    try:
        return cls.check_early(sampler.config, params, parts)
    except Exception as error:  # the plugin's own code
        raise PluginError(f"{sampler.entry}: check_early() raised {describe(error)}") from error
