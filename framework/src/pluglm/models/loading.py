"""Reading of planned tensors onto the device, one by one, and the making of linear layers from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from pluglm.kernel.interfaces.model import TiedFuser
from pluglm.models.tensor_plan import EMBEDDING, HEAD, TensorPlan

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.checkpoint import Checkpoint
    from pluglm.kernel.interfaces.model import FusedHead, Linear, ModelContext

# N: output features, K: input features, V: vocabulary, D: hidden size, R: rows


class TiedHead:
    """The head of a model that shares it with the embedding: computed on the embedding itself, never quantised.

    It holds no bytes of its own, which is the point of tying; a quantised copy would be a second matrix.
    """

    num_bytes = 0

    def __init__(self, embedding_VD: torch.Tensor) -> None:
        self.embedding_VD = embedding_VD

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.embedding_VD)


class TensorLoader:
    """Hands out the tensors of a checked plan in the context's dtype, on its device, and reports progress.

    Tensors that are fused are allocated once and filled piece by piece, so at most one piece exists twice.
    """

    def __init__(self, checkpoint: Checkpoint, context: ModelContext, plan: TensorPlan) -> None:
        self._checkpoint = checkpoint
        self._context = context
        self._plan = plan
        self._seen: set[str] = set()
        self.fuser = context.fuser

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its planned name. KeyError when the plan lacks it; CheckpointError when it is unreadable."""
        return self._read(name).to(self._context.device)

    def embedding(self) -> torch.Tensor:
        """embedding_VD, in the memory that the backend reads best."""
        embedding_VD = self.tensor(EMBEDDING)
        return embedding_VD if self.fuser is None else self.fuser.placed(embedding_VD)

    def linear(self, name: str, parts: Sequence[str]) -> Linear:
        """The layer `name` whose rows are the projections `parts` one after another, biases included if planned."""
        weight_NK = self._fused([f"{part}.weight" for part in parts])
        biases = [f"{part}.bias" for part in parts]
        bias_N = self._fused(biases) if biases[0] in self._plan.shapes else None
        return self._context.make_linear(f"{name}.weight", weight_NK, bias_N)

    def head(self, embedding_VD: torch.Tensor, tied: bool) -> Linear:
        """The head. A tied checkpoint that stores another matrix all the same is untied, as in transformers."""
        if HEAD not in self._plan.shapes:
            return TiedHead(embedding_VD)
        weight_VD = self.tensor(HEAD)
        if tied and torch.equal(weight_VD, embedding_VD):
            return TiedHead(embedding_VD)
        return self._context.make_linear(HEAD, weight_VD, None)

    def fused_head(self, head: Linear, norm_D: torch.Tensor, eps: float) -> FusedHead | None:
        """The backend's own final norm and head, if it has one for this head."""
        if self.fuser is None:
            return None
        if not isinstance(head, TiedHead):
            return self.fuser.head(norm_D, eps, head)
        if isinstance(self.fuser, TiedFuser):
            return self.fuser.tied_head(norm_D, eps, head.embedding_VD)
        return self.fuser.head(norm_D, eps, head.embedding_VD)

    def _fused(self, names: Sequence[str]) -> torch.Tensor:
        if len(names) == 1:
            return self.tensor(names[0])
        shapes = [self._plan.shapes[name] for name in names]
        rows = [shape[0] for shape in shapes]
        fused = self._empty((sum(rows), *shapes[0][1:]))
        start = 0
        for name, num_rows in zip(names, rows, strict=True):
            fused[start : start + num_rows].copy_(self._read(name))
            start += num_rows
        return fused

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Where the backend reads best, so that what is joined there need not be copied to it."""
        if self.fuser is not None:
            return self.fuser.empty(shape, self._context.dtype)
        return torch.empty(shape, dtype=self._context.dtype, device=self._context.device)

    def _read(self, name: str) -> torch.Tensor:
        stored = self._plan.layout.stored(name)
        expected = self._plan.shapes[name]
        tensor = self._checkpoint.tensor(stored, self._context.dtype)
        if tuple(tensor.shape) != expected:
            raise RuntimeError(f"checkpoint gave '{stored}' in shape {list(tensor.shape)}, not {list(expected)}")
        if name not in self._seen:
            self._seen.add(name)
            self._context.progress("loading", len(self._seen), len(self._plan.shapes))
        return tensor
