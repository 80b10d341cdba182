"""A small byte-level tokenizer for contexts: 256 bytes, a few merges and one end token. Real, but of no real model."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
MERGES = (("t", "h"), ("e", "r"), ("a", "n"), ("y", "e"), ("ye", "s"))


class TinyTokenizer:
    """A TokenizerView of 262 ids; id 261 ends a text. Every string of bytes can be encoded."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = [*alphabet, *(left + right for left, right in MERGES)]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(END, special=True)])

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({self.vocab_size - 1})

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())
