"""Two threads in one native attention: a call that the engine gave up on still runs beside the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.native.attention import NativeAttention
from pluglm.native.tools import NativeTools

KEYS = 2048


def test_calls_of_two_threads_do_not_mix(native_tools: Callable[..., NativeTools]) -> None:
    """All values of a store are one number, so every row of its output is that number, whatever the weights."""
    attention = NativeAttention(native_tools("baseline", 3))
    layer = LayerSpec(index=0, num_heads=4, num_kv_heads=2, head_dim=64, scale=1.0)
    wrong: list[float] = []

    def work(rows: int, value: float) -> None:
        keys, values = torch.zeros(KEYS, 2, 64), torch.full((KEYS, 2, 64), value)
        table = tuple(range(KEYS // 16))
        whole = {"sequence_id": 0, "query_start": 0, "num_query": rows, "num_context": KEYS - rows}
        plan = attention.plan([Segment(**whole, block_table=table)], 16)
        for _ in range(40):
            out = attention.attend(layer, torch.ones(rows, 4, 64), plan, keys, values)
            wrong.extend([value] * (not torch.allclose(out, torch.tensor(value), rtol=0, atol=1e-4)))

    threads = [threading.Thread(target=work, args=one, daemon=True) for one in ((3, 1.0), (40, 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
