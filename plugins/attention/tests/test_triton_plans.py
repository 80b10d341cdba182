"""What is decided on the host before a Triton launch: plans, splits, the table of launch configs. Needs no triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pluglm.kernel.core import Segment
from pluglm_attention.triton.launch_configs import (
    CAPABILITIES,
    DEFAULT_TABLE,
    LaunchConfig,
    capability_class,
    check_storage,
    choose_config,
    read_table,
    write_table,
)
from pluglm_attention.triton.plan import plan_flash, plan_paged
from pluglm_attention.triton.splits import choose_splits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def segment(start: int, num_query: int, num_context: int, *table: int) -> Segment:
    return Segment(
        sequence_id=start, query_start=start, num_query=num_query, num_context=num_context, block_table=table
    )


BATCH = (segment(0, 3, 2, 7, 4), segment(3, 1, 8, 0, 9, 2))


def on(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))


def test_a_plan_holds_the_segments() -> None:
    plan = plan_paged(BATCH, 4, CPU)
    assert plan.cu_query.tolist() == [0, 3, 4]
    assert plan.num_context.tolist() == [2, 8]
    assert plan.block_tables.tolist() == [[7, 4, 0], [0, 9, 2]]
    assert (plan.num_tokens, plan.max_query, plan.max_keys, plan.num_segments) == (4, 3, 9, 2)


def test_every_part_of_a_plan_starts_at_16_bytes() -> None:
    """Kernels are compiled anew for other alignments."""
    plan = plan_paged(BATCH, 4, CPU)
    parts = (plan.cu_query, plan.num_context, plan.block_tables)
    assert [(part.data_ptr() - plan.packed.data_ptr()) % 16 for part in parts] == [0, 0, 0]
    assert all(part.dtype == torch.int32 for part in parts)


def test_segments_filled_in_are_one_row_before_their_first_key() -> None:
    plan = plan_paged((segment(0, 1, 8, 0, 9, 2),), 4, CPU, num_segments=3, max_blocks=4)
    assert plan.cu_query.tolist() == [0, 1, 2, 3]
    assert plan.num_context.tolist() == [8, -1, -1]
    assert plan.block_tables.tolist() == [[0, 9, 2, 0], [0] * 4, [0] * 4]
    assert plan.max_keys == 16


def test_a_batch_without_segments() -> None:
    plan = plan_paged((), 4, CPU)
    assert (plan.num_tokens, plan.num_segments, plan.max_query) == (0, 0, 0)


def test_segments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 segments of up to 3 blocks do not fit 1 x None"):
        plan_paged(BATCH, 4, CPU, num_segments=1)
    with pytest.raises(ValueError, match="do not fit None x 2"):
        plan_paged(BATCH, 4, CPU, max_blocks=2)


def test_a_plan_takes_over_only_one_of_its_size() -> None:
    with pytest.raises(ValueError, match="cannot take the place"):
        plan_paged(BATCH, 4, CPU).update(plan_paged(BATCH[:1], 4, CPU))


def test_a_flash_plan_says_where_position_0_lies() -> None:
    plan = plan_flash(BATCH, [40, 8], CPU)
    assert plan.first_rows.tolist() == [40, 8]
    assert plan.cu_query.tolist() == [0, 3, 4]
    with pytest.raises(ValueError, match="starts at row 3, not at 0"):
        plan_flash(BATCH[1:], [8], CPU)


@pytest.mark.parametrize(
    ("programs", "keys", "processors", "splits"),
    [
        (132, 10**6, 132, 1),  # every processor has a program
        (8, 4096, 132, 32),  # 33 would give two programs to each; 32 parts have 128 keys
        (8, 100000, 132, 33),
        (8, 200, 132, 1),  # too short to split
        (1, 10**6, 132, 128),
        (0, 0, 132, 1),
    ],
)
def test_splits(programs: int, keys: int, processors: int, splits: int) -> None:
    assert choose_splits(programs, keys, processors) == splits


@pytest.mark.parametrize(
    ("device", "entry"),
    [
        *(((8, 0), 80), ((8, 6), 89), ((8, 7), 80), ((8, 9), 89), ((9, 0), 90), ((10, 0), 100), ((10, 3), 100)),
        *(((12, 0), 120), ((12, 1), 120), ((11, 0), 120), ((13, 0), 120)),
    ],
)
def test_devices_have_the_entry_whose_limits_hold(
    monkeypatch: pytest.MonkeyPatch, device: tuple[int, int], entry: int
) -> None:
    on(monkeypatch, *device)
    assert capability_class(CUDA) == entry


def test_old_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 7, 5)
    with pytest.raises(ValueError, match=r"8\.0 or newer, cuda has 7\.5"):
        capability_class(CUDA)


def test_e4m3_storage_needs_8_9(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 8, 6)
    check_storage(torch.int8, CUDA)
    with pytest.raises(ValueError, match=r"e4m3 needs 8\.9: store int8"):
        check_storage(torch.float8_e4m3fn, CUDA)
    on(monkeypatch, 8, 9)
    check_storage(torch.float8_e4m3fn, CUDA)


def test_the_table_is_complete_and_its_tiles_are_powers_of_two() -> None:
    kernels = ("prefill", "quantised", "decode", "flash", "float32")
    assert set(DEFAULT_TABLE) == {(k, c, h) for k in kernels for c in CAPABILITIES for h in (64, 128, 256)}
    sides = {side for config in DEFAULT_TABLE.values() for side in (config.block_m, config.block_n, config.num_warps)}
    assert all(side.bit_count() == 1 for side in sides)


def test_head_dims_take_the_next_entry() -> None:
    assert choose_config(DEFAULT_TABLE, "decode", CPU, 80) == DEFAULT_TABLE["decode", 90, 128]


def test_a_written_table_is_read_over_the_default(tmp_path: Path) -> None:
    key, config = ("decode", 90, 128), LaunchConfig(16, 128, 8, 4)
    write_table(tmp_path / "t.json", {key: config}, "a device")
    assert read_table(tmp_path / "t.json") == {**DEFAULT_TABLE, key: config}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{"kernel": "decode", "capability": 90}', "head_dim"),
        (
            '{"kernel": "x", "capability": 90, "head_dim": 64, '
            '"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 1}',
            "no known kernel",
        ),
        ('{"kernel": "decode", "capability": 90, "head_dim": 64, "rows": 1}', "rows"),
        (
            '{"kernel": "decode", "capability": 90, "head_dim": 64, '
            '"block_m": 0, "block_n": 16, "num_warps": 4, "num_stages": 1}',
            "whole numbers from 1",
        ),
        ("3", "is no table of launch configs"),
    ],
)
def test_a_table_with_a_bad_entry(tmp_path: Path, entry: str, message: str) -> None:
    (tmp_path / "t.json").write_text(f'{{"device": "d", "entries": [{entry}]}}')
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "t.json")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"entries": 3}', "\N{BYTE ORDER MARK}{", None])
def test_a_file_that_is_no_table(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    says = "cannot be read: No such file" if text is None else "is no table of launch configs"
    with pytest.raises(ValueError, match=f"t.json {says}") as caught:
        read_table(path)
    assert "\n" not in str(caught.value)


def test_plans_and_tables_import_no_triton() -> None:
    modules = (
        "plan, pluglm_attention.triton.splits, pluglm_attention.triton.checks, pluglm_attention.triton.launch_configs"
    )
    code = f"import sys, pluglm_attention.triton.{modules}; raise SystemExit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
