"""The contract kit of backends: clock, memory, KV store and the execution of flat batches of a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from pluglm.arguments import silent
from pluglm.kernel.core import ModelInput
from pluglm.kernel.interfaces.backend import Backend, BackendContext, LaunchingBackend
from pluglm.kernel.interfaces.component import ATTENTION_UNUSED, BATCH_INVARIANT, LAYER_GROUPS
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.kv_format import FormatBackend
from pluglm.kernel.interfaces.model import Model
from pluglm.testing.backend_formats import backend_format_checks
from pluglm.testing.backend_groups import backend_group_checks
from pluglm.testing.batches import Part, flat_input, grow
from pluglm.testing.block_kv import BlockPool
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.checkpoints import MemoryCheckpoint
from pluglm.testing.common import common_checks, provides
from pluglm.testing.tiny_model import CONFIG, LoopAttention, TinyModel, tiny_shapes

# T: tokens of the flat batch, R: rows with logits, V: vocabulary, K: kv heads, H: head dim

LAYOUT = KVLayout(num_blocks=12, block_size=4)
TEXT = [3, 17, 5, 3, 11, 8, 2, 19, 4, 30, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    cls: type[Any]
    config: Any

    def build(self, deterministic: bool = False) -> Backend:
        context = BackendContext(dtype="float32", deterministic=deterministic, num_threads=1)
        backend: Backend = self.cls(self.config, context)
        return backend


class Bench:
    """A backend with a tiny model and KV, and one pool of block tables."""

    def __init__(self, subject: Subject, deterministic: bool = False) -> None:
        self.backend = subject.build(deterministic)
        checkpoint = MemoryCheckpoint(CONFIG, tiny_shapes(CONFIG))
        self.model: Model = self.backend.load_model(TinyModel, checkpoint, None, silent)
        self.store: KVStore = self.backend.allocate_kv(LAYOUT, TinyModel.read_spec(CONFIG))
        self.pool = BlockPool(LAYOUT.num_blocks, LAYOUT.block_size)

    def inputs(self, *parts: Part) -> ModelInput:
        for sequence_id, tokens, computed in parts:
            grow(self.pool, sequence_id, computed + len(tokens))
        return flat_input(parts, self.pool)

    def execute(self, inputs: ModelInput) -> torch.Tensor:
        attention: Any = LoopAttention()
        return self.backend.execute(self.model, inputs, attention, self.store)

    def logits(self, *parts: Part) -> torch.Tensor:
        return self.execute(self.inputs(*parts)).cpu()


def backend_checks(cls: type[Any], config: Any = None) -> Iterator[Check]:
    """Every check of a backend class that this machine can run; one that it cannot run is held to the first few."""
    config = cls.Config() if config is None else config
    subject = Subject(cls=cls, config=config)
    yield make_check(unavailable_is_pure, cls)
    if cls.unavailable() is not None:
        return
    yield from common_checks("backend", cls, config, subject.build)
    for function in ALWAYS:
        yield make_check(function, subject)
    capabilities = cls.capabilities(config)
    if ATTENTION_UNUSED not in capabilities.provides:  # else keys and values are the backend's own affair
        yield make_check(store_holds_keys_and_values, subject)
        yield make_check(layers_have_storage_of_their_own, subject)
        if issubclass(cls, FormatBackend):
            yield from backend_format_checks(subject.build)
    if "slot:quantizer" not in capabilities.refuses:
        yield make_check(given_linear_layers_are_used, subject)
    if provides(cls, config, BATCH_INVARIANT):
        yield make_check(bits_do_not_depend_on_the_batch, subject)
    if issubclass(cls, LaunchingBackend):
        yield make_check(a_launch_gives_what_execute_gives, subject)
    if LAYER_GROUPS in capabilities.provides:
        yield from backend_group_checks(subject.build)


def unavailable_is_pure(cls: type[Any]) -> None:
    first, second = cls.unavailable(), cls.unavailable()
    expect(first == second, f"the same answer twice, {first!r}", repr(second))
    fine = first is None or (isinstance(first, str) and bool(first.strip()) and "\n" not in first)
    expect(fine, "None or a reason of one line", repr(first))


def device_is_one_of_torch(subject: Subject) -> None:
    expect(isinstance(subject.build().device, str), "a device name", subject.build().device)
    torch.device(subject.build().device)


def clock_never_goes_back(subject: Subject) -> None:
    bench = Bench(subject)
    times = [bench.backend.now()]
    for length in range(3):
        bench.logits((length, TEXT, 0))
        times.append(bench.backend.now())
    expect(all(isinstance(time, float) for time in times), "seconds as float", times)
    expect(times == sorted(times), "times that never fall", times)


def free_memory_is_a_count(subject: Subject) -> None:
    found = subject.build().free_memory()
    expect(isinstance(found, int) and found >= 0, "a number of bytes", repr(found))


def loaded_model_has_the_familys_spec(subject: Subject) -> None:
    found, expected = Bench(subject).model.spec, TinyModel.read_spec(CONFIG)
    expect(found == expected, f"the spec of the family, {expected}", found)


def store_has_the_layout(subject: Subject) -> None:
    store = Bench(subject).store
    expect(store.layout == LAYOUT, f"layout {LAYOUT}", store.layout)
    slots = LAYOUT.num_blocks * LAYOUT.block_size
    for layer in range(2):
        found = (store.keys(layer).shape[0], store.values(layer).shape[0])
        expect(found == (slots, slots), f"{slots} slots of keys and values", found)


def store_holds_keys_and_values(subject: Subject) -> None:
    bench, spec = Bench(subject), TinyModel.read_spec(CONFIG)
    for layer in spec.layers:
        for tensor in (bench.store.keys(layer.index), bench.store.values(layer.index)):
            shape = (48, layer.num_kv_heads, layer.head_dim)
            expect(tuple(tensor.shape) == shape, f"shape {shape}", tuple(tensor.shape))
            expect(tensor.dtype == torch.float32, "the run's dtype float32", tensor.dtype)
            device = bench.backend.device.partition(":")[0]
            expect(tensor.device.type == device, f"storage on {device}", tensor.device)


def layers_have_storage_of_their_own(subject: Subject) -> None:
    layout = KVLayout(num_blocks=13, block_size=4)
    store = subject.build().allocate_kv(layout, TinyModel.read_spec(CONFIG))
    for number, tensor in enumerate((store.keys(0), store.values(0), store.keys(1), store.values(1))):
        tensor.fill_(float(number))
    found = [float(one.mean()) for one in (store.keys(0), store.values(0), store.keys(1), store.values(1))]
    expect(found == [0.0, 1.0, 2.0, 3.0], "four tensors that do not overlap", found)


def _mark(store: KVStore) -> None:
    """Every slot holds ten times its number (keys) or one more (values), in every layer."""
    for layer in range(2):
        for tensor, extra in ((store.keys(layer), 0), (store.values(layer), 1)):
            marks = torch.arange(len(tensor), device=tensor.device) * 10 + extra
            tensor.copy_(marks.reshape(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor).to(tensor.dtype))


def _marks(tensor: torch.Tensor, blocks: list[int]) -> list[int]:
    size = LAYOUT.block_size
    return [int(tensor[slot].flatten()[-1]) for block in blocks for slot in range(block * size, block * size + size)]


def blocks_are_copied_as_if_at_once(subject: Subject) -> None:
    """A swap, a chain and a bystander, in keys and values of every layer."""
    store = Bench(subject).store
    _mark(store)
    store.copy_blocks([(1, 2), (2, 1), (3, 4), (4, 5)])
    for layer in range(2):
        for name, tensor in (("keys", store.keys(layer)), ("values", store.values(layer))):
            extra = 0 if name == "keys" else 1
            expected = [10 * slot + extra for block in (2, 1, 3, 3, 4, 6) for slot in range(block * 4, block * 4 + 4)]
            found = _marks(tensor, [1, 2, 3, 4, 5, 6])
            expect(found == expected, f"{name} of layer {layer} = {expected}", found)


def copies_come_before_the_run(subject: Subject) -> None:
    """The step writes into the source of a copy: the target must hold what the source held before."""
    bench = Bench(subject)
    inputs = bench.inputs((1, TEXT[:3], 0))
    source = inputs.segments[0].block_table[0]
    _mark(bench.store)
    before = [_marks(bench.store.keys(layer), [source]) for layer in range(2)]
    bench.execute(replace(inputs, copies=((source, 7),)))
    after = [_marks(bench.store.keys(layer), [7]) for layer in range(2)]
    expect(after == before, f"the source's old content {before} in the target", after)


def every_row_is_stored_and_no_other(subject: Subject) -> None:
    """Keys and values of every layer, whichever rows' logits are asked for."""
    bench = Bench(subject)
    inputs = bench.inputs((1, TEXT, 0), (2, TEXT[:2], 0))
    written = sorted(inputs.slots_T.tolist())
    _mark(bench.store)
    tensors = [part(layer) for layer in range(2) for part in (bench.store.keys, bench.store.values)]
    before = [tensor.clone() for tensor in tensors]
    bench.execute(replace(inputs, logit_rows_R=inputs.logit_rows_R[:1]))
    for number, (now, old) in enumerate(zip(tensors, before, strict=True)):
        name = f"{('keys', 'values')[number % 2]} of layer {number // 2}"
        changed = (now != old).flatten(1).any(1).nonzero().flatten().tolist()
        expect(changed == written, f"{name} written in slots {written}", changed)


def logits_are_float32_rows(subject: Subject) -> None:
    bench = Bench(subject)
    found = bench.execute(bench.inputs((1, TEXT, 0), (2, TEXT[:3], 0)))
    expect(tuple(found.shape) == (14, 40), "shape (14, 40)", tuple(found.shape))
    expect(found.dtype == torch.float32, "float32", found.dtype)


def only_the_asked_rows_come_back(subject: Subject) -> None:
    """In the order asked for, and none for none."""
    everything, bench = Bench(subject).logits((1, TEXT, 0)), Bench(subject)
    inputs = bench.inputs((1, TEXT, 0))
    found = bench.execute(replace(inputs, logit_rows_R=torch.tensor([8, 2]))).cpu()
    expect(tuple(found.shape) == (2, 40), "shape (2, 40)", tuple(found.shape))
    _expect_near(found, everything[[8, 2]], "rows 8 and 2")
    none = bench.execute(replace(inputs, logit_rows_R=torch.tensor([], dtype=torch.int64)))
    expect(tuple(none.shape) == (0, 40), "shape (0, 40) when no row is asked for", tuple(none.shape))


def _expect_near(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    expect(error <= 1e-4, f"{what} within 1e-4 of the largest logit", f"{error:.3g}")


def cached_tokens_are_read_back(subject: Subject) -> None:
    whole, bench = Bench(subject).logits((1, TEXT, 0)), Bench(subject)
    bench.logits((1, TEXT[:6], 0), (2, TEXT[:5], 0))
    _expect_near(bench.logits((2, [9], 5), (1, TEXT[6:], 6))[1:], whole[6:], "the rows of a continued sequence")


def same_batch_same_logits(subject: Subject) -> None:
    first, second = Bench(subject).logits((1, TEXT[:9], 0)), Bench(subject).logits((1, TEXT[:9], 0))
    _expect_near(second, first, "the same batch in a second backend")


def results_carry_no_gradients(subject: Subject) -> None:
    bench = Bench(subject)
    found = bench.execute(bench.inputs((1, TEXT[:10], 0)))
    expect(not found.requires_grad, "logits without gradients", "requires_grad")


def a_launch_gives_what_execute_gives(subject: Subject) -> None:
    """Its logits, and keys and values for the steps that follow."""
    whole, bench, attention = Bench(subject).logits((1, TEXT, 0)), Bench(subject), LoopAttention()
    backend: Any = bench.backend
    for start, stop in ((0, 6), (6, len(TEXT))):
        wait = backend.launch(bench.model, bench.inputs((1, TEXT[start:stop], start)), attention, bench.store)
        _expect_near(wait().cpu(), whole[start:stop], f"rows {start} to {stop} of two launches")


class _Doubled:
    """A linear layer that computes twice what it should, to show that it was used."""

    num_bytes = 0

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.weight_NK = weight_NK

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight_NK.T * 2


def given_linear_layers_are_used(subject: Subject) -> None:
    names: list[str] = []

    def make_linear(name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Any:
        names.append(name)
        return _Doubled(weight_NK)

    bench = Bench(subject)
    plain = bench.logits((1, TEXT[:1], 0))
    checkpoint = MemoryCheckpoint(CONFIG, tiny_shapes(CONFIG))
    bench.model = bench.backend.load_model(TinyModel, checkpoint, make_linear, silent)
    expect(len(names) == 9, "the quantizer's factory called for all 9 layers", names)
    change = float((bench.logits((2, TEXT[:1], 0)) - plain).abs().max())
    expect(change > 0.01, "logits of the layers that it made", f"a change of {change:.3g}")


def bits_do_not_depend_on_the_batch(subject: Subject) -> None:
    """Declared, so it holds in deterministic mode: alone, in company and in chunks."""
    alone, bench = Bench(subject, True).logits((1, TEXT, 0)), Bench(subject, True)
    together = bench.logits((2, TEXT[:7], 0), (1, TEXT[:4], 0), (3, [5], 0))[7:11]
    rest = bench.logits((3, [6], 1), (1, TEXT[4:], 4))[1:]
    same = torch.equal(torch.cat([together, rest]), alone)
    expect(same, "the bits of the sequence alone", (torch.cat([together, rest]) - alone).abs().max())


ALWAYS: tuple[Callable[[Subject], None], ...] = (
    device_is_one_of_torch,
    clock_never_goes_back,
    free_memory_is_a_count,
    loaded_model_has_the_familys_spec,
    store_has_the_layout,
    blocks_are_copied_as_if_at_once,
    copies_come_before_the_run,
    every_row_is_stored_and_no_other,
    logits_are_float32_rows,
    only_the_asked_rows_come_back,
    cached_tokens_are_read_back,
    same_batch_same_logits,
    results_carry_no_gradients,
)
