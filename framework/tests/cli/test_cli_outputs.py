"""What `pluglm run` shows of several outputs and of a prefix cache, compared with what the library gives."""

from __future__ import annotations

import json
from pathlib import Path

from pluglm import Engine, RunConfig, SamplingParams

PROMPT = "Why is the sky blue?"
START = list(range(500, 564))  # four blocks of 16 tokens


def test_several_outputs_follow_one_another(pluglm, fake_config: Path):
    outcome = pluglm("run", fake_config, "--prompt", PROMPT, "--raw", "--set", "sampling.n=3")
    config = RunConfig.from_file(fake_config, {"sampling.n": 3})
    with Engine.from_config(config) as engine:
        texts = [one.text for one in engine.generate(PROMPT)[0].completions]
    assert len(set(texts)) == 3
    assert outcome.out == "".join(f"--- output {number} of 3\n{text}\n" for number, text in enumerate(texts, start=1))


def test_json_has_every_output_when_several_were_asked_for(pluglm, fake_config: Path):
    several = json.loads(pluglm("run", fake_config, "--prompt", PROMPT, "--json", "--set", "sampling.n=2").out)
    one = json.loads(pluglm("run", fake_config, "--prompt", PROMPT, "--json").out)
    assert "completions" not in one
    first, second = several["completions"]
    assert [first["lane"], second["lane"]] == [0, 1]
    assert first["token_ids"] == several["token_ids"] == one["token_ids"]
    assert first["text"] == several["text"] == one["text"]
    assert second["token_ids"] != first["token_ids"]
    assert "logprobs" not in second


def test_what_a_cache_gave_is_in_the_table_and_in_the_json(pluglm, fake_config: Path, tmp_path: Path):
    """One seat, so the second prompt comes after the first: it finds four blocks, 64 of the 2 x 66 tokens."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_token_ids": [*START, last, last]}) + "\n" for last in (7, 8)))
    common = ("run", fake_config, "--prompts-file", file, "--set", "engine.max_num_seqs=1")
    outcome = pluglm(*common, "--set", "kv.use=hash_prefix")
    found = [json.loads(line)["metrics"]["num_cached_tokens"] for line in outcome.out.splitlines()]
    assert found == [0, 64]
    assert "64 of 132 (48%)" in outcome.err
    assert "cached prompt tokens" in outcome.err
    assert "cached prompt tokens" not in pluglm(*common, "--set", "kv.use=paged").err


def test_preemptions_are_in_the_table(pluglm, fake_config: Path, tmp_path: Path):
    """Three blocks of 4 tokens hold no two requests of 4 prompt and 6 output tokens."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_token_ids": [number] * 4}) + "\n" for number in (5, 6)))
    pool = ("--set", "kv.num_blocks=3", "--set", "kv.block_size=4", "--set", "sampling.ignore_eos=true")
    outcome = pluglm("run", fake_config, "--prompts-file", file, *pool)
    with Engine.from_config(RunConfig.from_file(fake_config, {"kv.num_blocks": 3, "kv.block_size": 4})) as engine:
        params = SamplingParams(temperature=1.0, max_tokens=6, seed=7, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": [number] * 4} for number in (5, 6)], params)
    metrics = [one.metrics for one in outputs if one.metrics is not None]
    preemptions, recomputed = sum(m.num_preemptions for m in metrics), sum(m.num_recomputed_tokens for m in metrics)
    assert preemptions >= 1
    assert f"{preemptions} ({recomputed} tokens computed again)" in outcome.err
    assert "preemptions" not in pluglm("run", fake_config, "--prompt", PROMPT).err
