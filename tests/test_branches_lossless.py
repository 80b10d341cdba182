"""Trees of drafts change no token, text, stop or log-probability of a real model, bit for bit in deterministic mode.

The reference is the same run without a drafter. The drafter knows its texts, and hides the right tokens in branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from branch_cases import oracle, taken
from engine_cases import ids, real_config, require_idle, write_plugin
from seat_cases import TAKING_SOURCE

from pluglm import Engine, RequestOutput, SamplingParams

PROMPTS = (
    [9, 41, 77, 12, 30, 5, 18],
    [23],
    [60, 61, 62, 60, 61, 62, 60, 61],
    [9, 41, 77, 12, 30, 5, 18, 33, 21, 8, 99],
)
BASE = {"max_tokens": 20, "seed": 7, "ignore_eos": True, "logprobs": 2}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "sampled": {"temperature": 0.9},
    "everything": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
    },
    "xtc": {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    "mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    "processed logprobs": {"temperature": 0.9, "top_k": 9, "logprobs_mode": "processed"},
    "grammar": {"temperature": 0.9, "grammar": {"regex": "(cat|dog|[0-9]{2})( (on|the|mat|log)){3,9}"}},
    "greedy grammar": {"temperature": 0, "grammar": {"regex": "(ab|abc|x[0-9]+){2,8}"}},
    "lanes": {"temperature": 1.1, "n": 3},
    "eos": {"temperature": 1.5, "ignore_eos": False},
}
PLACES: dict[str, dict[str, Any]] = {
    "paged": {"kv": {"use": "paged", "block_size": 4}},
    "contiguous": {"kv": {"use": "contiguous", "num_regions": 12}},
    "prefix cache": {"kv": {"use": "hash_prefix", "block_size": 4}},
    "radix": {"kv": {"use": "radix", "block_size": 4}},
    "chunks": {"kv": {"use": "paged", "block_size": 4}, "engine": {"max_step_tokens": 40}},
    "seats taken": {"kv": {"use": "hash_prefix", "block_size": 4}, "scheduler": "taking:Taking"},
    "flash": {"attention": "flash"},
}


def outputs_of(engine: Engine, kind: str) -> list[RequestOutput]:
    params = SamplingParams.model_validate({**BASE, **KINDS[kind]})
    return engine.generate([ids(*prompt) for prompt in PROMPTS], params)


def config(model: Path, folder: Path | None = None, **slots: Any) -> Any:
    return real_config(model, folder, **{"grammar": "llguidance", "attention": "paged", **slots})


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Iterator[dict[str, list[RequestOutput]]]:
    with Engine.from_config(config(tiny_model)) as engine:
        yield {kind: outputs_of(engine, kind) for kind in KINDS}


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    pairs = zip(PROMPTS, outputs, strict=True)
    return [[*prompt, *lane.token_ids] for prompt, output in pairs for lane in output.completions]


def shown(output: RequestOutput) -> list[Any]:
    return [(one.token_ids, one.text, one.finish_reason, one.stop, one.logprobs) for one in output.completions]


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_as_without_branches(
    tiny_model: Path, reference: dict[str, list[RequestOutput]], kind: str
) -> None:
    with Engine.from_config(config(tiny_model, drafter=oracle(texts_of(reference[kind])))) as engine:
        for output, wanted in zip(outputs_of(engine, kind), reference[kind], strict=True):
            assert output.error is None
            assert shown(output) == shown(wanted)
        require_idle(engine)
        assert taken(engine) > 3


@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_kv_is(
    tiny_model: Path, tmp_path: Path, reference: dict[str, list[RequestOutput]], place: str
) -> None:
    write_plugin(tmp_path, TAKING_SOURCE, "taking")
    texts = [text for kind in ("greedy", "sampled") for text in texts_of(reference[kind])]
    with Engine.from_config(config(tiny_model, tmp_path, drafter=oracle(texts), **PLACES[place])) as engine:
        for kind in ("greedy", "sampled", "greedy"):
            for output, wanted in zip(outputs_of(engine, kind), reference[kind], strict=True):
                assert output.error is None
                assert shown(output) == shown(wanted)
            require_idle(engine)
        assert taken(engine) > 3


def test_hidden_states_are_those_of_the_way_that_was_taken(
    tiny_model: Path, reference: dict[str, list[RequestOutput]]
) -> None:
    """Bit for bit those of plain decoding, for a drafter that reads them."""
    found = []
    for branches in (False, True):
        drafter = {**oracle(texts_of(reference["greedy"])), "use": "branch_cases:HiddenDrafter", "branches": branches}
        with Engine.from_config(config(tiny_model, drafter=drafter)) as engine:
            outputs_of(engine, "greedy")
            core: Any = engine._core
            assert (taken(engine) > 3) == branches
            found.append(core.parts.drafter.rows)
    plain, branched = found
    assert len(branched) > 60
    assert all(torch.equal(row_D, plain[text]) for text, row_D in branched.items() if text in plain)
    assert len(plain.keys() & branched.keys()) > 60


def test_a_stop_inside_a_branch_ends_the_text_there(
    tiny_model: Path, reference: dict[str, list[RequestOutput]]
) -> None:
    texts = texts_of(reference["greedy"])
    with Engine.from_config(config(tiny_model, drafter=oracle(texts))) as engine:
        for prompt, text in zip(PROMPTS, texts, strict=True):
            for place in range(2, 12):
                stop = text[len(prompt) + place]
                first = text.index(stop, len(prompt))
                params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
                output = engine.generate(ids(*prompt), params)[0]
                assert output.token_ids == text[len(prompt) : first + 1]
                assert (output.finish_reason, output.stop) == ("stop", stop)
                require_idle(engine)
