"""Turns any accepted form of prompt into token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pluglm.kernel.errors import RequestError
from pluglm.outputs import Prompt


def prompt_token_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Ids of a string, {"prompt_token_ids": [...]}, or a list of messages (through the model's chat template).

    Raises RequestError for anything else, TokenizerError when the template refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if isinstance(prompt, Mapping):
        if set(prompt) != {"prompt_token_ids"}:
            raise RequestError(f"a prompt mapping holds only 'prompt_token_ids', not {sorted(map(str, prompt))}")
        return list(prompt["prompt_token_ids"])
    from pluglm.text.chat_template import render_chat  # jinja2 is only needed for chats

    text = render_chat(tokenizer, prompt, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))
