"""Helpers of the tests of KV formats: what transformers says when its cache holds what a format stands for."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from pluglm.assembly.registry import find, list_entries, load
from pluglm.kernel.interfaces.component import ComponentConfig

FORMATS = sorted(entry.name for entry in list_entries("kv_format"))

# B: sequences, K: kv heads, S: tokens, H: head dim


def made_format(name: str) -> Any:
    return load(find(("kv_format",), name))(ComponentConfig(), "cpu", torch.float32)


def encoding_cache(name: str | None) -> Any:
    """transformers' cache, which gives back keys and values as the format stores them; None changes nothing."""
    from transformers import DynamicCache

    if name is None:
        return DynamicCache()
    kv_format = made_format(name)

    def stored(x_BKSH: torch.Tensor) -> torch.Tensor:
        x_TKH = x_BKSH.transpose(1, 2).flatten(0, 1)
        found_TKH = kv_format.decode(*kv_format.encode(x_TKH))
        return found_TKH.unflatten(0, (len(x_BKSH), -1)).transpose(1, 2).to(x_BKSH.dtype)

    class EncodingCache(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(stored(key_states), stored(value_states), *args, **kwargs)

    return EncodingCache()


def greedy(model: Any, prompts_BS: torch.Tensor, num_tokens: int, kv_format: str | None) -> Any:
    """The output of `generate`, with the logits of each step."""
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "output_scores": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later versions of transformers 5 call it `cache`
        cache = encoding_cache(kv_format)
        return model.generate(prompts_BS, return_dict_in_generate=True, past_key_values=cache, **options)


def reference_tokens(path: Path, prompts: list[list[int]], num_tokens: int, kv_format: str | None) -> list[list[int]]:
    """Greedy tokens of each prompt alone, in float32."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    outputs = [greedy(model, torch.tensor([prompt]), num_tokens, kv_format).sequences[0] for prompt in prompts]
    return [one[len(prompt) :].tolist() for one, prompt in zip(outputs, prompts, strict=True)]
