"""The kit of model families is tested: a tiny model passes, and for every check one broken family fails only that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.kernel.core import ModelInput
from pluglm.kernel.errors import CheckpointError
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.model import AttentionCall, ModelContext, ModelSpec
from pluglm.testing.check import Check, run_checks
from pluglm.testing.model import model_checks
from pluglm.testing.tiny_model import CONFIG, TinyModel, tiny_shapes


def checks(family: type[Any]) -> list[Check]:
    return list(model_checks(family, CONFIG, tiny_shapes(CONFIG)))


class OldVersion(TinyModel):
    interface_version = 0


class WrongHidden(TinyModel):
    """A spec whose vocabulary is not that of the config, in every place."""

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        return replace(super().read_spec(config), vocab_size=41)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(super().logits(hidden_RD), (0, 1))


class GuessesKeys(TinyModel):
    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        return super().read_spec({"num_attention_heads": 4, **config})


class ReadsBeforeItLooks(TinyModel):
    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> TinyModel:
        if any(checkpoint.shape(name) is None for name in tiny_shapes(checkpoint.config)):
            checkpoint.tensor("embedding.weight", context.dtype)
        return super().load(checkpoint, context)


class _Cut:
    """A checkpoint whose tensors of one row too many lose it."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint, self._wanted = checkpoint, tiny_shapes(checkpoint.config)
        self.path, self.config = checkpoint.path, checkpoint.config

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None if self._checkpoint.shape(name) is None else self._wanted[name]

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        found: torch.Tensor = self._checkpoint.tensor(name, dtype)
        return found[: self._wanted[name][0]]


class CutsTensorsToSize(TinyModel):
    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> TinyModel:
        return super().load(_Cut(checkpoint), context)  # type: ignore[arg-type]


class ReadsTwice(TinyModel):
    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> TinyModel:
        model = super().load(checkpoint, context)
        checkpoint.tensor("head.weight", context.dtype)
        return model


class RenamesItsSpec(TinyModel):
    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> TinyModel:
        model = super().load(checkpoint, context)
        model.spec = replace(model.spec, family="other")
        return model


class PadsHidden(TinyModel):
    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        return torch.nn.functional.pad(super().forward(inputs, attend), (0, 1))

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_RD[:, :-1])


class DoubleLogits(TinyModel):
    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_RD).double()


class AttendsTwice(TinyModel):
    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        super().forward(inputs, attend)
        return super().forward(inputs, attend)


class CountsFromZero(TinyModel):
    """The positions of a chunk that continues a single sequence start again."""

    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        first = inputs.positions_T[0] if len(inputs.segments) == 1 else 0
        return super().forward(replace(inputs, positions_T=inputs.positions_T - first), attend)


class CountsRows(TinyModel):
    """The rows of a batch of several sequences are numbered through."""

    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        rows_T = torch.arange(len(inputs.positions_T)) if len(inputs.segments) > 1 else inputs.positions_T
        return super().forward(replace(inputs, positions_T=rows_T), attend)


class NoPositions(TinyModel):
    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        return super().forward(replace(inputs, positions_T=torch.zeros_like(inputs.positions_T)), attend)


class NormalisesInPlace(TinyModel):
    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden_RD)
        hidden_RD.div_(2.0)
        return found


class MapsNothing(TinyModel):
    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> TinyModel:
        return super().load(checkpoint, replace(context, map_rows=lambda function, *tensors: function(*tensors)))


class PlainHead:
    num_bytes = 0

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.weight_NK = weight_NK

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight_NK.T


class OwnLayers(TinyModel):
    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> TinyModel:
        return super().load(checkpoint, replace(context, make_linear=lambda name, weight, bias: PlainHead(weight)))


class TakesAnyNumber(TinyModel):
    """Minus one vocabulary."""

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        return super().read_spec(
            {**config, "vocab_size": abs(config["vocab_size"])} if cls.negative(config) else config
        )

    @staticmethod
    def negative(config: Mapping[str, Any]) -> bool:
        return config.get("vocab_size") == -1


BROKEN: dict[str, type[Any]] = {
    "states_its_interface_version": OldVersion,
    "spec_describes_the_config": WrongHidden,
    "missing_keys_are_named": GuessesKeys,
    "unusable_values_are_named": TakesAnyNumber,
    "missing_tensors_are_found_before_reading": ReadsBeforeItLooks,
    "misshaped_tensors_are_found_before_reading": CutsTensorsToSize,
    "tensors_are_read_once": ReadsTwice,
    "loaded_spec_is_the_one_read": RenamesItsSpec,
    "hidden_has_a_row_a_token": PadsHidden,
    "logits_are_float32_rows": DoubleLogits,
    "layers_attend_once_in_order": AttendsTwice,
    "chunks_agree_with_the_whole": CountsFromZero,
    "batched_sequences_agree_with_alone": CountsRows,
    "positions_are_used": NoPositions,
    "inputs_are_not_changed": NormalisesInPlace,
    "row_work_goes_through_map_rows": MapsNothing,
    "layers_come_from_make_linear": OwnLayers,
}


def test_a_tiny_model_passes() -> None:
    report = run_checks(checks(TinyModel))
    assert report.ok, str(report)


def test_every_check_has_a_broken_fixture() -> None:
    assert {check.name for check in checks(TinyModel)} == set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_family_fails_exactly_its_check(name: str) -> None:
    report = run_checks(checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


def test_errors_that_name_no_key_are_found() -> None:
    class Nameless(TinyModel):
        @classmethod
        def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
            try:
                return super().read_spec(config)
            except CheckpointError:
                raise CheckpointError("config.json: something is wrong") from None

    assert run_checks(checks(Nameless)).failed == ("missing_keys_are_named", "unusable_values_are_named")


def test_a_family_with_defaults_for_every_size_need_not_demand_any() -> None:
    names = {check.name for check in model_checks(TinyModel, CONFIG, tiny_shapes(CONFIG), required=())}
    assert names == set(BROKEN) - {"missing_keys_are_named"}
