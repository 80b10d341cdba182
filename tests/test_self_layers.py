"""`self_layers` in the engine: drafts are those of the model cut short, and its use of the run's KV leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import GREEDY, ids, real_config, require_idle, write_plugin

from pluglm import Engine, RequestOutput, SamplingParams
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.drafter import DraftRequest, Proposal
from pluglm.target.access import TargetAccess
from pluglm.testing.context import small_spec
from pluglm.testing.runner import TableRunner
from pluglm_spec_decode.self_layers import SelfLayersDrafter

DRAFTER = {"use": "self_layers", "num_layers": 2, "num_tokens": 3}
PROMPTS = [ids(*range(3, 10)), ids(7, 7, 7), ids(*range(30, 3, -1)), ids(9)]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, seed=5, n=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model(make_tiny_model: Callable[..., Path]) -> Path:
    """Small steps from layer to layer, so that the first ones say something about the last."""
    return make_tiny_model("layers", num_hidden_layers=4, initializer_range=0.15)


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[RequestOutput]]:
    with Engine.from_config(real_config(model)) as engine:
        return {"greedy": engine.generate(PROMPTS, GREEDY), "sampled": engine.generate(PROMPTS, SAMPLED)}


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [[tuple(lane.token_ids) for lane in output.completions] for output in outputs]


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DraftRequest, Proposal]]:
    seen: list[tuple[DraftRequest, Proposal]] = []
    propose = SelfLayersDrafter.propose

    def watched(self: SelfLayersDrafter, requests: Any) -> list[Proposal]:
        found = propose(self, requests)
        seen.extend(zip(requests, found, strict=True))
        return found

    monkeypatch.setattr(SelfLayersDrafter, "propose", watched)
    return seen


def test_drafts_are_those_of_the_model_cut_short(model: Path, proposals: list[tuple[DraftRequest, Proposal]]) -> None:
    """transformers with the first two layers alone, over the whole text each time."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model).float()
    reference.model.layers = reference.model.layers[:2]
    with Engine.from_config(real_config(model, drafter=DRAFTER)) as engine:
        engine.generate(PROMPTS, GREEDY)
    drafted = [(request, proposal) for request, proposal in proposals if proposal.token_ids]
    assert len(drafted) >= 8
    for request, proposal in drafted:
        text = list(request.token_ids)
        for draft in proposal.token_ids:
            with torch.inference_mode():
                logits_V = reference(torch.tensor([text])).logits[0, -1]
            assert logits_V.argmax() == draft
            text.append(draft)


@pytest.mark.parametrize(
    "slots",
    [
        {},
        {"kv": {"use": "contiguous"}},
        {"kv": {"use": "paged", "block_size": 2}},
        {"kv": {"use": "radix", "block_size": 4}},
        {"kv": {"use": "paged", "num_blocks": 10, "block_size": 4}, "engine": {"max_num_seqs": 4}},
        {"engine": {"max_step_tokens": 5}},
    ],
    ids=["paged", "contiguous", "small blocks", "radix", "preemption", "small steps"],
)
def test_outputs_are_those_without_it(
    model: Path, plain: dict[str, list[RequestOutput]], slots: dict[str, Any]
) -> None:
    with Engine.from_config(real_config(model, drafter=DRAFTER, **slots)) as engine:
        for _ in range(2):  # the second time with what the first left in a prefix cache
            assert tokens(engine.generate(PROMPTS, GREEDY)) == tokens(plain["greedy"])
            outputs = engine.generate(PROMPTS, SAMPLED)
            assert tokens(outputs) == tokens(plain["sampled"])
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        assert 0 < sum(one.num_accepted for one in metrics) < sum(one.num_drafted for one in metrics)
        require_idle(engine)


def test_all_layers_but_the_last_agree_more_often_than_one(model: Path) -> None:
    accepted = []
    for num_layers in (1, 3):
        with Engine.from_config(real_config(model, drafter={**DRAFTER, "num_layers": num_layers})) as engine:
            outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
        accepted.append(sum(output.metrics.num_accepted for output in outputs if output.metrics is not None))
    assert accepted[0] < accepted[1]


def test_drawn_drafts_under_the_rules_that_need_their_rows(model: Path) -> None:
    """That the law is kept is the kit's to prove; here, that drawn drafts are kept and refused in a run."""
    engine_options = {"deterministic": False, "verification": "token"}
    config = real_config(model, drafter={**DRAFTER, "draws": True}, engine=engine_options)
    with Engine.from_config(config) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(temperature=1.0, max_tokens=24, seed=1, ignore_eos=True))
        tokens(outputs)
        metrics = [output.metrics for output in outputs if output.metrics is not None]
    assert 0 < sum(one.num_accepted for one in metrics) < sum(one.num_drafted for one in metrics)


@pytest.mark.parametrize(("num_layers", "most"), [(4, 3), (9, 3)])
def test_a_number_of_layers_that_leaves_none(model: Path, num_layers: int, most: int) -> None:
    with pytest.raises(PluginError, match=f"num_layers is {num_layers} and the model has 4 layers; give 1 to {most}"):
        Engine.from_config(real_config(model, drafter={**DRAFTER, "num_layers": num_layers}))


def test_a_family_without_the_ability_is_refused() -> None:
    access = TargetAccess(small_spec(), "drafter 'mine'", lambda path: TableRunner(), may_evict=True, patience_s=1)
    access.use_first_layers(1)
    with pytest.raises(PluginError, match="drafter 'mine' drafts with the model itself, and family 'table' cannot"):
        access.bind(SimpleNamespace(model=object(), backend=object()))  # type: ignore[arg-type]


def test_once_the_model_is_there_nothing_more_can_be_asked_for() -> None:
    access = TargetAccess(small_spec(), "drafter 'mine'", lambda path: TableRunner(), may_evict=True, patience_s=1)
    access.bind(SimpleNamespace(model=object(), backend=object()))  # type: ignore[arg-type]  # unasked, it needs nothing
    for ask in (lambda: access.use_first_layers(1), access.use_hidden_states, lambda: access.build_head("head")):
        with pytest.raises(RuntimeError, match="is called while the drafter is built"):
            ask()
    with pytest.raises(RuntimeError, match="call use_first_layers while the drafter is built"), access.room({}):
        pass


BORROWER = """
    import threading
    from collections.abc import Sequence
    from pluglm.kernel.core import Chunk
    from pluglm.kernel.interfaces.component import ComponentConfig, Capabilities
    from pluglm.kernel.interfaces.drafter import Proposal

    class Config(ComponentConfig):
        mode: str

    class Borrower:
        interface_version = 2
        Config = Config
        failures = []
        resumed = threading.Event()
        back = threading.Event()

        @classmethod
        def capabilities(cls, config):
            return Capabilities()

        def __init__(self, config, context):
            self.mode, self.target = config.mode, context.target
            self.target.use_first_layers(1)
            if self.mode == "newest state":
                self.target.use_hidden_states()

        def propose(self, requests):
            one = requests[0]
            size = len(one.token_ids)
            if self.mode == "hangs":
                self.resumed.wait(20)
                try:
                    with self.target.room({one.sequence_id: size}):
                        pass
                except RuntimeError as error:
                    self.failures.append(str(error))
                self.back.set()
            elif self.mode == "another's":
                with self.target.room({one.sequence_id + 1000: 3}):
                    pass
            elif self.mode == "too far":
                with self.target.room({one.sequence_id: size + one.max_tokens + 1}):
                    pass
            elif self.mode == "no room":
                self.target.run_first([Chunk(one.sequence_id, [1], size - 1)])
            elif self.mode == "states":
                self.target.take_hidden(one.sequence_id, size - 1)
            elif self.mode == "newest state":
                self.target.take_hidden(one.sequence_id, size)
            elif self.mode == "asks late":
                self.target.use_first_layers(1)
            elif self.mode == "over the text":
                with self.target.room({one.sequence_id: size}):
                    self.target.run_first([Chunk(one.sequence_id, [1], size - 2)])
            elif self.mode == "shrunk text":
                del one.token_ids[1:]
                with self.target.room({one.sequence_id: size}):
                    self.target.run_first([Chunk(one.sequence_id, [1], size - 2)])
            return [Proposal([]) for _ in requests]

        def observe(self, sequence_id, num_accepted, token_ids):
            if self.mode == "late":
                with self.target.room({}):
                    pass

        def release(self, sequence_id):
            pass
"""


def borrowed(model: Path, folder: Path, mode: str, **engine_options: Any) -> tuple[Engine, type[Any]]:
    name = write_plugin(folder, BORROWER, f"borrower_{''.join(filter(str.isalpha, mode))}")
    config = real_config(model, folder, drafter={"use": f"{name}:Borrower", "mode": mode}, engine=engine_options)
    engine = Engine.from_config(config)
    return engine, type(engine.core.parts.drafter.drafter)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("another's", "is not among those that are proposed for"),
        ("too far", "more than the 14 that were asked for: its 8 and max_tokens, 6"),
        ("no room", "run_first may be used inside room alone"),
        ("over the text", "was to be run from position 6; the first allowed is 7"),
        ("shrunk text", "was to be run from position 6; the first allowed is 7"),
        ("newest state", "were to be taken up to 8; its newest token has none yet, so stop is at most 7"),
        ("asks late", "use_first_layers is called while the drafter is built"),
        ("states", "not asked for this; call use_hidden_states while the drafter is built"),
        ("late", "inside propose alone"),
    ],
)
def test_what_a_drafter_may_not_do_fails_its_requests_alone(model: Path, tmp_path: Path, mode: str, says: str) -> None:
    engine, _ = borrowed(model, tmp_path, mode)
    with engine:
        (output,) = engine.generate(PROMPTS[:1], GREEDY)
        assert output.error is not None
        assert "Borrower" in output.error
        assert says in output.error
        require_idle(engine)


def test_a_call_that_was_given_up_on_can_touch_the_target_no_more(model: Path, tmp_path: Path) -> None:
    engine, cls = borrowed(model, tmp_path, "hangs", plugin_timeout_s=1)
    with engine:
        (output,) = engine.generate(PROMPTS[:1], GREEDY)
        assert output.error is not None
        assert "gave no answer" in output.error
        cls.resumed.set()
        assert cls.back.wait(10)
        assert len(cls.failures) == 1
        assert "no longer once that call was given up on" in cls.failures[0]
        (again,) = engine.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=1))
        assert again.error is None
