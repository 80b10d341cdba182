"""The Gemma 3 family (`model_type` gemma3_text, and the text part of gemma3): local and global layers, four norms."""

from __future__ import annotations

from typing import ClassVar

import torch

from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.models.activations import ACTIVATIONS
from pluglm.models.config_reader import ConfigReader
from pluglm.models.decoder import Decoder
from pluglm.models.layer import DecoderLayer
from pluglm.models.loading import TensorLoader
from pluglm.models.rope_settings import RopeSettings, read_rope_table
from pluglm.models.settings import DecoderSettings, Sizes, layer_windows, read_sizes, refuse_foreign
from pluglm.models.tensor_plan import NameLayout

# T: rows, D: hidden size, N: query heads, H: head dim

# What transformers' Gemma3TextConfig fills in; the published multimodal configs rely on it.
_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "vocab_size": 262_208,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_THETA = {"full_attention": ("rope_theta", 1_000_000.0), "sliding_attention": ("rope_local_base_freq", 10_000.0)}


class SandwichLayer(DecoderLayer):
    """A layer whose attention and feed-forward results are normalised before they are added."""

    def __init__(self, settings: DecoderSettings, index: int, loader: TensorLoader) -> None:
        super().__init__(settings, index, loader)
        self._attention_out_norm = self._row_norm("post_attention_layernorm", settings, loader)
        self._mlp_out_norm = self._row_norm("post_feedforward_layernorm", settings, loader)

    def post_attention(self, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> tuple[torch.Tensor]:
        x_TD = x_TD + self._attention_out_norm(self._output(out_TNH.flatten(1)))
        return (x_TD + self._mlp_out_norm(self._feed_forward(x_TD)),)


class Gemma3Model(Decoder):
    """Sliding layers use the local rotary base; norms multiply by 1 + weight; embeddings are scaled by sqrt(D).

    `attn_logit_softcapping` becomes LayerSpec.soft_cap as the key says (transformers 5 stores the key and ignores it;
    every published Gemma 3 has null there). Of a multimodal checkpoint the vision tensors are left unread.
    """

    layer_class = SandwichLayer
    foreign_prefixes: ClassVar[tuple[str, ...]] = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )
    name_layouts = (
        NameLayout(),
        NameLayout(stem="language_model.model.", head="language_model.lm_head.weight"),
        NameLayout(stem="model.language_model."),
    )

    @classmethod
    def read_settings(cls, config: ConfigReader) -> DecoderSettings:
        text = _text_part(config)
        sizes = read_sizes(text, _DEFAULTS)
        window = text.optional_integer("sliding_window", 4096)
        pattern = text.integer("sliding_window_pattern", 6)
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(sizes.num_layers)]
        windows = layer_windows(text, sizes.num_layers, window, kinds)
        ropes = _read_ropes(text, sizes)
        return DecoderSettings(
            spec=_spec(text, sizes, windows, ropes),
            intermediate_size=sizes.intermediate_size,
            activation=text.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
            norm_eps=text.number("rms_norm_eps", 1e-6),
            tied_head=text.flag("tie_word_embeddings", True),
            ropes=ropes,
            rope_of_layer=tuple(0 if window is None else 1 for window in windows),
            qkv_bias=text.flag("attention_bias", False),
            output_bias=text.flag("attention_bias", False),
            head_norms=True,
            sandwich_norms=True,
            norm_offset=1.0,
            embedding_scale=sizes.hidden_size**0.5,
            final_soft_cap=text.optional_number("final_logit_softcapping"),
        )


def _spec(
    text: ConfigReader, sizes: Sizes, windows: tuple[int | None, ...], ropes: tuple[RopeSettings, ...]
) -> ModelSpec:
    scale = text.number("query_pre_attn_scalar", 256) ** -0.5
    return ModelSpec(
        family="gemma3",
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        max_position=ropes[0].max_position,
        layers=sizes.layers(windows, scale, text.optional_number("attn_logit_softcapping")),
        kv_of_prompt_length=any(rope.kind == "dynamic" for rope in ropes),
    )


def _text_part(config: ConfigReader) -> ConfigReader:
    """The level that describes the decoder: `text_config` of a multimodal file, where the outer tie flag counts."""
    text = config.table("text_config")
    if text is None:
        return config
    refuse_foreign(config)
    return text.merged({"tie_word_embeddings": config.flag("tie_word_embeddings", True)})


def _read_ropes(text: ConfigReader, sizes: Sizes) -> tuple[RopeSettings, ...]:
    """The global embedding, then the local one."""
    nested = text.table("rope_parameters")
    if nested is not None and not any(nested.has(kind) for kind in _THETA):
        raise text.refuse("rope_parameters", f"has neither {' nor '.join(_THETA)}")
    return tuple(_read_rope(text, kind, sizes) for kind in _THETA)


def _read_rope(text: ConfigReader, kind: str, sizes: Sizes) -> RopeSettings:
    """transformers 5 has a table for each kind; before, `rope_scaling` was about the global embedding only."""
    table = text.table_or_empty("rope_parameters").table_or_empty(kind)
    scaling = text.table("rope_scaling") if kind == "full_attention" else None
    if scaling is not None:
        table = scaling.merged({**table.values(), **scaling.values()})
    if table.value("rope_theta") is None:
        theta_key, default_theta = _THETA[kind]
        table = table.merged({"rope_theta": text.number(theta_key, default_theta)})
    return read_rope_table(table, sizes.head_dim, sizes.max_position)
