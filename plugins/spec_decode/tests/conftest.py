"""A second model for the draft_model tests: its logits are a function of the tokens read back through the real block
tables of a KV manager, so a stale, shifted or missing block changes what it says. Plain greedy is computed beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pluglm.arguments import silent
from pluglm.backends.cpu import CpuBackend
from pluglm.kernel.core import Chunk, ModelInput, Segment
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.drafter import DraftRequest
from pluglm.kernel.interfaces.kv import KVManager
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec
from pluglm.kernel.runner import ModelRunner
from pluglm.kv.contiguous import ContiguousKV
from pluglm.kv.paged import PagedKV
from pluglm.testing.context import make_context, resolve_component
from pluglm.testing.drafter import ids_of
from pluglm.weights.open import open_checkpoint
from pluglm_spec_decode.draft_model import DraftModelDrafter
from pluglm_spec_decode.heads.model import DraftHeadModel
from pluglm_spec_decode.heads.module import DraftHead
from pluglm_spec_decode.heads.settings import head_config

NUM_TOKENS, NUM_LOGITS = 50, 64  # ids of the tokenizer; rows of the head, whose padding is always the most likely
MAX_POSITION = 60
NEVER_WRITTEN = -1


def next_scores(token_ids: Sequence[int]) -> list[float]:
    """The model: the order of all tokens before decides, and the padding rows always win."""
    state = 1
    for token_id in token_ids:
        state = (state * 48_271 + token_id + 11) % 2_147_483_647
    return [float((state * (row + 1)) % 10_007) for row in range(NUM_TOKENS)] + [1e6] * (NUM_LOGITS - NUM_TOKENS)


def plain_greedy(token_ids: Sequence[int], count: int) -> list[int]:
    """The reference: one token after the other from the whole text, without any cache."""
    known = list(token_ids)
    for _ in range(count):
        scores = next_scores(known)[:NUM_TOKENS]
        known.append(scores.index(max(scores)))
    return known[len(token_ids) :]


class EchoRunner:
    """A Runner whose KV is the token and position themselves. `calls`: (sequences, tokens) of every run."""

    def __init__(self, kv: KVManager, max_step_tokens: int) -> None:
        layer = LayerSpec(index=0, num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)
        self.spec = ModelSpec(
            family="echo", hidden_size=1, vocab_size=NUM_LOGITS, max_position=MAX_POSITION, layers=(layer,)
        )
        self.kv = kv
        self.calls: list[tuple[int, int]] = []
        self._max_step_tokens = max_step_tokens
        layout = kv.layout
        self._stored = [(NEVER_WRITTEN, NEVER_WRITTEN)] * (layout.num_blocks * layout.block_size)

    def make_input(self, chunks: Sequence[Chunk]) -> ModelInput:
        size, segments, tokens, positions, slots = self.kv.layout.block_size, [], [], [], []
        for sequence_id, new, num_context, _ in chunks:
            table = self.kv.block_table(sequence_id)
            covered = table[: -(-(num_context + len(new)) // size)]
            segments.append(Segment(
                sequence_id=sequence_id, query_start=len(tokens), num_query=len(new), num_context=num_context,
                block_table=covered,
            ))  # fmt: skip
            for offset, token_id in enumerate(new):
                position = num_context + offset
                tokens.append(token_id)
                positions.append(position)
                slots.append(covered[position // size] * size + position % size)
        last_rows = [segment.query_start + segment.num_query - 1 for segment in segments]
        return ModelInput(
            token_ids_T=torch.tensor(tokens),
            positions_T=torch.tensor(positions),
            slots_T=torch.tensor(slots),
            logit_rows_R=torch.tensor(last_rows),
            segments=tuple(segments),
            block_size=size,
        )

    def run(self, inputs: ModelInput) -> torch.Tensor:
        size = inputs.block_size
        for source, target in inputs.copies:
            self._stored[target * size : (target + 1) * size] = self._stored[source * size : (source + 1) * size]
        rows = zip(inputs.slots_T.tolist(), inputs.token_ids_T.tolist(), inputs.positions_T.tolist(), strict=True)
        for slot, token_id, position in rows:
            self._stored[slot] = (token_id, position)
        self.calls.append((len(inputs.segments), len(inputs.token_ids_T)))
        if len(inputs.token_ids_T) > self._max_step_tokens or max(inputs.positions_T.tolist()) >= MAX_POSITION:
            raise AssertionError("a call is larger than the run allows, or beyond the model's context")
        return torch.tensor([self._scores(segment, size) for segment in inputs.segments])

    def _scores(self, segment: Segment, size: int) -> list[float]:
        cells = [self._stored[segment.block_table[p // size] * size + p % size] for p in range(segment.num_keys)]
        if [position for _, position in cells] != list(range(segment.num_keys)):
            raise AssertionError(f"sequence {segment.sequence_id} reads positions {[p for _, p in cells]}")
        return next_scores([token_id for token_id, _ in cells])


class NamedTokens:
    """A TokenizerView with the JSON of a vocabulary of NUM_TOKENS tokens; `changes` replaces some."""

    vocab_size = NUM_TOKENS
    eos_token_ids = frozenset({0})

    def __init__(self, changes: dict[int, str | None] | None = None) -> None:
        tokens: dict[int, str | None] = {token_id: f"t{token_id}" for token_id in range(NUM_TOKENS - 1)}
        tokens |= changes or {}
        vocabulary = {token: token_id for token_id, token in tokens.items() if token is not None}
        added = [{"id": NUM_TOKENS - 1, "content": "<end>", "special": True}]
        self._json = json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": added})

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(f"t{token_id}" for token_id in token_ids)

    def to_json(self) -> str:
        return self._json


def build_context(**overrides: Any) -> BuildContext:
    def refuse(*_: object) -> Any:
        raise PluginError("not needed here")

    fields: dict[str, Any] = {
        "spec": ModelSpec(family="target", hidden_size=1, vocab_size=NUM_LOGITS, max_position=999, layers=()),
        "device": "cpu",
        "dtype": "float32",
        "deterministic": True,
        "max_num_seqs": 8,
        "max_step_tokens": 32,
        "max_model_len": MAX_POSITION,
        "kv_bytes": 10**6,
        "bytes_per_token": 1,
        "tokenizer": NamedTokens(),
        "eos_token_ids": frozenset({0}),
        "build_runner": refuse,
        "resolve_component": refuse,
    }
    return BuildContext(**{**fields, **overrides})


class DraftModelBench:
    """A drafter, the runner it was given, and what it asked for."""

    def __init__(self, kv: KVManager, max_step_tokens: int = 32, draft_tokens: Any = None, **config: Any) -> None:
        self.runner = EchoRunner(kv, max_step_tokens)
        self.asked: list[str] = []

        def build_runner(model: str) -> tuple[EchoRunner, Any]:
            self.asked.append(model)
            return self.runner, draft_tokens or NamedTokens()

        context = build_context(build_runner=build_runner, max_step_tokens=max_step_tokens)
        settings = DraftModelDrafter.Config.model_validate({"model": "small", **config})
        self.drafter = DraftModelDrafter(settings, context)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return ids_of(self.drafter.propose(requests))


def paged_kv(num_blocks: int = 200, block_size: int = 4) -> KVManager:
    return PagedKV(PagedKV.Config(block_size=block_size, num_blocks=num_blocks), build_context())


def contiguous_kv() -> KVManager:
    return ContiguousKV(ContiguousKV.Config(), build_context())


@pytest.fixture(params=["paged", "contiguous"])
def any_kv(request: pytest.FixtureRequest) -> Callable[[], KVManager]:
    return {"paged": paged_kv, "contiguous": contiguous_kv}[request.param]


@pytest.fixture
def small_pool() -> Callable[..., KVManager]:
    return paged_kv


@pytest.fixture
def make_bench() -> Callable[..., DraftModelBench]:
    return DraftModelBench


@pytest.fixture
def greedy() -> Callable[[Sequence[int], int], list[int]]:
    return plain_greedy


@pytest.fixture
def scores() -> Callable[[Sequence[int]], list[float]]:
    return next_scores


@pytest.fixture
def named_tokens() -> Callable[..., NamedTokens]:
    return NamedTokens


@pytest.fixture
def plain_context() -> BuildContext:
    return build_context()


@pytest.fixture(scope="session")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[DraftHead, Path]]:
    """A random head for a target of this spec, as a module and as a folder. Keywords are those of head_config."""

    def make(kind: str, spec: ModelSpec, **shape: Any) -> tuple[DraftHead, Path]:
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(5)
        head = DraftHead(head_config(kind, spec, **{"intermediate_size": 40, **shape}))
        head.save(folder)
        return head, folder

    return make


@cache
def loaded_head(path: str, kernels: Any) -> tuple[CpuBackend, Any]:
    backend = CpuBackend(
        CpuBackend.Config(kernels=kernels), BackendContext(dtype="float32", deterministic=False, num_threads=1)
    )
    checkpoint = open_checkpoint(Path(path))
    try:
        return backend, backend.load_model(DraftHeadModel, checkpoint, None, silent)
    finally:
        checkpoint.close()


def head_on_cpu(path: str, num_blocks: int = 1024, kernels: str = "torch") -> ModelRunner:
    """A Runner of the head in this folder, in float32 and with KV blocks of four tokens."""
    backend, model = loaded_head(path, kernels)
    context = make_context(spec=model.spec, kv_bytes=1 << 22)
    attention, config = resolve_component("attention", "naive", {})
    kv = PagedKV(PagedKV.Config(block_size=4, num_blocks=num_blocks), context)
    return ModelRunner(backend, model, attention(config, context), kv, backend.allocate_kv(kv.layout, model.spec))


@pytest.fixture
def head_runner() -> Callable[..., ModelRunner]:
    return head_on_cpu
