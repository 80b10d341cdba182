"""The worker's side: JSON lines in and out, and how times become a result. Standard library only: peers lack ours.

Requests (seed and batch say which prompts; contenders that get the same request see the same tokens):

    {"run": "decode", "batch": 8, "context": 512, "new_tokens": 32, "seed": 1}  -> {"seconds": S, "tokens": T}
    {"run": "prefill", "tokens": 1024, "seed": 1}                               -> {"seconds": S, "tokens": T}
    {"run": "greedy", "prompt": [ids], "new_tokens": 32}                        -> {"token_ids": [ids]}

A request that raises is answered {"error": "..."} and the worker goes on.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_LOWEST_TOKEN = 16  # control tokens come first


@dataclass(frozen=True)
class Generated:
    """times[i][j]: `time.perf_counter` when token j of sequence i was there; token_ids likewise, where it is known."""

    started: float
    times: Sequence[Sequence[float]]
    token_ids: Sequence[Sequence[int]]


class Contender(Protocol):
    """One engine with the model loaded. Prompts are new each time: nothing may be reused from one to the next."""

    vocab_size: int

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        """Exactly new_tokens greedy tokens for each prompt, all prompts at once, whatever ends a sequence."""
        ...


@dataclass(frozen=True)
class Setup:
    """path: the weights in the form that the contender reads. threads: of its arithmetic."""

    path: str
    threads: int


def decode_window(times: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Seconds and tokens from when every sequence has its first token to when the first one ends.

    In between all of them decode, so no prefill and no emptying batch is in it. For equal sequences of n tokens that
    is (n - 1) x batch. Raises ValueError when a sequence ends before another has begun: too few tokens were asked for.
    """
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    if end <= begin:
        raise ValueError("one sequence ends before another has its first token; ask for more new_tokens")
    return end - begin, sum(begin < moment <= end for one in times for moment in one)


def prompts_of(seed: int, batch: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, the same for the same numbers in every Python."""
    generator = random.Random(seed * 1_000_003 + batch * 10_007 + length)
    return [[generator.randrange(_LOWEST_TOKEN, vocab_size) for _ in range(length)] for _ in range(batch)]


def answer(contender: Contender, request: dict[str, Any]) -> dict[str, Any]:
    """See the module. Raises ValueError for another `run`."""
    if request["run"] == "greedy":
        return {"token_ids": list(contender.generate([request["prompt"]], request["new_tokens"]).token_ids[0])}
    if request["run"] == "prefill":
        prompts = prompts_of(request["seed"], 1, request["tokens"], contender.vocab_size)
        done = contender.generate(prompts, 1)
        return {"seconds": done.times[0][0] - done.started, "tokens": request["tokens"]}
    if request["run"] == "decode":
        prompts = prompts_of(request["seed"], request["batch"], request["context"], contender.vocab_size)
        seconds, tokens = decode_window(contender.generate(prompts, request["new_tokens"]).times)
        return {"seconds": seconds, "tokens": tokens}
    raise ValueError(f"unknown run {request['run']!r}; allowed: decode, prefill, greedy")


def serve(make: Callable[[Setup], Contender]) -> None:
    """The whole life of a worker: argv[1] is its Setup in JSON; ends with its input. Load errors end it with 1."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the replies
    started = time.perf_counter()
    try:
        contender = make(Setup(**json.loads(sys.argv[1])))
    except Exception as error:
        print(json.dumps({"error": _one_line(error)}), file=replies)
        raise
    print(json.dumps({"ready": time.perf_counter() - started}), file=replies)
    for line in sys.stdin:
        try:
            reply = answer(contender, json.loads(line))
        except Exception as error:
            reply = {"error": _one_line(error)}
        print(json.dumps(reply), file=replies)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
