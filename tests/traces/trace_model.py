"""A model that is a checksum of what its KV gives back, its sampler, and its tokens in closed form. Knows no scheduler.

Each slot holds the token id, its position and its namespace. A row's logits are looked up by the CRC-32 of everything
that the row reads: all tokens up to its own through the first layer, the last WINDOW of them through the second. So a
stale, shifted, missing or foreign slot changes the tokens.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pluglm.kernel.core import GroupInput, ModelInput, SampleRow, Segment
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kernel.interfaces.search import Walk

# S: slots, R: rows with logits, V: vocabulary

VOCAB_SIZE = 24
EOS = 0
WINDOW = 5
POISON = VOCAB_SIZE  # an id that no token has: rows that read it are NaN
NONSENSE = VOCAB_SIZE + 1  # what a batch that fails may have written
TOKEN_BITS = 8
TOKEN_MASK = (1 << TOKEN_BITS) - 1
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
    layers=tuple(
        LayerSpec(index=index, num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, window=window)
        for index, window in enumerate((None, WINDOW))
    ),
)


class TraceModel:
    """Stands for the model in a runner."""

    spec = SPEC


class TraceStore:
    """Token ids as keys, position and namespace as values: int64 [S, 1, 1], shared with numpy arrays [S].

    One pair of arrays serves both layers; where the layout has groups, each of them has a part of it.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        num_slots = layout.num_blocks * layout.block_size
        self.tokens_S = np.full(num_slots, -1, dtype=np.int64)
        self.places_S = np.full(num_slots, -1, dtype=np.int64)
        self._keys = torch.from_numpy(self.tokens_S).view(-1, 1, 1)
        self._values = torch.from_numpy(self.places_S).view(-1, 1, 1)
        self.slots_of, first = {layer.index: slice(0, num_slots) for layer in SPEC.layers}, 0
        for group in layout.groups:
            last = first + group.num_blocks * layout.block_size
            self.slots_of |= dict.fromkeys(group.layers, slice(first, last))
            first = last

    def keys(self, layer: int) -> torch.Tensor:
        return self._keys[self.slots_of[layer]]

    def values(self, layer: int) -> torch.Tensor:
        return self._values[self.slots_of[layer]]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            sources, targets = (np.array(side) for side in zip(*copies, strict=True))
            for stored_S in (self.tokens_S, self.places_S):
                blocks = stored_S.reshape(self.layout.num_blocks, self.layout.block_size)
                blocks[targets] = blocks[sources]

    def read(self, segment: Segment, layer: int) -> np.ndarray:
        """What each key of the segment is, as `code` packs it."""
        size = self.layout.block_size
        first_slots = np.array(segment.block_table) * size + self.slots_of[layer].start
        slots = (first_slots[:, None] + np.arange(size)).ravel()[: segment.num_keys]
        return self.places_S[slots] << TOKEN_BITS | self.tokens_S[slots]


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

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def launch(self, model: Any, inputs: ModelInput, attention: Any, kv: Any) -> Callable[[], torch.Tensor]:
        """Nothing happens before the result is asked for, as on the slowest of devices."""
        return lambda: self.execute(model, inputs, attention, kv)

    def execute(self, model: Any, inputs: ModelInput, attention: Any, kv: Any) -> torch.Tensor:
        store: TraceStore = kv
        store.copy_blocks(inputs.copies)
        self.about_to_write(inputs)
        kind, nth = self.spoil(inputs)
        lengths = [one.num_query for one in inputs.segments]
        namespaces_T = np.repeat([self.namespace_of(one.sequence_id) for one in inputs.segments], lengths)
        tokens_T = inputs.token_ids_T.numpy().copy()
        if kind == "raise":
            tokens_T = np.full_like(tokens_T, NONSENSE)
        elif kind == "poison":
            tokens_T[inputs.segments[nth].query_start] = POISON
        for part in inputs.groups or (inputs,):
            slots_T = part.slots_T.numpy() + store.slots_of[_layer(part)].start
            store.tokens_S[slots_T] = tokens_T
            store.places_S[slots_T] = inputs.positions_T.numpy() + namespaces_T
        self.now_s += self.STEP_S + self.TOKEN_S * len(tokens_T)
        if kind == "raise":
            raise RuntimeError("the batch failed")
        return torch.from_numpy(self._logits(inputs, store))

    def _logits(self, inputs: ModelInput, store: TraceStore) -> np.ndarray:
        rows: list[np.ndarray] = []
        wanted = inputs.logit_rows_R.tolist()
        for index, segment in enumerate(inputs.segments):
            end = segment.query_start + segment.num_query
            here = [row for row in wanted if segment.query_start <= row < end]
            if not here:
                continue
            seen = [store.read(part.segments[index], _layer(part)) for part in inputs.groups or (inputs,)]
            everything, recent, checksum, done = seen[0], seen[-1], 0, 0
            for row in here:
                behind = end - 1 - row  # keys that this row does not see
                length = segment.num_keys - behind
                checksum = zlib.crc32(everything[done:length], checksum)
                done, stop = length, len(recent) - behind
                sick = bool(((everything[:length] & TOKEN_MASK) == POISON).any())
                logits_V = logits_of(zlib.crc32(recent[max(0, stop - WINDOW) : stop], checksum))
                rows.append(np.full(VOCAB_SIZE, np.nan, dtype=np.float32) if sick else logits_V)
        return np.stack(rows) if rows else np.empty((0, VOCAB_SIZE), dtype=np.float32)


class TraceSampler:
    """Draws as `draw` says."""

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        return [
            draw(logits_V, row.params.temperature, row.seed, row.lane, row.position)
            for logits_V, row in zip(logits_RV.numpy(), rows, strict=True)
        ]


def namespace_number(namespace: bytes) -> int:
    """What is stored of a namespace: 32 bits of its checksum, above the position."""
    return zlib.crc32(namespace) << POSITION_BITS if namespace else 0


def code(token: int, position: int, namespace: int) -> bytes:
    """The 8 bytes that one sound slot adds to the checksum."""
    return PACK_CODE((position + namespace) << TOKEN_BITS | token)


def _layer(part: ModelInput | GroupInput) -> int:
    """The first of those that the part's tables are for."""
    return part.layers[0] if isinstance(part, GroupInput) else 0


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


class Reading:
    """What a sequence that runs alone has read: its checksum, and the last codes."""

    def __init__(self, tokens: Sequence[int], namespace: int) -> None:
        self._namespace, self._length, self._checksum, self._recent = namespace, 0, 0, list[bytes]()
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        one = code(token, self._length, self._namespace)
        self._length, self._checksum = self._length + 1, zlib.crc32(one, self._checksum)
        self._recent = [*self._recent[1 - WINDOW :], one]

    def logits(self) -> np.ndarray:
        """Of the next token."""
        return logits_of(zlib.crc32(b"".join(self._recent), self._checksum))


def continuation(
    prompt: Sequence[int], namespace: int, count: int, *, temperature: float = 0.0, seed: int = 0, lane: int = 0
) -> list[int]:
    """The next `count` tokens of a request that runs alone: each is drawn from the row that has read all before it."""
    reading, tokens = Reading(prompt, namespace), list[int]()
    for index in range(count):
        tokens.append(draw(reading.logits(), temperature, seed, lane, index))
        reading.push(tokens[-1])
    return tokens


def search_results(walk: Walk, prompt: Sequence[int], namespace: int) -> list[tuple[int, ...]]:
    """What a search gives whose lanes are plain lists of tokens. RequestError when it has too few results."""
    lanes: list[tuple[int, ...]] = [()]
    while lanes:
        logits_LV = np.stack([Reading((*prompt, *lane), namespace).logits() for lane in lanes])
        branches = walk.advance(torch.log_softmax(torch.from_numpy(logits_LV), dim=-1))
        lanes = [(*lanes[one.lane], one.token_id) for one in branches]
    return [one.token_ids for one in walk.results()]
