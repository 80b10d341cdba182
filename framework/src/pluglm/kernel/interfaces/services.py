"""What the kernel is handed from outside instead of importing it: text, weights, hooks, tiers, and a second model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.core import Chunk, ModelInput
    from pluglm.kernel.engine import EngineCore
    from pluglm.kernel.interfaces.checkpoint import Checkpoint
    from pluglm.kernel.interfaces.component import ComponentConfig
    from pluglm.kernel.interfaces.kv import KVManager
    from pluglm.kernel.interfaces.model import ModelSpec
    from pluglm.kernel.sampling_params import SamplingParams

Progress = Callable[[str, int, int], None]  # (what, done, total)


class TextDelta(NamedTuple):
    """New text that is safe to show, and the stop string that the last token completed, if any."""

    text: str
    stopped: str | None = None


class TextStream(Protocol):
    """Turns one request's output tokens into text. Pushed once per token, in order."""

    def push(self, token_id: int) -> TextDelta: ...

    def finish(self) -> str:
        """Text still held back; called once, at the end."""
        ...


class TokenizerView(Protocol):
    """What components may use of the tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]:
        """Ids as the model was trained on them, special tokens of the tokenizer's own added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        ...

    def to_json(self) -> str:
        """The tokenizer in the JSON form of the `tokenizers` library."""
        ...


class Runner(Protocol):
    """A loaded model with its own KV and attention, for components that bring a second model.

    spec, kv: of that model. run: hidden states for every row are computed and their KV stored; returns logits_RV of
    `inputs.logit_rows_R`. make_input: a flat batch with logits for the last token of each chunk.
    """

    spec: ModelSpec
    kv: KVManager

    def make_input(self, chunks: Sequence[Chunk]) -> ModelInput: ...

    def run(self, inputs: ModelInput) -> torch.Tensor: ...


class HookCalls(Protocol):
    """Calls the hook of this name in every registered plugin; never raises."""

    def call(self, hook: str, **arguments: object) -> None: ...


class Tiers(Protocol):
    """KV memory beside the device's. Each call sees the engine between two of its own acts, and never raises.

    counts: by tier, what became of its blocks.
    """

    @property
    def counts(self) -> Mapping[str, object]: ...

    def before_plan(self, engine: EngineCore) -> None:
        """Loads for waiting sequences; those whose KV is on its way are held out of the plan."""
        ...

    def after_commit(self, engine: EngineCore) -> None:
        """Evicted blocks still have their content: what they hold is written over next."""
        ...

    def after_step(self, engine: EngineCore, num_tokens: list[int]) -> None:
        """That many of each sequence were computed since after_commit."""
        ...

    def reset(self, engine: EngineCore) -> None:
        """Forget every block, also those on their way."""
        ...

    def close(self, engine: EngineCore) -> None:
        """The run is over: give up what is on its way, and let go of the tiers."""
        ...


class ComponentResolver(Protocol):
    """(kind, name, options) -> the class, checked, and its validated config. Raises PluginError or ConfigError."""

    def __call__(self, kind: str, name: str, options: Mapping[str, Any]) -> tuple[type[Any], ComponentConfig]: ...


class RunnerFactory(Protocol):
    """model -> a Runner for another checkpoint on the same backend, attention and dtype, and its tokenizer."""

    def __call__(self, model: str) -> tuple[Runner, TokenizerView]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The outside world of the kernel. Written by the public Engine, read by the wiring."""

    resolve_model: Callable[[str, str | None, Progress], Path]
    open_checkpoint: Callable[[Path], Checkpoint]
    load_tokenizer: Callable[[Checkpoint], TokenizerView]
    eos_token_ids: Callable[[Checkpoint, TokenizerView], frozenset[int]]
    text_stream: Callable[[TokenizerView, SamplingParams], TextStream]
