"""The kit of backends is tested: a plain one passes, and for every check one broken backend fails only that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.kernel.core import ModelInput
from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.model import ModelContext, ModelSpec
from pluglm.testing.backend import backend_checks
from pluglm.testing.check import run_checks
from pluglm.testing.common import COMMON
from pluglm.testing.stores import PlainStore


class ExactLinear:
    """Every output is a sum of its own, so a row's bits never depend on the other rows."""

    def __init__(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.weight_NK, self.num_bytes = weight_NK, weight_NK.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(self.weight_NK * row).sum(1) for row in x]) if len(x) else x.new_zeros(0, 1)


class PlainBackend:
    """Runs on the CPU. Methods are what the fixtures break."""

    interface_version = 1
    Config = ComponentConfig
    device = "cpu"

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.num_runs = 0

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(provides=frozenset({"numerics:batch_invariant"}))

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def now(self) -> float:
        return time.monotonic()

    def free_memory(self) -> int:
        return 1 << 30

    def load_model(self, family: Any, checkpoint: Any, make_linear: Any, progress: Any) -> Any:
        context = ModelContext(
            device="cpu",
            dtype=torch.float32,
            make_linear=make_linear or ExactLinear,
            map_rows=lambda function, *tensors: function(*tensors),
            progress=progress,
        )
        return family.load(checkpoint, context)

    def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> Any:
        return PlainStore(layout, spec, torch.float32)

    def execute(self, model: Any, inputs: ModelInput, attention: Any, kv: KVStore) -> torch.Tensor:
        self.num_runs += 1
        self.copy(inputs, kv)
        batch = AttentionBatch(segments=inputs.segments, slots_T=inputs.slots_T, block_size=inputs.block_size)
        plan = attention.plan(batch)
        with torch.inference_mode():
            hidden_TD = model.forward(inputs, lambda *parts: attention.run(*parts, plan, kv))
            if not len(inputs.logit_rows_R):
                return torch.empty(0, model.spec.vocab_size)
            logits_RV: torch.Tensor = model.logits(hidden_TD[inputs.logit_rows_R])
        self.finish(inputs, kv)
        return logits_RV

    def copy(self, inputs: ModelInput, kv: KVStore) -> None:
        kv.copy_blocks(inputs.copies)

    def finish(self, inputs: ModelInput, kv: KVStore) -> None:
        """After the run."""


def executes(change: Any) -> type[PlainBackend]:
    """PlainBackend whose logits pass through change(backend, inputs, logits)."""

    class Broken(PlainBackend):
        def execute(self, model: Any, inputs: ModelInput, attention: Any, kv: KVStore) -> torch.Tensor:
            return torch.as_tensor(change(self, inputs, super().execute(model, inputs, attention, kv)))

    return Broken


def allocates(make: Any) -> type[PlainBackend]:
    """PlainBackend with another store: make(layout, spec)."""

    class Broken(PlainBackend):
        def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> Any:
            return make(layout, spec)

    return Broken


class NamesNoDevice(PlainBackend):
    device = "cpu:zero"


class RunsBackwards(PlainBackend):
    def now(self) -> float:
        return 100.0 - self.num_runs


class MemoryInGib(PlainBackend):
    def free_memory(self) -> int:
        return 1.5  # type: ignore[return-value]


class OtherSpec(PlainBackend):
    def load_model(self, family: Any, checkpoint: Any, make_linear: Any, progress: Any) -> Any:
        model = super().load_model(family, checkpoint, make_linear, progress)
        model.spec = replace(model.spec, max_position=64)
        return model


class ForgetsLayout(PlainStore):
    def __init__(self, layout: KVLayout, spec: ModelSpec) -> None:
        super().__init__(layout, spec, torch.float32)
        self.layout = replace(layout, num_blocks=layout.num_blocks + 1)


class CopiesOneByOne(PlainStore):
    def __init__(self, layout: KVLayout, spec: ModelSpec) -> None:
        super().__init__(layout, spec, torch.float32)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for pair in copies:
            super().copy_blocks([pair])


class OverlapsBySlot(PlainStore):
    """The values of both layers in one buffer that is a slot too short when the number of blocks is odd."""

    def __init__(self, layout: KVLayout, spec: ModelSpec) -> None:
        super().__init__(layout, spec, torch.float32)
        slots, lost = len(self._values[0]), layout.num_blocks % 2
        buffer = torch.zeros(2 * slots - lost, *self._values[0].shape[1:])
        self._values = [buffer[:slots], buffer[slots - lost :]]


class CopiesAfterwards(PlainBackend):
    def copy(self, inputs: ModelInput, kv: KVStore) -> None:
        """Too early."""

    def finish(self, inputs: ModelInput, kv: KVStore) -> None:
        kv.copy_blocks(inputs.copies)


class ClearsPadding(PlainBackend):
    """Rounds a batch of 13 rows up to 16 and stores the rest in the last block."""

    def finish(self, inputs: ModelInput, kv: KVStore) -> None:
        if len(inputs.slots_T) == 13:
            kv.keys(0)[-3:] = 0.5


class IgnoresFactory(PlainBackend):
    def load_model(self, family: Any, checkpoint: Any, make_linear: Any, progress: Any) -> Any:
        return super().load_model(family, checkpoint, None, progress)


def half(backend: Any, inputs: ModelInput, logits: torch.Tensor) -> torch.Tensor:
    return logits.half() if len(inputs.logit_rows_R) == 14 else logits


def in_row_order(backend: Any, inputs: ModelInput, logits: torch.Tensor) -> torch.Tensor:
    order = inputs.logit_rows_R.argsort()
    return logits[order]


def forgets_the_cache(backend: Any, inputs: ModelInput, logits: torch.Tensor) -> torch.Tensor:
    continued = len(inputs.segments) == 2 and all(one.num_context >= 5 for one in inputs.segments)
    return logits + 1 if continued else logits


class Drifts(PlainBackend):
    """Each object of the process is a little louder than the one before."""

    objects: list[int] = []  # noqa: RUF012 - the shared state is what is wrong with it

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.objects.append(1)
        self.number = len(self.objects)

    def execute(self, model: Any, inputs: ModelInput, attention: Any, kv: KVStore) -> torch.Tensor:
        logits_RV = super().execute(model, inputs, attention, kv)
        return logits_RV * (1 + self.number * 0.01) if len(inputs.logit_rows_R) == 9 else logits_RV


def with_gradient(backend: Any, inputs: ModelInput, logits: torch.Tensor) -> torch.Tensor:
    return logits.clone().requires_grad_() if len(inputs.logit_rows_R) == 10 else logits


def rounds_by_size(backend: Any, inputs: ModelInput, logits: torch.Tensor) -> torch.Tensor:
    return logits * (1 + 2**-22) if len(inputs.segments) == 3 else logits


def wide_store(layout: KVLayout, spec: ModelSpec) -> PlainStore:
    return PlainStore(layout, spec, torch.float64)


BROKEN: dict[str, type[PlainBackend]] = {
    "device_is_one_of_torch": NamesNoDevice,
    "clock_never_goes_back": RunsBackwards,
    "free_memory_is_a_count": MemoryInGib,
    "loaded_model_has_the_familys_spec": OtherSpec,
    "store_has_the_layout": allocates(ForgetsLayout),
    "store_holds_keys_and_values": allocates(wide_store),
    "layers_have_storage_of_their_own": allocates(OverlapsBySlot),
    "blocks_are_copied_as_if_at_once": allocates(CopiesOneByOne),
    "copies_come_before_the_run": CopiesAfterwards,
    "every_row_is_stored_and_no_other": ClearsPadding,
    "logits_are_float32_rows": executes(half),
    "only_the_asked_rows_come_back": executes(in_row_order),
    "cached_tokens_are_read_back": executes(forgets_the_cache),
    "same_batch_same_logits": Drifts,
    "results_carry_no_gradients": executes(with_gradient),
    "given_linear_layers_are_used": IgnoresFactory,
    "bits_do_not_depend_on_the_batch": executes(rounds_by_size),
}


def test_a_plain_backend_passes() -> None:
    report = run_checks(backend_checks(PlainBackend))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    names = {check.name for check in backend_checks(PlainBackend)}
    assert names == COMMON | set(BROKEN) | {"unavailable_is_pure"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_fails_exactly_its_check(name: str) -> None:
    report = run_checks(backend_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


class SaysItInLines(PlainBackend):
    @classmethod
    def unavailable(cls) -> str | None:
        return "no device\nsorry"


class Busy(PlainBackend):
    """Unavailable only on every second question."""

    answers: list[str] = []  # noqa: RUF012 - the shared state is what is wrong with it

    @classmethod
    def unavailable(cls) -> str | None:
        cls.answers.append("asked")
        return None if len(cls.answers) % 2 == 0 else "busy"


@pytest.mark.parametrize("backend", [SaysItInLines, Busy])
def test_unavailable_that_is_not_pure_fails_exactly_its_check(backend: type[PlainBackend]) -> None:
    assert run_checks(backend_checks(backend)).failed == ("unavailable_is_pure",)


class Weightless(PlainBackend):
    """Says that attention and quantizers mean nothing to it."""

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(
            provides=frozenset({"attention:unused"}), refuses={"slot:quantizer": "it computes no weights"}
        )


def test_checks_of_what_is_declined_are_not_made() -> None:
    left_out = {
        "store_holds_keys_and_values",
        "layers_have_storage_of_their_own",
        "given_linear_layers_are_used",
        "bits_do_not_depend_on_the_batch",
    }
    names = {check.name for check in backend_checks(Weightless)}
    assert names == (COMMON | set(BROKEN) | {"unavailable_is_pure"}) - left_out


def test_an_unavailable_backend_is_held_to_that_one_check() -> None:
    class Elsewhere(PlainBackend):
        @classmethod
        def unavailable(cls) -> str | None:
            return "this machine has no such device"

    report = run_checks(backend_checks(Elsewhere))
    assert report.ok
    assert [outcome.name for outcome in report.outcomes] == ["unavailable_is_pure"]
