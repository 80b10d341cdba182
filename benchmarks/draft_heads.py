"""Trains draft heads for the default model on the spot, for benchmarks/speculation.py: small ones, on little text.

    python benchmarks/draft_heads.py [--texts 256] [--new-tokens 80] [--epochs 6] [--kinds eagle mtp]
                                     [--to .bench/heads]

The model answers prompts made of tasks and subjects (none of them a prompt of the benchmark), greedily and in bfloat16;
heads learn from the hidden states of these answers, in float32. Some ten minutes on two cores. A head that is to serve
people needs a hundred times the text; what these two gain is a lower bound.
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

import torch
from command_line import whole
from rich.progress import Progress

from pluglm import SamplingParams
from pluglm_spec_decode.heads.collecting import Trace, collect_traces
from pluglm_spec_decode.heads.distilling import distill
from pluglm_spec_decode.heads.module import DraftHead
from pluglm_spec_decode.heads.settings import head_config
from pluglm_spec_decode.heads.teacher import Teacher, load_teacher

MODEL = "smollm2-135m-instruct"
BLOCKS = {"eagle": 1, "mtp": 2}
TASKS = (
    "Explain in a few sentences what {} is.",
    "Write three rules for dealing with {}.",
    "Tell a short story in which {} plays a part.",
    "What are common mistakes with {}?",
    "Give me five tips about {}.",
    "Write a letter to a friend about {}.",
    "Translate into French: I have always been interested in {}.",
    "Translate into German: Nobody in our family knows much about {}.",
    "Write a Python function that prints a line about {}.",
    "Summarize what beginners should know about {}.",
)
SUBJECTS = (
    "gardening", "chess", "the moon", "public transport", "coffee", "photography", "bees", "volcanoes",
    "old furniture", "cycling", "recipes", "winter", "swimming", "maps", "music lessons", "trees", "the weather",
    "job interviews", "stamps", "sleep", "birthday parties", "computers", "rivers", "painting", "football",
    "languages", "travelling by train", "cats", "money", "museums", "fishing", "bread", "camping", "exams", "dancing",
    "history", "electric cars", "libraries", "tea", "insects",
)  # fmt: skip


def prompts(number: int) -> list[list[dict[str, str]]]:
    made = [task.format(subject) for task, subject in itertools.product(TASKS, SUBJECTS)]
    random.Random(0).shuffle(made)
    return [[{"role": "user", "content": text}] for text in made[:number]]


def collect(number: int, new_tokens: int) -> list[Trace]:
    run = {"model": {"path": MODEL, "dtype": "bfloat16"}, "kv": "paged", "engine": {"max_num_seqs": 32}}
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, repetition_penalty=1.1)
    traces, asked, batch = list[Trace](), prompts(number), 32
    with Progress() as progress:
        bar = progress.add_task("answers", total=len(asked))
        for start in range(0, len(asked), batch):
            traces += collect_traces(run, asked[start : start + batch], params)
            progress.update(bar, completed=len(traces))
    return traces


def train(kind: str, traces: list[Trace], teacher: Teacher, num_epochs: int) -> DraftHead:
    torch.manual_seed(0)
    head = DraftHead(head_config(kind, teacher.spec, num_blocks=BLOCKS[kind], intermediate_size=1536))
    with Progress(*Progress.get_default_columns(), "{task.fields[loss]}") as progress:
        bar = progress.add_task(kind, total=num_epochs, loss="")

        def report(epoch: int, _: int, loss: float) -> None:
            progress.update(bar, completed=epoch, loss=f"loss {loss:.3f}")

        distill(head, traces, teacher, num_epochs=num_epochs, learning_rate=5e-4, report=report)
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=whole, default=256)
    parser.add_argument("--new-tokens", type=whole, default=80)
    parser.add_argument("--epochs", type=whole, default=6)
    parser.add_argument("--kinds", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--to", type=Path, default=Path(".bench/heads"))
    options = parser.parse_args()
    traces, teacher = collect(options.texts, options.new_tokens), load_teacher(MODEL)
    print(f"{sum(len(trace.token_ids) for trace in traces)} tokens of {len(traces)} texts")
    for kind in options.kinds:
        train(kind, traces, teacher, options.epochs).save(options.to / kind)
        print(f"head: {options.to / kind}")


if __name__ == "__main__":
    main()
