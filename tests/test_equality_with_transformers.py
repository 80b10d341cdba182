"""Real models in float32, greedy: token ids and logits equal those of transformers on the same GGUF file.

transformers reads and dequantises the file by itself. It is run once over prompt + our tokens: if its argmax at every
position is our next token, its own greedy decoding gives our tokens (by induction over positions).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.kernel.errors import CheckpointError
from pluglm.weights.resolve import resolve_model

NUM_TOKENS = 64
MAX_LOGIT_DIFFERENCE = 2e-4
STORY = "The lighthouse keeper climbed the stairs every evening, counted the ships on the horizon and wrote them down. "
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "languages": ["',
    "<html>\n  <body>\n    <h1>",
    "人工智能的未来是",
    "今天天气很好,我们去",
    "I love pizza 🍕 and 🎉🎉 because",
    "👩‍👩‍👧‍👦 means",
    " ",
    "\n",
    ".",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    STORY * 45,
)


def record_rows(engine: Engine) -> dict[tuple[int, ...], dict[int, torch.Tensor]]:
    """Prompt -> output position -> logits, as the sampler gets them."""
    rows: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
    drawer: Any = engine._core._drawer
    original: Callable[..., Any] = drawer.draw

    def draw(logits_RV: torch.Tensor, windows: Any) -> Any:
        for row, window in enumerate(windows):
            request = window.sequence.request
            rows.setdefault(request.prompt_token_ids, {})[window.sequence.num_output] = logits_RV[row].clone()
        return original(logits_RV, windows)

    drawer.draw = draw
    return rows


def peer_of(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def check_equality(name: str) -> None:
    path = resolve_model(name)
    config = RunConfig.from_dict(
        {"model": {"path": str(path), "dtype": "float32", "max_model_len": 1100}, "backend": "cpu"}
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with Engine.from_config(config) as engine:
        rows = record_rows(engine)
        outputs = engine.generate(list(PROMPTS), params)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    assert max(len(output.prompt_token_ids) for output in outputs) >= 900
    peer, worst = peer_of(path), 0.0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = output.prompt_token_ids + output.token_ids
        start = len(output.prompt_token_ids) - 1
        with torch.inference_mode():
            logits_SV = peer(torch.tensor([ids[:-1]])).logits[0, start:]
        assert logits_SV.argmax(-1).tolist() == output.token_ids, f"tokens differ for {prompt[:40]!r}"
        ours = rows[tuple(output.prompt_token_ids)]
        worst = max(worst, *(float((ours[i] - logits_SV[i]).abs().max()) for i in range(NUM_TOKENS)))
    print(f"{name}: {len(PROMPTS)} prompts x {NUM_TOKENS} tokens equal, largest logit difference {worst:.2e}")
    assert worst < MAX_LOGIT_DIFFERENCE


def test_smollm2_equals_transformers() -> None:
    check_equality("smollm2-135m-instruct")


@pytest.mark.slow
def test_gemma_3_270m_equals_transformers() -> None:
    try:
        resolve_model("gemma-3-270m")
    except CheckpointError as error:
        pytest.skip(str(error))
    check_equality("gemma-3-270m")
