"""The decoder that all families share: loading in checked order, the forward pass, the head.

All arithmetic on rows happens in functions given to `map_rows`; that is what lets a backend make them batch-invariant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.nn.functional import embedding

from pluglm.kernel.interfaces.model import FusedTiedHead, StackFuser, StepFuser
from pluglm.models.config_reader import ConfigReader
from pluglm.models.footprint import planned_weights, step_bytes
from pluglm.models.layer import DecoderLayer
from pluglm.models.loading import TensorLoader
from pluglm.models.norms import row_norm, wide_weight
from pluglm.models.rope import DynamicRotary, TableRotary, make_rotary, rotary_lengths
from pluglm.models.settings import DecoderSettings
from pluglm.models.tensor_plan import FINAL_NORM, NameLayout, TensorPlan, factors_tensor, make_plan

if TYPE_CHECKING:
    from pluglm.kernel.core import ModelInput
    from pluglm.kernel.interfaces.checkpoint import Checkpoint
    from pluglm.kernel.interfaces.footprint import PlannedWeight
    from pluglm.kernel.interfaces.model import AttentionCall, FusedStack, FusedStep, ModelContext, ModelSpec

# T: rows of the batch, R: rows with logits, D: hidden size, V: vocabulary, N: query heads, K: kv heads, H: head dim


class Decoder(ABC):
    """A decoder-only language model on the kernel's Model contract; a family says how its configuration is read."""

    interface_version: ClassVar[int] = 1
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    name_layouts: ClassVar[tuple[NameLayout, ...]] = (NameLayout(),)
    foreign_prefixes: ClassVar[tuple[str, ...]] = ()
    spec: ModelSpec

    def __init_subclass__(cls, **options: Any) -> None:
        """TypeError for a family with another `forward` and our `forward_rows`, which would compute something else."""
        super().__init_subclass__(**options)
        if "forward" in vars(cls) and "forward_rows" not in vars(cls):
            raise TypeError(f"{cls.__name__} overrides forward; override forward_rows with the same layers too")

    def __init__(
        self, settings: DecoderSettings, loader: TensorLoader, context: ModelContext, factors: str | None
    ) -> None:
        self.spec = settings.spec
        self._map_rows = context.map_rows
        embedding_VD = loader.embedding()
        divisors = loader.tensor(factors) if factors is not None else None
        self._rotaries = [
            make_rotary(rope, divisors if index == 0 else None, context.dtype, context.device)
            for index, rope in enumerate(settings.ropes)
        ]
        self._is_dynamic = any(isinstance(rotary, DynamicRotary) for rotary in self._rotaries)
        self._layers = [self.layer_class(settings, layer.index, loader) for layer in self.spec.layers]
        self._fuser = context.fuser
        self._stack, self._lower_stack = self._fused_stacks()
        norm_D = loader.tensor(FINAL_NORM)
        self._norm = row_norm(norm_D, settings.norm_eps, settings.norm_offset)
        self._head = loader.head(embedding_VD, settings.tied_head)
        self._fused_head = loader.fused_head(self._head, wide_weight(norm_D, settings.norm_offset), settings.norm_eps)
        self._look_up: Callable[[torch.Tensor], torch.Tensor] = partial(embedding, weight=embedding_VD)
        self._embedding_VD: torch.Tensor | None = embedding_VD
        if isinstance(self._fused_head, FusedTiedHead):  # it may have packed the embedding where it lies
            self._look_up, self._embedding_VD = self._fused_head.embed, None
        self._soft_cap = settings.final_soft_cap
        scale = settings.embedding_scale
        # transformers rounds the scale to the model's dtype before it multiplies.
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(context.dtype).item()
        self._step = self._fused_step()

    @classmethod
    @abstractmethod
    def read_settings(cls, config: ConfigReader) -> DecoderSettings:
        """Everything the configuration fixes. Raises CheckpointError naming file and key."""

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        return cls.read_settings(ConfigReader(config, "config.json")).spec

    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> Self:
        settings, plan = cls._checked_plan(checkpoint)
        loader = TensorLoader(checkpoint, context, plan)
        return cls(settings, loader, context, factors_tensor(settings, checkpoint))

    @classmethod
    def planned_weights(cls, checkpoint: Checkpoint) -> Sequence[PlannedWeight]:
        return tuple(planned_weights(cls._checked_plan(checkpoint)[1]))

    @classmethod
    def step_bytes(cls, config: Mapping[str, Any], *, value_bytes: int, num_tokens: int, num_rows: int) -> int:
        settings = cls.read_settings(ConfigReader(config, "config.json"))
        return step_bytes(settings, value_bytes, num_tokens, num_rows)

    @classmethod
    def _checked_plan(cls, checkpoint: Checkpoint) -> tuple[DecoderSettings, TensorPlan]:
        source = checkpoint.path / "config.json" if checkpoint.path.is_dir() else checkpoint.path
        settings = cls.read_settings(ConfigReader(checkpoint.config, str(source)))
        plan = make_plan(settings, checkpoint, cls.name_layouts)
        plan.check(checkpoint, settings.spec.family, cls.foreign_prefixes)
        return settings, plan

    def _fused_stacks(self) -> tuple[FusedStack | None, FusedStack | None]:
        """The backend's own ways through all layers and through all but the last, if it computes each of them."""
        fused, ropes = [layer.fused for layer in self._layers], [layer.rope for layer in self._layers]
        known = [one for one in fused if one is not None]
        if not isinstance(self._fuser, StackFuser) or len(known) < len(fused):
            return None, None
        whole = self._fuser.stack(known, ropes)
        return whole, None if whole is None or len(known) == 1 else self._fuser.stack(known[:-1], ropes[:-1])

    def _fused_step(self) -> FusedStep | None:
        """The backend's own way from token ids to logits, where nothing but its parts comes in between."""
        tables = [one for one in self._rotaries if isinstance(one, TableRotary)]
        own = all(getattr(type(self), name) is getattr(Decoder, name) for name in ("forward", "embed", "logits"))
        between = self._soft_cap is not None or self._embedding_scale is not None
        if not own or between or len(tables) < len(self._rotaries) or not isinstance(self._fuser, StepFuser):
            return None
        stack, head = self._stack, self._fused_head
        return None if stack is None or head is None else self._fuser.step(self._embedding_VD, stack, head)

    def forward_logits(self, inputs: ModelInput, attend: AttentionCall) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`forward`, and `logits` of all its rows, in one go; None, with nothing done, where the two have to be called.

        hidden_TD and logits_TV.
        """
        if self._step is None:
            return None
        self._prepare(inputs)
        tables = [table for one in self._rotaries if isinstance(one, TableRotary) for table in one.tables]
        return self._step(inputs.token_ids_T, inputs.positions_T, tables, attend)

    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        x_TD, angles = self._embedded(inputs)
        if self._stack is not None and (hidden_TD := self._stack(x_TD, angles, attend)) is not None:
            return hidden_TD
        x_TD, out_TNH = self._last_attended(x_TD, angles, attend)
        return self._layers[-1].after_attention(self._map_rows, x_TD, out_TNH)

    def forward_rows(
        self, inputs: ModelInput, attend: AttentionCall, pick_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """hidden_RD of inputs.logit_rows_R. Behind the last attention nothing mixes rows, so the others end there."""
        x_TD, out_TNH = self._last_attended(*self._embedded(inputs), attend)
        rows_R = inputs.logit_rows_R
        x_RD = pick_rows(x_TD, rows_R)
        if not len(rows_R):
            return x_RD
        out_RNH = pick_rows(out_TNH.flatten(1), rows_R).view(-1, *out_TNH.shape[1:])
        return self._layers[-1].after_attention(self._map_rows, x_RD, out_RNH)

    def _embedded(self, inputs: ModelInput) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """x_TD, and the cosine and sine of each rotary embedding in turn."""
        self._prepare(inputs)
        lengths_T = rotary_lengths(inputs) if self._is_dynamic else inputs.positions_T
        x_TD, *angles = self._map_rows(self._embed, inputs.token_ids_T, inputs.positions_T, lengths_T)
        return x_TD, angles

    def _prepare(self, inputs: ModelInput) -> None:
        longest = max((segment.num_keys for segment in inputs.segments), default=0)
        for rotary in self._rotaries:
            rotary.prepare(longest)

    def _last_attended(
        self, x_TD: torch.Tensor, angles: list[torch.Tensor], attend: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that the last layer takes, and what its attention gives, [T, N, H]."""
        hidden_TD = None if self._lower_stack is None else self._lower_stack(x_TD, angles, attend)
        if hidden_TD is None:
            hidden_TD = x_TD
            for layer in self._layers[:-1]:
                out_TNH = self._attended(layer, hidden_TD, angles, attend)
                hidden_TD = layer.after_attention(self._map_rows, hidden_TD, out_TNH)
        return hidden_TD, self._attended(self._layers[-1], hidden_TD, angles, attend)

    def _attended(
        self, layer: DecoderLayer, x_TD: torch.Tensor, angles: list[torch.Tensor], attend: AttentionCall
    ) -> torch.Tensor:
        cos_T1H, sin_T1H = angles[2 * layer.rope : 2 * layer.rope + 2]
        return attend(layer.spec, *layer.before_attention(self._map_rows, x_TD, cos_T1H, sin_T1H))

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        if self._fused_head is None:
            return self._map_rows(self._project, hidden_RD)[0]
        logits_RV = self._fused_head(hidden_RD)
        return logits_RV if self._soft_cap is None else self._map_rows(self._capped, logits_RV)[0]

    def first_layers(self, num_layers: int) -> Self:
        first = copy(self)
        first.spec = replace(self.spec, layers=self.spec.layers[:num_layers])
        first._layers = self._layers[:num_layers]
        first._stack, first._lower_stack = first._fused_stacks()
        first._step = first._fused_step()
        return first

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        x_TD = self._look_up(token_ids_T)
        return x_TD if self._embedding_scale is None else x_TD * self._embedding_scale

    def _embed(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, lengths_T: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """x_TD, then cosine and sine of each rotary embedding."""
        x_TD = self.embed(token_ids_T)
        angles = [rotary.rows(positions_T, lengths_T) for rotary in self._rotaries]
        return (x_TD, *(tensor for pair in angles for tensor in pair))

    def _project(self, hidden_RD: torch.Tensor) -> tuple[torch.Tensor]:
        return self._capped(self._head(self._norm(hidden_RD)).float())

    def _capped(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor]:
        if self._soft_cap is not None:
            logits_RV = (logits_RV / self._soft_cap).tanh_().mul_(self._soft_cap)
        return (logits_RV,)
