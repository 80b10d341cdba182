"""What drafters gain: tokens per step of the target and decode speed beside plain decoding, eight steps each in turn.

    python benchmarks/speculation.py [--threads 2] [--rounds 3] [--batches 1 8] [--drafters NAME ...] [--kinds NAME ...]
                                     [--prompts held-out] [--new-tokens 128] [--record FILE.json]

The default model in bfloat16, greedy, on prompts of four kinds: those that adaptive lengths were tuned on
(speculation_tasks.py), or others (speculation_held_out.py). One process has an engine for each drafter. All of them
answer a prompt before the next one comes, a few steps each in turn, since a shared machine is slower at one moment than
at another; so a model's weights leave the cache between turns, for all alike. A batch of 8 has the prompts of one kind
in turn, two for each seat, and the next one comes when a text ends. A figure is of the steps in which every seat goes
on with a text: none computes a prompt, and none is empty, as seats are at the end, where texts of speculation end one
by one and those of plain decoding together. Tokens per step count one step of one sequence, the token behind the drafts
included; speed is tokens per second over that of plain decoding in the same round, and the median of the rounds. Prints
both beside what is aimed at, and writes a JSON record. How often the first draft of a step was kept, the second, and so
on, is of whole texts, so of more steps.

`suffix` keeps no past outputs here, since each prompt comes again in every round. `draft_model` and `universal` draft
with the weights of the target, for want of a smaller model: they show what is kept of good drafts, what encoding anew
costs, and that a drafter that cannot pay is switched off. `self_layers` drafts with 24 of its 30 layers, which were not
trained for early exits. Heads are those of draft_heads.py; without them they are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from command_line import parser_of, surroundings, whole, write_record
from rich.console import Console
from rich.table import Table
from speculation_held_out import HELD_OUT
from speculation_tasks import KINDS, Kind

from pluglm import Engine, SamplingParams
from pluglm.prompts import prompt_token_ids
from pluglm.verification.counts import SpeculationCounts

MODEL = "smollm2-135m-instruct"
HEADS = Path(".bench/heads")  # where draft_heads.py leaves them
EAGLE = {"use": "eagle_head", "model": str(HEADS / "eagle"), "num_tokens": 2}
MTP = {"use": "mtp_head", "model": str(HEADS / "mtp"), "num_tokens": 2}
PLAIN = "none"
DRAFTERS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "ngram": {"use": "ngram", "num_tokens": 8},
    "ngram, adaptive": {"use": "ngram", "num_tokens": 8, "adaptive": True},
    "suffix": {"use": "suffix", "shared_tokens": 0},
    "suffix, adaptive": {"use": "suffix", "shared_tokens": 0, "adaptive": True},
    "self_layers": {"use": "self_layers", "num_layers": 24, "num_tokens": 2},
    "self_layers, adaptive": {"use": "self_layers", "num_layers": 24, "num_tokens": 2, "adaptive": True},
    "draft_model": {"use": "draft_model", "model": MODEL, "num_tokens": 4},
    "draft_model, adaptive": {"use": "draft_model", "model": MODEL, "num_tokens": 4, "adaptive": True},
    "universal": {"use": "universal", "model": MODEL, "num_tokens": 4},
    "universal, adaptive": {"use": "universal", "model": MODEL, "num_tokens": 4, "adaptive": True},
    "eagle_head": EAGLE,
    "eagle_head, adaptive": EAGLE | {"adaptive": True},
    "mtp_head": MTP,
    "mtp_head, adaptive": MTP | {"adaptive": True},
}
PROMPTS = {"tuned-on": KINDS, "held-out": HELD_OUT}
LEAST_TOKENS, LEAST_SPEED, LEAST_ELSEWHERE = 1.8, 1.3, 0.97
KV_MEMORY = 256 << 20
PROMPTS_PER_SEAT = 2  # in batches
BLOCK = 8  # steps of one contender, before it is another's turn


class Decoded(NamedTuple):
    """Steps in which every seat went on with a text. sequence_steps: of each sequence, those that gave it tokens.

    speculation: what became of the drafts of whole texts.
    """

    num_tokens: int
    sequence_steps: int
    seconds: float
    speculation: SpeculationCounts

    @classmethod
    def total(cls, parts: list[Decoded]) -> Decoded:
        return cls(
            sum(one.num_tokens for one in parts),
            sum(one.sequence_steps for one in parts),
            sum(one.seconds for one in parts),
            sum((one.speculation for one in parts), SpeculationCounts()),
        )


class Contender:
    """An engine with one drafter."""

    def __init__(self, drafter: dict[str, Any] | None, batch: int, threads: int) -> None:
        limits = {"max_num_seqs": batch, "kv_memory": KV_MEMORY, "num_threads": threads}
        model = {"path": MODEL, "dtype": "bfloat16"}
        self._batch = batch
        self._engine = Engine.from_config({"model": model, "drafter": drafter, "kv": "paged", "engine": limits})
        self._num_calls = 0

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Generator[None, None, Decoded]:
        """Pauses every BLOCK steps. Raises RuntimeError when a request ends with an error."""
        self._num_calls += 1
        core = self._engine.core
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
        for place, prompt in enumerate(prompts):
            core.add(f"{self._num_calls}-{place}", prompt, params)
        num_tokens, sequence_steps, seconds, speculation = 0, 0, 0.0, SpeculationCounts()
        going_on: set[str] = set()
        for number in count(1):
            started = time.perf_counter()
            events = core.step()
            took = time.perf_counter() - started
            if errors := [event.error for event in events if event.error]:
                raise RuntimeError(errors[0])
            speculation = sum((event.metrics.speculation for event in events if event.metrics), speculation)
            if len(going_on) == self._batch:
                seconds += took
                num_tokens += sum(len(event.token_ids) for event in events)
                sequence_steps += sum(bool(event.token_ids) for event in events)
            going_on |= {event.request_id for event in events if event.token_ids}
            going_on &= core.roster.requests.keys()
            if not core.roster.requests:
                break
            if number % BLOCK == 0:
                yield
        return Decoded(num_tokens, sequence_steps, seconds, speculation)

    def encode(self, text: str) -> list[int]:
        """A chat with one message of the user's."""
        return list(prompt_token_ids([{"role": "user", "content": text}], self._engine.tokenizer))

    def close(self) -> None:
        self._engine.close()


def batches_of(kind: Kind, batch: int) -> list[list[str]]:
    """One batch for each prompt when they come alone, else one of all, in turn until every seat has had enough."""
    if batch == 1:
        return [[prompt] for prompt in kind.prompts]
    return [list(islice(cycle(kind.prompts), batch * PROMPTS_PER_SEAT))]


def in_turn(decodings: dict[str, Generator[None, None, Decoded]]) -> dict[str, Decoded]:
    """All of them to their end, a block of steps each in turn.

    Never there and back: who has two blocks in a row finds the model's weights in the cache for the second one.
    """
    done: dict[str, Decoded] = {}
    while len(done) < len(decodings):
        for name in [name for name in decodings if name not in done]:
            try:
                next(decodings[name])
            except StopIteration as stop:
                done[name] = stop.value
    return done


def measure(
    kinds: list[Kind], names: list[str], batch: int, options: argparse.Namespace
) -> dict[str, dict[str, list[Decoded]]]:
    """kind -> drafter -> one figure a round, of all the kind's prompts."""
    rounds: dict[str, dict[str, list[Decoded]]] = {kind.name: {name: [] for name in names} for kind in kinds}
    with ExitStack() as stack:
        contenders = {
            name: stack.enter_context(closing(Contender(DRAFTERS[name], batch, options.threads))) for name in names
        }
        encode = contenders[PLAIN].encode
        in_turn({name: one.decode([encode("Hello")] * batch, 16) for name, one in contenders.items()})
        for _ in range(options.rounds):
            for kind in kinds:
                parts: dict[str, list[Decoded]] = {name: [] for name in names}
                for prompts in batches_of(kind, batch):
                    token_ids = [encode(prompt) for prompt in prompts]
                    decodings = {name: one.decode(token_ids, options.new_tokens) for name, one in contenders.items()}
                    for name, decoded in in_turn(decodings).items():
                        parts[name].append(decoded)
                for name, some in parts.items():
                    rounds[kind.name][name].append(Decoded.total(some))
    return rounds


def summary(kind: Kind, batch: int, name: str, mine: list[Decoded], plain: list[Decoded]) -> dict[str, Any]:
    speeds = [
        (one.num_tokens / one.seconds) / (base.num_tokens / base.seconds) for one, base in zip(mine, plain, strict=True)
    ]
    total = Decoded.total(mine)
    return {
        "batch": batch,
        "kind": kind.name,
        "copies": kind.copies,
        "drafter": name,
        "tokens_per_step": total.num_tokens / total.sequence_steps,
        "tokens_per_second": statistics.median(one.num_tokens / one.seconds for one in mine),
        "speed": statistics.median(speeds),
        "speeds": speeds,
        "speculation": total.speculation.to_json(),
        "rounds": [one._asdict() | {"speculation": one.speculation.to_json()} for one in mine],
    }


def aim(result: dict[str, Any]) -> str:
    """What the drafters that need no model are to reach: all of them where text is copied, adaptive ones elsewhere."""
    if result["copies"] and result["drafter"].startswith(("ngram", "suffix")):
        is_met = result["tokens_per_step"] >= LEAST_TOKENS and result["speed"] >= LEAST_SPEED
        return f"{LEAST_TOKENS} tokens, {LEAST_SPEED}: {'met' if is_met else 'MISSED'}"
    if not result["copies"] and "adaptive" in result["drafter"]:
        return f"{LEAST_ELSEWHERE}: {'met' if result['speed'] >= LEAST_ELSEWHERE else 'MISSED'}"
    return ""


def is_there(name: str) -> bool:
    """False, and said, for a head that was not trained yet."""
    model = Path((DRAFTERS[name] or {}).get("model", ""))
    if model.parent == HEADS and not model.is_dir():
        print(f"{name} is left out: there is no {model}; benchmarks/draft_heads.py trains it")
        return False
    return True


def show(results: list[dict[str, Any]], console: Console) -> None:
    for batch in dict.fromkeys(result["batch"] for result in results):
        table = Table(title=f"batch {batch}", title_justify="left")
        for column in ("kind", "drafter", "tokens/step", "tokens/s", "speed", "of rounds", "aim"):
            table.add_column(column, justify="left" if column in ("kind", "drafter", "aim") else "right")
        for result in (one for one in results if one["batch"] == batch):
            low, high = min(result["speeds"]), max(result["speeds"])
            table.add_row(
                result["kind"],
                result["drafter"],
                f"{result['tokens_per_step']:.2f}",
                f"{result['tokens_per_second']:.1f}",
                f"{result['speed']:.2f}",
                f"{low:.2f} to {high:.2f}",
                aim(result),
            )
        console.print(table)
        show_acceptance([one for one in results if one["batch"] == batch], console)


def show_acceptance(results: list[dict[str, Any]], console: Console) -> None:
    """Of one batch size: percent of drafts kept, by their place in a step."""
    table = Table(title="drafts kept", title_justify="left")
    for column in ("kind", "drafter", "a step", "% of the first, the second, ..."):
        table.add_column(column, justify="right" if column == "a step" else "left")
    for result in results:
        if shares := result["speculation"]["acceptance_by_position"]:
            cells = " ".join(f"{share * 100:.0f}" for share in shares)
            table.add_row(result["kind"], result["drafter"], f"{result['speculation']['accepted_per_step']:.2f}", cells)
    if table.row_count:
        console.print(table)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "speculation.json")
    parser.add_argument("--threads", type=whole, default=2)
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--batches", type=whole, nargs="+", default=[1, 8])
    parser.add_argument("--drafters", nargs="+", choices=list(DRAFTERS), default=list(DRAFTERS), metavar="NAME")
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=None, metavar="NAME")
    parser.add_argument("--prompts", choices=list(PROMPTS), default="held-out")
    parser.add_argument("--new-tokens", type=whole, default=128)
    return parser.parse_args()


def main() -> None:
    options = parse()
    kinds = [kind for kind in PROMPTS[options.prompts] if options.kinds is None or kind.name in options.kinds]
    names = [name for name in DRAFTERS if name == PLAIN or (name in options.drafters and is_there(name))]
    results: list[dict[str, Any]] = []
    for batch in options.batches:
        rounds = measure(kinds, names, batch, options)
        results += [
            summary(kind, batch, name, rounds[kind.name][name], rounds[kind.name][PLAIN])
            for kind in kinds
            for name in names
        ]
    show(results, Console(width=None if Console().is_terminal else 140))
    record = {
        "benchmark": "speculation",
        "model": MODEL,
        "threads": options.threads,
        "rounds": options.rounds,
        "new_tokens": options.new_tokens,
        "prompts": options.prompts,
        "drafters": {name: DRAFTERS[name] for name in names},
        "aims": {"tokens_per_step": LEAST_TOKENS, "speed": LEAST_SPEED, "speed_elsewhere": LEAST_ELSEWHERE},
        **surroundings(),
        "results": results,
    }
    write_record(options.record, record)


if __name__ == "__main__":
    main()
