"""Builds a tokenizer from the `tokenizer.*` keys of a GGUF file. Knows vocabularies, not how the file is read.

Key names and token types: the GGUF specification. Rules of the two kinds: GPT-2 byte-level BPE, and SentencePiece
BPE, whose merges follow from the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pluglm.kernel.errors import TokenizerError
from pluglm.text import gguf_pre
from pluglm.text.messages import one_line
from pluglm.text.tokenizer import SPACE_MARK, Tokenizer

KINDS = ("gpt2", "llama")
GEMMA_ARCHITECTURES = ("gemma", "gemma2", "gemma3")
NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
EXTRA_EOS_IDS = ("eot_token_id", "eom_token_id")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary:
    """The checked `tokenizer.ggml.*` entries of one file; every id in it is inside the vocabulary.

    Raises TokenizerError naming the file and the key that is missing or damaged.
    """

    def __init__(self, metadata: Mapping[str, Any], file: Path) -> None:
        self.file = file
        self._metadata = metadata
        self.tokens: list[str] = self._list("tokens", str, None)
        count = len(self.tokens)
        if len(set(self.tokens)) != count:
            raise self.damaged("tokens", "lists a token twice")
        default_types = [int(TokenType.NORMAL)] * count
        self.types: list[int] = self._list("token_type", int, count) if self.has("token_type") else default_types
        self.special_tokens = {
            name: self.tokens[token_id]
            for name, key in NAMED_IDS.items()
            if (token_id := self.token_id(key)) is not None
        }

    def has(self, key: str) -> bool:
        return self._metadata.get(f"tokenizer.ggml.{key}") is not None

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return default if value is None else value

    def token_id(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.damaged(key, f"is {value!r}, outside the {len(self.tokens)} tokens")
        return value

    def scores(self) -> list[float]:
        return self._list("scores", (int, float), len(self.tokens))

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges", str, None)]
        if any(len(pair) != 2 for pair in pairs):
            raise self.damaged("merges", "has an entry that is not two pieces with one space between")
        return pairs

    def damaged(self, key: str, what: str) -> TokenizerError:
        return TokenizerError(f"{self.file}: tokenizer.ggml.{key} {what}; the file is damaged, fetch it again")

    def _list(self, key: str, kind: type | tuple[type, ...], length: int | None) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, kind) for v in value):
            raise self.damaged(key, "is missing or not a list of the right kind")
        if length is not None and len(value) != length:
            raise self.damaged(key, f"has {len(value)} entries for {length} tokens")
        return list(value)


def tokenizer_from_gguf(
    metadata: Mapping[str, Any], file: Path, *, rules: gguf_pre.Rules = "transformers"
) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    metadata: the file's key-value pairs as Python values; `file` is for messages.
    rules: "transformers" gives the ids of transformers' GGUF reader. "published" gives those of the model's own
        tokenizer where that reader is known to differ: the `digits` family of gguf_pre (SmolLM2), and BOS for the
        Llama-3 family when the file does not say.
    Raises TokenizerError for a file without a vocabulary, of an unknown kind or pre-tokenizer, or damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise TokenizerError(
            f"{file}: holds no tokenizer (no tokenizer.ggml.model); use a file converted with its vocabulary, or name "
            "a folder with tokenizer.json as the tokenizer"
        )
    if kind not in KINDS:
        raise TokenizerError(f"{file}: tokenizer.ggml.model is {kind!r}, which is not known; known: {', '.join(KINDS)}")
    if rules not in ("transformers", "published"):
        raise ValueError(f"rules is {rules!r}; expected 'transformers' or 'published'")
    vocabulary = Vocabulary(metadata, file)
    gemma = metadata.get("general.architecture") in GEMMA_ARCHITECTURES
    try:
        backend = _byte_level(vocabulary, rules) if kind == "gpt2" else _sentencepiece(vocabulary, gemma)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception for merges outside the vocabulary
        raise TokenizerError(
            f"{file}: its vocabulary does not fit its merges ({one_line(error)}); fetch it again"
        ) from error
    return _finish(backend, vocabulary, _adds_bos(vocabulary, kind, rules), metadata.get("tokenizer.chat_template"))


def _adds_bos(vocabulary: Vocabulary, kind: str, rules: gguf_pre.Rules) -> bool:
    """The file's flag; SentencePiece files without one add BOS, byte-level ones do not."""
    default = kind == "llama"
    if kind == "gpt2" and rules == "published":
        default = gguf_pre.family(vocabulary.get("pre", "default"), vocabulary.file) == "llama3"
    return bool(vocabulary.get("add_bos_token", default))


def _byte_level(vocabulary: Vocabulary, rules: gguf_pre.Rules) -> tokenizers.Tokenizer:
    family = gguf_pre.family(vocabulary.get("pre", "default"), vocabulary.file)
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=vocabulary.merges()))
    backend.pre_tokenizer = gguf_pre.pre_tokenizer(family, rules)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: Vocabulary, gemma: bool) -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback. Gemma adds no space at the start and merges in the order of its ids."""
    tokens = [_marked_spaces(token) for token in vocabulary.tokens] if gemma else vocabulary.tokens
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranks = [-float(token_id) for token_id in range(len(tokens))] if gemma else vocabulary.scores()
    merges = vocabulary.merges() if vocabulary.has("merges") else _merges_of(ids, ranks, vocabulary.types)
    unknown = vocabulary.special_tokens.get("unk_token")
    model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix_space = not gemma and bool(vocabulary.get("add_space_prefix", True))
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    else:
        scheme = "first" if prefix_space else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=False)
    if prefix_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _marked_spaces(token: str) -> str:
    """Gemma files write runs of spaces as spaces, while text reaches the vocabulary with every space marked."""
    return SPACE_MARK * len(token) if token and not token.strip(" ") else token


def _merges_of(ids: Mapping[str, int], ranks: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies: each way to cut a token into two tokens, best first.

    Order: higher rank, then longer left piece, then longer right piece, then id. Control tokens are left out: they
    are matched in the text before any merge, and must not be reachable from plain text.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in ids.items():
        if types[token_id] != TokenType.CONTROL:
            rank = -ranks[token_id]
            ranked.extend((rank, -len(left), -len(right), left, right) for left, right in _cuts(token, ids))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _cuts(token: str, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for index in range(1, len(token)):
        left, right = token[:index], token[index:]
        if left in ids and right in ids:
            yield left, right


def _finish(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, adds_bos: bool, chat_template: Any) -> Tokenizer:
    special = vocabulary.special_tokens
    backend.add_tokens(list(_added_tokens(vocabulary, set(backend.get_vocab()))))
    adds_eos = bool(vocabulary.get("add_eos_token", False))
    bos = special.get("bos_token") if adds_bos else None
    backend.post_processor = _bos_eos_processor(backend, bos, special.get("eos_token") if adds_eos else None)
    if chat_template is not None and not isinstance(chat_template, str):
        raise TokenizerError(f"{vocabulary.file}: tokenizer.chat_template is not a string; fetch the file again")
    extra = (vocabulary.token_id(key) for key in EXTRA_EOS_IDS)
    return Tokenizer(
        backend,
        source=str(vocabulary.file),
        special_tokens=special,
        extra_eos_token_ids=[token_id for token_id in extra if token_id is not None],
        chat_template=chat_template,
    )


def _bos_eos_processor(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None
) -> processors.TemplateProcessing:
    """Puts `bos` before and `eos` after a sequence, where given; both must be tokens of the backend."""
    around = [text for text in (bos, eos) if text is not None]
    single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    return processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=[(text, backend.token_to_id(text)) for text in set(around)]
    )


def _added_tokens(vocabulary: Vocabulary, known: set[str]) -> Iterator[AddedToken]:
    """Control and named tokens as special ones, user-defined ones as plain added tokens: matched whole in a text.

    A run of spaces that was re-spelled with marks is no longer in the vocabulary under its own spelling; the merges
    reach it, so it is left out here.
    """
    named = set(vocabulary.special_tokens.values())
    for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True):
        special = token_type == TokenType.CONTROL or token in named
        if special or (token_type == TokenType.USER_DEFINED and token in known):
            yield AddedToken(token, normalized=False, special=special)
