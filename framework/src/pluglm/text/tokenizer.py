"""Text to token ids and back, on a `tokenizers` backend. Knows ids, special tokens and the chat template's source;
does not know files of weights, prompts or how text is streamed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from pluglm.kernel.errors import RequestError
from pluglm.text.byte_alphabet import byte_of_character, spelled_bytes
from pluglm.text.decoding import BYTE_TOKEN, SpelledBytes, Stage, streaming_decoder
from pluglm.text.messages import one_line

SPACE_MARK = "▁"
_MOST_TEXTS = 1 << 18  # tokens whose text is remembered


class Tokenizer:
    """One vocabulary with its rules. Immutable after construction and safe to share between threads.

    vocab_size: one more than the highest id, added tokens included.
    special_ids: ids of control tokens (left out of text by `decode`, never produced with `parse_special=False`).
    eos_token_ids: ids that the tokenizer itself says end a sequence; may be empty.
    bos_token_id: the id of the beginning-of-sequence token, or None.
    special_tokens: name -> text (`bos_token`, `eos_token` ...), the variables that chat templates read.
    chat_template: Jinja source, or None.
    source: the file or folder it was read from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._plain_backend = _plain_text_twin(backend)
        self.source = source
        self.chat_template = chat_template
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id = self._named_id("bos_token")
        eos_token_id = self._named_id("eos_token")
        self.eos_token_ids = frozenset(extra_eos_token_ids) | (set() if eos_token_id is None else {eos_token_id})
        self._json_lock = threading.Lock()
        self._json: str | None = None
        self._decoder_spec: Mapping[str, Any] | None = _decoder_spec(backend)
        self._text_of = lru_cache(_MOST_TEXTS)(backend.id_to_token)  # asked for with every token of every output
        self._spelled = SpelledBytes()
        self._byte_table = byte_of_character() if _spells_bytes(self._decoder_spec) else None

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Reads a checkpoint folder's tokenizer.json and the files beside it; see pluglm.text.folder."""
        from pluglm.text.folder import tokenizer_from_folder

        return tokenizer_from_folder(Path(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, as transformers' `tokenizer(text).input_ids` gives them.

        add_special_tokens: add what the tokenizer puts around a sequence (BOS, EOS).
        parse_special: text that spells a control token becomes that token. With False it stays plain text, for
            text that is not trusted; non-special added tokens are still matched, as the vocabulary demands.
        Raises RequestError when text is not valid Unicode, or with parse_special=False when this vocabulary cannot
        spell the control token as plain text.
        """
        backend = self._backend if parse_special else self._plain_backend
        try:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise RequestError(
                f"text is not valid Unicode text ({one_line(error)}); send a string without lone surrogates"
            ) from None
        if not parse_special:
            self._refuse_control_ids(encoding)
        return list(encoding.ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, without any clean-up of spaces. Ids without a token add nothing.

        Raises RequestError for a value that is not an unsigned 32-bit integer.
        """
        ids = list(token_ids)
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            bad = next((value for value in ids if not isinstance(value, int) or not 0 <= value < 2**32), ids)
            raise RequestError(f"{bad!r} is not a token id; ids are integers from 0 to {self.vocab_size - 1}") from None

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None when no token has this id."""
        return self._text_of(token_id) if token_id >= 0 else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; for a control token, its spelling. Empty for an id without a token.

        A leading space counts, also where `decode` drops it at the start of a text.
        """
        text = self.token_text(token_id)
        if text is None:
            return b""
        if self._byte_table is not None:
            return spelled_bytes(text, self._byte_table)
        byte = BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE_MARK, " ").encode("utf-8")

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled `text`, or None."""
        return self._backend.token_to_id(text)

    def stream_decoder(self) -> Stage:
        """A fresh streaming form of this tokenizer's decoder. Raises TokenizerError when it has none."""
        return streaming_decoder(self._decoder_spec, self.source, self._spelled)

    def to_json(self) -> str:
        """The backend in the JSON form of the tokenizers library."""
        with self._json_lock:
            if self._json is None:
                self._json = self._backend.to_str()
            return self._json

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _refuse_control_ids(self, encoding: tokenizers.Encoding) -> None:
        for token_id, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if token_id in self.special_ids and not added:
                raise RequestError(
                    f"text contains {self.token_text(token_id)!r}, a control token that {self.source} cannot spell as "
                    "plain text; remove it"
                )


def _plain_text_twin(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer over the same (shared) model, blind to control tokens in text.

    `encode_special_tokens` is a setting of the object, so switching it per call would race between threads.
    """
    twin = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        value = getattr(backend, part)
        if value is not None:
            setattr(twin, part, value)
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([token for _, token in sorted(added.items())])
    if twin.get_added_tokens_decoder() != added:
        twin = tokenizers.Tokenizer.from_str(backend.to_str())
    twin.encode_special_tokens = True
    return twin


def _spells_bytes(spec: Mapping[str, Any] | None) -> bool:
    if spec is None:
        return False
    return spec["type"] == "ByteLevel" or any(map(_spells_bytes, spec.get("decoders", ())))


def _decoder_spec(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    if backend.decoder is None:
        return None
    spec: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    return spec
