"""Every public report that sampling was designed against has a test that names it, or a reason why it has none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
REPORTS: dict[int, tuple[str, ...]] = {
    1: ("vllm #5404",),
    2: ("vllm #1885",),
    3: ("mlx-lm #388",),
    4: ("TensorRT-LLM #1590",),
    5: ("CTranslate2 #586", "TransformerLens #1347", "gemma #789"),
    6: ("vllm #1623", "aici #19", "transformers #11267"),
    7: ("exllama #226", "litgpt #401", "transformers #25722"),
    8: ("pytorch #48841", "transformers #23088", "pytorch #192577"),
    9: ("sglang #27649",),
    10: ("transformers #2302", "NeMo Speech #8194"),
    11: ("TensorRT-LLM #5623", "vmlx-swift #295"),
    12: ("transformers #36642", "TGI #1170"),
    13: ("TGI #1765", "unsloth #6923"),
    14: ("transformers #27165",),
    15: ("llama.cpp #4091", "llama.cpp #3841", "text-generation-webui #4463"),
    16: ("exllamav2 #800",),
    17: ("vllm #17524", "vllm #51226"),
    18: ("vllm #11898", "llama.cpp #18700", "sglang #28805", "tokenspeed #1613"),
    27: ("TensorRT-LLM #12358", "sglang #31378", "vllm #32634"),
    29: ("mlx-vlm #1917",),
    30: ("vllm #57986",),
    31: ("vllm #32557", "TensorRT-LLM #15706"),
}
ELSEWHERE: dict[int, tuple[tuple[str, ...], str, str]] = {
    20: (
        ("vllm #9453", "TRL #4163", "vllm #47680"),
        "tests/test_speculation_lossless.py",
        "test_logprobs_are_the_models_own",
    ),
    21: (
        ("llama.cpp #7125", "llama.cpp #10783"),
        "tests/test_speculation_lossless.py",
        "test_logprobs_are_the_models_own",
    ),
    22: (("sglang #4097", "vllm #10234", "sonar #183"), "tests/test_prompt_logprobs.py", "test_json_has_no_infinity"),
    23: (
        ("vllm #3574", "vllm #3672", "mlx-knife #68"),
        "framework/tests/test_text_stop.py",
        "test_every_chunking_gives_the_brute_force_cut",
    ),
    24: (("smg #2203",), "framework/tests/test_text_stop.py", "test_nothing_is_held_beyond_a_possible_stop"),
    25: (
        ("exllamav3 #171", "exo #1691", "mlx-vlm #1778"),
        "framework/tests/test_text_detokenizer.py",
        "test_streamed_text_equals_full_decode",
    ),
    26: (
        ("vllm #4589", "mlx-vlm #2112"),
        "framework/tests/test_text_eos_and_load.py",
        "test_eos_is_the_union_of_all_sources",
    ),
    28: (
        ("vllm #16529", "sglang #7670"),
        "tests/test_token_ids_of_requests.py",
        "test_an_id_outside_the_vocabulary_is_refused_by_name",
    ),
    32: (("vllm #8268", "vllm #42245"), "tests/test_prompt_logprobs.py", "test_a_cached_prefix_is_computed_again"),
}
WITHOUT_COUNTERPART: dict[int, tuple[tuple[str, ...], str]] = {
    19: (("sglang #15481",), "no endpoint: the library's params are the only surface")
}


def docstrings(file: Path) -> dict[str, str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: ast.get_docstring(node) or "" for node in functions}


def test_none_was_forgotten() -> None:
    """Numbered in the order in which they were collected."""
    assert sorted([*REPORTS, *ELSEWHERE, *WITHOUT_COUNTERPART]) == list(range(1, 33))


def test_every_report_is_named_by_a_test_here() -> None:
    named: set[str] = set()
    for text in docstrings(Path(__file__).parent / "test_sampling_reports.py").values():
        named |= set(re.findall(r"[\w.-]+(?: Speech)? #\d+", text))
    assert named == {report for reports in REPORTS.values() for report in reports}


def test_those_elsewhere_are_there() -> None:
    for _, path, name in ELSEWHERE.values():
        assert name in docstrings(ROOT / path), path
