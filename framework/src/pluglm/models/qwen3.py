"""The Qwen3 family (`model_type` qwen3, dense): Llama with a norm on every query and key head."""

from __future__ import annotations

from pluglm.models.config_reader import ConfigReader
from pluglm.models.decoder import Decoder
from pluglm.models.qwen2 import qwen_windows
from pluglm.models.settings import DecoderSettings, plain_settings, read_sizes


class Qwen3Model(Decoder):
    """Heads are 128 wide unless `head_dim` says otherwise; `attention_bias` is on q, k, v and o."""

    @classmethod
    def read_settings(cls, config: ConfigReader) -> DecoderSettings:
        defaults = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "head_dim": 128}
        sizes = read_sizes(config, defaults)
        attention_bias = config.flag("attention_bias", False)
        return plain_settings(
            config,
            "qwen3",
            sizes,
            qwen_windows(config, sizes.num_layers),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            head_norms=True,
        )
