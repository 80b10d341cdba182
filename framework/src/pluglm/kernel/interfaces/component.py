"""What every plug-in component has in common: a config model, an interface version and declared capabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from pluglm.kernel.interfaces.kernels import KernelLog

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.kv_format import KVFormat
    from pluglm.kernel.interfaces.model import ModelSpec
    from pluglm.kernel.interfaces.services import ComponentResolver, RunnerFactory, TokenizerView
    from pluglm.kernel.interfaces.target import Target


BATCH_INVARIANT = "numerics:batch_invariant"  # a row's bits depend on its own sequence only
DETERMINISTIC = "run:deterministic"  # provided by the run when the config asks for it
ATTENTION_UNUSED = "attention:unused"  # the backend never calls the attention
KV_FORMATS = "attention:kv_formats"  # the attention reads and writes KV in context.kv_format
LAYER_GROUPS = "kv:layer_groups"  # the backend reads ModelInput.groups and KVLayout.groups


class ComponentConfig(BaseModel):
    """Base of a component's own config model. Frozen and strict about unknown keys; subclass it beside the class."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a component offers, needs and cannot stand, as tags; the kernel accepts or refuses the combination at start.

    A tag is free text of the form `kind:value`, such as `numerics:batch_invariant`. Every filled slot provides
    `slot:NAME` (`slot:drafter`) by itself, and the run provides `run:deterministic` when the config asks for it, and
    `verification:RULE`.
    needs, refuses: tag -> the reason in words, which the user reads when the combination is refused.
    """

    provides: frozenset[str] = frozenset()
    needs: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a component may know of the run it is built for. Written by the kernel before weights load its tensors.

    device, dtype: torch names ("cpu", "float32"); kv_bytes: bytes that the KV cache may take; bytes_per_token: KV bytes
    of one token over all layers; target: what a drafter may use of the model, None for parts of a second one;
    kv_format: how KV is stored, None is in dtype; kernels: where a component records which kernels it chose; tools: the
    backend's, of its own type, None when it has none (see interfaces.kernels). A drafter that needs a model of its own
    builds it with `build_runner`; a component with small components of its own (a chain of logits steps) finds them
    with `resolve_component`.
    """

    spec: ModelSpec
    device: str
    dtype: str
    deterministic: bool
    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    kv_bytes: int
    bytes_per_token: int
    tokenizer: TokenizerView
    eos_token_ids: frozenset[int]
    build_runner: RunnerFactory
    resolve_component: ComponentResolver
    target: Target | None = None
    kv_format: KVFormat | None = None
    kernels: KernelLog = field(default_factory=KernelLog)
    tools: Any = None


@runtime_checkable
class ComponentUser(Protocol):
    """Optional ability: (kind, name, options) of each small component that it resolves, to be checked up front."""

    @classmethod
    def uses(cls, config: Any) -> Sequence[tuple[str, str, Mapping[str, Any]]]: ...


class Component(Protocol):
    """Base of the contracts. A component class is built as `cls(config, context)`; building may raise PluglmError."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    interface_version: ClassVar[int]

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        """Tags for this config. Called before anything is built; must not touch a device."""
        return Capabilities()
