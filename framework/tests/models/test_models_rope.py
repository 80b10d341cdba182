"""Rotary embeddings: every kind, in the old and the new spelling, past the original context too.

Authority: transformers' `modeling_rope_utils` and whole tiny transformers models in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.errors import CheckpointError
from pluglm.models.config_reader import ConfigReader
from pluglm.models.rope import TableRotary, make_rotary, rotary_lengths, rotate
from pluglm.models.rope_frequencies import inverse_frequencies
from pluglm.models.rope_settings import RopeSettings, read_rope

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, own attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.4,
        "truncate": False,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def config_of(scaling: dict[str, Any], spelling: str, theta: float, max_position: int) -> dict[str, Any]:
    base = {"max_position_embeddings": max_position}
    if spelling == "new":
        return base | {"rope_parameters": scaling | {"rope_theta": theta}}
    if spelling == "old":
        return base | {"rope_theta": theta, "rope_scaling": scaling}
    renamed = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    return base | {"rope_theta": theta, "rope_scaling": renamed}


@pytest.mark.parametrize("case", SCALINGS)
def test_prompts_longer_than_the_original_context_equal_transformers(kit: Any, case: str) -> None:
    """The prompt of 29 is past the original 16 of every scaling; dynamic scaling acts from max_position_embeddings."""
    max_position = 16 if case == "dynamic" else 64
    parameters = SCALINGS[case] | {"rope_theta": 500.0}
    pair = kit.build("llama", max_position_embeddings=max_position, rope_parameters=parameters)
    kit.assert_same_as_transformers(pair, kit.prompt(29))


def test_dynamic_scaling_sets_in_while_decoding_as_in_transformers(kit: Any) -> None:
    parameters = SCALINGS["dynamic"] | {"rope_theta": 500.0}
    pair = kit.build("llama", max_position_embeddings=16, rope_parameters=parameters)
    kit.assert_same_as_transformers(pair, kit.prompt(9))


def test_dynamic_scaling_does_not_depend_on_chunks(kit: Any) -> None:
    """Past the original context too; transformers computes the prompt in one piece."""
    parameters = SCALINGS["dynamic"] | {"rope_theta": 500.0}
    pair = kit.build("llama", max_position_embeddings=16, rope_parameters=parameters)
    prompt = kit.prompt(29)
    expected = pair.reference_logits(prompt)
    for size in (1, 7, 29):
        session = kit.Session(pair.load())
        session.num_prompts[1] = len(prompt)
        rows = [session.step([(1, prompt[at : at + size], at)])[0] for at in range(0, len(prompt), size)]
        torch.testing.assert_close(torch.cat(rows), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", [name for name in SCALINGS if name != "dynamic"])
@pytest.mark.parametrize("spelling", ["new", "old", "older"])
def test_frequencies_equal_transformers_in_every_spelling(case: str, spelling: str) -> None:
    scaling, theta, max_position = SCALINGS[case], 1234.5, 64
    rope = read_rope(ConfigReader(config_of(scaling, spelling, theta, max_position), "config.json"), 12, max_position)
    config = LlamaConfig(
        hidden_size=48,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    if case == "default":
        expected, attention_factor = 1.0 / theta ** (torch.arange(0, 12, 2).float() / 12), 1.0
    else:
        expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None)
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    factor=st.floats(1.0, 64.0),
    theta=st.floats(100.0, 1e6),
    original=st.sampled_from([32, 2048, 8192]),
    half=st.integers(2, 64),
)
def test_frequencies_equal_transformers_for_any_numbers(
    kind: str, factor: float, theta: float, original: int, half: int
) -> None:
    table: dict[str, Any] = {"rope_type": kind, "factor": factor, "rope_theta": theta}
    if kind != "linear":
        table["original_max_position_embeddings"] = original
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = read_rope(ConfigReader({"rope_parameters": table}, "config.json"), 2 * half, original)
    config = LlamaConfig(
        hidden_size=2 * half, num_attention_heads=1, max_position_embeddings=original, rope_parameters=dict(table)
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, None)
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_divisors_of_a_gguf_file_replace_the_llama3_rule(kit: Any) -> None:
    """GGUF stores theta-independent divisors instead of the four llama3 numbers; both must give one model."""
    pair = kit.build("llama", rope_parameters=SCALINGS["llama3"] | {"rope_theta": 500.0})
    rope = read_rope(ConfigReader(pair.checkpoint.config, "config.json"), 12, 256)
    plain = 1.0 / 500.0 ** (torch.arange(0, 12, 2).float() / 12)
    pair.checkpoint.tensors["rope_freqs.weight"] = plain / inverse_frequencies(rope)
    config = {key: value for key, value in pair.checkpoint.config.items() if key != "rope_parameters"}
    for scaling in (None, {"rope_type": "freq_factors", "tensor": "rope_freqs.weight"}):
        pair.checkpoint.config = config | {"rope_theta": 500.0, "rope_scaling": scaling}
        kit.assert_same_as_transformers(pair, kit.prompt(21), num_tokens=4)


def test_named_divisors_that_are_missing_are_refused(kit: Any) -> None:
    pair = kit.build("llama")
    pair.checkpoint.config["rope_scaling"] = {"rope_type": "freq_factors", "tensor": "rope_freqs.weight"}
    with pytest.raises(CheckpointError, match=r"tensor 'rope_freqs\.weight' is missing \(expected shape \[6\]\)"):
        pair.load()


@pytest.mark.parametrize("spelling", ["nested", "old"])
def test_gemma_scales_the_global_embedding_only(kit: Any, spelling: str) -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    }
    pair = kit.build("gemma3_text", sliding_window=6, sliding_window_pattern=3, rope_parameters=parameters)
    if spelling == "old":
        del pair.checkpoint.config["rope_parameters"]
        pair.checkpoint.config |= {
            "rope_theta": 700.0,
            "rope_local_base_freq": 90.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        }
    kit.assert_same_as_transformers(pair, kit.prompt(21), num_tokens=8)


def rope_of(kind: str) -> RopeSettings:
    return RopeSettings(
        kind=kind, theta=500.0, head_dim=12, max_position=64, factor=2.0, original_max_position=16, low_freq_factor=1.0
    )


def test_a_table_grown_in_steps_equals_one_made_at_once() -> None:
    frequencies = inverse_frequencies(rope_of("default"))
    stepwise, at_once = (TableRotary(frequencies, 1.0, torch.float32, "cpu") for _ in range(2))
    for num_positions in (1, 130, 131, 1000):
        stepwise.prepare(num_positions)
    at_once.prepare(1000)
    positions = torch.arange(1000)
    for got, want in zip(stepwise.rows(positions, positions), at_once.rows(positions, positions), strict=True):
        assert torch.equal(got, want)


def test_dynamic_rotation_of_drafts_equals_that_of_single_tokens() -> None:
    """Rows behind the prompt depend on their own position only: speculation and batch mates change no bit."""
    rotary = make_rotary(rope_of("dynamic"), None, torch.float32, "cpu")
    together = rotary_lengths(flat_batch((0, 20), (30, 3), num_prompt=20))
    assert together.tolist() == [20] * 20 + [31, 32, 33]
    alone = [rotary_lengths(flat_batch((30 + step, 1), num_prompt=20)).item() for step in range(3)]
    assert together[20:].tolist() == alone
    cos, _ = rotary.rows(torch.tensor([5]), torch.tensor([10]))
    plain, _ = rotary.rows(torch.tensor([5]), torch.tensor([16]))
    assert torch.equal(cos, plain)


def flat_batch(*segments: tuple[int, int], num_prompt: int = 0) -> ModelInput:
    """A batch of (num_context, num_query) segments; only positions and segments are read here."""
    made, positions = [], []
    for sequence_id, (num_context, num_query) in enumerate(segments):
        made.append(
            Segment(
                sequence_id=sequence_id,
                query_start=len(positions),
                num_query=num_query,
                num_context=num_context,
                block_table=(),
                num_prompt=num_prompt,
            )
        )
        positions += range(num_context, num_context + num_query)
    positions_T = torch.tensor(positions)
    return ModelInput(
        token_ids_T=positions_T,
        positions_T=positions_T,
        slots_T=positions_T,
        logit_rows_R=positions_T,
        segments=tuple(made),
        block_size=1,
    )


@settings(max_examples=20, deadline=None)
@given(shift=st.integers(0, 100), gap=st.integers(0, 50))
def test_scores_depend_on_the_distance_only(shift: int, gap: int) -> None:
    """The defining property of rotary embeddings (https://arxiv.org/abs/2104.09864, equation 16)."""
    rotary = make_rotary(rope_of("default"), None, torch.float64, "cpu")
    rotary.prepare(200)
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(1, 1, 12, generator=generator, dtype=torch.float64) for _ in range(2))

    def score(at: int) -> float:
        turned = [
            rotate(x, *rotary.rows(torch.tensor([p]), torch.tensor([p]))) for x, p in ((query, at + gap), (key, at))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(shift) == pytest.approx(score(0), abs=1e-4)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "longrope"},
            r"rope_scaling\.rope_type' is 'longrope', which is not supported; supported: default",
        ),
        ({"type": "su"}, r"rope_scaling\.type' is 'su'"),
        ({"rope_type": "linear"}, r"rope_scaling\.factor' is missing"),
        ({"rope_type": "linear", "factor": -1}, r"rope_scaling\.factor' is -1"),
        ({"rope_type": "llama3", "factor": 8.0}, r"rope_scaling\.low_freq_factor' is missing"),
        (SCALINGS["llama3"] | {"high_freq_factor": 1.0}, r"high_freq_factor' is 1\.0; it must be above"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor' is not 1"),
        ({"full_attention": {"rope_type": "default"}}, r"full_attention' is a table of one layer kind"),
        ({"rope_type": "freq_factors"}, r"rope_scaling\.tensor' is None"),
        ("linear", r"'rope_scaling' is 'linear'; a table is needed"),
    ],
)
def test_unsupported_scaling_names_file_and_key(scaling: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: key '.*" + message.removeprefix("'")) as caught:
        read_rope(ConfigReader({"rope_scaling": scaling}, "config.json"), 12, 64)
    assert "\n" not in str(caught.value)
