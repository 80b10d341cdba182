"""What a run will take and what computes it, as tables: the memory plan, and the kernels with the reasons."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pluglm.cli.terminal import new_table
from pluglm.kernel.interfaces.kernels import ToolOwner
from pluglm.native.tools import NativeTools

if TYPE_CHECKING:
    from rich.table import Table

    from pluglm.assembly.memory_plan import MemoryPlan
    from pluglm.engine import Engine

_NOTE_WIDTH = 44  # so that the table fits into 80 columns
MIB = 1 << 20


def memory_table(plan: MemoryPlan) -> Table:
    """One row for each part, and their peak against what is free."""
    table = new_table(None, "memory", "MiB", "")
    table.columns[1].justify = "right"
    pool = f"{plan.num_blocks:,} blocks of {plan.block_size:,} tokens"
    rows = (
        ("process", plan.process, "resident already, and what first calls load"),
        ("weights", plan.weights, ""),
        ("KV pool", plan.kv, f"{pool}, when they are full" if plan.device == "cpu" else pool),
        ("workspace", plan.workspace, f"a step of {plan.step_tokens:,} tokens, {plan.logit_rows:,} rows of logits"),
        ("loading", plan.loading, "beside the weights, before KV and workspace"),
        ("peak", plan.peak, f"on {plan.device}; {plan.free // MIB:,} MiB are free beside the process"),
    )
    for name, num_bytes, note in rows:
        if num_bytes:
            table.add_row(name, f"{-(-num_bytes // MIB):,}", note)
    return table


def kernels_table(engine: Engine) -> Table | None:
    """Operation, kernel, and why no preferred one; None where the backend reports no kernels."""
    choices = engine.kernels
    if not choices:
        return None
    table = new_table(None, "operation", "kernel", "why not another")
    for choice in choices:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refused)
        table.add_row(choice.operation, choice.kernel, "\n".join(textwrap.wrap(reasons, _NOTE_WIDTH)) or "-")
    return table


def threads_note(engine: Engine) -> str | None:
    """How the native kernels' threads wait; None without native kernels."""
    backend = engine.core.parts.runner.backend
    tools = backend.tools if isinstance(backend, ToolOwner) else None
    if not isinstance(tools, NativeTools):
        return None
    tiles = ", matrix tiles" if tools.has_tiles else ""
    waiting = f"spin {tools.spin_us} us, then sleep" if tools.spin_us else "sleep at once"
    return f"native kernels: {tools.level}{tiles}; {tools.num_threads} thread(s), which {waiting}"
