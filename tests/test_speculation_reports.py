"""Every public report that speculation was designed against has a test that names it or stands for it, or a reason."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, ids, real_config, require_idle
from step_cases import Steps, takes

from pluglm import Engine, SamplingParams

ROOT = Path(__file__).parents[1]
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
KIT = "framework/tests/test_kit_lossless.py"
RULES = "test_wrong_rules_fail_every_check_of_a_law"
LOSSLESS = "tests/test_speculation_lossless.py"
EQUAL = "test_tokens_texts_and_logprobs_are_those_without_a_drafter"
WINDOWS = "tests/test_logits_params_end_to_end.py"
RUNS = "tests/test_engine_streaming.py"
HERE = "tests/test_speculation_reports.py"
# number in the order in which they were collected -> reports, and the test of what is right
TESTED: dict[int, tuple[str, str, str]] = {
    1: ("transformers #33534, speculative-sampling #3", KIT, RULES),
    2: ("xllm #2175", KIT, RULES),
    3: ("vllm-ascend #7807", KIT, RULES),
    4: ("sglang #35771", KIT, "test_other_faults_fail_their_own_checks"),
    5: ("vllm #40149, sglang #26312", KIT, "test_other_faults_fail_their_own_checks"),
    6: ("vllm #18902, TensorRT-LLM #17701", LOSSLESS, EQUAL),
    7: ("vllm #42744, vllm #38202", WINDOWS, "test_drafts_see_what_every_position_sees"),
    8: ("sglang #33643", WINDOWS, "test_drafts_see_what_every_position_sees"),
    9: ("vllm #33251", LOSSLESS, EQUAL),
    10: (
        "vmlx-swift #361",
        "tests/test_mirostat_lanes.py",
        "test_refused_and_accepted_drafts_leave_the_state_of_the_text",
    ),
    11: ("vllm #44297, vllm #53777, genai #4081, vllm #9423", LOSSLESS, EQUAL),
    12: ("vllm #31955, vllm #31944", HERE, "test_preemption_drops_drafts_and_grammars_go_on"),
    15: ("genai #4190", "tests/traces/test_trace_suite.py", "test_random_traces_keep_every_invariant"),
    17: ("transformers #30042, transformers #30413", LOSSLESS, EQUAL),
    18: ("transformers #47912, koboldcpp #1276", RUNS, "test_eos_and_stop_token_ids_inside_a_run"),
    19: ("sglang #31599, sglang #33758", RUNS, "test_a_stop_that_the_last_allowed_token_completes_is_a_stop"),
    20: ("vllm #47616, sglang #39826", RUNS, "test_stop_strings_across_tokens_cut_ids_text_and_logprobs_together"),
    21: ("vllm #6038, vllm #9441, vllm-ascend #13608, sglang #33395", LOSSLESS, "test_any_prompt_any_seed"),
    22: ("TensorRT-LLM #19487", HERE, "test_requests_without_a_seed_share_no_stream"),
    24: ("llama.cpp #27972, vllm #38711, vllm #53488", LOSSLESS, "test_logprobs_are_the_models_own"),
    25: ("vllm #40768", "tests/faults/test_faults_drafter_sampler_grammar.py", "test_drafter_proposals"),
    26: (
        "transformers #46936, llama.cpp #17480",
        "plugins/spec_decode/tests/test_draft_model_drafter.py",
        "test_another_vocabulary_is_refused",
    ),
    27: (
        "Automodel #2447, vllm #50158",
        "tests/test_speculation_metrics.py",
        "test_drafts_that_are_hardly_ever_kept_are_told_once",
    ),
    28: ("vllm #49548", "plugins/spec_decode/tests/test_draft_length.py", "test_near_break_even_it_does_not_flap"),
    29: ("llama.cpp #3919", "tests/test_speculation_metrics.py", "test_a_run_counted_by_hand"),
}
WITHOUT_COUNTERPART: dict[int, tuple[str, str]] = {
    13: ("vllm #42722", "every window ends with a token of the target, so no output of it is empty"),
    14: ("vllm #20247", "one process: what the scheduler plans with are the engine's own counts"),
    16: ("mlx-lm #1109, vllm #39273, vllm #53505", "no model has recurrent state"),
    23: ("vllm #17498", "one device: no other rank could accept another length"),
}


def test_none_was_forgotten() -> None:
    assert sorted([*TESTED, *WITHOUT_COUNTERPART]) == list(range(1, 30))


@pytest.mark.parametrize("number", TESTED)
def test_the_test_is_there(number: int) -> None:
    _, path, name = TESTED[number]
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mode", ["recompute", "offload", "pause"])
def test_preemption_drops_drafts_and_grammars_go_on(tiny_model: Path, tmp_path: Path, mode: str) -> None:
    """vllm #31955, vllm #31944: drafts from before a preemption met a grammar that had begun anew."""
    params = SamplingParams(
        temperature=0.9, seed=3, max_tokens=24, grammar={"regex": "(ab|abc|x[0-9]+){6,20}"}, ignore_eos=True
    )
    slots: dict[str, Any] = {"grammar": "llguidance", "drafter": {"use": "ngram", "num_tokens": 3}}
    prompt = [9, 41, 77, 9, 41, 77, 9, 41]
    with Engine.from_config(real_config(tiny_model, grammar="llguidance")) as engine:
        expected = engine.generate(ids(*prompt), params)[0]
    limits = {"max_num_seqs": 1}
    config = real_config(tiny_model, tmp_path, scheduler=takes(tmp_path, mode), engine=limits, **slots)
    with Engine.from_config(config) as engine:
        steps = Steps(engine)
        steps.add("a", prompt, params)
        for number in range(3):
            steps.step()
            steps.add(f"b{number}", [7, 8], SHORT, priority=-1)
            steps.step()
            assert (steps.running, steps.sequence("a").drafts) == ([f"b{number}"], [])
            steps.until(lambda: steps.running == ["a"])
        steps.finish()
        assert steps.tokens("a") == expected.token_ids
        assert steps.metrics("a").num_preemptions == 3
        assert steps.metrics("a").num_drafted > 0
        require_idle(engine)


def test_requests_without_a_seed_share_no_stream(tiny_model: Path) -> None:
    """TensorRT-LLM #19487: requests without a seed drew from one stream and said nearly the same."""
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    with Engine.from_config(fake_config(tiny_model, drafter="ngram")) as engine:
        outputs = engine.generate([ids(5, 6, 5, 6, 5, 6)] * 20, params)
        assert len({output.seed for output in outputs}) == 20
        assert len({output.token_ids[0] for output in outputs}) > 10  # 20 draws of hundreds of likely tokens
        assert len({tuple(output.token_ids) for output in outputs}) == 20
        again = engine.generate(ids(5, 6, 5, 6, 5, 6), params.model_copy(update={"seed": outputs[3].seed}))[0]
        assert again.token_ids == outputs[3].token_ids
