"""Layers with a window keep little more than it, and no token or logits bit shows that: against the paged manager.

The models are tiny random ones of Gemma 3 (windows and full attention) and Mistral (windows alone), in deterministic
mode. That the paged manager is right is known from transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from differential_cases import FORCED, FORCED_SOURCE
from engine_cases import fake_config, real_config, require_idle, vocab_size, write_plugin
from window_cases import (
    GREEDY,
    KINDS,
    LENGTHS,
    SAMPLED,
    WINDOW,
    Holdings,
    Rows,
    fake_tokens,
    prompts,
    texts,
    write_model,
)

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.kernel import engine as kernel_engine
from pluglm.kernel.errors import IncompatibleError, RequestError

CHUNKS = {1: 1, 7: 7, 64: 64, "all": 4096}
NEW = 30  # tokens of each request


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_model(tmp_path_factory.mktemp(family), family, tiny_model) for family in KINDS}


def config_of(model: Path, folder: Path | None = None, kv: Any = "window_paged", **engine: Any) -> RunConfig:
    slots = {name: engine.pop(name) for name in ("drafter", "scheduler", "attention") if name in engine}
    settings = {"max_num_seqs": 4, **engine}
    return real_config(
        model,
        folder,
        model={"path": str(model), "dtype": "float32", "max_model_len": 400},
        kv=kv,
        engine=settings,
        **slots,
    )


@pytest.fixture(scope="module")
def paged(models: dict[str, Path]) -> Callable[[str, SamplingParams], tuple[Any, Rows]]:
    """Tokens and logits rows of the paged manager with prompts computed whole."""
    known: dict[tuple[str, SamplingParams], tuple[Any, Rows]] = {}

    def run(family: str, params: SamplingParams) -> tuple[Any, Rows]:
        if (family, params) not in known:
            with Engine.from_config(config_of(models[family], kv="paged")) as engine:
                rows = Rows(engine)
                known[family, params] = texts(engine.generate(prompts(), params)), rows
        return known[family, params]

    return run


def check(engine: Engine, expected: tuple[Any, Rows], params: SamplingParams) -> Any:
    """Run the prompts; tokens and rows are the expected ones. Returns the outputs."""
    rows = Rows(engine)
    outputs = engine.generate(prompts(), params)
    assert [output.error for output in outputs] == [None] * len(LENGTHS)
    assert texts(outputs) == expected[0]
    assert rows.differing(expected[1]) == []
    require_idle(engine)
    return outputs


@pytest.mark.parametrize("family", KINDS)
def test_the_paged_manager_gives_the_tokens_of_transformers(
    models: dict[str, Path], paged: Callable[..., Any], family: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32).eval()
    greedy = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    ids = [torch.tensor([one["prompt_token_ids"]]) for one in prompts()]
    expected = [model.generate(one, **greedy)[0, one.shape[1] :].tolist() for one in ids]
    assert [list(lane) for (lane,) in paged(family, GREEDY)[0]] == expected


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_tokens_and_bits_are_those_of_paged(
    models: dict[str, Path], paged: Callable[..., Any], chunk: Any, block_size: int, family: str
) -> None:
    kv = {"use": "window_paged", "block_size": block_size}
    with Engine.from_config(config_of(models[family], kv=kv, max_step_tokens=CHUNKS[chunk])) as engine:
        check(engine, paged(family, GREEDY), GREEDY)


@pytest.mark.parametrize("family", KINDS)
def test_lanes_share_and_part(models: dict[str, Path], paged: Callable[..., Any], family: str) -> None:
    """Two outputs of each request, drawn with seeds: they share the prompt's KV, and then each slides on alone."""
    params = SAMPLED.model_copy(update={"n": 2})
    with Engine.from_config(config_of(models[family], max_step_tokens=16)) as engine:
        check(engine, paged(family, params), params)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED.model_copy(update={"n": 2})], ids=["greedy", "n=2"])
def test_preemption_of_every_kind(
    models: dict[str, Path],
    paged: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    params: SamplingParams,
) -> None:
    """In every step somebody is computed again, copied to the host and back, or paused with its KV."""
    restored = []
    original = kernel_engine.write_blocks
    monkeypatch.setattr(
        kernel_engine, "write_blocks", lambda *args: (restored.append(args[2].num_dropped), original(*args))
    )
    write_plugin(tmp_path, FORCED_SOURCE, FORCED)
    config = config_of(models[family], tmp_path, max_step_tokens=24, scheduler=f"{FORCED}:ForcedPreemption")
    with Engine.from_config(config) as engine:
        scheduler: Any = engine._core.parts.scheduler
        check(engine, paged(family, params), params)
        assert min(scheduler.counts.values()) > 0
    assert any(max(dropped) > 0 for dropped in restored)


@pytest.mark.parametrize("family", KINDS)
def test_a_small_pool_preempts_and_gives_the_same(
    models: dict[str, Path], paged: Callable[..., Any], family: str
) -> None:
    """Room for the longest request, or for one span of a window, and little more."""
    kv = {"use": "window_paged", "num_blocks": 16, "num_windows": 1}
    config = config_of(models[family], kv=kv, max_step_tokens=32)
    with Engine.from_config(config) as engine:
        outputs = check(engine, paged(family, GREEDY), GREEDY)
    assert family == "mistral" or sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "self_layers"])
def test_refused_drafts_are_trimmed(
    models: dict[str, Path], paged: Callable[..., Any], family: str, drafter: str
) -> None:
    """The draft model is that of the other family, so its KV is of groups too and most of its drafts are refused."""
    options: dict[str, Any] = {"use": drafter, "num_tokens": 3}
    if drafter == "draft_model":
        options["model"] = str(next(path for name, path in models.items() if name != family))
    if drafter == "self_layers":
        options["num_layers"] = 1
    with Engine.from_config(config_of(models[family], max_step_tokens=16, drafter=options)) as engine:
        outputs = check(engine, paged(family, GREEDY), GREEDY)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    assert sum(one.num_drafted for one in metrics) > 0
    assert sum(one.num_accepted for one in metrics) < sum(one.num_drafted for one in metrics)


@pytest.mark.parametrize("family", KINDS)
def test_sdpa_gives_the_same_tokens(models: dict[str, Path], paged: Callable[..., Any], family: str) -> None:
    config = config_of(models[family], max_step_tokens=16, attention="sdpa", deterministic=False)
    with Engine.from_config(config) as engine:
        assert texts(engine.generate(prompts(), GREEDY)) == paged(family, GREEDY)[0]


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(("block_size", "chunk"), [(16, 16), (16, 64), (8, 7), (48, 4096)])
def test_a_window_holds_no_more_than_its_bound(
    models: dict[str, Path], block_size: int, chunk: int, family: str
) -> None:
    """In any step the window before the first query, less than one unit before that, and the step's tokens."""
    unit = {8: 64, 16: 64, 48: 192}[block_size]  # least common multiple with 64
    kv = {"use": "window_paged", "block_size": block_size}
    with Engine.from_config(config_of(models[family], kv=kv, max_step_tokens=chunk)) as engine:
        holdings = Holdings(engine)
        engine.generate(prompts(), GREEDY)
    longest = LENGTHS[0] + NEW - 1  # the last token is not computed
    for group, most, most_decoding in zip(holdings.groups, holdings.most, holdings.most_decoding, strict=True):
        if group.window is None:
            assert most == -(-longest // block_size)
        else:
            assert most <= -(-(WINDOW - 1 + unit - 1 + min(chunk, 400)) // block_size)
            assert most_decoding <= -(-(WINDOW + unit - 1) // block_size) or chunk == 1


def test_windows_alone_hold_a_prompt_of_any_length(models: dict[str, Path], paged: Callable[..., Any]) -> None:
    """All of Mistral's layers have the window: a pool of 9 blocks of 16 tokens serves prompts of 203."""
    kv = {"use": "window_paged", "num_blocks": 9}
    with Engine.from_config(config_of(models["mistral"], kv=kv, max_step_tokens=32)) as engine:
        assert engine._core.kv.capacity().total_blocks * 16 < LENGTHS[0]
        assert engine._core.kv.max_request_tokens() == 400
        check(engine, paged("mistral", GREEDY), GREEDY)


def test_what_can_never_fit_is_refused_at_the_door(models: dict[str, Path]) -> None:
    """Gemma's layers without a window need a block for every 16 tokens; 10 of them hold 160."""
    with Engine.from_config(config_of(models["gemma3_text"], kv={"use": "window_paged", "num_blocks": 10})) as engine:
        assert engine._core.kv.max_request_tokens() == 160
        with pytest.raises(RequestError, match="203 tokens and the KV pool holds 160 tokens"):
            engine.submit(prompts()[0], GREEDY)
        with pytest.raises(RequestError, match=r"prompt 96 \+ max_tokens 65 = 161, the KV pool holds 160 tokens"):
            engine.submit(prompts()[2], GREEDY.model_copy(update={"max_tokens": 65}))
        assert len(engine.generate(prompts()[2], GREEDY.model_copy(update={"max_tokens": 64}))[0].token_ids) == 64


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("kv", ["paged", "window_paged"])
def test_the_fake_backend_reads_what_the_windows_show(models: dict[str, Path], family: str, kv: str) -> None:
    """Many requests in a pool for a few: the documented hash of what each window shows comes back."""
    lengths = (203, 17, 96, 60, 150, 41, 80, 1, 120, 40)
    config = fake_config(
        models[family], kv={"use": kv, "num_blocks": 24}, engine={"max_step_tokens": 40, "max_num_seqs": 6}
    )
    with Engine.from_config(config) as engine:
        asked = prompts(lengths)
        outputs = engine.generate(asked, GREEDY)
        size = vocab_size(engine)
        require_idle(engine)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    expected = [[fake_tokens(family, one["prompt_token_ids"], NEW, size)] for one in asked]
    assert texts(outputs) == expected


def test_a_backend_that_knows_no_groups_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    source = """
from pluglm.backends.cpu import CpuBackend
from pluglm.kernel.interfaces.component import BATCH_INVARIANT, Capabilities


class OldBackend(CpuBackend):
    @classmethod
    def capabilities(cls, config):
        return Capabilities(provides=frozenset({BATCH_INVARIANT}))
"""
    write_plugin(tmp_path, source, "old_backend")
    config = config_of(models["mistral"], tmp_path).model_dump() | {"backend": "old_backend:OldBackend"}
    with pytest.raises(IncompatibleError, match=r"kv 'window_paged' .* needs 'kv:layer_groups', which nothing here"):
        Engine.from_config(RunConfig.from_dict(config, folder=tmp_path))
