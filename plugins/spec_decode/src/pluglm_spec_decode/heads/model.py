"""The model family `draft_head`: blocks that go on from a target's hidden states, on the kernel's Model contract.

It has no embedding and no vocabulary: what goes in comes from the target by way of the drafter, as what comes out goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pluglm.models import footprint
from pluglm.models.config_reader import ConfigReader
from pluglm.models.layer import DecoderLayer
from pluglm.models.loading import TensorLoader
from pluglm.models.norms import row_norm
from pluglm.models.rope import make_rotary
from pluglm.models.settings import DecoderSettings
from pluglm.models.tensor_plan import NameLayout, TensorPlan, make_plan
from pluglm_spec_decode.heads.settings import FAMILY, read_head_settings, read_settings_of

if TYPE_CHECKING:
    from pluglm.kernel.core import ModelInput
    from pluglm.kernel.interfaces.checkpoint import Checkpoint
    from pluglm.kernel.interfaces.footprint import PlannedWeight
    from pluglm.kernel.interfaces.model import AttentionCall, ModelContext, ModelSpec

# T: rows of the batch, R: rows asked for, D: hidden size, E: 2 D (an embedding beside a feature), H: head dim

LAYERS = "model.layers."


class DraftHeadModel:
    """A Model whose logits are its hidden rows, and a FedModel: `feed` gives the rows x_TE of a batch.

    block: which of the blocks the next run computes, with KV at the layer of its index. The drafter writes both.
    """

    interface_version: ClassVar[int] = 1

    def __init__(self, settings: DecoderSettings, loader: TensorLoader, context: ModelContext) -> None:
        self.spec: ModelSpec = settings.spec
        self.block = 0
        self.feed: Callable[[torch.Tensor], torch.Tensor] = _unfed
        self._map_rows = context.map_rows
        self._rotary = make_rotary(settings.ropes[0], None, context.dtype, context.device)
        self._blocks = [_Block(settings, layer.index, loader) for layer in self.spec.layers]

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        return read_settings_of(config).spec

    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> DraftHeadModel:
        settings, plan = _checked_plan(checkpoint)
        return cls(settings, TensorLoader(checkpoint, context, plan), context)

    @classmethod
    def planned_weights(cls, checkpoint: Checkpoint) -> Sequence[PlannedWeight]:
        return tuple(footprint.planned_weights(_checked_plan(checkpoint)[1]))

    @classmethod
    def step_bytes(cls, config: Mapping[str, Any], *, value_bytes: int, num_tokens: int, num_rows: int) -> int:
        """All rows may be asked for. On the way in a row has embedding, feature, both side by side, their norms, x."""
        settings = read_settings_of(config)
        entering = num_tokens * value_bytes * 7 * settings.spec.hidden_size
        return max(entering, footprint.step_bytes(settings, value_bytes, num_tokens, num_tokens))

    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        block, map_rows = self._blocks[self.block], self._map_rows
        self._rotary.prepare(max((segment.num_keys for segment in inputs.segments), default=0))
        cos_T1H, sin_T1H = self._rotary.rows(inputs.positions_T, inputs.positions_T + 1)
        (x_TD,) = map_rows(block.enter, self.feed(inputs.token_ids_T))
        q_TNH, k_TKH, v_TKH = block.layer.before_attention(map_rows, x_TD, cos_T1H, sin_T1H)
        return block.layer.after_attention(map_rows, x_TD, attend(block.layer.spec, q_TNH, k_TKH, v_TKH))

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """The rows themselves, float32: features of the target's kind, before its final norm."""
        return hidden_RD.float()


class _Block:
    """Embedding and feature, each normalised, made one by a linear layer, then a decoder layer."""

    def __init__(self, settings: DecoderSettings, index: int, loader: TensorLoader) -> None:
        stem = f"{LAYERS}{index}."
        self._embedding_norm, self._feature_norm = (
            row_norm(loader.tensor(f"{stem}{part}_norm.weight"), settings.norm_eps, 0.0)
            for part in ("embedding", "feature")
        )
        self._fuse = loader.linear(f"{stem}fuse", [f"{stem}fuse"])
        self.layer = DecoderLayer(settings, index, loader)

    def enter(self, x_TE: torch.Tensor) -> tuple[torch.Tensor]:
        embedding_TD, feature_TD = x_TE.chunk(2, -1)
        return (self._fuse(torch.cat((self._embedding_norm(embedding_TD), self._feature_norm(feature_TD)), -1)),)


def _checked_plan(checkpoint: Checkpoint) -> tuple[DecoderSettings, TensorPlan]:
    """Raises CheckpointError before a tensor is read."""
    settings = read_head_settings(ConfigReader(checkpoint.config, str(checkpoint.path / "config.json")))
    width, shapes = settings.spec.hidden_size, dict[str, tuple[int, ...]]()
    of_layers = make_plan(settings, checkpoint, (NameLayout(),)).shapes
    for layer in settings.spec.layers:
        stem = f"{LAYERS}{layer.index}."
        shapes |= {f"{stem}{part}_norm.weight": (width,) for part in ("embedding", "feature")}
        shapes[f"{stem}fuse.weight"] = (width, 2 * width)
        shapes |= {name: shape for name, shape in of_layers.items() if name.startswith(stem)}
    plan = TensorPlan(shapes=shapes, layout=NameLayout())
    plan.check(checkpoint, FAMILY, ())
    return settings, plan


def _unfed(token_ids_T: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a draft head runs on what a drafter feeds it; set feed before each run")
