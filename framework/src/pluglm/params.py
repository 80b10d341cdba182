"""Sampling parameters as callers give them: the kernel's, and those that are about text or about whole outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from pluglm.assembly.validation import OneLineErrors
from pluglm.kernel import sampling_params as kernel
from pluglm.kernel.errors import RequestError

if TYPE_CHECKING:
    from pluglm.text.tokenizer import Tokenizer

Word = Annotated[str, Field(min_length=1)]


class SamplingParams(kernel.SamplingParams, OneLineErrors):
    """How one request is sampled. Frozen; a wrong value raises RequestError when the object is made.

    Beside what the kernel's parameters say (see its bases): bad_words are words that must not come, with a space or
    without. best_of draws so many outputs, of which the n with the highest mean raw log-probability a token come back,
    best first; it does not stream. prompt_logprobs k adds the raw log-probability of each prompt token and the k most
    likely ones of its place. echo puts the prompt's text before that of each output.
    """

    refusal = RequestError

    bad_words: tuple[Word, ...] = ()
    best_of: StrictInt | None = Field(default=None, ge=1, le=1024)
    prompt_logprobs: StrictInt | None = Field(default=None, ge=0, le=100)
    echo: StrictBool = False

    @model_validator(mode="after")
    def _enough_outputs(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} is below n {self.n}; raise it, or lower n")
        if self.best_of is not None and self.search is not None:
            raise ValueError("a search ranks its outputs by itself and takes no best_of; leave one of them out")
        if self.best_of is not None and self.logprobs_mode != "raw":
            raise ValueError("best_of ranks by raw log-probabilities; leave logprobs_mode raw")
        if self.bad_words and self.search is not None:
            raise ValueError("a search takes no bad_words; leave them out")
        return self


def as_given(params: kernel.SamplingParams) -> SamplingParams:
    """Params with all fields; those that only the kernel knows have the others' defaults."""
    return params if isinstance(params, SamplingParams) else SamplingParams(**_kernel_fields(params))


def for_kernel(params: kernel.SamplingParams, tokenizer: Tokenizer) -> kernel.SamplingParams:
    """What the kernel, hooks and plugins get to see: the kernel's parameters alone.

    Raises RequestError for a bad word that has no tokens.
    """
    if not isinstance(params, SamplingParams):
        return params
    fields = _kernel_fields(params)
    fields["bad_words_ids"] = (*params.bad_words_ids, *bad_words_ids(params.bad_words, tokenizer))
    if params.best_of is not None:
        fields |= {"n": params.best_of, "logprobs": params.logprobs or 0}
    return kernel.SamplingParams(**fields)


def _kernel_fields(params: kernel.SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in kernel.SamplingParams.model_fields}


def bad_words_ids(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The runs of tokens that spell each word, with a space before it and without, in the middle of a text."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.removeprefix(" ")
        runs = [_run(text, tokenizer) for text in (bare, f" {bare}")]
        if not any(runs):
            raise RequestError(f"bad_words: {word!r} has no tokens; leave it out")
        found |= dict.fromkeys(run for run in runs if run)
    return tuple(found)


def _run(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of exactly this text: a tokenizer that puts a space before every text is asked behind a newline."""
    wanted = text.encode()
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    if _spelled(ids, tokenizer) == wanted:
        return tuple(ids)
    behind = tokenizer.encode(f"\n{text}", add_special_tokens=False, parse_special=False)
    exact = (behind[start:] for start in range(len(behind)) if _spelled(behind[start:], tokenizer) == wanted)
    return tuple(next(exact, ids))


def _spelled(ids: list[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))
