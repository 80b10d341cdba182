"""The Qwen2 family (`model_type` qwen2: Qwen2, Qwen2.5): Llama with biases on q, k and v."""

from __future__ import annotations

from pluglm.models.config_reader import ConfigReader
from pluglm.models.decoder import Decoder
from pluglm.models.settings import DecoderSettings, layer_windows, plain_settings, read_sizes


class Qwen2Model(Decoder):
    """Layers from `max_window_layers` on have a sliding window when `use_sliding_window` is true."""

    @classmethod
    def read_settings(cls, config: ConfigReader) -> DecoderSettings:
        sizes = read_sizes(config, {"num_key_value_heads": 32, "max_position_embeddings": 32_768})
        windows = qwen_windows(config, sizes.num_layers)
        return plain_settings(config, "qwen2", sizes, windows, qkv_bias=True)


def qwen_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows as both Qwen generations spell them; `layer_types` wins over `max_window_layers`."""
    window = config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    first = config.integer("max_window_layers", 28, least=0) if window is not None else num_layers
    kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    return layer_windows(config, num_layers, window, kinds)
