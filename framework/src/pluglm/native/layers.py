"""A decoder layer around its attention in two native calls, or by parts for so many rows that products are torch's."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch

from pluglm.native.library import LayerStruct
from pluglm.native.linear import NativeLinear, dense
from pluglm.native.tools import DTYPES

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.model import LayerParts
    from pluglm.native.tools import NativeTools

# T: rows, D: hidden size, I: inner size, N: query heads, K: kv heads, C: N + 2K heads side by side, H: head dim

_LINEARS = ("qkv", "output", "gate_up", "down")
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu": 2, "relu": 3}


def refusal(parts: LayerParts) -> str | None:
    """Why a layer of these parts cannot be fused, or None."""
    foreign = {type(one).__name__ for one in (getattr(parts, name) for name in _LINEARS)} - {NativeLinear.__name__}
    if len(native_linears(parts)) < len(_LINEARS):
        return f"its products are {', '.join(sorted(foreign))}"
    if parts.activation not in ACTIVATIONS:
        return f"activation {parts.activation} has no native form"
    return "its head dim is odd" if parts.spec.head_dim % 2 else _misfit(parts)


def _misfit(parts: LayerParts) -> str | None:
    """The first part that has not the shape or dtype that the others need, or None."""
    linears, spec = native_linears(parts), parts.spec
    (_, width), (_, inner) = linears["qkv"].shape, linears["down"].shape
    turned, dim = spec.num_heads + spec.num_kv_heads, spec.head_dim
    shapes = {
        "qkv": ((turned + spec.num_kv_heads) * dim, width),
        "output": (width, spec.num_heads * dim),
        "gate_up": (2 * inner, width),
        "down": (width, inner),
        "head_norm": (turned, dim),
        **dict.fromkeys(("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"), (width,)),
    }
    for name, shape in shapes.items():
        part = linears.get(name) or getattr(parts, name)
        if part is not None and part.shape != shape:
            return f"its {name} is {list(part.shape)}, not {list(shape)}"
    dtypes = {one.dtype for one in linears.values()}
    return f"its products have {len(dtypes)} dtypes" if len(dtypes) > 1 else None


def native_linears(parts: LayerParts) -> dict[str, NativeLinear]:
    """Those of the four products that are native, by name."""
    found = {name: getattr(parts, name) for name in _LINEARS}
    return {name: layer for name, layer in found.items() if isinstance(layer, NativeLinear)}


class NativeLayer:
    """The FusedLayer of parts that `refusal` accepts. Rounds to the run's dtype between products, and adds in float32.

    Where products are in panels, they are gated in the same pass, and not rounded in between.
    most_rows: how many rows take two calls.

    Its plain reference is DecoderLayer on torch.
    """

    def __init__(self, tools: NativeTools, parts: LayerParts) -> None:
        self._tools, self._eps, self.spec = tools, parts.eps, parts.spec
        self._struct = LayerStruct(
            activation=ACTIVATIONS[parts.activation],
            eps=parts.eps,
            heads=parts.spec.num_heads,
            kv_heads=parts.spec.num_kv_heads,
            head_dim=parts.spec.head_dim,
        )
        self._norms: dict[str, torch.Tensor | None] = {}
        for name in ("attention_norm", "head_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"):
            weight = getattr(parts, name)
            if weight is not None:
                weight = weight.float().contiguous()
                setattr(self._struct, name, weight.data_ptr())
            self._norms[name] = weight
        linears = native_linears(parts)
        for name, layer in linears.items():
            setattr(self._struct, name, layer.struct)
        self._qkv, self._output, self._gate_up, self._down = linears.values()
        self.dtype, self.width = self._qkv.dtype, self._qkv.shape[1]
        self.type_code = DTYPES[self.dtype]
        self.address, self.most_rows = ctypes.addressof(self._struct), min(one.most_rows for one in linears.values())
        self._kinds = (parts.spec.num_heads, parts.spec.num_kv_heads, parts.spec.num_kv_heads)
        self.heads_shape = (sum(self._kinds), parts.spec.head_dim)
        self.out_shape = (parts.spec.num_heads, parts.spec.head_dim)

    def split(self, heads_TCH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_TNH, k_TKH and v_TKH, views."""
        q_TNH, k_TKH, v_TKH = heads_TCH.split_with_sizes(self._kinds, 1)
        return q_TNH, k_TKH, v_TKH

    def pre_attention(
        self, x_TD: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_TNH, k_TKH and v_TKH, views of one tensor [T, C, H]."""
        num_rows, tools = x_TD.shape[0], self._tools
        x_TD = dense(x_TD, self.dtype, (num_rows, self.width))
        angles_shape = (num_rows, 1, self.spec.head_dim)
        cos_T1H, sin_T1H = dense(cos_T1H, self.dtype, angles_shape), dense(sin_T1H, self.dtype, angles_shape)
        heads_TCH = torch.empty((num_rows, *self.heads_shape), dtype=x_TD.dtype)
        angles = cos_T1H.data_ptr(), sin_T1H.data_ptr(), num_rows, heads_TCH.data_ptr()
        if num_rows <= self.most_rows:
            tools.library.pluglm_pre_attention(tools.handle, self.type_code, self.address, x_TD.data_ptr(), *angles)
        else:
            projected = self._qkv(self._norm(x_TD, "attention_norm"))
            tools.library.pluglm_turn_heads(tools.handle, self.type_code, self.address, projected.data_ptr(), *angles)
        return self.split(heads_TCH)

    def post_attention(self, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> torch.Tensor:
        """x_TD after the attention's output projection and the feed-forward part."""
        num_rows, tools = x_TD.shape[0], self._tools
        x_TD = dense(x_TD, self.dtype, (num_rows, self.width))
        attended = dense(out_TNH, self.dtype, (num_rows, *self.out_shape))
        if num_rows > self.most_rows:
            return self._post_attention_by_parts(x_TD, attended.flatten(1))
        out_TD = torch.empty_like(x_TD)
        pointers = x_TD.data_ptr(), attended.data_ptr(), num_rows, out_TD.data_ptr()
        tools.library.pluglm_post_attention(tools.handle, self.type_code, self.address, *pointers)
        return out_TD

    def _post_attention_by_parts(self, x_TD: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        change_TD = self._output(attended)
        normed_TD = torch.empty_like(change_TD)
        x_TD = self._add(x_TD, change_TD, "attention_out_norm", normed_TD)
        return self._add(x_TD, self._down(self._active(normed_TD)), "mlp_out_norm")

    def _active(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """What the second product of the feed-forward part takes, [T, I]."""
        tools, kind = self._tools, self._struct.activation
        num_rows, width = normed_TD.shape[0], self._gate_up.shape[0] // 2
        gate_up_TJ = self._gate_up(normed_TD)  # J = 2 I
        active_TI = torch.empty((num_rows, width), dtype=normed_TD.dtype)
        rows = gate_up_TJ.data_ptr(), num_rows, width
        tools.library.pluglm_gated(tools.handle, self.type_code, kind, *rows, active_TI.data_ptr())
        return active_TI

    def _add(
        self, x_TD: torch.Tensor, change_TD: torch.Tensor, out_norm: str, normed_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x + change, in the place of change, and into normed_TD the norm of that for the feed-forward part."""
        tools = self._tools
        tools.library.pluglm_add_and_norm(
            tools.handle,
            self.type_code,
            x_TD.data_ptr(),
            change_TD.data_ptr(),
            getattr(self._struct, out_norm),
            None if normed_TD is None else self._struct.mlp_norm,
            self._eps,
            *x_TD.shape,
            change_TD.data_ptr(),
            None if normed_TD is None else normed_TD.data_ptr(),
        )
        return change_TD

    def _norm(self, x_TD: torch.Tensor, name: str) -> torch.Tensor:
        return norm_rows(self._tools, x_TD, self._norms[name], self._eps)


def norm_rows(tools: NativeTools, x_TD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / rms(x) * weight of contiguous rows; weight_D is float32."""
    if weight_D is None:
        raise ValueError("a norm without weights has no native form")
    out_TD = torch.empty_like(x_TD)
    tools.library.pluglm_norm(
        tools.handle, DTYPES[x_TD.dtype], x_TD.data_ptr(), weight_D.data_ptr(), eps, *x_TD.shape, out_TD.data_ptr()
    )
    return out_TD


class Logits(NamedTuple):
    """A head and where its logits go: addresses of product, norm weights and logits, and epsilon."""

    product: int
    norm_D: int
    logits_RV: int
    eps: float


NO_LOGITS = Logits(0, 0, 0, 0.0)


class NativeHead:
    """Final norm and head: hidden_RD -> logits_RV float32, before a soft cap."""

    def __init__(self, tools: NativeTools, norm_D: torch.Tensor, eps: float, head: NativeLinear) -> None:
        if norm_D.shape != head.shape[1:]:
            raise ValueError(f"a head {list(head.shape)} takes no norm {list(norm_D.shape)}")
        self._tools, self._norm_D, self._eps, self._head = tools, norm_D.float().contiguous(), eps, head
        self.dtype, self.most_rows = head.dtype, head.most_rows
        self._num_outputs, self._width = head.shape

    def __call__(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        tools, num_rows = self._tools, hidden_RD.shape[0]
        hidden_RD = dense(hidden_RD, self.dtype, (num_rows, self._width))
        if num_rows > self.most_rows:
            return self._head(norm_rows(tools, hidden_RD, self._norm_D, self._eps)).float()
        logits_RV = self.empty(num_rows)
        product, norm, to, eps = self.logits(logits_RV)
        rows = hidden_RD.data_ptr(), num_rows
        tools.library.pluglm_head(tools.handle, DTYPES[self.dtype], product, norm, eps, *rows, to)
        return logits_RV

    def empty(self, num_rows: int) -> torch.Tensor:
        """Room for logits_RV."""
        return torch.empty((num_rows, self._num_outputs), dtype=torch.float32)

    def logits(self, logits_RV: torch.Tensor) -> Logits:
        """For whoever computes them into there."""
        return Logits(self._head.address, self._norm_D.data_ptr(), logits_RV.data_ptr(), self._eps)


class NativeTiedHead(NativeHead):
    """One over the embedding, which it took over."""

    @property
    def embedding(self) -> NativeLinear:
        """As weights [V, D]."""
        return self._head

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return self._head.rows(token_ids_T)
