"""Support for the tests of model families: tiny transformers models as the authority, and plain stand-ins for the rest.

The attention here is the textbook one over Python lists, so these tests depend on no KV manager and no backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.model import LayerSpec, Model, ModelContext
from pluglm.models.gemma3 import Gemma3Model
from pluglm.models.llama import LlamaModel
from pluglm.models.mistral import MistralModel
from pluglm.models.qwen2 import Qwen2Model
from pluglm.models.qwen3 import Qwen3Model

FAMILIES: dict[str, tuple[type[Any], str, str]] = {
    "llama": (LlamaModel, "LlamaConfig", "LlamaForCausalLM"),
    "mistral": (MistralModel, "MistralConfig", "MistralForCausalLM"),
    "qwen2": (Qwen2Model, "Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": (Qwen3Model, "Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3_text": (Gemma3Model, "Gemma3TextConfig", "Gemma3ForCausalLM"),
}
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass
class MemoryCheckpoint:
    """A Checkpoint over a dictionary. `reads` lists the tensors handed out, in order."""

    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]
    path: Path = Path("tiny.safetensors")
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor '{name}'")
        self.reads.append(name)
        return self.tensors[name].to(dtype).clone()

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class PlainLinear:
    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight_NK, self.bias_N)


@dataclass
class Layers:
    """A LinearFactory that remembers what it made."""

    made: dict[str, PlainLinear] = field(default_factory=dict)

    def __call__(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> PlainLinear:
        self.made[name] = PlainLinear(weight_NK, bias_N)
        return self.made[name]


def map_once(function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return function(*tensors)


def make_context(dtype: torch.dtype = torch.float32, **changes: Any) -> ModelContext:
    parts: dict[str, Any] = {"make_linear": Layers(), "map_rows": map_once, "progress": lambda what, done, total: None}
    return ModelContext(device="cpu", dtype=dtype, **(parts | changes))


class ListAttention:
    """Causal attention with windows and soft caps, one row at a time, over lists of stored keys and values."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.stored: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __call__(self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        out_TNH = torch.empty_like(q_TNH)
        for segment in self.segments:
            stored = self.stored.setdefault((layer.index, segment.sequence_id), [])
            del stored[segment.num_context :]
            for row in range(segment.query_start, segment.query_start + segment.num_query):
                stored.append((k_TKH[row], v_TKH[row]))
                out_TNH[row] = self._row(layer, q_TNH[row], stored)
        return out_TNH

    @staticmethod
    def _row(layer: LayerSpec, q_NH: torch.Tensor, stored: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        seen = stored if layer.window is None else stored[-layer.window :]
        group = layer.num_heads // layer.num_kv_heads
        keys_SNH = torch.stack([key for key, _ in seen]).repeat_interleave(group, 1)
        values_SNH = torch.stack([value for _, value in seen]).repeat_interleave(group, 1)
        scores_SN = torch.einsum("nh,snh->sn", q_NH, keys_SNH) * layer.scale
        if layer.soft_cap is not None:
            scores_SN = layer.soft_cap * torch.tanh(scores_SN / layer.soft_cap)
        weights_SN = scores_SN.float().softmax(0).to(q_NH.dtype)
        return torch.einsum("sn,snh->nh", weights_SN, values_SNH)


class Session:
    """Feeds a model flat batches: each part is (sequence id, new token ids, tokens already computed)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.attention = ListAttention()
        self.num_prompts: dict[int, int] = {}  # sequence id -> prompt length, when it is not that of its first part

    def step(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> list[torch.Tensor]:
        """Logits [tokens, V] of every row, one tensor a part."""
        inputs = self.inputs(parts)
        with torch.inference_mode():
            logits_RV = self.model.logits(self.model.forward(inputs, self.attention))
        return [logits_RV[s.query_start : s.query_start + s.num_query] for s in inputs.segments]

    def inputs(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> ModelInput:
        """The flat batch of these parts, which the attention is told of as well."""
        segments, tokens, positions = [], [], []
        for sequence_id, token_ids, num_context in parts:
            num_prompt = self.num_prompts.setdefault(sequence_id, len(token_ids))
            segments.append(
                Segment(
                    sequence_id=sequence_id,
                    num_prompt=num_prompt,
                    query_start=len(tokens),
                    num_query=len(token_ids),
                    num_context=num_context,
                    block_table=(),
                )
            )
            tokens += token_ids
            positions += range(num_context, num_context + len(token_ids))
        rows = torch.arange(len(tokens))
        self.attention.segments = tuple(segments)
        return ModelInput(
            token_ids_T=torch.tensor(tokens, dtype=torch.int64),
            positions_T=torch.tensor(positions, dtype=torch.int64),
            slots_T=rows,
            logit_rows_R=rows,
            segments=self.attention.segments,
            block_size=1,
        )

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """num_tokens greedy tokens and the logits [num_tokens, V] each was chosen from."""
        (logits,) = self.step([(0, prompt, 0)])
        chosen, rows = [], []
        while len(chosen) < num_tokens:
            rows.append(logits[-1])
            chosen.append(int(logits[-1].argmax()))
            if len(chosen) < num_tokens:
                (logits,) = self.step([(0, chosen[-1:], len(prompt) + len(chosen) - 1)])
        return chosen, torch.stack(rows)


@dataclass
class Pair:
    """A transformers model in float32 and its checkpoint, to be loaded by ours."""

    family: type[Any]
    reference: Any
    checkpoint: MemoryCheckpoint

    def load(self, **changes: Any) -> Any:
        return self.family.load(self.checkpoint, make_context(**changes))

    def session(self) -> Session:
        return Session(self.load())

    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, V] of one uncached forward pass."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(token_ids)])).logits[0]

    def reference_greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """What `generate` chooses with its cache, and the logits [num_tokens, V] it chose from."""
        token_ids = torch.tensor([list(prompt)])
        result = self.reference.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Norm weights and biases start as constants; a test that loses one of them must fail."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def build_pair(family: str, seed: int = 0, **config: Any) -> Pair:
    """A tiny random model of the family. Its config takes the form that save_pretrained writes."""
    ours, config_name, model_name = FAMILIES[family]
    torch.manual_seed(seed)
    sizes = TINY | ({"head_dim": 12} if family in ("qwen3", "gemma3_text") else {})
    settings = getattr(transformers, config_name)(**(sizes | config))
    settings._attn_implementation = "eager"
    reference = getattr(transformers, model_name)(settings).eval().float()
    randomise(reference, seed)
    written = json.loads(settings.to_json_string(use_diff=True))
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    if written["tie_word_embeddings"]:
        # save_pretrained stores a shared tensor once, under the embedding's name.
        del tensors["lm_head.weight"]
    return Pair(ours, reference, MemoryCheckpoint(written, tensors))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, TINY["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Kit:
    """What the tests of this folder share, handed over as one fixture."""

    build = staticmethod(build_pair)
    prompt = staticmethod(prompt_of)
    context = staticmethod(make_context)
    Session = Session
    MemoryCheckpoint = MemoryCheckpoint
    Layers = Layers
    Pair = Pair

    @staticmethod
    def assert_same_as_transformers(pair: Pair, prompt: Sequence[int], num_tokens: int = 24) -> None:
        """Every prefill row, every decode row and every greedy token."""
        session = pair.session()
        (logits,) = session.step([(1, prompt, 0)])
        torch.testing.assert_close(logits, pair.reference_logits(prompt), atol=2e-4, rtol=0)
        tokens, rows = session.greedy(prompt, num_tokens)
        expected_tokens, expected_rows = pair.reference_greedy(prompt, num_tokens)
        torch.testing.assert_close(rows, expected_rows, atol=2e-4, rtol=0)
        assert tokens == expected_tokens


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    torch.set_num_threads(1)
    return Kit
