"""How a chain builds its steps: from the vocabulary's size, or from the whole context where a step asks for it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.sampler import LogitsStep


@runtime_checkable
class ContextStep(Protocol):
    """Optional ability of a logits step: built from what the run knows, such as its EOS ids."""

    @classmethod
    def from_context(cls, config: Any, context: BuildContext) -> LogitsStep: ...


def build_step(step_class: type[Any], config: Any, context: BuildContext) -> LogitsStep:
    """The step by `from_context` if its class has one, else as the contract says."""
    if isinstance(step_class, ContextStep):
        return step_class.from_context(config, context)
    step: LogitsStep = step_class(config, context.spec.vocab_size)
    return step
