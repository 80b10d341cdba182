"""Per-request sampling parameters: how much is drawn, when it ends, what comes back. The logits' part is a contract."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, model_validator

from pluglm.kernel.interfaces.grammar import GrammarSpec as GrammarSpec
from pluglm.kernel.interfaces.logits_params import LogitsParams


def _as_tuple(stop: Any) -> Any:
    return (stop,) if isinstance(stop, str) else stop


class SamplingParams(LogitsParams):
    """How one request is sampled. Frozen; a wrong value is refused when the object is made.

    Beside what LogitsParams has: seed None draws a fresh one. max_tokens None means: until the context is full; one
    that does not fit is refused, or lowered with clip_max_tokens. n outputs are drawn from one prompt, each with its
    own lane of the seed. logprobs k adds the k most likely tokens of each position: by the model's own row (raw), or by
    the row that the token was drawn from, after masks and steps (processed). ignore_eos only keeps EOS from ending the
    output. search: options of the configured search, which then finds the n outputs instead of drawing them.
    """

    seed: StrictInt | None = Field(default=None, ge=0, lt=2**64)
    max_tokens: StrictInt | None = Field(default=128, ge=1, lt=2**63)
    clip_max_tokens: StrictBool = False
    n: StrictInt = Field(default=1, ge=1, le=1024)
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)] = ()
    include_stop: StrictBool = False
    ignore_eos: StrictBool = False
    logprobs: StrictInt | None = Field(default=None, ge=0, le=100)
    logprobs_mode: Literal["raw", "processed"] = "raw"
    skip_special_tokens: StrictBool = True
    grammar: GrammarSpec | None = None
    search: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it")
        if self.logprobs_mode == "processed" and self.logprobs is None:
            raise ValueError("logprobs_mode 'processed' shows nothing without logprobs; set logprobs to 0 or more")
        return self
