"""One prompt's result as the JSON object that `pluglm run` writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pluglm.cli.jobs import Job
from pluglm.kernel.core import RequestMetrics
from pluglm.outputs import Completion, RequestOutput, logprobs_json


def result_json(index: int, job: Job, output: RequestOutput) -> dict[str, Any]:
    """index counts from 0; times are seconds on the backend's clock.

    `id`, `logprobs` and `prompt_logprobs` only when asked for; `completions`, with all outputs, when more than one was.
    """
    result: dict[str, Any] = {"index": index}
    if job.label is not None:
        result["id"] = job.label
    result |= {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop": output.stop,
        "error": output.error,
        "seed": job.params.seed,
        "metrics": _metrics_json(output.metrics),
    }
    if job.params.logprobs is not None:
        result["logprobs"] = logprobs_json(output.logprobs)
    if job.params.prompt_logprobs is not None:
        result["prompt_logprobs"] = logprobs_json(output.prompt_logprobs)
    if job.params.n > 1:
        result["completions"] = [_completion_json(job, one) for one in output.completions]
    return result


def _completion_json(job: Job, completion: Completion) -> dict[str, Any]:
    result = asdict(completion)
    result["logprobs"] = logprobs_json(completion.logprobs)
    if job.params.logprobs is None:
        del result["logprobs"]
    return result


def _metrics_json(metrics: RequestMetrics | None) -> dict[str, Any] | None:
    if metrics is None:
        return None
    return {
        "num_prompt_tokens": metrics.num_prompt_tokens,
        "num_output_tokens": metrics.num_output_tokens,
        "ttft_s": metrics.ttft_s,
        "tpot_s": metrics.tpot_s,
        "total_s": metrics.finished_s - metrics.arrival_s,
        "num_preemptions": metrics.num_preemptions,
        "num_drafted": metrics.num_drafted,
        "num_accepted": metrics.num_accepted,
        "speculation": metrics.speculation.to_json(),
        "num_cached_tokens": metrics.num_cached_tokens,
        "num_loaded_tokens": metrics.num_loaded_tokens,
        "num_recomputed_tokens": metrics.num_recomputed_tokens,
    }
