"""pluglm, through its own engine loop, in bfloat16."""

from __future__ import annotations

from driven_engine import DrivenEngine

from peers.serving import Setup, serve

_MOST_SEQUENCES, _STEP_TOKENS = 32, 2048  # room for the largest batch; a prefill of 1,024 in one step, as peers do


class PluglmEngine(DrivenEngine):
    def __init__(self, setup: Setup) -> None:
        limits = {
            "num_threads": setup.threads, "max_num_seqs": _MOST_SEQUENCES, "max_step_tokens": _STEP_TOKENS,
        }  # fmt: skip
        super().__init__({"model": {"path": setup.path, "dtype": "bfloat16"}, "engine": limits})


if __name__ == "__main__":
    serve(PluglmEngine)
