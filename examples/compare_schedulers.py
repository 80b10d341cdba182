"""Scheduling policies beside each other on the fake backend, whose clock is virtual: the numbers repeat exactly.

    python examples/compare_schedulers.py [NAME ...]

Forty requests arrive one a step at an engine with four seats: every fourth is long and of low priority, the others
are short and urgent. Printed: mean virtual seconds to the first token and to the end, for both sorts.
"""

from __future__ import annotations

import statistics
import sys

from pluglm import Engine, RequestOutput, RunConfig, SamplingParams

NUM_REQUESTS = 40
BASE = {
    "model": {"path": "smollm2-135m-instruct"},  # only its shape and tokenizer are read
    "backend": {"use": "fake", "step_base_s": 0.01, "token_s": 0.0001},
    "engine": {"max_num_seqs": 4, "max_step_tokens": 64},
}


def play(scheduler: str) -> dict[str, list[RequestOutput]]:
    """Runs the whole scene under one policy; the finished requests by sort."""
    outputs: dict[str, list[RequestOutput]] = {"short": [], "long": []}
    with Engine.from_config(RunConfig.from_dict({**BASE, "scheduler": scheduler})) as engine:
        for index in range(NUM_REQUESTS):
            sort, length, limit = ("long", 96, 64) if index % 4 == 0 else ("short", 16, 8)
            params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
            prompt = {"prompt_token_ids": [1 + index] * length}
            request_id = engine.submit(prompt, params, priority=1 if sort == "long" else 0)
            outputs[sort].append(RequestOutput(request_id, prompt["prompt_token_ids"]))
            engine.step()
        for output in (*outputs["short"], *outputs["long"]):
            for event in engine.events(output.request_id):
                output.add(event)
    return outputs


def main() -> None:
    print(f"{'policy':12} {'requests':8} {'first token':>12} {'finished':>9}")
    for scheduler in sys.argv[1:] or ["fcfs", "priority"]:
        for sort, outputs in play(scheduler).items():
            metrics = [output.metrics for output in outputs if output.metrics is not None]
            first = statistics.mean(one.ttft_s for one in metrics if one.ttft_s is not None)
            end = statistics.mean(one.finished_s - one.arrival_s for one in metrics)
            print(f"{scheduler:12} {sort:8} {first:10.3f} s {end:7.3f} s")


if __name__ == "__main__":
    main()
