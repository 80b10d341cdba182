"""Trainable heads: their numbers are transformers' and the framework's own, and training brings them to the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pluglm.kernel.core import Chunk
from pluglm.kernel.errors import CheckpointError
from pluglm.testing.context import small_spec
from pluglm_spec_decode.heads.collecting import Trace
from pluglm_spec_decode.heads.distilling import distill
from pluglm_spec_decode.heads.module import DraftHead
from pluglm_spec_decode.heads.settings import head_config, read_settings_of
from pluglm_spec_decode.heads.teacher import Teacher

SPEC = small_spec(24)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def random_rows(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn"])
@torch.inference_mode()
def test_a_block_is_a_llama_layer_behind_norms_and_a_product(
    make_head: Callable[..., Any], rope: dict[str, Any] | None
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    head = DraftHead(head_config("eagle", SPEC, intermediate_size=40) | ({"rope_parameters": rope} if rope else {}))
    embeddings_BTD, features_BTD = random_rows(2, 40, 32), random_rows(2, 40, 32, seed=4)
    (found_BTD,) = head(embeddings_BTD, features_BTD)
    known = {name: value for name, value in head.config.items() if name not in ("model_type", "kind")}
    config = LlamaConfig(**known, attn_implementation="eager")
    layer, block = LlamaDecoderLayer(config, 0).eval(), head.layers[0]
    state = block.state_dict()
    layer.load_state_dict({name: state[name] for name in layer.state_dict()})
    normed = []
    for rows_BTD, name in ((embeddings_BTD, "embedding_norm"), (features_BTD, "feature_norm")):
        mean = rows_BTD.double().square().mean(-1, keepdim=True)
        normed.append(rows_BTD.double() / (mean + 1e-5).sqrt() * state[f"{name}.weight"])
    fused_BTD = (torch.cat(normed, -1) @ state["fuse.weight"].double().T).float()
    positions = torch.arange(40)[None]
    expected = layer(
        fused_BTD,
        attention_mask=torch.full((40, 40), -math.inf).triu(1)[None, None],
        position_embeddings=LlamaRotaryEmbedding(config)(fused_BTD, positions),
    )
    expected_BTD = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(found_BTD, expected_BTD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@torch.inference_mode()
def test_the_frameworks_run_is_the_modules_forward(
    make_head: Callable[..., Any], head_runner: Any, kernels: str
) -> None:
    """Three texts in chunks, in one batch and through block tables; every block, within 1e-4."""
    head, folder = make_head("mtp", SPEC, num_blocks=3)
    runner, lengths = head_runner(str(folder), kernels=kernels), (17, 6, 11)
    texts = [(random_rows(num, 32, seed=num), random_rows(num, 32, seed=num + 50)) for num in lengths]
    transaction = runner.kv.transaction()
    for number, num in enumerate(lengths):
        transaction.acquire(number)
        transaction.extend(number, num)
    transaction.commit()
    for block in range(3):
        runner.model.block = block
        features = [torch.empty(0, 32) for _ in lengths]
        for first, stop in ((0, 5), (5, 6), (6, 17)):
            running = [number for number, num in enumerate(lengths) if num > first]
            rows = [torch.cat([one[first:stop] for one in texts[number]], -1) for number in running]
            chunks = [Chunk(number, [0] * len(one), first) for number, one in zip(running, rows, strict=True)]
            runner.model.feed = lambda token_ids_T, rows=rows: torch.cat(rows)
            inputs = replace(runner.make_input(chunks), logit_rows_R=torch.arange(sum(map(len, rows))))
            for number, part in zip(running, runner.run(inputs).split([len(one) for one in rows]), strict=True):
                features[number] = torch.cat((features[number], part))
        for found_TD, one in zip(features, texts, strict=True):
            expected_TD = head.layers[block](one[0][None], one[1][None])[0]
            torch.testing.assert_close(found_TD, expected_TD, atol=1e-4, rtol=1e-4)


def test_saved_heads_are_those_loaded(make_head: Callable[..., Any]) -> None:
    head, folder = make_head("mtp", SPEC, num_blocks=2)
    for place in (folder, str(folder)):
        head.save(place)
        loaded = DraftHead.load(place)
        assert loaded.config == head.config
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "num_blocks", "says"),
    [
        ("medusa", 1, "config of a draft head: key 'kind' is 'medusa', which is not supported; supported: eagle, mtp"),
        ("eagle", 2, "config of a draft head: key 'num_hidden_layers' is 2; a head of kind eagle is one block"),
    ],
)
def test_what_no_head_can_be_is_refused(kind: str, num_blocks: int, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        head_config(kind, SPEC, num_blocks=num_blocks)
    assert str(caught.value).startswith(says)


def test_a_damaged_folder_is_refused(make_head: Callable[..., Any], tmp_path: Path) -> None:
    head, _ = make_head("mtp", SPEC, num_blocks=2)
    head.config = {**head.config, "num_hidden_layers": 3}
    head.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\."):
        DraftHead.load(tmp_path)


def table_teacher() -> tuple[Teacher, list[Trace]]:
    """A target whose features are a table of the token before and the token: what comes next can be learnt."""
    tables = {name: random_rows(24, 32, seed=seed) for name, seed in (("embedding", 7), ("before", 8), ("now", 9))}
    head_DV, generator = random_rows(32, 24, seed=10), torch.Generator().manual_seed(11)
    traces = []
    for _ in range(64):
        text = torch.randint(0, 24, (14,), generator=generator)
        features_nD = tables["now"][text[:-1]]
        features_nD[1:] += 0.5 * tables["before"][text[:-2]]
        traces.append(Trace(text.tolist(), features_nD))
    embedding_VD = tables["embedding"]
    return Teacher(SPEC, lambda token_ids_T: embedding_VD[token_ids_T], lambda rows_RD: rows_RD @ head_DV), traces


@pytest.mark.parametrize(("kind", "num_blocks"), [("eagle", 1), ("mtp", 2)])
def test_the_loss_is_that_of_the_papers(kind: str, num_blocks: int) -> None:
    """In float64 numpy, text by text; a batch of texts of several lengths has the mean over all entries."""
    teacher, traces = table_teacher()
    pairs = zip(traces, (14, 5, 9), strict=False)
    some = [Trace(one.token_ids[:num], one.features_nD[: num - 1]) for one, num in pairs]
    torch.manual_seed(0)
    head = DraftHead(head_config(kind, SPEC, num_blocks=num_blocks, intermediate_size=40))
    expected = []
    for block in range(num_blocks):
        entropies, distances = list[Any](), list[Any]()
        for one in some:
            with torch.no_grad():
                said = head(teacher.embed(torch.tensor([one.token_ids[1:]])), one.features_nD[None])
            said_TD, true_TD = said[block][0, :-1].double().numpy(), one.features_nD[block + 1 :].double().numpy()
            logits = [teacher.logits(torch.tensor(rows).float()).double().numpy() for rows in (true_TD, said_TD)]
            target, found = (np.exp(rows) / np.exp(rows).sum(-1, keepdims=True) for rows in logits)
            entropies += (-(target * np.log(found)).sum(-1)).tolist()
            off = np.abs(said_TD - true_TD)
            distances += np.where(off < 1, off**2 / 2, off - 0.5).tolist()
        expected.append(np.mean(entropies) + (np.mean(distances) if kind == "eagle" else 0.0))
    (loss,) = distill(head, some, teacher, num_epochs=1, batch_size=3)
    assert loss == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.parametrize(("kind", "num_blocks"), [("eagle", 1), ("mtp", 2)])
def test_training_brings_the_most_likely_token_to_the_targets(kind: str, num_blocks: int) -> None:
    """On texts that it was not trained on. Measured: from 0.06 to 0.79 (eagle) and 0.77 (mtp)."""
    teacher, traces = table_teacher()
    torch.manual_seed(0)
    head = DraftHead(head_config(kind, SPEC, num_blocks=num_blocks, intermediate_size=40))
    held_out, reports = traces[:4], list[tuple[int, int, float]]()
    before = agreement(head, held_out, teacher)
    losses = distill(
        head, traces[4:], teacher, num_epochs=20, learning_rate=1e-2, report=lambda *one: reports.append(one)
    )
    assert reports == [(epoch + 1, 20, loss) for epoch, loss in enumerate(losses)]
    assert losses[-1] < losses[0]
    after = agreement(head, held_out, teacher)
    assert after > 0.6 > 0.2 > before


@torch.no_grad()
def agreement(head: DraftHead, traces: list[Trace], teacher: Teacher) -> float:
    """Of block 0: the share of entries whose most likely next token is the target's."""
    same = []
    for one in traces:
        said = head(teacher.embed(torch.tensor([one.token_ids[1:]])), one.features_nD[None])[0][0, :-1]
        same.append(teacher.logits(said).argmax(-1) == teacher.logits(one.features_nD[1:]).argmax(-1))
    return float(torch.cat(same).float().mean())


def test_the_order_is_the_seeds() -> None:
    teacher, traces = table_teacher()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        head = DraftHead(head_config("eagle", SPEC, intermediate_size=40))
        losses.append(distill(head, traces, teacher, num_epochs=2, seed=seed))
    assert losses[0] == losses[1] != losses[2]


def test_texts_that_are_too_short_are_refused() -> None:
    teacher, traces = table_teacher()
    head = DraftHead(head_config("mtp", SPEC, num_blocks=3, intermediate_size=40))
    short = [Trace(one.token_ids[:4], one.features_nD[:3]) for one in traces]
    with pytest.raises(ValueError, match="no text is longer than 4 tokens"):
        distill(head, short, teacher, num_epochs=1)


@pytest.mark.parametrize(
    ("options", "count", "says"),
    [
        ({"num_epochs": 0}, 2, "num_epochs is 0; give 1 or more"),
        ({"num_epochs": 1, "batch_size": 0}, 2, "batch_size is 0; give 1 or more"),
        ({"num_epochs": 1}, 0, "there are no traces to train on"),
    ],
)
def test_training_on_nothing_is_refused(options: dict[str, int], count: int, says: str) -> None:
    teacher, traces = table_teacher()
    head = DraftHead(head_config("eagle", SPEC, intermediate_size=40))
    with pytest.raises(ValueError, match=says):
        distill(head, traces[:count], teacher, **options)


@pytest.mark.parametrize(("key", "value"), [("attention_bias", True), ("mlp_bias", True), ("sliding_window", 4)])
def test_keys_that_mean_nothing_to_a_head_are_refused(key: str, value: object) -> None:
    config = head_config("eagle", small_spec()) | {key: value}
    with pytest.raises(CheckpointError, match=f"{key}.* is set, and heads"):
        read_settings_of(config)
