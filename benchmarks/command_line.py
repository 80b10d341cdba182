"""What the benchmarks' command lines have in common: parsers, numbers, what is said of the machine, records as JSON."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDS = Path("benchmarks/records")


def parser_of(description: str | None, record: str) -> argparse.ArgumentParser:
    """With --record FILE, which is RECORDS / record when it is not given. The description is shown as it is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORDS / record, metavar="FILE.json")
    return parser


def whole(text: str) -> int:
    """A number of rounds, threads or the like, for add_argument(type=...)."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def surroundings() -> dict[str, str]:
    """The fields of a record that say what it was measured with."""
    import torch  # here, since a process that measures its own memory has not loaded it before

    machine = f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}"
    return {"torch": torch.__version__, "machine": machine}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes the record and says where; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {path}")
