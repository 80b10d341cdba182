"""A small byte-level vocabulary trained here, a grammar over it, and helpers that walk texts through a matcher."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.grammar import Matcher
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kernel.sampling_params import GrammarSpec
from pluglm_grammar.llguidance import LlguidanceGrammar

SPECIAL_TOKENS = ["<|end|>", "<|im_end|>", "<|tool|>"]  # ids 0, 1, 2; the first two are EOS
EOS = frozenset({0, 1})
NUM_PADDING = 45  # the head is wider than the tokenizer, and its width is no multiple of 32


class SmallTokenizer:
    """TokenizerView on a tokenizer of all 256 bytes and some merges."""

    def __init__(self) -> None:
        self.backend = tokenizers.Tokenizer(models.BPE())
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        lines = [
            '{"name": "Ann", "age": 30, "ok": true, "no": false, "list": [1, 2, 3]}',
            "the cat sat",
            "café ☃ 日本 null",
        ]
        self.backend.train_from_iterator(lines * 20, trainer)
        self.backend.enable_truncation(4)  # must not reach the grammar
        self.eos_token_ids = EOS
        alphabet = {chr(byte): byte for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
        others = [byte for byte in range(256) if byte not in alphabet.values()]
        alphabet |= {chr(256 + index): byte for index, byte in enumerate(others)}
        self._bytes = {
            token_id: bytes(alphabet[character] for character in piece)
            for piece, token_id in self.backend.get_vocab().items()
            if piece not in SPECIAL_TOKENS
        }
        self._ids = {piece: token_id for token_id, piece in self._bytes.items()}

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        plain = tokenizers.Tokenizer.from_str(self.backend.to_str())
        plain.no_truncation()
        return plain.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._bytes[token_id] for token_id in token_ids).decode("utf-8")

    def to_json(self) -> str:
        return self.backend.to_str()

    def encode_bytes(self, text: str) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text.encode("utf-8")]

    def encode_anyhow(self, text: str, generator: random.Random) -> list[int]:
        """Any cut of the text into tokens, not only the usual one."""
        data, token_ids = text.encode("utf-8"), []
        while data:
            piece = generator.choice([data[:n] for n in range(1, 7) if data[:n] in self._ids and n <= len(data)])
            token_ids.append(self._ids[piece])
            data = data[len(piece) :]
        return token_ids


class Walker:
    """Reads masks and feeds texts. `num_ids` is the width of the logits."""

    def __init__(self, tokenizer: SmallTokenizer, num_ids: int) -> None:
        self.tokenizer = tokenizer
        self.num_ids = num_ids

    def row(self, matcher: Matcher) -> np.ndarray:
        row_W = np.full(-(-self.num_ids // 32), -1, dtype=np.int32)
        matcher.fill_mask(row_W)
        return row_W

    def open_ids(self, matcher: Matcher) -> set[int]:
        """Reads bit t % 32 of word t // 32, as the contract says; padding bits of the last word included."""
        words = [int(word) & 0xFFFFFFFF for word in self.row(matcher)]
        return {32 * index + bit for index, word in enumerate(words) for bit in range(32) if word >> bit & 1}

    def num_accepted(self, matcher: Matcher, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if not matcher.accept(token_id):
                return index
        return len(token_ids)

    def matches(self, matcher: Matcher, token_ids: Sequence[int]) -> bool:
        """Whether the whole text and then EOS are taken. The matcher is rolled back to where it was."""
        taken = self.num_accepted(matcher, [*token_ids, min(EOS)])
        matcher.rollback(taken)
        return taken == len(token_ids) + 1

    def generate(self, matcher: Matcher, generator: random.Random, wanted: int, favoured: str = "") -> list[int]:
        """Random tokens from the masks; ends when it may after `wanted` tokens, and at 400 without EOS fails.

        Every other token is one of the favoured characters if it can be: `[^a]*a` would hardly ever end by chance.
        """
        token_ids: list[int] = []
        likely = {token_id for character in favoured for token_id in self.tokenizer.encode(character)}
        while len(token_ids) < 400:
            choices = sorted(self.open_ids(matcher))
            if choices and (set(choices) <= EOS or (set(choices) & EOS and len(token_ids) >= wanted)):
                return token_ids
            going_on = [token_id for token_id in choices if token_id not in EOS]
            some = [token_id for token_id in going_on if token_id in likely]
            token_ids.append(generator.choice(some if some and generator.random() < 0.5 else going_on))
            if not matcher.accept(token_ids[-1]):
                raise AssertionError("a token of the mask was refused")
        raise AssertionError(f"never complete: {token_ids}")


@pytest.fixture(scope="session")
def tokenizer() -> SmallTokenizer:
    return SmallTokenizer()


@pytest.fixture(scope="session")
def walker(tokenizer: SmallTokenizer) -> Walker:
    return Walker(tokenizer, tokenizer.vocab_size + NUM_PADDING)


@pytest.fixture(scope="session")
def make_grammar(tokenizer: SmallTokenizer) -> Callable[..., LlguidanceGrammar]:
    def refuse(*_: object) -> Any:
        raise PluginError("a grammar asks for nothing else")

    def make(
        *, num_ids: int | None = None, eos: frozenset[int] = EOS, view: Any = tokenizer, **config: Any
    ) -> LlguidanceGrammar:
        num_ids = tokenizer.vocab_size + NUM_PADDING if num_ids is None else num_ids
        spec = ModelSpec(family="test", hidden_size=1, vocab_size=num_ids, max_position=64, layers=())
        context = BuildContext(
            spec=spec,
            device="cpu",
            dtype="float32",
            deterministic=True,
            max_num_seqs=1,
            max_step_tokens=1,
            max_model_len=64,
            kv_bytes=0,
            bytes_per_token=0,
            tokenizer=view,
            eos_token_ids=eos,
            build_runner=refuse,
            resolve_component=refuse,
        )
        return LlguidanceGrammar(LlguidanceGrammar.Config.model_validate(config), context)

    return make


@pytest.fixture(scope="session")
def grammar(make_grammar: Callable[..., LlguidanceGrammar]) -> LlguidanceGrammar:
    return make_grammar()


@pytest.fixture(scope="session")
def any_spelling(make_grammar: Callable[..., LlguidanceGrammar]) -> LlguidanceGrammar:
    """Masks that are the language itself, whatever the cut into tokens."""
    return make_grammar(canonical=False)


@pytest.fixture(scope="session")
def regex() -> Callable[[str], GrammarSpec]:
    return lambda pattern: GrammarSpec(kind="regex", value=pattern)


@pytest.fixture(scope="session")
def json_schema() -> Callable[[Any], GrammarSpec]:
    return lambda schema: GrammarSpec(kind="json_schema", value=schema)
