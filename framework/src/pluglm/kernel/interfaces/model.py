"""The contract of a model family: read a checkpoint, compute hidden states for a flat batch, project rows to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.core import ModelInput
    from pluglm.kernel.interfaces.checkpoint import Checkpoint
    from pluglm.kernel.interfaces.services import Progress

MODEL_VERSION = 1

# T: tokens of the flat batch, R: rows with logits, D: hidden size, V: vocabulary
# N: query heads, K: kv heads, H: head dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Attention of one layer. window: how many last keys a query sees, itself included; None is all."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a model. vocab_size is the number of logits (the head's rows, padding included).

    kv_of_prompt_length: a token's keys depend on the length of its request's prompt too (dynamic rope scaling), so only
    prompts of one length may share them.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    kv_of_prompt_length: bool = False

    @property
    def kv_values_per_token(self) -> int:
        """Numbers stored for one token over all layers (keys and values)."""
        return sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.layers)


class Linear(Protocol):
    """A linear layer ready to run. num_bytes is what it holds."""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, K] -> [rows, N], in x's dtype."""
        ...


class LinearFactory(Protocol):
    """Makes a layer from weight_NK [N, K] and bias_N [N]; takes ownership of both, so it may pack them in place."""

    def __call__(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Linear: ...


class RowMap(Protocol):
    """Applies a row-wise function: every tensor is [T, ...], every result too, and row t depends on row t only.

    The plain one calls the function once. The deterministic one calls it on tiles of one fixed row count.
    """

    def __call__(
        self, function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a pre-norm decoder layer consists of. Norm weights have a family's offset added; None where it has no such.

    head_norm: [N + K, H], of query and key heads; attention_out_norm, mlp_out_norm: of what is added to the rows.
    qkv and gate_up hold the rows of the projections one after another.
    """

    spec: LayerSpec
    activation: str
    eps: float
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    head_norm: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None


class FusedLayer(Protocol):
    """A decoder layer around its attention; the same values as the family's own functions, in fewer calls.

    In deterministic runs a row's bits depend on that row alone, so no RowMap goes around it.
    """

    def pre_attention(
        self, x_TD: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_TNH, k_TKH, v_TKH. The cosine is as wide as a head; the first half of the sine is negated."""
        ...

    def post_attention(self, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> torch.Tensor:
        """x_TD after output projection, feed-forward part and both residual additions."""
        ...


class FusedStack(Protocol):
    """All layers of a model in one call, with the attention of the run; the values that the layers give one by one."""

    def __call__(
        self, x_TD: torch.Tensor, angles_T1H: Sequence[torch.Tensor], attend: AttentionCall
    ) -> torch.Tensor | None:
        """Rows behind the last layer, [T, D] in x's dtype; x_TD keeps its values. None, with nothing done, where the
        layers have to run one by one.

        angles_T1H: the cosine and the sine of each rotary embedding in turn.
        """
        ...


class FusedHead(Protocol):
    """Final norm and head: hidden_RD -> logits_RV float32. Deterministic as FusedLayer is."""

    def __call__(self, hidden_RD: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class FusedTiedHead(Protocol):
    """A FusedHead over an embedding that it took over, maybe to pack it where it lies: only it knows the rows now."""

    def __call__(self, hidden_RD: torch.Tensor) -> torch.Tensor: ...

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T, D]. IndexError for an id that it does not have."""
        ...


class FusedStep(Protocol):
    """Embedding, all layers and head in one call: what FusedStack and FusedHead give of embedded token ids."""

    def __call__(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        angles_P1H: Sequence[torch.Tensor],
        attend: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """hidden_TD and logits_TV float32; None, with nothing done, where the parts have to run one by one.

        angles_P1H: tables of the cosine and the sine of each rotary embedding in turn, by position. IndexError for an
        id or a position that has no row.
        """
        ...


class Fuser(Protocol):
    """A backend's offer to compute whole layers of a family; None where it cannot, and then the family's own runs."""

    def layer(self, parts: LayerParts) -> FusedLayer | None: ...

    def head(self, norm_D: torch.Tensor, eps: float, head: Linear | torch.Tensor) -> FusedHead | None:
        """head: the layer, or of a tied model the embedding [V, D], which stays what it is."""
        ...

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in memory that the backend reads best; it may be the tensor itself."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Such memory with nothing in it yet; `placed` leaves it where it is."""
        ...

    def placed_bytes(self, num_bytes: int) -> int:
        """What a tensor of num_bytes takes there."""
        ...


@runtime_checkable
class StackFuser(Protocol):
    """Optional ability of a Fuser."""

    def stack(self, layers: Sequence[FusedLayer], ropes: Sequence[int]) -> FusedStack | None:
        """layers: all of a model, of this fuser; ropes: which rotary embedding each uses. None: they run one by one."""
        ...


@runtime_checkable
class TiedFuser(Protocol):
    """Optional ability of a Fuser."""

    def tied_head(self, norm_D: torch.Tensor, eps: float, embedding_VD: torch.Tensor) -> FusedTiedHead | None:
        """As `head`, but the embedding is its own from then on: nobody else may read it. None: nothing was done."""
        ...


@runtime_checkable
class StepFuser(Protocol):
    """Optional ability of a StackFuser."""

    def step(self, embedding_VD: torch.Tensor | None, stack: FusedStack, head: FusedHead) -> FusedStep | None:
        """stack, head: of this fuser. embedding_VD: None where the head took it over. None: they run one by one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """How a model is to be put on a device. Written by the backend, read by the family while loading.

    fuser: None when the backend computes no whole layers.
    """

    device: str
    dtype: torch.dtype
    make_linear: LinearFactory
    map_rows: RowMap
    progress: Progress
    fuser: Fuser | None = None


class AttentionCall(Protocol):
    """One layer's attention for the current batch: stores k and v (which may be strided views), returns the mix."""

    def __call__(
        self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor: ...


class Model(Protocol):
    """One family. The class is found by the checkpoint's `model_type`; it is built by `load` only.

    Loading takes tensors one by one and fails with CheckpointError before anything else uses the model; forward and
    logits run under torch.inference_mode and change nothing but the KV that `attend` stores.
    """

    interface_version: ClassVar[int]
    spec: ModelSpec

    @classmethod
    def read_spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Shape from a config.json dictionary; CheckpointError names a key that is missing or unsupported."""
        ...

    @classmethod
    def load(cls, checkpoint: Checkpoint, context: ModelContext) -> Model:
        """Checks all shapes before it reads the first tensor; a missing or misshaped one raises CheckpointError."""
        ...

    def forward(self, inputs: ModelInput, attend: AttentionCall) -> torch.Tensor:
        """hidden_TD before the final norm, one row per token of the batch."""
        ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Final norm and head: logits_RV float32."""
        ...


class RowPicker(Protocol):
    """How a backend gathers rows: x_TD[rows_R], rows_R int64."""

    def __call__(self, x_TD: torch.Tensor, rows_R: torch.Tensor, /) -> torch.Tensor: ...


@runtime_checkable
class RowsModel(Protocol):
    """Optional ability of a Model: what lies behind its last attention is computed for the rows with logits alone."""

    def forward_rows(self, inputs: ModelInput, attend: AttentionCall, pick_rows: RowPicker) -> torch.Tensor:
        """hidden_RD, the rows inputs.logit_rows_R of `forward`; the KV of every row is stored all the same."""
        ...


@runtime_checkable
class LogitsModel(Protocol):
    """Optional ability of a Model: from token ids to the logits of all rows in one go."""

    def forward_logits(self, inputs: ModelInput, attend: AttentionCall) -> tuple[torch.Tensor, torch.Tensor] | None:
        """hidden_TD, and logits_TV float32, as `forward` and `logits` give them. None, and nothing done: call those."""
        ...
