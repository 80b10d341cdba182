"""The sampling parameters that logits steps read: names, ranges and the values that switch them off."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator

GREEDY_BELOW = 1e-5  # temperatures under this mean argmax
StrictNumber = Annotated[float, Field(strict=True)]  # takes an int, not "0.5" or true
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _token_key(key: Any) -> Any:
    """JSON's keys are text, and "7" is 7 as JSON writes it; " 7 ", "07" and "7.0" stay text, which is refused."""
    return int(key) if isinstance(key, str) and re.fullmatch("0|-?[1-9][0-9]{0,18}", key) else key


TokenKey = Annotated[int, BeforeValidator(_token_key), Field(strict=True, ge=-(2**63), lt=2**63)]
TokenIds = tuple[Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)], ...]  # admission knows the vocabulary

# What a search takes no value of: it follows every candidate itself. The truncations draw nothing at temperature 0.
NOT_IN_SEARCH = (
    "stop", "stop_token_ids", "grammar", "logprobs", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "dry_multiplier", "allowed_token_ids", "bad_words_ids", "min_tokens", "logit_bias",
)  # fmt: skip


MIROSTAT_REPLACES = (
    "top_n_sigma", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "xtc_probability",
)  # fmt: skip


class LogitsParams(BaseModel):
    """What may happen to the logits of one request. Each default switches its step off; what a step does, it says.

    temperature 0 is greedy: truncations are ignored, nothing is drawn. top_k 0 or -1 is off. Hard masks:
    allowed_token_ids are the only tokens that may come; bad_words_ids are runs of tokens of which the last is banned
    where the others end the output; min_tokens bans EOS and stop_token_ids from the first so many output tokens.
    logit_bias maps token ids to what is added. repetition_penalty and DRY see prompt and output, frequency_penalty and
    presence_penalty the output only. dynatemp_high above 0 divides by a temperature from dynatemp_low to dynatemp_high
    that grows with the entropy, on top of `temperature`. mirostat 1 or 2, a version of it, takes the place of all other
    truncations and steers the surprise of the tokens to mirostat_tau bits, by mirostat_eta of what it is off a token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Finite = Field(default=1.0, ge=0.0)
    top_k: StrictInt = Field(default=0, ge=-1, lt=2**63)
    top_p: StrictNumber = Field(default=1.0, ge=0.0, le=1.0)
    min_p: StrictNumber = Field(default=0.0, ge=0.0, le=1.0)
    typical_p: StrictNumber = Field(default=1.0, ge=0.0, le=1.0)
    top_n_sigma: Finite = Field(default=0.0, ge=0.0)
    epsilon_cutoff: StrictNumber = Field(default=0.0, ge=0.0, lt=1.0)
    eta_cutoff: StrictNumber = Field(default=0.0, ge=0.0, lt=1.0)
    xtc_probability: StrictNumber = Field(default=0.0, ge=0.0, le=1.0)
    xtc_threshold: StrictNumber = Field(default=0.1, ge=0.0, le=1.0)
    dynatemp_low: Finite = Field(default=0.0, ge=0.0)
    dynatemp_high: Finite = Field(default=0.0, ge=0.0)
    dynatemp_exponent: Finite = Field(default=1.0, gt=0.0)
    mirostat: Annotated[int, Field(strict=True, ge=0, le=2)] = 0
    mirostat_tau: Finite = Field(default=5.0, ge=0.0)
    mirostat_eta: Finite = Field(default=0.1, ge=0.0)
    repetition_penalty: Finite = Field(default=1.0, gt=0.0)
    frequency_penalty: Finite = 0.0
    presence_penalty: Finite = 0.0
    dry_multiplier: Finite = Field(default=0.0, ge=0.0)
    dry_base: Finite = Field(default=1.75, ge=1.0)
    dry_allowed_length: StrictInt = Field(default=2, ge=1, lt=2**31)
    dry_breaker_ids: TokenIds = ()
    logit_bias: dict[TokenKey, Finite] = {}
    allowed_token_ids: TokenIds | None = Field(default=None, min_length=1)
    bad_words_ids: tuple[Annotated[TokenIds, Field(min_length=1)], ...] = ()
    min_tokens: StrictInt = Field(default=0, ge=0, lt=2**63)
    stop_token_ids: TokenIds = ()

    def __hash__(self) -> int:
        """By value, which a frozen model with a dictionary in it does not have by itself."""
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _dynatemp_ascends(self) -> Self:
        if self.dynatemp_low > self.dynatemp_high:
            raise ValueError(f"dynatemp_low {self.dynatemp_low} is above dynatemp_high {self.dynatemp_high}; swap them")
        return self

    @model_validator(mode="after")
    def _one_truncation(self) -> Self:
        for name in MIROSTAT_REPLACES if self.mirostat else ():
            value, off = getattr(self, name), {type(self).model_fields[name].default}
            if value not in (off | {-1} if name == "top_k" else off):
                raise ValueError(f"mirostat takes the place of {name} {value}; leave one of them out")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def token_ids(self) -> dict[str, TokenIds]:
        """Every token id that a request names, by field, for whoever knows the vocabulary."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_ids": tuple(one for word in self.bad_words_ids for one in word),
            "logit_bias": tuple(self.logit_bias),
            "dry_breaker_ids": self.dry_breaker_ids,
        }
