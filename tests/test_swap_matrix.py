"""Every pair of components that can be combined gives the reference tokens; every other pair is refused with a reason.

The components are those that are installed, so a new one joins by its entry point. References: transformers in float32
for the CPU backend (with the weights that a quantizer and the keys and values that a KV format stand for), and the
documented hash for the fake backend.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_format_cases import greedy

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.assembly.registry import list_entries
from pluglm.assembly.resolving import SLOTS
from pluglm.kernel.errors import PluginError
from pluglm_spec_decode.heads.module import DraftHead
from pluglm_spec_decode.heads.settings import head_config
from pluglm_spec_decode.heads.teacher import load_teacher

PROMPTS = ([9, 41, 77, 12, 30, 5, 18], [23], [60, 61, 62, 60, 61, 62, 60, 61])
NUM_TOKENS = 12
OPTIONS: dict[tuple[str, str], list[dict[str, Any]]] = {("kv", "paged"): [{"block_size": 1}, {"block_size": 16}]}
DRAFT_MODELS = ("draft_model", "universal")
HEADS = {"eagle_head": "eagle"}
LIKE_ANOTHER = {"mtp_head"}  # wired by what it has in common with eagle_head; test_draft_heads.py runs it
Choice = tuple[str, str, dict[str, Any]]


def choices(slot: str) -> list[Choice]:
    names = sorted({entry.name for kind in SLOTS[slot] for entry in list_entries(kind)} - LIKE_ANOTHER)
    return [(slot, name, options) for name in names for options in OPTIONS.get((slot, name), [{}])]


ALL: list[Choice] = [choice for slot in SLOTS for choice in choices(slot)] + [("engine", "deterministic", {})]
PAIRS = [(one, two) for one, two in itertools.combinations(ALL, 2) if one[0] != two[0]]


def expected_refusal(names: dict[str, str]) -> str | None:
    """The pairs that cannot work, and what the message must say; anything else has to run."""
    if names.get("backend") == "fake" and "quantizer" in names:
        return "backend 'fake'.*computes no weights"
    if names.get("backend") == "fake" and names.get("drafter") in HEADS:
        return f"drafter '{names['drafter']}' reads the model's hidden states, and the backend gives none"
    if "engine" in names and names.get("attention") == "sdpa":
        return "attention 'sdpa'.*cannot run with engine.deterministic"
    if "engine" in names and names.get("backend") == "cuda":
        return "backend 'cuda'.*cannot run with engine.deterministic"
    if names.get("backend") == "cuda" and not torch.cuda.is_available():
        return "backend 'cuda'.*cannot run on this machine"
    return None


def pair_id(pair: tuple[Choice, Choice]) -> str:
    return "+".join(f"{slot}={name}{''.join(map(str, options.values()))}" for slot, name, options in pair)


def config_of(model: Path, draft: Path, pair: tuple[Choice, Choice]) -> RunConfig:
    data: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "backend": "cpu",
        "engine": {"max_step_tokens": 8, "num_threads": 1, "max_num_seqs": 2},
    }
    for slot, name, options in pair:
        if slot == "engine":
            data["engine"] = {**data["engine"], name: True}
            data["attention"] = data.get("attention", {"use": "naive"})
        else:
            more = {"self_layers": {"num_layers": 1}, **{one: {"model": str(draft)} for one in DRAFT_MODELS}}
            more |= {one: {"model": str(draft.with_name(kind))} for one, kind in HEADS.items()}
            data[slot] = {"use": name, **options, **more.get(name, {})}
    return RunConfig.from_dict(data)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Callable[[str | None, str | None], list[list[int]]]:
    """Greedy tokens by transformers, with every linear weight as the named quantizer and KV as the format stores it."""
    from transformers import LlamaForCausalLM

    from pluglm.assembly.registry import find, load

    known: dict[tuple[str | None, str | None], list[list[int]]] = {}

    def tokens(quantizer: str | None, kv_format: str | None) -> list[list[int]]:
        if (quantizer, kv_format) in known:
            return known[quantizer, kv_format]
        model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
        if quantizer is not None:
            cls = load(find(("quantizer",), quantizer))
            maker = cls(cls.Config(), "cpu", torch.float32)
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear):
                    weight = maker.dequantize(maker.make_linear(name, module.weight.detach().clone(), None))
                    module.weight.data = weight
        outputs = [greedy(model, torch.tensor([p]), NUM_TOKENS, kv_format).sequences[0] for p in PROMPTS]
        known[quantizer, kv_format] = [one[len(p) :].tolist() for one, p in zip(outputs, PROMPTS, strict=True)]
        return known[quantizer, kv_format]

    return tokens


def fake_tokens(prompt: list[int], vocab_size: int) -> list[int]:
    """What the fake backend's docstrings say the most likely token is: the first number of the digest, modulo V."""
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        data = b"".join(t.to_bytes(8, "little") + p.to_bytes(8, "little") for p, t in enumerate(ids))
        ids.append(int.from_bytes(hashlib.blake2b(data, digest_size=40).digest()[:8], "little") % vocab_size)
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def draft(make_tiny_model: Callable[..., Path], tiny_model: Path) -> Path:
    """Another model with the same tokenizer, so that most of its drafts are refused; random heads beside it."""
    model = make_tiny_model("draft", seed=1)
    for kind in HEADS.values():
        DraftHead(head_config(kind, load_teacher(str(tiny_model)).spec)).save(model.with_name(kind))
    return model


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_pair(
    pair: tuple[Choice, Choice], tiny_model: Path, draft: Path, reference: Callable[..., list[list[int]]]
) -> None:
    names = {slot: name for slot, name, _ in pair}
    config = config_of(tiny_model, draft, pair)
    if (reason := expected_refusal(names)) is not None:
        with pytest.raises(PluginError, match=reason):
            Engine.from_config(config)
        return
    with Engine.from_config(config) as engine:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
        assert [output.error for output in outputs] == [None] * len(PROMPTS)
        if names.get("backend") == "fake":
            vocab_size = engine._core.parts.runner.spec.vocab_size
            assert [output.token_ids for output in outputs] == [fake_tokens(p, vocab_size) for p in PROMPTS]
        else:
            assert [output.token_ids for output in outputs] == reference(names.get("quantizer"), names.get("kv_format"))
        if "grammar" in names:
            check_grammar(engine)
        if "search" in names:
            check_search(engine, [output.token_ids for output in outputs])
        engine._core.kv.audit()
        assert engine._core.kv.capacity().held_blocks == 0


def check_grammar(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, grammar={"regex": "(cat|dog) [0-9]{3}"})
    output = engine.generate({"prompt_token_ids": list(PROMPTS[0])}, params)[0]
    assert output.finish_reason == "stop", output.error
    assert re.fullmatch("(cat|dog) [0-9]{3}", output.text)


def check_search(engine: Engine, expected: list[list[int]]) -> None:
    """Keeping only the best candidate of each step is greedy decoding."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, search={"width": 1})
    outputs = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], params)
    assert [(output.token_ids, output.error) for output in outputs] == [(tokens, None) for tokens in expected]


def test_every_refusal_is_expected_and_most_pairs_run() -> None:
    """Guards the matrix itself: it must cover every slot, and be large."""
    assert {slot for pair in PAIRS for slot, _, _ in pair} == {*SLOTS, "engine"}
    assert len(PAIRS) > 120
