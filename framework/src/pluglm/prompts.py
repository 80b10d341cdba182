"""Turns any accepted form of prompt into token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from pluglm.kernel.errors import RequestError
from pluglm.outputs import Chat, Message, Prompt, PromptTokens
from pluglm.text.tokenizer import Tokenizer


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Ids of a string, {"prompt_token_ids": [...]}, a list of messages or {"messages": [...]}.

    A string is taken as it is; messages go through the model's chat template.

    Raises RequestError for anything else, TokenizerError when the template refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if isinstance(prompt, Mapping):
        if set(prompt) == {"messages"}:
            return prompt_token_ids(cast(Chat, prompt)["messages"], tokenizer)
        if set(prompt) != {"prompt_token_ids"}:
            raise RequestError(
                f"a prompt mapping holds 'prompt_token_ids' or 'messages', not {sorted(map(str, prompt))}"
            )
        token_ids = cast(PromptTokens, prompt)["prompt_token_ids"]
        if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
            raise RequestError(f"prompt_token_ids must be a list of token ids, not {type(token_ids).__name__}")
        return list(token_ids)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        forms = "a string, {'prompt_token_ids': [...]} or a list of messages"
        raise RequestError(f"a prompt is {forms}, not {type(prompt).__name__}")
    from pluglm.text.chat_template import render_chat  # jinja2 is only needed for chats

    text = render_chat(tokenizer, cast(Sequence[Message], prompt), add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))
