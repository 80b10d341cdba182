"""An interrupt while a drafter is told of outcomes: what the step gave is kept, and the requests go on."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, require_idle, vocab_size

from pluglm import Engine

PROMPTS = {"r0": [1, 2, 1, 2, 1, 2], "r1": [9]}


@pytest.mark.parametrize("scheduler", ["fcfs", "priority"])
def test_the_same_requests_go_on_to_the_same_tokens(tiny_model: Path, scheduler: str) -> None:
    release, calls, tokens = threading.Event(), list[int](), dict[str, list[int]]()
    kv = {"use": "hash_prefix", "block_size": 3}
    with Engine.from_config(fake_config(tiny_model, drafter="ngram", kv=kv, scheduler=scheduler)) as engine:
        core: Any = engine.core
        observe = core.parts.drafter.observe

        def interrupt_once(sequence_id: int, num_accepted: int, token_ids: Any) -> None:
            calls.append(sequence_id)
            if len(calls) == 5:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
                release.wait(20)
            observe(sequence_id, num_accepted, token_ids)

        core.parts.drafter.observe = interrupt_once
        for name, prompt in PROMPTS.items():
            core.add(name, prompt, GREEDY)
        num_interrupts = 0
        while core.roster.requests:
            try:
                events = core.step()
            except KeyboardInterrupt:
                num_interrupts += 1
                release.set()
                continue
            for event in events:
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        assert num_interrupts == 1
        assert tokens == {name: fake_tokens(prompt, 8, vocab_size(engine)) for name, prompt in PROMPTS.items()}
        core.step()
        require_idle(engine)
