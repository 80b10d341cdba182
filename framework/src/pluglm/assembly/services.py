"""The standard services: text and weights of this framework, handed to the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pluglm.kernel.interfaces.services import Services, TextStream, TokenizerView
from pluglm.text.eos import eos_token_ids
from pluglm.text.load import load_tokenizer
from pluglm.text.stream import TextStream as PlainTextStream
from pluglm.weights.open import open_checkpoint
from pluglm.weights.resolve import resolve_model

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.checkpoint import Checkpoint
    from pluglm.kernel.sampling_params import SamplingParams


def default_services() -> Services:
    return Services(
        resolve_model=lambda name, revision, progress: resolve_model(name, revision=revision, progress=progress),
        open_checkpoint=open_checkpoint,
        load_tokenizer=load_tokenizer,
        eos_token_ids=_eos,
        text_stream=_stream,
    )


def _eos(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    return eos_token_ids(checkpoint.config, checkpoint.generation_config, tokenizer)


def _stream(tokenizer: TokenizerView, params: SamplingParams) -> TextStream:
    text: Any = tokenizer
    return PlainTextStream(
        text,
        stop=params.stop,
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
    )
