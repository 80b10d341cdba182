"""Available memory read from made-up /proc and /sys trees, by the kernel's documentation of those files."""

from __future__ import annotations

from pathlib import Path

from pluglm.backends.memory import available_memory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 10 kB\nMemAvailable: {6 * GIB // 1024} kB\n"}


def test_without_groups_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, MEMINFO)) == 6 * GIB


def test_version_2_takes_the_tightest_group_up_to_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "1\n",
    }
    assert available_memory(write(tmp_path, MEMINFO | files)) == 2 * GIB


def test_in_a_container_the_mount_itself_is_the_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/elsewhere/not-mounted-here\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    assert available_memory(write(tmp_path, MEMINFO | files)) == GIB


def test_version_1_reads_the_memory_controller(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"cache 1\ntotal_inactive_file {GIB // 2}\n",
    }
    assert available_memory(write(tmp_path, MEMINFO | files)) == GIB + GIB // 2


def test_an_exhausted_group_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "100\n", "sys/fs/cgroup/memory.current": "101\n"}
    assert available_memory(write(tmp_path, MEMINFO | files)) == 0


def test_elsewhere_it_is_the_physical_memory(tmp_path: Path) -> None:
    assert available_memory(tmp_path) >= available_memory() > 0
