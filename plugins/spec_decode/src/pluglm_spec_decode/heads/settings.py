"""What a draft head's config.json says: its kind, its blocks, and the target it was trained for. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.models.config_reader import ConfigReader
from pluglm.models.settings import DecoderSettings, plain_settings, read_sizes
from pluglm.weights.json_file import read_json_object

FAMILY = "draft_head"
DRAFTERS = {"eagle": "eagle_head", "mtp": "mtp_head"}  # by the kind of head that they run
_UNUSED = {
    "attention_bias": "is set, and heads have no biases; leave it out",
    "mlp_bias": "is set, and heads have no biases; leave it out",
    "sliding_window": "is set, and heads see all of the text; leave it out",
}
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
    for key, what in _UNUSED.items():
        if config.values().get(key):
            raise config.refuse(key, what)
    settings = plain_settings(config, FAMILY, sizes, (None,) * sizes.num_layers)
    if settings.ropes[0].kind not in _ROPES:
        what = f"asks for the kind {settings.ropes[0].kind!r}, which heads do not have; supported: {', '.join(_ROPES)}"
        raise config.refuse("rope_parameters", what)
    return replace(settings, spec=replace(settings.spec, vocab_size=sizes.hidden_size))


def read_fitting_head(model: str, kind: str, target: ModelSpec) -> ModelSpec:
    """As read_head, once it is sure that the head goes on from this target's hidden states."""
    spec, vocab_size = read_head(model, kind)
    found = (spec.hidden_size, vocab_size)
    if found != (target.hidden_size, target.vocab_size):
        raise PluginError(
            f"drafter '{DRAFTERS[kind]}': {model} was trained for a hidden_size of {found[0]} and a vocab_size of "
            f"{found[1]}, this model has {target.hidden_size} and {target.vocab_size}; train a head for this model "
            "(docs/drafters.md)"
        )
    return spec


def read_head(model: str, kind: str) -> tuple[ModelSpec, int]:
    """The spec of the head in the local folder `model`, and the rows of logits of the target it was trained for.

    Raises PluginError without such a folder or for another kind, CheckpointError for a config.json that cannot be read.
    Opens no weights.
    """
    name = f"drafter '{DRAFTERS[kind]}'"
    if (folder := _existing_folder(model)) is None:
        raise PluginError(f"{name}: there is no folder {model}; train a head (docs/drafters.md), or correct the path")
    file = folder / "config.json"
    values = read_json_object(file)
    config = ConfigReader(values, str(file))
    if values.get("model_type") != FAMILY:
        raise PluginError(
            f"{name}: {file} is of model_type {values.get('model_type')!r}; give the folder of a draft head"
        )
    settings = read_head_settings(config)
    if values["kind"] != kind:
        raise PluginError(f"{name}: {file} is a head of kind {values['kind']}; use {DRAFTERS[values['kind']]} for it")
    return settings.spec, config.integer("vocab_size")


def _existing_folder(model: str) -> Path | None:
    try:
        folder = Path(model).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # nothing that could be a path
        return None


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
    read_settings_of(config)
    return config


def read_settings_of(config: Mapping[str, Any]) -> DecoderSettings:
    """As read_head_settings, for a dictionary."""
    return read_head_settings(ConfigReader(config, "config of a draft head"))
