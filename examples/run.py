"""The library in one page: load a config, swap one component, stream one answer, generate several."""

from __future__ import annotations

from pathlib import Path

from pluglm import Engine, RunConfig, SamplingParams
from pluglm.outputs import Message, Prompt

CONFIG = Path(__file__).parents[1] / "configs/quickstart.yaml"


def main() -> None:
    config = RunConfig.from_file(CONFIG, overrides={"attention.use": "naive"})
    with Engine.from_config(config) as engine:
        question: list[Message] = [{"role": "user", "content": "Name three primary colours."}]  # by the chat template
        for chunk in engine.stream(question, SamplingParams(temperature=0.0, max_tokens=24)):
            print(chunk.text, end="", flush=True)
        print()

        ids = engine.tokenizer.encode("The capital of France is")
        prompts: list[Prompt] = ["Once upon a time", {"prompt_token_ids": ids}, ""]  # the last one alone is refused
        for output in engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12)):
            print(f"{output.finish_reason:8} {output.error or output.text!r}")
            if output.metrics is not None:
                print(f"{'':8} {output.metrics.num_output_tokens} tokens, first after {output.metrics.ttft_s:.3f} s")


if __name__ == "__main__":
    main()
