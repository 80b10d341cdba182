"""What heads draft, against the trainable modules over the whole text each time, which have no cache to get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pluglm.kernel.errors import CheckpointError, PluginError
from pluglm.kernel.interfaces.drafter import Proposal
from pluglm.testing.context import make_context, small_spec
from pluglm.testing.drafter import draft_request
from pluglm.testing.target import TableTarget, ToldDrafter
from pluglm.weights import resolve
from pluglm_spec_decode.heads.eagle import EagleHeadDrafter
from pluglm_spec_decode.heads.module import DraftHead
from pluglm_spec_decode.heads.mtp import MtpHeadDrafter

KINDS: dict[str, tuple[type[Any], int]] = {"eagle": (EagleHeadDrafter, 1), "mtp": (MtpHeadDrafter, 3)}
NUM_IDS = 262  # of the kit's tokenizer; the head of its target has more rows
NEAR = 1e-3  # of a logit: drafts that are as likely as that are as good


class Bench:
    """A drafter on the kit's target. starts: position of the first hidden state that each sequence has."""

    def __init__(self, head: DraftHead, folder: Path, runner: Any, *, max_step_tokens: int = 64, **config: Any) -> None:
        spec = small_spec()
        self.head, self.starts = head, dict[int, int]()
        self.target = TableTarget(spec, lambda path: runner)
        self.kv = runner.kv
        cls, _ = KINDS[head.config["kind"]]
        context = replace(make_context(spec=spec, max_step_tokens=max_step_tokens), target=self.target)
        self.inner = cls(cls.Config(**{"model": str(folder), "num_tokens": 3, **config}), context)
        self.drafter = ToldDrafter(self.inner, self.target)

    def skip(self, sequence_id: int, stop: int) -> None:
        """The target computes nothing before this position, as when it adopts a cached prefix."""
        self.target.skip(sequence_id, stop)
        self.starts[sequence_id] = stop

    def release(self, sequence_id: int) -> None:
        self.drafter.release(sequence_id)
        self.starts.pop(sequence_id, None)

    def propose(self, texts: dict[int, list[int]], max_tokens: int = 3) -> list[list[int]]:
        requests = [draft_request(text, sequence_id=one, max_tokens=max_tokens) for one, text in texts.items()]
        return [proposal.token_ids for proposal in self.drafter.propose(requests)]

    def checked(self, texts: dict[int, list[int]], max_tokens: int = 3) -> list[list[int]]:
        """Proposals, each draft near the most likely one by the reference."""
        found = self.propose(texts, max_tokens)
        for (sequence_id, text), drafts in zip(texts.items(), found, strict=True):
            assert len(drafts) == (max_tokens if len(text) - 1 > self.starts.get(sequence_id, 0) else 0)
            for logits_V, draft in zip(
                self._logits(text, self.starts.get(sequence_id, 0), drafts), drafts, strict=True
            ):
                assert logits_V[draft] > logits_V.max() - NEAR
        return found

    @torch.inference_mode()
    def _logits(self, text: list[int], start: int, drafts: list[int]) -> Sequence[torch.Tensor]:
        """By the definitions of the papers: eagle feeds features back, mtp has a block for each draft."""
        if not drafts:
            return []
        known, features_TD, logits = text + drafts, self.target.states(text)[start:-1], list[torch.Tensor]()
        for index in range(len(drafts)):
            if self.head.config["kind"] == "eagle":
                said_TD = self._block(0, known[start + 1 : len(text) + index], features_TD)
                features_TD = torch.cat((features_TD, said_TD[-1:]))
            else:
                said_TD = features_TD = self._block(index, known[start + 1 + index : len(text) + index], features_TD)
            with self.target.lent([]):
                logits.append(self.target.logits(said_TD[-1:])[0, :NUM_IDS])
        return logits

    def _block(self, index: int, token_ids: list[int], features_TD: torch.Tensor) -> torch.Tensor:
        with self.target.lent([]):
            embedded_1TD = self.target.embed(torch.tensor([token_ids]))
        said: torch.Tensor = self.head.layers[index](embedded_1TD, features_TD[None])[0]
        return said


@pytest.fixture(params=KINDS)
def make_bench(request: pytest.FixtureRequest, make_head: Callable[..., Any], head_runner: Any) -> Callable[..., Bench]:
    def make(num_blocks: int = 1024, max_position: int = 512, **options: Any) -> Bench:
        head, folder = make_head(
            request.param, small_spec(), num_blocks=KINDS[request.param][1], max_position=max_position
        )
        return Bench(head, folder, head_runner(str(folder), num_blocks), **options)

    return make


@pytest.mark.parametrize("max_step_tokens", [64, 5])
def test_interleaved_sequences_equal_the_whole_text(make_bench: Callable[..., Bench], max_step_tokens: int) -> None:
    """Six sequences join, wait, begin behind a prefix, have gaps and leave, with random numbers of drafts accepted."""
    generator, bench = random.Random(2), make_bench(max_step_tokens=max_step_tokens)
    texts: dict[int, list[int]] = {}
    for _ in range(40):
        for sequence_id in generator.sample(range(6), 2):
            if sequence_id not in texts:
                texts[sequence_id] = generator.choices(range(250), k=generator.randint(1, 14))
                bench.skip(sequence_id, generator.choice((0, 0, len(texts[sequence_id]) // 2)))
            elif generator.random() < 0.2:
                bench.release(sequence_id)
                del texts[sequence_id]
            elif generator.random() < 0.2:
                texts[sequence_id] += generator.choices(range(250), k=3)
                bench.skip(sequence_id, len(texts[sequence_id]) - generator.randint(1, 2))
        chosen = {one: texts[one] for one in generator.sample(sorted(texts), generator.randint(0, len(texts)))}
        max_tokens = generator.randint(1, 3)
        found = bench.checked(chosen, max_tokens)
        if generator.random() < 0.3:
            assert bench.propose(chosen, max_tokens) == found
            bench.checked(chosen, 3)
        for sequence_id, drafts in zip(chosen, found, strict=True):
            num_accepted = generator.randint(0, len(drafts))
            committed = [*drafts[:num_accepted], generator.randrange(250)]
            bench.drafter.observe(sequence_id, num_accepted, committed)
            texts[sequence_id] = texts[sequence_id] + committed
        bench.kv.audit()
    assert bench.inner.num_exhausted == 0
    for sequence_id in range(6):
        bench.release(sequence_id)
    assert bench.kv.capacity().held_blocks == 0


def test_calls_are_batched(make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for the entries of all sequences, then one a draft; or one a block."""
    bench, calls = make_bench(), list[tuple[int, int]]()
    runner = bench.inner._run_block._runner
    run = runner.run

    def counted(inputs: Any) -> torch.Tensor:
        calls.append((len(inputs.segments), len(inputs.token_ids_T)))
        return run(inputs)

    monkeypatch.setattr(runner, "run", counted)
    texts = {1: [3, 1, 4, 1, 5], 2: [9, 2], 3: [6, 5, 3]}
    found = bench.checked(texts)
    is_eagle = bench.head.config["kind"] == "eagle"
    assert calls == ([(3, 7), (3, 3), (3, 3)] if is_eagle else [(3, 7)] * 3)
    calls.clear()
    for one, drafts in zip(texts, found, strict=True):
        bench.drafter.observe(one, 1, [drafts[0], 7])
        texts[one] = [*texts[one], drafts[0], 7]
    bench.checked(texts)
    # two new entries each; of the three sequences, mtp computes up to two of the entries before again
    assert calls == ([(3, 6), (3, 3), (3, 3)] if is_eagle else [(3, 6 + 2 + 1 + 2)] * 3)


def test_kv_of_predicted_features_is_given_back(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    (drafts,) = bench.checked({0: list(range(8))})  # seven entries: two blocks of four tokens
    assert bench.kv.capacity().held_blocks == (3 if bench.head.config["kind"] == "eagle" else 2)
    bench.drafter.observe(0, 3, [*drafts, 9])
    assert bench.kv.capacity().held_blocks == 2


def test_no_room_leaves_a_sequence_without_drafts_and_later_begins_anew(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(num_blocks=4)
    long, short = list(range(40)), [1, 2, 3]
    assert bench.propose({0: long}) == [[]]
    bench.skip(0, 0)
    bench.checked({0: long[:10]})
    assert bench.propose({0: long}) == [[]]
    assert bench.inner.num_exhausted == 2
    assert bench.kv.capacity().held_blocks == 0
    bench.starts[0] = len(long) - 1
    bench.checked({0: [*long, 7], 1: short})


def test_texts_beyond_the_heads_context_begin_anew(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_position=8)
    assert bench.propose({0: list(range(20))}) == [[]]
    bench.starts[0] = 19
    text = [*range(20), 7]
    for _ in range(4):  # entries 1, 2, 3, 4
        bench.checked({0: text})
        text = [*text, 9]
        bench.drafter.observe(0, 0, [9])
    text = [*text, 3, 3, 3]
    drafts = bench.propose({0: text})[0]
    assert len(drafts) == (1 if bench.head.config["kind"] == "eagle" else 3)  # 8 entries, and each fed draft is one


def test_a_failed_call_leaves_a_usable_drafter(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    runner, text = bench.inner._run_block._runner, [1, 2, 3, 4, 5]

    def fail(inputs: Any) -> torch.Tensor:
        raise RuntimeError("device lost")

    bench.checked({0: text})
    with monkeypatch.context() as patched:
        patched.setattr(runner, "run", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            bench.propose({0: [*text, 6], 1: text})
    assert bench.propose({0: [*text, 6], 1: text}) == [[], []]  # those features are gone
    bench.starts |= {0: 5, 1: 4}
    bench.checked({0: [*text, 6, 7], 1: [*text, 8]})


@pytest.mark.parametrize("max_step_tokens", [64, 6])
def test_greedy_requests_beside_drawn_ones(make_bench: Callable[..., Bench], max_step_tokens: int) -> None:
    """Rows are the softmax at the request's temperature, by float64; ids its running sum's.

    In steps of six, the entries that are made of drafts would be torn from the last one, were they not kept together.
    """
    bench, text = make_bench(draws=True, max_step_tokens=max_step_tokens), [4, 8, 15, 16, 23, 42, 1, 2]
    requests = []
    for sequence_id, temperature in enumerate((0.7, 0.0)):
        one = draft_request(text, sequence_id=sequence_id, max_tokens=3)
        params = one.request.params.model_copy(update={"temperature": temperature})
        requests.append(replace(one, request=replace(one.request, params=params)))
    drawn, fixed = bench.drafter.propose(requests)
    assert fixed.rows_kV is None
    assert isinstance(drawn, Proposal)
    assert drawn.rows_kV is not None
    logits = bench._logits(text, 0, drawn.token_ids)
    for logits_V, row_V, token, coin in zip(logits, drawn.rows_kV, drawn.token_ids, requests[0].coins(3), strict=True):
        expected_V = torch.softmax(logits_V.double() / 0.7, -1)
        torch.testing.assert_close(row_V[:NUM_IDS].double(), expected_V, atol=1e-4, rtol=0)
        assert not row_V[NUM_IDS:].any()
        assert row_V.double().cumsum(0)[token] > coin - 1e-6
        assert row_V.double().cumsum(0)[token] - row_V[token] < coin + 1e-6


@pytest.mark.parametrize(
    ("kind", "other", "says"),
    [
        (
            "eagle",
            {"hidden_size": 48},
            "hidden_size of 48 and a vocab_size of 320, this model has 32 and 320; train a head",
        ),
        (
            "eagle",
            {"vocab_size": 99},
            "hidden_size of 32 and a vocab_size of 99, this model has 32 and 320; train a head",
        ),
        ("mtp", {}, "config.json is a head of kind mtp; use mtp_head for it"),
    ],
)
def test_a_head_of_another_model_is_refused(
    make_head: Callable[..., Any], kind: str, other: dict[str, int], says: str
) -> None:
    _, folder = make_head(kind, replace(small_spec(), **other))

    def read_no_weights(path: str) -> Any:
        raise AssertionError("the head was built")

    context = make_context(target=TableTarget(small_spec(), read_no_weights))
    with pytest.raises(PluginError, match=says) as caught:
        EagleHeadDrafter(EagleHeadDrafter.Config(model=str(folder)), context)
    assert "drafter 'eagle_head'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, "of model_type 'llama'; give the folder of a draft head"),
        ({"kind": "medusa"}, "key 'kind' is 'medusa', which is not supported; supported: eagle, mtp"),
        ({"num_hidden_layers": 2}, "key 'num_hidden_layers' is 2; a head of kind eagle is one block"),
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "key 'rope_parameters' asks for the kind 'dynamic', which heads do not have",
        ),
    ],
)
def test_a_config_of_something_else_is_refused(
    make_head: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    head, _ = make_head("eagle", small_spec())
    head.config = {**head.config, **changes}
    head.save(tmp_path)
    with pytest.raises((PluginError, CheckpointError), match=says) as caught:
        EagleHeadDrafter(EagleHeadDrafter.Config(model=str(tmp_path)), make_context(target=TableTarget(small_spec())))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_more_tokens_than_blocks_are_refused(make_head: Callable[..., Any]) -> None:
    _, folder = make_head("mtp", small_spec(), num_blocks=2)
    for num_tokens, steps_of, says in (
        (3, 64, "num_tokens is 3 and .* has 2 blocks; set num_tokens to 2 or less"),
        (2, 1, "num_tokens is 2, more than the 1 tokens of a step; lower num_tokens"),
    ):
        context = make_context(target=TableTarget(small_spec()), max_step_tokens=steps_of)
        with pytest.raises(PluginError, match=says):
            MtpHeadDrafter(MtpHeadDrafter.Config(model=str(folder), num_tokens=num_tokens), context)


@pytest.mark.parametrize(
    "name", ["heads/smollm2", "smollm2-135m-instruct", "a\0b", "~nobody-of-that-name/x", "x" * 5000]
)
def test_a_head_is_a_folder_and_is_looked_for_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not by the names that packages register, nor on the hub, though the first reads like one of its ids."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "fetch_from_hub", lambda *_: pytest.fail("the hub was asked"))
    config = EagleHeadDrafter.Config(model=name)
    for use in (
        lambda: EagleHeadDrafter.check_files(config),
        lambda: EagleHeadDrafter(config, make_context(target=TableTarget(small_spec()))),
    ):
        with pytest.raises(PluginError) as caught:
            use()
        assert str(caught.value).startswith(f"drafter 'eagle_head': there is no folder {name}; train a head")


def test_a_head_in_the_working_directory_is_found(
    make_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = make_head("mtp", small_spec(), num_blocks=2)
    monkeypatch.chdir(folder.parent)
    MtpHeadDrafter.check_files(MtpHeadDrafter.Config(model=folder.name, num_tokens=2))
    with pytest.raises(PluginError, match="has 2 blocks; set num_tokens to 2 or less"):
        MtpHeadDrafter.check_files(MtpHeadDrafter.Config(model=folder.name, num_tokens=3))
