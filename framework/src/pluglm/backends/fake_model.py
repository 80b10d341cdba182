"""A model without weights: its logits are a hash of the tokens and positions that the KV store gives back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from pluglm.kernel.core import ModelInput
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import AttentionCall, ModelSpec

# S: slots, P: tokens of a prefix, R: rows with logits, D: hidden size, V: vocabulary

WINNER_LOGITS = (8.0, 6.0, 4.0, 2.0)  # all other tokens stay below 1
_NOISE_STEPS = 1021  # a prime, so that noise repeats with no power of two
_CHEAP_MODULUS = 2**31 - 1  # a prime


class FakeModel:
    """Stands for a family's shape. The fake backend reads `spec` and never calls the model."""

    interface_version: ClassVar[int] = 1

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def first_layers(self, num_layers: int) -> FakeModel:
        """Its logits are those of all layers, unless a window makes the others see more or less."""
        return FakeModel(replace(self.spec, layers=self.spec.layers[:num_layers]))

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        raise ComponentFailure("backend 'fake'", "loads no weights, so it embeds nothing")

    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        raise ComponentFailure("backend 'fake'", "loads no weights: run its model through FakeBackend.execute only")

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        raise ComponentFailure("backend 'fake'", "loads no weights: run its model through FakeBackend.execute only")


class FakeKVStore:
    """Token ids in the place of keys and positions in the place of values: int64 [S, 1, 1].

    One pair serves every layer, or every layer of a group; a slot that was never written holds -1.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._slots_of, first = dict[int, slice](), 0
        for group in layout.groups:
            last = first + group.num_blocks * layout.block_size
            self._slots_of |= dict.fromkeys(group.layers, slice(first, last))
            first = last
        shape = (layout.num_blocks * layout.block_size, 1, 1)
        self._tokens = torch.full(shape, -1, dtype=torch.int64)
        self._positions = torch.full(shape, -1, dtype=torch.int64)

    def keys(self, layer: int) -> torch.Tensor:
        return self._tokens[self._slots_of[layer]] if self._slots_of else self._tokens

    def values(self, layer: int) -> torch.Tensor:
        return self._positions[self._slots_of[layer]] if self._slots_of else self._positions

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, targets = (torch.tensor(side, dtype=torch.int64) for side in zip(*copies, strict=True))
        for stored in (self._tokens, self._positions):
            blocks = stored.view(self.layout.num_blocks, self.layout.block_size)
            blocks[targets] = blocks[sources]


def prefix_digest(pairs_P2: torch.Tensor) -> bytes:
    """BLAKE2b (RFC 7693), 40 bytes, of pairs_P2 int64 (token id, position), each number as 8 little-endian bytes."""
    return hashlib.blake2b(pairs_P2.numpy().astype("<i8").tobytes(), digest_size=40).digest()


def hashed_logits(digest: bytes, vocab_size: int) -> torch.Tensor:
    """logits_V float32 of one row: WINNER_LOGITS at ids named by the digest, noise in [0, 1) elsewhere.

    The digest is five 64-bit numbers. The first four, modulo V, are the winners (the better one keeps a place that two
    name); the fifth, f, gives token i the noise ((i * (f % 1020 + 1) + f // 1021) mod 1021) / 1021.
    """
    numbers = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 40, 8)]
    factor, shift = numbers[4] % (_NOISE_STEPS - 1) + 1, numbers[4] // _NOISE_STEPS % _NOISE_STEPS
    steps_V = (torch.arange(vocab_size) * factor + shift) % _NOISE_STEPS
    logits_V = steps_V.to(torch.float32) / _NOISE_STEPS
    for number, logit in reversed(list(zip(numbers, WINNER_LOGITS, strict=False))):
        logits_V[number % vocab_size] = logit
    return logits_V


def cheap_logits(pairs_R2: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """logits_RV float32 of pairs_R2 int64, (token id t, position p): 1 for one id, 0 for all others.

    The id is ((48271 t + 69621 p + 1) mod (2^31 - 1)) mod V.
    """
    winners_R = (48271 * pairs_R2[:, 0] + 69621 * pairs_R2[:, 1] + 1) % _CHEAP_MODULUS % vocab_size
    logits_RV = torch.zeros((len(winners_R), vocab_size))
    return logits_RV.scatter_(1, winners_R[:, None], 1.0)
