"""Loading: everything is checked before anything is read, tensors are fused, shared and never lost.

Authority: the Model contract (pluglm.kernel.interfaces.model) and the weights of the tiny transformers models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm.kernel.errors import CheckpointError

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_needed_and_its_loss_is_found_before_any_read(kit: Any, family: str) -> None:
    pair = kit.build(family, num_hidden_layers=2, attention_bias=True, mlp_bias=True)
    complete = pair.checkpoint.tensors
    for name in complete:
        pair.checkpoint.tensors = {key: value for key, value in complete.items() if key != name}
        with pytest.raises(CheckpointError, match=f"^tiny.safetensors: tensor '{name}' is missing"):
            pair.load()
    assert pair.checkpoint.reads == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_shape_is_found_before_any_read(kit: Any, family: str) -> None:
    pair = kit.build(family, num_hidden_layers=2)
    complete = dict(pair.checkpoint.tensors)
    for name, tensor in complete.items():
        pair.checkpoint.tensors = complete | {name: tensor[:-1]}
        found, expected = list(tensor[:-1].shape), list(tensor.shape)
        with pytest.raises(CheckpointError) as caught:
            pair.load()
        assert str(caught.value) == (
            f"tiny.safetensors: tensor '{name}' has shape {found}; expected {expected} (config)"
        )
    assert pair.checkpoint.reads == []


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_is_read_once_and_counted(kit: Any, family: str) -> None:
    pair = kit.build(family)
    steps: list[tuple[str, int, int]] = []
    pair.load(progress=lambda *step: steps.append(step))
    total = len(pair.checkpoint.tensors)
    assert sorted(pair.checkpoint.reads) == sorted(pair.checkpoint.tensors)
    assert steps == [("loading", done, total) for done in range(1, total + 1)]


def test_unread_tensors_are_refused_by_name(kit: Any) -> None:
    pair = kit.build("llama")
    pair.checkpoint.tensors |= {f"model.layers.0.extra.{index}": torch.zeros(1) for index in range(6)}
    with pytest.raises(CheckpointError) as caught:
        pair.load()
    assert str(caught.value) == (
        "tiny.safetensors: 6 tensors have no place in a llama model of this config: model.layers.0.extra.0, "
        "model.layers.0.extra.1, model.layers.0.extra.2, model.layers.0.extra.3, ..."
    )
    assert pair.checkpoint.reads == []


def test_biases_that_the_config_denies_are_refused(kit: Any) -> None:
    pair = kit.build("llama", attention_bias=True)
    pair.checkpoint.config["attention_bias"] = False
    with pytest.raises(CheckpointError, match=r"12 tensors have no place .*layers\.0\.self_attn\.k_proj\.bias"):
        pair.load()


def test_stored_rotary_buffers_are_ignored(kit: Any) -> None:
    pair = kit.build("llama")
    pair.checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    pair.load()


def test_projections_are_fused_in_the_order_q_k_v_and_gate_up(kit: Any) -> None:
    pair = kit.build("qwen2", num_hidden_layers=1)
    layers = kit.Layers()
    pair.load(make_linear=layers)
    stem = "model.layers.0."
    assert sorted(layers.made) == [
        "lm_head.weight",
        f"{stem}mlp.down_proj.weight",
        f"{stem}mlp.gate_up_proj.weight",
        f"{stem}self_attn.o_proj.weight",
        f"{stem}self_attn.qkv_proj.weight",
    ]
    qkv, gate_up = layers.made[f"{stem}self_attn.qkv_proj.weight"], layers.made[f"{stem}mlp.gate_up_proj.weight"]
    tensors = pair.checkpoint.tensors
    assert torch.equal(qkv.weight_NK, torch.cat([tensors[f"{stem}self_attn.{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(qkv.bias_N, torch.cat([tensors[f"{stem}self_attn.{p}_proj.bias"] for p in "qkv"]))
    assert torch.equal(gate_up.weight_NK, torch.cat([tensors[f"{stem}mlp.{p}_proj.weight"] for p in ("gate", "up")]))
    assert gate_up.bias_N is None
    assert all(layer.weight_NK.is_contiguous() for layer in layers.made.values())


def test_a_tied_head_is_never_a_second_matrix(kit: Any) -> None:
    pair = kit.build("llama", tie_word_embeddings=True)
    layers = kit.Layers()
    pair.load(make_linear=layers)
    assert "lm_head.weight" not in layers.made
    pair.checkpoint.tensors["lm_head.weight"] = pair.checkpoint.tensors["model.embed_tokens.weight"].clone()
    pair.load(make_linear=layers)
    assert "lm_head.weight" not in layers.made


def test_a_tied_config_with_another_head_stored_is_untied(kit: Any) -> None:
    """transformers 5 ties only when both matrices are equal (modeling_utils.tie_weights)."""
    pair = kit.build("llama", tie_word_embeddings=False)
    pair.checkpoint.config["tie_word_embeddings"] = True
    kit.assert_same_as_transformers(pair, kit.prompt(9), num_tokens=3)


def test_an_untied_config_without_a_head_is_refused(kit: Any) -> None:
    pair = kit.build("llama", tie_word_embeddings=True)
    pair.checkpoint.config["tie_word_embeddings"] = False
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is missing \(expected shape \[97, 48\]\)"):
        pair.load()


@pytest.mark.parametrize(
    ("stem", "head"),
    [("language_model.model.", "language_model.lm_head.weight"), ("model.language_model.", "lm_head.weight")],
)
def test_the_text_part_of_a_multimodal_gemma(kit: Any, stem: str, head: str) -> None:
    """Both spellings on the hub: google/gemma-3-4b-it as published, and as transformers 5 saves it."""
    pair = kit.build("gemma3_text", sliding_window=6, tie_word_embeddings=False)
    renamed = {
        head if name == "lm_head.weight" else stem + name.removeprefix("model."): tensor
        for name, tensor in pair.checkpoint.tensors.items()
    }
    towers = {"vision_tower.x": torch.zeros(1), "model.multi_modal_projector.y": torch.zeros(1)}
    config = {"model_type": "gemma3", "text_config": pair.checkpoint.config, "tie_word_embeddings": False}
    pair.checkpoint = kit.MemoryCheckpoint(config, renamed | towers)
    kit.assert_same_as_transformers(pair, kit.prompt(13), num_tokens=3)


def test_a_failing_linear_layer_fails_the_load(kit: Any) -> None:
    def refuse(name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Any:
        raise CheckpointError(f"{name}: cannot be packed")

    with pytest.raises(CheckpointError, match=r"^model\.layers\.0\.self_attn\.qkv_proj\.weight: cannot be packed$"):
        kit.build("llama").load(make_linear=refuse)


def test_a_checkpoint_that_lies_about_a_shape_is_a_bug_not_a_broadcast(kit: Any) -> None:
    pair = kit.build("llama")
    shapes = {name: tuple(tensor.shape) for name, tensor in pair.checkpoint.tensors.items()}
    pair.checkpoint.shape = shapes.get
    pair.checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(1, 48)
    with pytest.raises(RuntimeError, match=r"gave 'model\.layers\.0\.self_attn\.k_proj\.weight' in shape \[1, 48\]"):
        pair.load()
