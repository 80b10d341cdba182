"""A drafter's own model beside the run's: what it may differ in without a word, and what the output then is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_cases import GREEDY, ids, real_config

from pluglm import Engine
from pluglm.assembly.run_config import ModelConfig


def test_a_draft_model_may_have_a_shorter_context_than_the_run(
    tiny_model: Path, make_tiny_model: Callable[..., Path]
) -> None:
    """Past its context it proposes nothing; the expected tokens are those of the same run without a drafter."""
    draft = make_tiny_model("short", max_position_embeddings=16)
    prompts = [ids(*range(3, 10)), ids(*range(3, 33))]
    model = ModelConfig(path=str(tiny_model), dtype="float32", max_model_len=128).model_dump()
    with Engine.from_config(real_config(tiny_model, model=model)) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    drafter = {"use": "draft_model", "model": str(draft), "num_tokens": 3}
    with Engine.from_config(real_config(tiny_model, model=model, drafter=drafter)) as engine:
        outputs = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    drafted = [output.metrics.num_drafted for output in outputs if output.metrics]
    assert drafted[0] > 0
    assert drafted[1] == 0
