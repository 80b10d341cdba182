"""The arithmetic of memory plans in closed forms, for models small enough to count by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.assembly.memory_plan import MIB, MemoryPlan, WeightSizer, attention_bytes, kv_bytes
from pluglm.backends.linear import DenseLinear, PackedLinear
from pluglm.backends.rows import whole_rows
from pluglm.backends.torch_backend import TorchBackend
from pluglm.kernel.errors import CheckpointError, ConfigError
from pluglm.kernel.interfaces.footprint import Footprint, PlannedWeight
from pluglm.kernel.interfaces.kv import KVGroup, KVLayout
from pluglm.models.llama import LlamaModel
from pluglm.testing.checkpoints import MemoryCheckpoint

# width D, query heads N, kv heads K, head dim H, vocabulary V
D, INNER, N, K, H, V, LAYERS = 8, 12, 4, 2, 2, 20, 2
CONFIG = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LAYER = {
    "self_attn.q_proj": (N * H, D),
    "self_attn.k_proj": (K * H, D),
    "self_attn.v_proj": (K * H, D),
    "self_attn.o_proj": (D, N * H),
    "mlp.gate_proj": (INNER, D),
    "mlp.up_proj": (INNER, D),
    "mlp.down_proj": (D, INNER),
    "input_layernorm": (D,),
    "post_attention_layernorm": (D,),
}
LAYER_VALUES = 2 * N * H * D + 2 * K * H * D + 3 * INNER * D + 2 * D


def llama(**config: Any) -> MemoryCheckpoint:
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in LAYER.items()}
    shapes = {"model.embed_tokens.weight": (V, D), **names, "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    if config.get("tie_word_embeddings"):
        del shapes["lm_head.weight"]
    return MemoryCheckpoint({**CONFIG, **config}, shapes)


def backend(make_linear: Any = DenseLinear) -> TorchBackend:
    class Host(TorchBackend):
        interface_version = 1

        @classmethod
        def unavailable(cls) -> str | None:
            return None

        def free_memory(self) -> int:
            return 0

    return Host("cpu", torch.bfloat16, make_linear, whole_rows, None)


class Fused:
    """The part of a Fuser that is asked here: everything takes twice its size."""

    def placed_bytes(self, num_bytes: int) -> int:
        return 2 * num_bytes


class Eighth:
    """A quantizer whose layers take an eighth of the weight, and three times its bytes while they are made."""

    def linear_footprint(self, num_outputs: int, num_inputs: int, weight_bytes: int) -> Footprint:
        return Footprint(num_outputs * num_inputs // 4, 3 * weight_bytes)


def sizes(checkpoint: Any, host: Any, quantizer: Any = None, value_bytes: int = 2) -> tuple[int, int]:
    return WeightSizer(checkpoint, host, quantizer, value_bytes).sizes(LlamaModel.planned_weights(checkpoint))


@pytest.mark.parametrize("value_bytes", [2, 4])
@pytest.mark.parametrize(("tied", "heads"), [(False, 2), (True, 1)])
def test_plain_layers_keep_every_value_once(value_bytes: int, tied: bool, heads: int) -> None:
    kept, _ = sizes(llama(tie_word_embeddings=tied), backend(), value_bytes=value_bytes)
    assert kept == value_bytes * (heads * V * D + LAYERS * LAYER_VALUES + D)


def test_planned_weights_are_joined_as_the_layers_join_them() -> None:
    planned = LlamaModel.planned_weights(llama())
    shapes = [one.shape for one in planned if one.kind == "linear"]
    layer = [((N + 2 * K) * H, D), (D, N * H), (2 * INNER, D), (D, INNER)]
    assert shapes == [*layer, *layer, (V, D)]
    assert [one.shape for one in planned if one.kind == "embedding"] == [(V, D)]
    assert [one.kind for one in planned].count("tensor") == 2 * LAYERS + 1


def test_planning_reads_nothing_and_refuses_what_loading_would() -> None:
    checkpoint = llama()
    LlamaModel.planned_weights(checkpoint)
    assert checkpoint.reads == []
    checkpoint._shapes["model.norm.weight"] = (D + 1,)
    with pytest.raises(CheckpointError, match=re.escape("'model.norm.weight' has shape [9]; expected [8]")):
        LlamaModel.planned_weights(checkpoint)


def weight(*shapes: tuple[int, ...], kind: Any = "linear") -> PlannedWeight:
    return PlannedWeight(parts=tuple((str(i), shape) for i, shape in enumerate(shapes)), kind=kind)


def worst(host: Any, *weights: PlannedWeight, quantizer: Any = None, checkpoint: Any = None) -> tuple[int, int]:
    return WeightSizer(checkpoint or llama(), host, quantizer, 2).sizes(weights)


def test_loading_holds_one_part_beside_what_is_joined() -> None:
    assert worst(backend(), weight((4, 10), (6, 10))) == (200, 120)
    assert worst(backend(), weight((10, 10))) == (200, 0)


def test_a_packed_weight_exists_twice_for_a_moment() -> None:
    assert worst(backend(PackedLinear), weight((10, 10))) == (200, 200)
    assert worst(backend(PackedLinear), weight((10, 10), kind="embedding")) == (200, 0)


def test_only_what_exceeds_all_weights_counts_as_loading() -> None:
    big, small = weight((10, 10)), weight((7, 10))
    assert worst(backend(PackedLinear), big, small) == (340, 140)
    assert worst(backend(PackedLinear), big, *[small] * 3) == (620, 140)
    assert worst(backend(PackedLinear), small, big) == (340, 200)


def test_joined_weights_are_made_where_they_stay_and_single_ones_are_copied_there() -> None:
    host = backend()
    host._fuser = Fused()  # type: ignore[assignment]
    assert worst(host, weight((4, 10), (6, 10))) == (400, 120)
    assert worst(host, weight((10, 10))) == (400, 200)


def test_a_quantizer_says_what_its_layers_take() -> None:
    assert worst(backend(), weight((10, 10)), quantizer=Eighth()) == (25, 600)
    assert worst(backend(), weight((10, 10), kind="embedding"), quantizer=Eighth()) == (200, 0)


def test_what_a_checkpoint_holds_while_it_reads_counts() -> None:
    class Mapped(MemoryCheckpoint):
        def read_bytes(self, name: str) -> int:
            return 1000

    assert worst(backend(), weight((10, 10)), checkpoint=Mapped(CONFIG, {})) == (200, 1000)


def test_kv_bytes_with_and_without_groups() -> None:
    spec = LlamaModel.read_spec(CONFIG)
    assert kv_bytes(KVLayout(num_blocks=5, block_size=3), spec, 2) == 2 * 15 * LAYERS * K * H * 2
    groups = (KVGroup(layers=(0,), num_blocks=4), KVGroup(layers=(1,), num_blocks=1, window=3))
    grouped = KVLayout(num_blocks=5, block_size=3, groups=groups)
    assert kv_bytes(grouped, spec, 4) == 2 * (12 + 3) * K * H * 4


def test_activations_of_a_step_in_closed_form() -> None:
    def of(config: dict[str, Any], value_bytes: int, num_tokens: int, num_rows: int) -> int:
        return LlamaModel.step_bytes(config, value_bytes=value_bytes, num_tokens=num_tokens, num_rows=num_rows)

    feed_forward, attention = 4 * D + 3 * INNER, D + (N + 2 * K + 2 * (N + K)) * H
    assert feed_forward > attention
    assert of(CONFIG, 2, 100, 1) == 200 * feed_forward
    assert of({**CONFIG, "intermediate_size": 1}, 4, 100, 1) == 400 * max(4 * D + 3, attention)
    assert of({**CONFIG, "vocab_size": 1000}, 2, 10, 10) == 20 * D + 10 * 1000 * (4 * 4 + 2)
    assert of({**CONFIG, "vocab_size": 1000}, 4, 10, 10) == 40 * D + 10 * 1000 * 4 * 4


def test_attention_counts_queries_results_and_one_layers_keys() -> None:
    assert attention_bytes(LlamaModel.read_spec(CONFIG), 10, 50) == 4 * H * (2 * 10 * N + 2 * 50 * K)


def plan(**changes: Any) -> MemoryPlan:
    parts = {"process": 100, "weights": 300, "loading": 50, "kv": 200, "workspace": 20}
    rest = {"free": 1000, "step_tokens": 8, "logit_rows": 2, "num_blocks": 4, "block_size": 2}
    return MemoryPlan(device="cpu", **{**{name: value * MIB for name, value in {**parts, **changes}.items()}, **rest})


@pytest.mark.parametrize(("loading", "peak"), [(50, 620), (219, 620), (250, 650)])
def test_the_peak_is_loading_or_a_full_pool(loading: int, peak: int) -> None:
    assert plan(loading=loading).peak == peak * MIB


@pytest.mark.parametrize(
    ("free", "fix"),
    [
        (519, f"lower engine.kv_memory to {199 * MIB} or less"),
        (351, f"lower engine.kv_memory to {31 * MIB} or less"),
        (350, "lower engine.max_step_tokens"),
        (349, "take a smaller model, model.dtype: bfloat16 or a quantizer"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key_that_helps(free: int, fix: str) -> None:
    tight = replace(plan(), free=free * MIB)
    with pytest.raises(ConfigError) as caught:
        tight.require_fit("run.yaml")
    assert str(caught.value) == (
        "run.yaml: the run takes 520 MiB on cpu (weights 300, KV pool 200, workspace 20, loading 50), "
        f"only {free} MiB are free; {fix}"
    )
    replace(plan(), free=520 * MIB).require_fit("run.yaml")
