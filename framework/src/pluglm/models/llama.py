"""The Llama family (`model_type` llama: Llama 2 and 3, SmolLM2, TinyLlama and others of that shape)."""

from __future__ import annotations

from pluglm.models.config_reader import ConfigReader
from pluglm.models.decoder import Decoder
from pluglm.models.settings import DecoderSettings, plain_settings, read_sizes


class LlamaModel(Decoder):
    """Pre-norm decoder, full attention; `attention_bias` is on q, k, v and o, `mlp_bias` on all three projections."""

    @classmethod
    def read_settings(cls, config: ConfigReader) -> DecoderSettings:
        sizes = read_sizes(config, {"max_position_embeddings": 2048})
        attention_bias = config.flag("attention_bias", False)
        return plain_settings(
            config,
            "llama",
            sizes,
            (None,) * sizes.num_layers,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=config.flag("mlp_bias", False),
        )
