"""What a draft head's config.json says: its kind, its blocks, and the target it was trained for. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.models.config_reader import ConfigReader
from pluglm.models.settings import DecoderSettings, plain_settings, read_sizes
from pluglm.weights.json_file import read_json_object
from pluglm.weights.resolve import resolve_model

FAMILY = "draft_head"
DRAFTERS = {"eagle": "eagle_head", "mtp": "mtp_head"}  # by the kind of head that they run
_ROPES = ("default", "linear", "llama3", "yarn")


def read_head_settings(config: ConfigReader) -> DecoderSettings:
    """The blocks as layers of a decoder. The spec has the hidden size where a language model has its vocabulary.

    Raises CheckpointError naming file and key.
    """
    kind = config.choice("kind", DRAFTERS, None)
    sizes = read_sizes(config, {})
    if kind == "eagle" and sizes.num_layers != 1:
        raise config.refuse(
            "num_hidden_layers", f"is {sizes.num_layers}; a head of kind eagle is one block, used again"
        )
    settings = plain_settings(config, FAMILY, sizes, (None,) * sizes.num_layers)
    if settings.ropes[0].kind not in _ROPES:
        what = f"asks for the kind {settings.ropes[0].kind!r}, which heads do not have; supported: {', '.join(_ROPES)}"
        raise config.refuse("rope_parameters", what)
    return replace(settings, spec=replace(settings.spec, vocab_size=sizes.hidden_size))


def read_fitting_head(model: str, kind: str, target: ModelSpec) -> ModelSpec:
    """The spec of the head in the folder `model`, once it is sure that it goes on from this target's hidden states.

    Raises PluginError, or CheckpointError for a folder or a config.json that cannot be read. Opens no weights.
    """
    file = resolve_model(model) / "config.json"
    values = read_json_object(file)
    name, config = f"drafter '{DRAFTERS[kind]}'", ConfigReader(values, str(file))
    if values.get("model_type") != FAMILY:
        raise PluginError(
            f"{name}: {file} is of model_type {values.get('model_type')!r}; give the folder of a draft head"
        )
    settings = read_head_settings(config)
    if values["kind"] != kind:
        raise PluginError(f"{name}: {file} is a head of kind {values['kind']}; use {DRAFTERS[values['kind']]} for it")
    found = (settings.spec.hidden_size, config.integer("vocab_size"))
    if found != (target.hidden_size, target.vocab_size):
        raise PluginError(
            f"{name}: {file} was trained for a hidden_size of {found[0]} and a vocab_size of {found[1]}, this model "
            f"has {target.hidden_size} and {target.vocab_size}; train a head for this model (docs/drafters.md)"
        )
    return settings.spec


def head_config(
    kind: str,
    target: ModelSpec,
    *,
    num_blocks: int = 1,
    intermediate_size: int | None = None,
    max_position: int | None = None,
    rope_theta: float = 10_000.0,
    rms_norm_eps: float = 1e-5,
) -> dict[str, Any]:
    """The config.json of a new head for `target`, with attention of the shape that the target's first layer has.

    kind: eagle or mtp. num_blocks: 1 for eagle; for mtp as many as tokens can be drafted. intermediate_size: 4 times
    the hidden size unless given. Raises CheckpointError for what no head can be.
    """
    layer = target.layers[0]
    config = {
        "model_type": FAMILY,
        "kind": kind,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": num_blocks,
        "intermediate_size": 4 * target.hidden_size if intermediate_size is None else intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": rms_norm_eps,
        "rope_theta": rope_theta,
        "max_position_embeddings": target.max_position if max_position is None else max_position,
    }
    read_head_settings(ConfigReader(config, "config.json"))
    return config


def read_settings_of(config: Mapping[str, Any]) -> DecoderSettings:
    """As read_head_settings, for a dictionary."""
    return read_head_settings(ConfigReader(config, "config.json"))
