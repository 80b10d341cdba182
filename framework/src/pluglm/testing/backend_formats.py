"""The part of the backend kit about KV formats: stores with scales beside the codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.kv_format import PART_NAMES, PartedStore
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.kv_formats import NibbleKV
from pluglm.testing.tiny_model import CONFIG, TinyModel

LAYOUT = KVLayout(num_blocks=5, block_size=4)
Build = Callable[[], Any]


def backend_format_checks(build: Build) -> Iterator[Check]:
    """Every check of a FormatBackend that computes with what it stores."""
    for function in FORMAT_CHECKS:
        yield make_check(function, build)


def _store(build: Build) -> PartedStore:
    backend = build()
    kv_format = NibbleKV(ComponentConfig(), backend.device, torch.float32)
    store = backend.allocate_encoded_kv(LAYOUT, TinyModel.read_spec(CONFIG), kv_format)
    expect(isinstance(store, PartedStore), "a PartedStore", type(store).__name__)
    parted: PartedStore = store
    return parted


def stores_have_what_the_format_stores(build: Build) -> None:
    store: Any = _store(build)
    for layer in TinyModel.read_spec(CONFIG).layers:
        row = NibbleKV(ComponentConfig(), "cpu", torch.float32).row(layer.head_dim)
        codes = ((20, layer.num_kv_heads, row.num_codes), row.code_dtype)
        scales = ((20, layer.num_kv_heads, row.num_scales), row.scale_dtype)
        parts = store.parts(layer.index)
        found = [(tuple(one.shape), one.dtype) for one in parts]
        expect(found == [codes, codes, scales, scales], "codes of keys and values, then their scales", found)
        same = parts[0] is store.keys(layer.index) and parts[1] is store.values(layer.index)
        expect(same, "the first two parts to be keys and values", "other tensors")


def copies_move_every_part(build: Build) -> None:
    """As if all sources were read first: two blocks change places, and a third takes a copy of one of them."""
    store: Any = _store(build)
    for layer in TinyModel.read_spec(CONFIG).layers:
        for part in store.parts(layer.index):
            blocks = torch.arange(20, device=part.device) // 4 + 1
            part.copy_(blocks.reshape(-1, 1, 1).expand_as(part).to(part.dtype))
    store.copy_blocks([(1, 2), (2, 1), (2, 4)])
    for layer in TinyModel.read_spec(CONFIG).layers:
        for name, part in zip(PART_NAMES, store.parts(layer.index), strict=True):
            found = part[::4, 0, 0].tolist()
            expect(found == [1, 3, 2, 4, 3], f"{name} of layer {layer.index} with blocks [1, 3, 2, 4, 3]", found)


FORMAT_CHECKS: tuple[Callable[[Build], None], ...] = (stores_have_what_the_format_stores, copies_move_every_part)
