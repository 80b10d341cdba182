"""Per-request sampling parameters: their names, ranges and defaults. What they do is the logits steps' business."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

StrictNumber = Annotated[float, Field(strict=True)]  # takes an int, not "0.5" or true
GREEDY_BELOW = 1e-5  # temperatures under this mean argmax


class GrammarSpec(BaseModel):
    """What the output must match. `kind` is a name that the configured grammar component knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    value: Any

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        """Accept {json_schema: {...}} and {regex: "..."} beside {kind: ..., value: ...}."""
        if isinstance(data, dict) and len(data) == 1 and "kind" not in data:
            ((kind, value),) = data.items()
            return {"kind": kind, "value": value}
        return data


class SamplingParams(BaseModel):
    """How one request is sampled. Frozen; a wrong value is refused when the object is made.

    temperature 0 is greedy: truncations are ignored, nothing is drawn. top_k 0 or -1, top_p 1, min_p 0 are off.
    repetition_penalty sees prompt and output; frequency_penalty and presence_penalty see the output only.
    seed None draws a fresh one. max_tokens None means: until the context is full; one that does not fit is refused, or
    lowered with clip_max_tokens. n outputs are drawn from one prompt, each with its own lane of the seed. logprobs k
    adds the k most likely tokens of each position. ignore_eos only keeps EOS from ending the output. search: options of
    the configured search, which then finds the n outputs instead of drawing them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: StrictNumber = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_k: StrictInt = Field(default=0, ge=-1)
    top_p: StrictNumber = Field(default=1.0, ge=0.0, le=1.0)
    min_p: StrictNumber = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: StrictNumber = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    frequency_penalty: StrictNumber = Field(default=0.0, allow_inf_nan=False)
    presence_penalty: StrictNumber = Field(default=0.0, allow_inf_nan=False)
    seed: StrictInt | None = Field(default=None, ge=0, lt=2**64)
    max_tokens: StrictInt | None = Field(default=128, ge=1, lt=2**63)
    clip_max_tokens: StrictBool = False
    n: StrictInt = Field(default=1, ge=1, le=1024)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    include_stop: StrictBool = False
    stop_token_ids: tuple[StrictInt, ...] = ()
    ignore_eos: StrictBool = False
    logprobs: StrictInt | None = Field(default=None, ge=0, le=100)
    skip_special_tokens: StrictBool = True
    grammar: GrammarSpec | None = None
    search: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _single_stop(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("stop"), str):
            return {**data, "stop": (data["stop"],)}
        return data

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW
