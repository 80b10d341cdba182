"""The Mistral family (`model_type` mistral): Llama with a sliding window in every layer, or none at all."""

from __future__ import annotations

from pluglm.models.config_reader import ConfigReader
from pluglm.models.decoder import Decoder
from pluglm.models.settings import DecoderSettings, plain_settings, read_sizes


class MistralModel(Decoder):
    """`sliding_window` null is full attention; absent it is 4096, transformers' default."""

    @classmethod
    def read_settings(cls, config: ConfigReader) -> DecoderSettings:
        sizes = read_sizes(config, {"num_key_value_heads": 8, "max_position_embeddings": 131_072})
        window = config.optional_integer("sliding_window", 4096)
        if config.value("layer_types") is not None:
            raise config.refuse(
                "layer_types", "is set; Mistral uses one kind of attention in all layers (see ministral)"
            )
        return plain_settings(config, "mistral", sizes, (window,) * sizes.num_layers)
