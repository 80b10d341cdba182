"""Trees of drafts over layers with windows, each group of which has tables of its own, and beside KV tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from branch_cases import oracle, taken
from engine_cases import fake_config, fake_tokens, ids, real_config, require_idle
from window_cases import GREEDY, KINDS, SAMPLED, prompts, texts, write_model

from pluglm import Engine, SamplingParams


@pytest.fixture(scope="module", params=KINDS)
def windowed(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("windows"), request.param, tiny_model)


@pytest.mark.parametrize("num_windows", [None, 1])
def test_windows_see_what_they_should(windowed: Path, num_windows: int | None) -> None:
    """Bit for bit the tokens of a run without a drafter; with pools for one window, branches find little room."""
    params, kv = [GREEDY, SAMPLED, GREEDY], {"use": "window_paged", "block_size": 4, "num_windows": num_windows}
    limits = {"max_num_seqs": 3, "max_step_tokens": 256}
    with Engine.from_config(real_config(windowed, engine=limits)) as plain:
        expected = texts(plain.generate(prompts(), params))
    known = [
        [*prompt["prompt_token_ids"], *lane]
        for prompt, lanes in zip(prompts(), expected, strict=True)
        for lane in lanes
    ]
    with Engine.from_config(real_config(windowed, kv=kv, drafter=oracle(known), engine=limits)) as engine:
        outputs = engine.generate(prompts(), params)
        assert [output.error for output in outputs] == [None] * 3
        assert texts(outputs) == expected
        assert num_windows or taken(engine) > 3
        require_idle(engine)


def test_blocks_that_tiers_keep_are_those_of_the_text(tiny_model: Path) -> None:
    """A small pool evicts what others need; what comes back from the tier is what the text's way computed."""
    texts_asked = [[number, *range(40, 60)] for number in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    known = [[*prompt, *fake_tokens(prompt, 24, 320)] for prompt in texts_asked]
    slots: dict[str, Any] = {
        "kv": {"use": "hash_prefix", "block_size": 4, "num_blocks": 24},
        "kv_tiers": ["host"],
        "drafter": oracle(known),
    }
    with Engine.from_config(fake_config(tiny_model, **slots)) as engine:
        for _ in range(2):
            for prompt, text in zip(texts_asked, known, strict=True):
                output = engine.generate(ids(*prompt), params)[0]
                assert output.error is None
                assert [*prompt, *output.token_ids] == text
        assert taken(engine) > 3
        assert sum(one.num_loaded for one in engine.kv_tiers.values()) > 0
        require_idle(engine)
