"""What masks need to know of a vocabulary: llguidance's own tokenizer, the width of a mask row and the bits of EOS.

It does not know grammars or sequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLTokenizer

from pluglm.kernel.errors import PluginError

if TYPE_CHECKING:
    import numpy.typing as npt

    from pluglm.kernel.interfaces.component import BuildContext

WORD_BITS = 32

# W: int32 words of a mask row, bit t % 32 of word t // 32 is token id t


def num_words(num_ids: int) -> int:
    return -(-num_ids // WORD_BITS)


def pack_bits(ids: Iterable[int], words: int) -> npt.NDArray[np.int32]:
    """A mask row int32 [words] with the bits of `ids` set."""
    open_ids = np.zeros(words * WORD_BITS, dtype=np.bool_)
    open_ids[list(ids)] = True
    return np.packbits(open_ids, bitorder="little").view("<i4").astype(np.int32)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """num_ids: V, the width of the logits. library_words: the row width that llguidance writes, at least W.

    valid_W: the bits of ids below V. eos_W: the bits of eos_token_ids, which are all ids of the tokenizer.
    """

    tokenizer: Any
    num_ids: int
    library_words: int
    eos_token_ids: frozenset[int]
    valid_W: npt.NDArray[np.int32]
    eos_W: npt.NDArray[np.int32]

    @property
    def words(self) -> int:
        return num_words(self.num_ids)


def build_vocabulary(context: BuildContext) -> Vocabulary:
    """Raises PluginError when the tokenizer cannot be read or has no EOS that could end a constrained text."""
    num_ids = context.spec.vocab_size
    known_ids = min(num_ids, context.tokenizer.vocab_size)
    eos_token_ids = frozenset(i for i in context.eos_token_ids if 0 <= i < known_ids)
    if not eos_token_ids:
        raise PluginError(
            f"grammar 'llguidance' needs an EOS token to end a text, but none of {sorted(context.eos_token_ids)} "
            f"is an id of the tokenizer (0 to {known_ids - 1}); set the model's eos_token_id"
        )
    # A head may have fewer rows than the tokenizer has ids; llguidance wants room for all of them.
    library_ids = max(num_ids, context.tokenizer.vocab_size)
    tokenizer = _build_tokenizer(context.tokenizer.to_json(), library_ids, min(eos_token_ids))
    words = num_words(num_ids)
    return Vocabulary(
        tokenizer=tokenizer,
        num_ids=num_ids,
        library_words=num_words(library_ids),
        eos_token_ids=eos_token_ids,
        valid_W=pack_bits(range(num_ids), words),
        eos_W=pack_bits(eos_token_ids, words),
    )


def _build_tokenizer(tokenizer_json: str, num_ids: int, eos_token_id: int) -> Any:
    # Truncation or padding left in the file would change how llguidance tokenizes text that is certain to come.
    data = {**json.loads(tokenizer_json), "truncation": None, "padding": None}
    try:
        return LLTokenizer(json.dumps(data), n_vocab=num_ids, eos_token=eos_token_id)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise PluginError(f"grammar 'llguidance' cannot use this model's tokenizer: {reason}") from error
