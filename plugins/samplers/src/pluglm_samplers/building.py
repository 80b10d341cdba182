"""How a chain builds its steps: from the vocabulary's size, or from the whole context where a step asks for it."""

from __future__ import annotations

from typing import Any

from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.sampler import ContextStep, LogitsStep


def build_step(step_class: type[Any], config: Any, context: BuildContext) -> LogitsStep:
    """The step by `from_context` if its class has one, else as the contract says."""
    if isinstance(step_class, ContextStep):
        return step_class.from_context(config, context)
    step: LogitsStep = step_class(config, context.spec.vocab_size)
    return step
