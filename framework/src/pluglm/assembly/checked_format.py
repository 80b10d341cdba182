"""Guards a run against a KV format that misstates what it stores, or gives something else. Knows no arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from pluglm.kernel.errors import ComponentFailure, IncompatibleError, PluginError, describe
from pluglm.kernel.interfaces.kv_format import KVFormat, KVRow, SymmetricCodes
from pluglm.kernel.interfaces.model import ModelSpec

# T: tokens, K: kv heads, H: head dim, C: codes of a row, G: scales of a row

Encoded = tuple[torch.Tensor, torch.Tensor]


def row_fault(row: Any) -> str | None:
    """Why `row`, as a format's `row` gave it, describes no memory; or None."""
    if not isinstance(row, KVRow):
        return f"it gave {type(row).__name__}, not KVRow"
    for name in ("code_dtype", "scale_dtype"):
        if not isinstance(getattr(row, name), torch.dtype):
            return f"{name} is {getattr(row, name)!r}, not a torch dtype"
    for name, least in (("num_codes", 1), ("num_scales", 0)):
        number = getattr(row, name)
        if type(number) is not int or number < least:
            return f"{name} is {number!r}, not a whole number from {least}"
    return None


class CheckedFormat:
    """A KV format of which each row, encoding and decoding is checked before it is used; ComponentFailure names it.

    Attention adds and multiplies what it decodes: another shape would be broadcast, and nobody would notice.
    """

    def __init__(self, kv_format: KVFormat, name: str) -> None:
        self._format, self._name = kv_format, name
        self._rows: dict[int, KVRow] = {}  # by head dim

    def row(self, head_dim: int) -> KVRow:
        if head_dim not in self._rows:
            row = self._format.row(head_dim)
            if fault := row_fault(row):
                raise ComponentFailure(self._name, f"cannot say what it stores of heads of {head_dim}: {fault}")
            self._rows[head_dim] = row
        return self._rows[head_dim]

    def encode(self, x_TKH: torch.Tensor) -> Encoded:
        row = self.row(x_TKH.shape[2])
        codes_TKC, scales_TKG = self._format.encode(x_TKH)
        rows = x_TKH.shape[:2]
        self._require("codes", codes_TKC, x_TKH, (*rows, row.num_codes), row.code_dtype)
        self._require("scales", scales_TKG, x_TKH, (*rows, row.num_scales), row.scale_dtype)
        return codes_TKC, scales_TKG

    def decode(self, codes_TKC: torch.Tensor, scales_TKG: torch.Tensor) -> torch.Tensor:
        x_TKH = self._format.decode(codes_TKC, scales_TKG)
        num_tokens, num_heads, num_codes = codes_TKC.shape
        head_dims = [one for one, row in self._rows.items() if row.num_codes == num_codes]
        head_dim = x_TKH.shape[-1] if x_TKH.shape[-1:] and x_TKH.shape[-1] in head_dims else head_dims[0]
        self._require("numbers", x_TKH, codes_TKC, (num_tokens, num_heads, head_dim), torch.float32)
        return x_TKH

    def symmetric(self) -> SymmetricCodes | None:
        return self._format.symmetric()

    def _require(
        self, what: str, found: torch.Tensor, given: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        if found.device.type != given.device.type:
            raise ComponentFailure(self._name, f"gave {what} on {found.device}, for numbers on {given.device}")
        if found.shape != shape or found.dtype != dtype:
            gave, wanted = f"{list(found.shape)} of {found.dtype}", f"{list(shape)} of {dtype}"
            raise ComponentFailure(self._name, f"gave {what} {gave} where {wanted} are stored")


def require_rows(kv_format: KVFormat, spec: ModelSpec, device: str, dtype: torch.dtype, named: str) -> None:
    """PluginError, with `named`, unless heads of this model are stored and encoded as the format's `row` says."""
    for head_dim in sorted({layer.head_dim for layer in spec.layers}):
        try:
            kv_format.row(head_dim)
            kv_format.encode(torch.zeros(1, 1, head_dim, dtype=dtype, device=device))
        except IncompatibleError:
            raise
        except Exception as error:  # of somebody's plugin: the reason must carry its name
            raise PluginError(
                f"{named} cannot store heads of {head_dim}: {describe(error)}; mend the plugin"
            ) from error
