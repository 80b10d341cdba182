"""A model that is a checksum of what its KV gives back, its sampler, and its tokens in closed form. Knows no scheduler.

Each slot holds the token id, its position and its namespace. A row's logits are looked up by the CRC-32 of everything
that the row reads, so a stale, shifted, missing or foreign slot changes the tokens.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pluglm.kernel.core import ModelInput, SampleRow
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec

# S: slots, R: rows with logits, V: vocabulary

VOCAB_SIZE = 24
EOS = 0
POISON = VOCAB_SIZE  # an id that no token has: rows that read it are NaN
NONSENSE = VOCAB_SIZE + 1  # what a batch that fails may have written
TOKEN_BITS = 8
POSITION_BITS = 20
NOISE_ROWS = 1024
NOISE_NV = np.random.default_rng(0).random((NOISE_ROWS, VOCAB_SIZE), dtype=np.float32)
WINNER = 4.0  # what the first choice has over the noise, which is in [0, 1)
PACK_CODE = struct.Struct("<q").pack
PACK_DRAW = struct.Struct("<QQQ").pack

SPEC = ModelSpec(
    family="trace",
    hidden_size=1,
    vocab_size=VOCAB_SIZE,
    max_position=1 << POSITION_BITS,
    layers=(LayerSpec(index=0, num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0),),
)


class TraceModel:
    """Stands for the model in a runner."""

    spec = SPEC


class TraceStore:
    """Token ids as keys, position and namespace as values: int64 [S, 1, 1], shared with numpy arrays [S]."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.tokens_S = np.full(layout.num_blocks * layout.block_size, -1, dtype=np.int64)
        self.places_S = np.full(layout.num_blocks * layout.block_size, -1, dtype=np.int64)
        self._keys = torch.from_numpy(self.tokens_S).view(-1, 1, 1)
        self._values = torch.from_numpy(self.places_S).view(-1, 1, 1)

    def keys(self, layer: int) -> torch.Tensor:
        return self._keys

    def values(self, layer: int) -> torch.Tensor:
        return self._values

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            sources, targets = (np.array(side) for side in zip(*copies, strict=True))
            for stored_S in (self.tokens_S, self.places_S):
                blocks = stored_S.reshape(self.layout.num_blocks, self.layout.block_size)
                blocks[targets] = blocks[sources]


class TraceBackend:
    """Runs flat batches over a TraceStore on a clock of its own. A batch of n tokens takes STEP_S + n * TOKEN_S.

    namespace_of: sequence id -> its number, set by whoever builds the engine. about_to_write: told of each batch once
    its copies are made. spoil: what goes wrong with a batch, decided by the driver.
    """

    STEP_S, TOKEN_S = 0.01, 0.001
    device = "cpu"

    def __init__(self) -> None:
        self.now_s = 0.0
        self.namespace_of: Callable[[int], int] = lambda sequence_id: 0
        self.about_to_write: Callable[[ModelInput], None] = lambda inputs: None
        self.spoil: Callable[[ModelInput], tuple[str, int]] = lambda inputs: ("", 0)

    def now(self) -> float:
        return self.now_s

    def execute(self, model: Any, inputs: ModelInput, attention: Any, kv: Any) -> torch.Tensor:
        store: TraceStore = kv
        store.copy_blocks(inputs.copies)
        self.about_to_write(inputs)
        kind, nth = self.spoil(inputs)
        slots_T, tokens_T = inputs.slots_T.numpy(), inputs.token_ids_T.numpy()
        namespaces = [self.namespace_of(one.sequence_id) for one in inputs.segments]
        lengths = [one.num_query for one in inputs.segments]
        store.tokens_S[slots_T] = NONSENSE if kind == "raise" else tokens_T
        store.places_S[slots_T] = inputs.positions_T.numpy() + np.repeat(namespaces, lengths)
        self.now_s += self.STEP_S + self.TOKEN_S * len(slots_T)
        if kind == "raise":
            raise RuntimeError("the batch failed")
        if kind == "poison":
            store.tokens_S[slots_T[inputs.segments[nth].query_start]] = POISON
        return torch.from_numpy(self._logits(inputs, store))

    def _logits(self, inputs: ModelInput, store: TraceStore) -> np.ndarray:
        rows: list[np.ndarray] = []
        wanted = inputs.logit_rows_R.tolist()
        offsets_B = np.arange(inputs.block_size)
        for segment in inputs.segments:
            end = segment.query_start + segment.num_query
            here = [row for row in wanted if segment.query_start <= row < end]
            if not here:
                continue
            table_B = np.array(segment.block_table)[:, None] * inputs.block_size
            slots = (table_B + offsets_B).ravel()[: segment.num_keys]
            tokens, places = store.tokens_S[slots], store.places_S[slots]
            data = ((places << TOKEN_BITS) | tokens).tobytes()
            done, checksum = 0, 0
            for row in here:
                length = segment.num_context + row - segment.query_start + 1
                checksum, done = zlib.crc32(data[8 * done : 8 * length], checksum), length
                sick = bool((tokens[:length] == POISON).any())
                rows.append(np.full(VOCAB_SIZE, np.nan, dtype=np.float32) if sick else logits_of(checksum))
        return np.stack(rows) if rows else np.empty((0, VOCAB_SIZE), dtype=np.float32)


class TraceSampler:
    """Draws as `draw` says."""

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        return [
            draw(logits_V, row.params.temperature, row.seed, row.lane, row.position)
            for logits_V, row in zip(logits_RV.numpy(), rows, strict=True)
        ]


def namespace_number(namespace: bytes) -> int:
    """What is stored of a namespace: 32 bits of it, above the position."""
    return zlib.crc32(namespace) << POSITION_BITS if namespace else 0


def code(token: int, position: int, namespace: int) -> bytes:
    """The 8 bytes that one sound slot adds to the checksum."""
    return PACK_CODE((position + namespace) << TOKEN_BITS | token)


def logits_of(checksum: int) -> np.ndarray:
    """logits_V float32 of a row that read data of this CRC-32."""
    logits_V = NOISE_NV[checksum % NOISE_ROWS].copy()
    logits_V[checksum // NOISE_ROWS % VOCAB_SIZE] += WINNER
    return logits_V


def draw(logits_V: np.ndarray, temperature: float, seed: int, lane: int, position: int) -> int:
    """The most likely token, or one drawn by a number in [0, 1) that depends on the last three alone."""
    if not temperature:
        return int(logits_V.argmax())
    weights_V = np.exp(logits_V.astype(np.float64) / temperature).cumsum()
    return int(np.searchsorted(weights_V, zlib.crc32(PACK_DRAW(seed, lane, position)) / 2**32 * weights_V[-1], "right"))


def checksum_of(tokens: Sequence[int], namespace: int) -> int:
    checksum = 0
    for position, token in enumerate(tokens):
        checksum = zlib.crc32(code(token, position, namespace), checksum)
    return checksum


def continuation(
    prompt: Sequence[int], namespace: int, count: int, *, temperature: float = 0.0, seed: int = 0, lane: int = 0
) -> list[int]:
    """The next `count` tokens of a request that runs alone: each is drawn from the row that has read all before it."""
    checksum, tokens = checksum_of(prompt, namespace), list[int]()
    for index in range(count):
        tokens.append(draw(logits_of(checksum), temperature, seed, lane, index))
        checksum = zlib.crc32(code(tokens[-1], len(prompt) + index, namespace), checksum)
    return tokens
