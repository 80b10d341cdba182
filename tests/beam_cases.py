"""Helpers of the tests of searches in the engine: beam search by transformers, and configs with the slot filled."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from pluglm import RequestOutput, SamplingParams


@cache
def peer_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected_beams(
    folder: Path, prompt: list[int], width: int, max_tokens: int, *, eos: tuple[int, ...] = (0,), **options: Any
) -> list[list[int]]:
    """All `width` outputs of `generate`, best first, without the padding behind EOS, which is id 0 in tiny models."""
    how = {"num_beams": width, "num_return_sequences": width, **options} if width > 1 else {}
    rows = peer_of(folder).generate(
        torch.tensor([prompt]),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        **how,
    )
    found = [row[len(prompt) :] for row in rows.tolist()]
    lengths = [next((index + 1 for index, token in enumerate(row) if token in eos), len(row)) for row in found]
    return [row[:length] for row, length in zip(found, lengths, strict=True)]


def beam_params(width: int, n: int = 1, max_tokens: int = 8, *, ignore_eos: bool = False, **options: Any) -> Any:
    search = {"width": width, **options}
    return SamplingParams(temperature=0, max_tokens=max_tokens, n=n, ignore_eos=ignore_eos, search=search)


def found_beams(output: RequestOutput) -> list[list[int]]:
    """The outputs of one request, which must have ended well."""
    if output.error is not None:
        raise AssertionError(output.error)
    return [one.token_ids for one in output.completions]
