"""Everything that a configuration fixes about a decoder, and the reading of what all families spell alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.models.activations import ACTIVATIONS
from pluglm.models.config_reader import ConfigReader
from pluglm.models.rope_settings import RopeSettings, read_rope

_LAYER_KINDS = ("full_attention", "sliding_attention")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST_LAYERS = 10_000  # each becomes an object before the checkpoint is asked for its tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """A decoder as its family read it. Written by a family's `read_settings`, read by loading and by the layers.

    rope_of_layer: for each layer the index of its entry in `ropes`. norm_offset is added to every norm weight.
    """

    spec: ModelSpec
    intermediate_size: int
    activation: str
    norm_eps: float
    tied_head: bool
    ropes: tuple[RopeSettings, ...]
    rope_of_layer: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    final_soft_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers every family has."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def layers(
        self, windows: tuple[int | None, ...], scale: float | None = None, soft_cap: float | None = None
    ) -> tuple[LayerSpec, ...]:
        """Layer shapes with these windows; `scale` defaults to 1 / sqrt(head_dim)."""
        return tuple(
            LayerSpec(
                index=index,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5 if scale is None else scale,
                window=window,
                soft_cap=soft_cap,
            )
            for index, window in enumerate(windows)
        )


def read_sizes(config: ConfigReader, defaults: Mapping[str, int]) -> Sizes:
    """Reads and checks the sizes. `defaults` are the family's own, for keys that transformers lets a file leave out.

    Raises CheckpointError for a missing or impossible number, and for what no family here can run.
    """
    refuse_foreign(config)
    hidden_size = config.integer("hidden_size", defaults.get("hidden_size"))
    num_heads = config.integer("num_attention_heads", defaults.get("num_attention_heads"))
    num_kv_heads = config.optional_integer("num_key_value_heads", defaults.get("num_key_value_heads")) or num_heads
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"is {num_kv_heads}; it must divide the {num_heads} query heads")
    return Sizes(
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", defaults.get("intermediate_size")),
        vocab_size=config.integer("vocab_size", defaults.get("vocab_size")),
        max_position=config.integer("max_position_embeddings", defaults.get("max_position_embeddings")),
        num_layers=config.integer("num_hidden_layers", defaults.get("num_hidden_layers"), most=_MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", defaults.get("head_dim", max(1, hidden_size // num_heads))),
    )


def refuse_foreign(config: ConfigReader) -> None:
    """Raises CheckpointError for keys that turn the checkpoint into something these decoders would compute wrongly."""
    if config.value("quantization_config") is not None:
        raise config.refuse(
            "quantization_config", "says the tensors are quantised already; use the unquantised checkpoint or a GGUF"
        )
    for key in _EXPERT_KEYS:
        if config.value(key):
            raise config.refuse(key, f"is {config.value(key)!r}; mixtures of experts are not supported")
    for key in ("rope_interleaved", "use_bidirectional_attention"):
        if config.flag(key, False):
            raise config.refuse(key, "is true, which is not supported")


def layer_windows(
    config: ConfigReader, num_layers: int, window: int | None, default: list[str]
) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` where the file has it, else `default`.

    transformers lets query p see keys p - sliding_window + 1 .. p, so `sliding_window` is LayerSpec.window as it is.
    """
    kinds = config.choices("layer_types", _LAYER_KINDS, num_layers) or tuple(default)
    if window is None and "sliding_attention" in kinds:
        raise config.refuse("sliding_window", "is not set, but layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def plain_settings(
    config: ConfigReader,
    family: str,
    sizes: Sizes,
    windows: tuple[int | None, ...],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
) -> DecoderSettings:
    """Settings of a pre-norm decoder with one rotary embedding: Llama and its descendants."""
    rope = read_rope(config, sizes.head_dim, sizes.max_position)
    return DecoderSettings(
        spec=ModelSpec(
            family=family,
            hidden_size=sizes.hidden_size,
            vocab_size=sizes.vocab_size,
            max_position=rope.max_position,
            layers=sizes.layers(windows),
            kv_of_prompt_length=rope.kind == "dynamic",
        ),
        intermediate_size=sizes.intermediate_size,
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied_head=config.flag("tie_word_embeddings", False),
        ropes=(rope,),
        rope_of_layer=(0,) * sizes.num_layers,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        head_norms=head_norms,
    )
