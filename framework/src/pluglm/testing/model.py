"""The contract kit of model families: reading a config, refusing bad checkpoints, and rows that agree with each other.

Whether the numbers are those of the published model is for a family's own tests, against another implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pluglm.arguments import silent
from pluglm.kernel.core import ModelInput
from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.model import LayerSpec, Model, ModelContext, ModelSpec
from pluglm.testing.batches import Part, flat_input, grow
from pluglm.testing.block_kv import BlockPool
from pluglm.testing.check import Check, ContractViolation, expect, expect_raises, make_check
from pluglm.testing.checkpoints import MemoryCheckpoint
from pluglm.testing.common import states_its_interface_version
from pluglm.testing.stores import PlainStore
from pluglm.testing.tiny_model import LoopAttention

# T: tokens of the flat batch, R: rows with logits, D: hidden size, V: vocabulary, N: output, K: input features

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class _Plain:
    """A linear layer."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight_NK, self.bias_N)


@dataclass(slots=True)
class Recorder:
    """A ModelContext's callables, and how often they were called. tile: rows of a map_rows call, None for all."""

    tile: int | None = None
    linears: list[tuple[int, ...]] = field(default_factory=list)
    num_maps: int = 0

    def make_linear(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Any:
        self.linears.append(tuple(weight_NK.shape))
        return _Plain(weight_NK, bias_N)

    def map_rows(
        self, function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        self.num_maps += 1
        if self.tile is None:
            return function(*tensors)
        starts = range(0, max(1, len(tensors[0])), self.tile)
        parts = [function(*(tensor[start : start + self.tile] for tensor in tensors)) for start in starts]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def context(self) -> ModelContext:
        return ModelContext(
            device="cpu", dtype=torch.float32, make_linear=self.make_linear, map_rows=self.map_rows, progress=silent
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The family, a small config of it and the shapes of all tensors that such a checkpoint holds."""

    family: type[Any]
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    required: tuple[str, ...]

    def load(self, recorder: Recorder | None = None, checkpoint: MemoryCheckpoint | None = None) -> Model:
        checkpoint = checkpoint or MemoryCheckpoint(self.config, self.shapes)
        model: Model = self.family.load(checkpoint, (recorder or Recorder()).context())
        return model

    @property
    def spec(self) -> ModelSpec:
        spec: ModelSpec = self.family.read_spec(self.config)
        return spec


class Bench:
    """A loaded model with KV of its own. calls: (layer index, shapes of q, k, v) of every attention call."""

    def __init__(self, subject: Subject, recorder: Recorder | None = None) -> None:
        self.model, self.pool = subject.load(recorder), BlockPool(32, 4)
        self.store = PlainStore(self.pool.layout, self.model.spec, torch.float32)
        self.calls: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def inputs(self, *parts: Part) -> ModelInput:
        for sequence_id, tokens, computed in parts:
            grow(self.pool, sequence_id, computed + len(tokens))
        return flat_input(parts, self.pool)

    def hidden(self, inputs: ModelInput) -> torch.Tensor:
        attention = LoopAttention()
        batch = AttentionBatch(segments=inputs.segments, slots_T=inputs.slots_T, block_size=inputs.block_size)

        def attend(layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            self.calls.append((layer.index, tuple(q_TNH.shape), tuple(k_TKH.shape), tuple(v_TKH.shape)))
            return attention.run(layer, q_TNH, k_TKH, v_TKH, batch, self.store)

        with torch.inference_mode():
            return self.model.forward(inputs, attend)

    def logits(self, *parts: Part) -> torch.Tensor:
        hidden_TD = self.hidden(self.inputs(*parts))
        with torch.inference_mode():
            return self.model.logits(hidden_TD)


def model_checks(
    family: type[Any],
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    required: tuple[str, ...] = REQUIRED,
) -> Iterator[Check]:
    """Every check of a model family. required: config keys without a published default, which read_spec must demand.

    config must be small (a few layers, vocabulary of 20 or more); shapes: of a complete checkpoint of that config.
    """
    subject = Subject(family=family, config=config, shapes=shapes, required=required)
    yield make_check(states_its_interface_version, "model", family)
    if required:
        yield make_check(missing_keys_are_named, subject)
    for function in ALWAYS:
        yield make_check(function, subject)


TOKENS = [3, 17, 5, 3, 11, 8, 2, 19, 4]


def spec_describes_the_config(subject: Subject) -> None:
    spec, config = subject.spec, subject.config
    expect(spec == subject.spec, "equal specs for equal configs", "two different ones")
    found = (spec.hidden_size, len(spec.layers), spec.layers[0].num_heads, spec.vocab_size)
    expected = tuple(config[key] for key in REQUIRED)
    expect(found == expected, f"{REQUIRED} = {expected}", found)
    indices = [layer.index for layer in spec.layers]
    expect(indices == list(range(len(indices))), "layers numbered from 0", indices)


def missing_keys_are_named(subject: Subject) -> None:
    for key in subject.required:
        config = {name: value for name, value in subject.config.items() if name != key}
        with expect_raises(CheckpointError, f"for a config without {key}"):
            subject.family.read_spec(config)
        try:
            subject.family.read_spec(config)
        except CheckpointError as error:
            expect(key in str(error), f"a message that names {key}", error)


def unusable_values_are_named(subject: Subject) -> None:
    """Sizes that are no sizes."""
    for key in REQUIRED:
        for value in ("wide", -1):
            try:
                subject.family.read_spec({**subject.config, key: value})
            except CheckpointError as error:
                expect(key in str(error), f"a message that names {key}", error)
                continue
            raise ContractViolation(f"expected CheckpointError for {key} = {value!r}, found no exception")


def missing_tensors_are_found_before_reading(subject: Subject) -> None:
    for lost in _some_layer_tensors(subject):
        shapes = {name: shape for name, shape in subject.shapes.items() if name != lost}
        _expect_refusal(subject, shapes, f"for a checkpoint without {lost}")


def misshaped_tensors_are_found_before_reading(subject: Subject) -> None:
    for wrong in _some_layer_tensors(subject):
        shape = subject.shapes[wrong]
        shapes = {**subject.shapes, wrong: (shape[0] + 1, *shape[1:])}
        _expect_refusal(subject, shapes, f"for {wrong} of another shape")


def _some_layer_tensors(subject: Subject) -> list[str]:
    """The first and the last tensor of the layers; heads and embeddings may be tied."""
    names = sorted(name for name in subject.shapes if ".layers." in f".{name}")
    return [names[0], names[-1]]


def _expect_refusal(subject: Subject, shapes: Mapping[str, tuple[int, ...]], when: str) -> None:
    checkpoint = MemoryCheckpoint(subject.config, shapes)
    with expect_raises(CheckpointError, when):
        subject.load(checkpoint=checkpoint)
    expect(not checkpoint.reads, f"no tensor read {when}", checkpoint.reads[:3])


def tensors_are_read_once(subject: Subject) -> None:
    checkpoint = MemoryCheckpoint(subject.config, subject.shapes)
    subject.load(checkpoint=checkpoint)
    twice = sorted(name for name in set(checkpoint.reads) if checkpoint.reads.count(name) > 1)
    expect(not twice, "each tensor read once", twice)


def loaded_spec_is_the_one_read(subject: Subject) -> None:
    expect(subject.load().spec == subject.spec, "the spec that read_spec gives", subject.load().spec)


def hidden_has_a_row_a_token(subject: Subject) -> None:
    bench = Bench(subject)
    shape = tuple(bench.hidden(bench.inputs((1, TOKENS, 0), (2, [5, 6], 0))).shape)
    expect(shape == (11, subject.spec.hidden_size), f"shape (11, {subject.spec.hidden_size})", shape)


def logits_are_float32_rows(subject: Subject) -> None:
    for tokens in (TOKENS, [4]):
        found, expected = Bench(subject).logits((1, tokens, 0)), (len(tokens), subject.spec.vocab_size)
        expect(tuple(found.shape) == expected, f"shape {expected}", tuple(found.shape))
        expect(found.dtype == torch.float32, "float32", found.dtype)
        expect(bool(found.isfinite().all()), "finite logits", found)


def layers_attend_once_in_order(subject: Subject) -> None:
    bench = Bench(subject)
    bench.hidden(bench.inputs((1, TOKENS, 0)))
    expected = []
    for layer in subject.spec.layers:
        key = (len(TOKENS), layer.num_kv_heads, layer.head_dim)
        expected.append((layer.index, (len(TOKENS), layer.num_heads, layer.head_dim), key, key))
    expect(bench.calls == expected, f"(layer, q, k, v) = {expected}", bench.calls)


def chunks_agree_with_the_whole(subject: Subject) -> None:
    whole, bench = Bench(subject).logits((1, TOKENS, 0)), Bench(subject)
    for first, last in ((0, 4), (4, 5), (5, 9)):
        _expect_near(bench.logits((1, TOKENS[first:last], first)), whole[first:last], f"rows {first} to {last}")


def batched_sequences_agree_with_alone(subject: Subject) -> None:
    texts = (TOKENS, [7, 1], [2, 2, 2, 9])
    together = Bench(subject).logits(*((number, text, 0) for number, text in enumerate(texts)))
    start = 0
    for text in texts:
        alone = Bench(subject).logits((1, text, 0))
        _expect_near(together[start : start + len(text)], alone, f"the sequence {text} in a batch")
        start += len(text)


def _expect_near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    expect(error <= 1e-4, f"{what} within 1e-4 of the largest logit", f"{error:.3g}")


def positions_are_used(subject: Subject) -> None:
    """Tokens five times as far apart give the last one other logits."""
    near, far = Bench(subject), Bench(subject)
    inputs = far.inputs((1, TOKENS, 0))
    with torch.inference_mode():
        stretched = far.model.logits(far.hidden(replace(inputs, positions_T=inputs.positions_T * 5)))[-1]
    first = near.logits((1, TOKENS, 0))[-1]
    change = float((first - stretched).abs().max() / first.abs().max())
    expect(change > 1e-4, "logits that depend on positions_T", f"a change of {change:.3g}")


def inputs_are_not_changed(subject: Subject) -> None:
    bench = Bench(subject)
    inputs = bench.inputs((1, TOKENS, 0))
    names = ("token_ids_T", "positions_T", "slots_T", "logit_rows_R")
    before = [getattr(inputs, name).clone() for name in names]
    hidden_TD = bench.hidden(inputs)
    kept = hidden_TD.clone()
    with torch.inference_mode():
        bench.model.logits(hidden_TD)
    changed = [name for name, old in zip(names, before, strict=True) if not torch.equal(getattr(inputs, name), old)]
    expect(not changed, "index tensors as given", changed)
    expect(torch.equal(hidden_TD, kept), "the hidden rows given to logits() unchanged", "other values")


def row_work_goes_through_map_rows(subject: Subject) -> None:
    """Or the deterministic mode, which tiles the rows there, would not reach it."""
    plain, tiled = Recorder(), Recorder(tile=4)
    expected, found = Bench(subject, plain).logits((1, TOKENS, 0)), Bench(subject, tiled).logits((1, TOKENS, 0))
    num_layers = len(subject.spec.layers)
    expect(tiled.num_maps > num_layers, f"more than {num_layers} calls of map_rows", tiled.num_maps)
    _expect_near(found, expected, "rows mapped in tiles of 4")


def layers_come_from_make_linear(subject: Subject) -> None:
    """Or a quantizer would not reach them: most of the layers' weights have to pass through it."""
    recorder = Recorder()
    subject.load(recorder)
    matrices = [shape for name, shape in subject.shapes.items() if ".layers." in f".{name}" and len(shape) == 2]
    total, made = sum(n * k for n, k in matrices), sum(n * k for n, k in recorder.linears)
    expect(made >= 0.9 * total, f"linear layers of {total} weights from make_linear", f"{made} weights")


ALWAYS = (
    spec_describes_the_config,
    unusable_values_are_named,
    missing_tensors_are_found_before_reading,
    misshaped_tensors_are_found_before_reading,
    tensors_are_read_once,
    loaded_spec_is_the_one_read,
    hidden_has_a_row_a_token,
    logits_are_float32_rows,
    layers_attend_once_in_order,
    chunks_agree_with_the_whole,
    batched_sequences_agree_with_alone,
    positions_are_used,
    inputs_are_not_changed,
    row_work_goes_through_map_rows,
    layers_come_from_make_linear,
)
