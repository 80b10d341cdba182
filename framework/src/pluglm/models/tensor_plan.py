"""Which tensors a decoder needs, in which shapes and under which names, and the check of a checkpoint against that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pluglm.kernel.errors import CheckpointError
from pluglm.models.settings import DecoderSettings

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.checkpoint import Checkpoint

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_NAMED_AT_MOST = 4


@dataclass(frozen=True, slots=True)
class NameLayout:
    """How a checkpoint spells the names that this package writes as `model.*` and `lm_head.weight`."""

    stem: str = "model."
    head: str = HEAD

    def stored(self, name: str) -> str:
        if name == HEAD:
            return self.head
        return self.stem + name.removeprefix("model.") if name.startswith("model.") else name


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """shapes: every tensor that will be read, by this package's name for it; layout: what the checkpoint calls it."""

    shapes: Mapping[str, tuple[int, ...]]
    layout: NameLayout

    def check(self, checkpoint: Checkpoint, family: str, foreign_prefixes: tuple[str, ...]) -> None:
        """Raises CheckpointError for the first missing or misshaped tensor, then for tensors nobody would read.

        Tensors under `foreign_prefixes` belong to another modality and stay unread. Reads no tensor data.
        """
        for name, expected in self.shapes.items():
            stored = self.layout.stored(name)
            found = checkpoint.shape(stored)
            if found is None:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor '{stored}' is missing (expected shape {list(expected)}); "
                    "the checkpoint is incomplete or its config is of another model"
                )
            if tuple(found) != expected:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor '{stored}' has shape {list(found)}; expected {list(expected)} (config)"
                )
        self._refuse_unread(checkpoint, family, foreign_prefixes)

    def _refuse_unread(self, checkpoint: Checkpoint, family: str, foreign_prefixes: tuple[str, ...]) -> None:
        read = {self.layout.stored(name) for name in self.shapes} | {ROPE_FACTORS}
        unread = sorted(
            name
            for name in checkpoint.names() - read
            if not name.endswith(_IGNORED_SUFFIXES) and not name.startswith(foreign_prefixes)
        )
        if unread:
            shown = ", ".join(unread[:_NAMED_AT_MOST]) + (", ..." if len(unread) > _NAMED_AT_MOST else "")
            raise CheckpointError(
                f"{checkpoint.path}: {len(unread)} tensors have no place in a {family} model of this config: {shown}"
            )


def make_plan(settings: DecoderSettings, checkpoint: Checkpoint, layouts: tuple[NameLayout, ...]) -> TensorPlan:
    """The plan for this checkpoint: the first layout whose embedding it has, and optional tensors only if it has them.

    Optional are the head of a tied model (see `loading`) and `rope_freqs.weight`, GGUF's frequency divisors. The
    llama3 settings say the same as the divisors, so then they stay unread.
    """
    layout = next((layout for layout in layouts if checkpoint.shape(layout.stored(EMBEDDING))), layouts[0])
    spec = settings.spec
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in spec.layers:
        for name, shape in _layer_shapes(settings, layer.index).items():
            shapes[f"model.layers.{layer.index}.{name}"] = shape
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not settings.tied_head or checkpoint.shape(layout.stored(HEAD)) is not None:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    divisors = factors_tensor(settings, checkpoint)
    if divisors is not None:
        shapes[divisors] = (settings.ropes[0].head_dim // 2,)
    return TensorPlan(shapes=shapes, layout=layout)


def factors_tensor(settings: DecoderSettings, checkpoint: Checkpoint) -> str | None:
    """The tensor of frequency divisors that this model uses, if any."""
    rope = settings.ropes[0]
    if rope.factors_tensor is not None or rope.kind in ("llama3", "dynamic"):
        return rope.factors_tensor
    return ROPE_FACTORS if checkpoint.shape(ROPE_FACTORS) is not None else None


def _layer_shapes(settings: DecoderSettings, index: int) -> dict[str, tuple[int, ...]]:
    layer = settings.spec.layers[index]
    width, inner = settings.spec.hidden_size, settings.intermediate_size
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    projections = {
        "self_attn.q_proj": (query, width, settings.qkv_bias),
        "self_attn.k_proj": (key, width, settings.qkv_bias),
        "self_attn.v_proj": (key, width, settings.qkv_bias),
        "self_attn.o_proj": (width, query, settings.output_bias),
        "mlp.gate_proj": (inner, width, settings.mlp_bias),
        "mlp.up_proj": (inner, width, settings.mlp_bias),
        "mlp.down_proj": (width, inner, settings.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes | _norm_shapes(settings, layer.head_dim)


def _norm_shapes(settings: DecoderSettings, head_dim: int) -> dict[str, tuple[int, ...]]:
    rows = ["input_layernorm", "post_attention_layernorm"]
    rows += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if settings.sandwich_norms else []
    heads = ["self_attn.q_norm", "self_attn.k_norm"] if settings.head_norms else []
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (settings.spec.hidden_size,) for name in rows}
    return shapes | {f"{name}.weight": (head_dim,) for name in heads}
