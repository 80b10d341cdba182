"""Whether two tokenizers give every id the same token. Reads the JSON form of the `tokenizers` library."""

from __future__ import annotations

import json
from typing import Any

from pluglm.kernel.errors import PluginError


def require_same_vocabulary(target_json: str, draft_json: str, model: str) -> None:
    """Raises PluginError naming the first id that differs. How they cut text may differ: only ids are passed."""
    target, draft = read_vocabulary(target_json), read_vocabulary(draft_json)
    for token_id in sorted(target.keys() | draft.keys()):
        if target.get(token_id) != draft.get(token_id):
            raise PluginError(
                f"drafter 'draft_model': '{model}' has another vocabulary than the model it drafts for: "
                f"id {token_id} is {_name(draft, token_id)} there and {_name(target, token_id)} here; "
                "choose a model with the same tokenizer"
            )


def read_vocabulary(tokenizer_json: str) -> dict[int, str]:
    """id -> token, added tokens over the model's own."""
    data: dict[str, Any] = json.loads(tokenizer_json)
    vocabulary = data["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {token_id: token for token, token_id in vocabulary.items()}
    else:  # a Unigram model lists [token, score] by id
        tokens = {token_id: token for token_id, (token, _) in enumerate(vocabulary)}
    return tokens | {added["id"]: added["content"] for added in data.get("added_tokens") or ()}


def _name(vocabulary: dict[int, str], token_id: int) -> str:
    return repr(vocabulary[token_id]) if token_id in vocabulary else "nothing"
