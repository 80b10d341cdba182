"""Build contexts of a small run on the CPU, for components under test and for plugin authors' own tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pluglm.assembly import registry
from pluglm.assembly.validation import validate
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.testing.runner import build_runner
from pluglm.testing.tokenizers import TinyTokenizer


def small_spec(vocab_size: int = 320, num_layers: int = 2, **layer: Any) -> ModelSpec:
    """Two layers of four query and two kv heads of size 8; `layer` changes the fields of every LayerSpec."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 8**-0.5, **layer}
    layers = tuple(LayerSpec(index=index, **shape) for index in range(num_layers))
    return ModelSpec(family="table", hidden_size=32, vocab_size=vocab_size, max_position=512, layers=layers)


def resolve_component(kind: str, name: str, options: Mapping[str, Any]) -> tuple[type[Any], ComponentConfig]:
    """The installed component of that name and its config, exactly as the kernel finds it."""
    cls = registry.load(registry.find((kind,), name))
    return cls, validate(cls.Config, dict(options), "contract kit", (kind,))


def make_context(**overrides: Any) -> BuildContext:
    """A BuildContext of a small float32 run on the CPU; any field can be given instead.

    kv_bytes holds 192 tokens unless given. The logits (320) outnumber the tokenizer's ids (262), as padded heads do.
    """
    tokenizer = overrides.get("tokenizer", TinyTokenizer())
    spec: ModelSpec = overrides.get("spec", small_spec())
    bytes_per_token = overrides.get("bytes_per_token", spec.kv_values_per_token * 4)
    defaults = {
        "spec": spec,
        "device": "cpu",
        "dtype": "float32",
        "deterministic": False,
        "max_num_seqs": 4,
        "max_step_tokens": 64,
        "max_model_len": 48,
        "kv_bytes": 192 * bytes_per_token,
        "bytes_per_token": bytes_per_token,
        "tokenizer": tokenizer,
        "eos_token_ids": tokenizer.eos_token_ids,
        "build_runner": build_runner,
        "resolve_component": resolve_component,
    }
    return BuildContext(**{**defaults, **overrides})
