"""Builds a resolved run: backend, checkpoint, then every component, then the weights, then KV memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from pluglm.ahead.choice import plans_ahead
from pluglm.ahead.kv import AheadKV
from pluglm.ahead.planning import AheadPlanning
from pluglm.assembly.checked_attention import CheckedAttention
from pluglm.assembly.checked_format import CheckedFormat, require_rows
from pluglm.assembly.hook_calls import HookCaller
from pluglm.assembly.locating import locate
from pluglm.assembly.memory_plan import MemoryPlan, PlanShown, unseen
from pluglm.assembly.memory_planning import MemoryPlanner, PlannedModel, most_drafts
from pluglm.assembly.named_files import check_files
from pluglm.assembly.namespace import KVIdentity
from pluglm.assembly.registry import list_entries, load
from pluglm.assembly.resolving import ResolvedRun, capabilities_of
from pluglm.assembly.validation import validate
from pluglm.branching.planning import BranchPlanning
from pluglm.kernel.cache_keys import namespace
from pluglm.kernel.core import Budget
from pluglm.kernel.errors import CheckpointError, ConfigError, PluginError
from pluglm.kernel.guard import Guard, Watched
from pluglm.kernel.interfaces.backend import Backend, BackendContext
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.component import BuildContext, ComponentConfig
from pluglm.kernel.interfaces.kernels import KernelLog, KernelReport, ToolOwner
from pluglm.kernel.interfaces.kv import KVLayout, KVStore, PrefixCache
from pluglm.kernel.interfaces.kv_format import FormatBackend, KVFormat, token_bytes
from pluglm.kernel.interfaces.kv_tier import PERSISTENT
from pluglm.kernel.interfaces.model import LinearFactory, Model, ModelSpec
from pluglm.kernel.interfaces.quantizer import Quantizer
from pluglm.kernel.interfaces.services import Progress, Runner, Services, TokenizerView
from pluglm.kernel.parts import Limits, Parts, Tiers
from pluglm.kernel.planner import PolicyScheduler
from pluglm.kernel.planning import Planning
from pluglm.kernel.runner import ModelRunner
from pluglm.kv.no_tiers import NoTiers
from pluglm.kv.tiering import KVTiers
from pluglm.target.access import LendingDrafter, TargetAccess
from pluglm.target.hidden import RecordingRunner

KV_SHARE = 4  # the KV cache takes at most one part in this many of the free memory, unless the config says more


def build(run: ResolvedRun, services: Services, progress: Progress, planned: PlanShown = unseen) -> Parts:
    """The engine's parts. Every component is built before weights are read; nothing is kept when a stage raises.

    planned: shown the memory plan of the model before its weights are read, where there is one.
    """
    check_files(run)
    builder = _Builder(run, services, progress, planned)
    try:
        return builder.build()
    except BaseException:
        builder.guard.close()
        raise


class _Builder:
    def __init__(self, run: ResolvedRun, services: Services, progress: Progress, planned: PlanShown) -> None:
        self._run, self._services, self._progress, self._planned = run, services, progress, planned
        self._slots, self._config = run.slots, run.config
        self.guard = Guard(run.config.engine.plugin_timeout_s)
        self._names = run.names
        self._is_ahead = False

    def build(self) -> Parts:
        hooks = HookCaller({name: hook.build() for name, hook in self._run.hooks.items()}, self.guard)
        backend = self._backend()
        self._kv_format = self._built_format(backend)
        quantizer = self._quantizer(backend)
        make_linear: LinearFactory | None = None if quantizer is None else quantizer.make_linear
        self._memory = MemoryPlanner(backend, most_drafts(self._slots.get("drafter")))
        checkpoint = self._open(self._config.model.path, self._config.model.revision)
        try:
            family = self._family(checkpoint, self._config.model.family)
            spec = family.read_spec(checkpoint.config)
            identity = KVIdentity(self._run, family, spec, checkpoint)
            context = self._context(spec, backend, checkpoint, self._max_model_len(spec))
            target = self._target(context, backend)
            context = replace(context, target=target)
            slots = ("attention", "kv", "scheduler", "sampler", "grammar", "drafter", "search")
            built = {slot: self._slots[slot].build(context) for slot in slots if slot in self._slots}
            tiers = self._tiers(context)
            self._is_ahead = plans_ahead(self._config.engine.plan_ahead, backend, built["scheduler"], self._names)
            if (plan := self._plan(family, checkpoint, context, built["kv"], quantizer)) is not None:
                self._planned(plan)
            runner = self._runner(backend, family, checkpoint, built, make_linear, target.keeps_hidden)
        finally:
            checkpoint.close()
        target.bind(runner)
        if target.is_used:
            built["drafter"] = LendingDrafter(built["drafter"], target)
        return self._parts(context, built, runner, hooks, identity, tiers)

    def _parts(
        self,
        context: BuildContext,
        built: Mapping[str, Any],
        runner: ModelRunner,
        hooks: HookCaller,
        identity: KVIdentity,
        tiers: Tiers,
    ) -> Parts:
        is_policy = self._slots["scheduler"].entry.kind == "scheduling_policy"
        computing = ("backend", "attention", "quantizer", "kv_format")
        involved = [self._names[slot] for slot in computing if slot in self._names]
        engine, text_stream = self._config.engine, self._services.text_stream
        scheduler: Any = built["scheduler"]
        is_kept = any(PERSISTENT in capabilities_of(tier).provides for tier in self._run.kv_tiers.values())
        return Parts(
            runner=runner,
            prefix_cache=cast(Any, runner.kv) if isinstance(built["kv"], PrefixCache) else None,
            namespace=namespace(identity.portable_fields()) if is_kept else identity.namespace(),
            kv_fields=identity.portable_fields,
            tiers=tiers,
            scheduler=cast(Any, PolicyScheduler(scheduler, engine.when_kv_full)) if is_policy else scheduler,
            policy=scheduler if is_policy else None,
            sampler=built["sampler"],
            drafter=built.get("drafter"),
            grammar=built.get("grammar"),
            search=built.get("search"),
            tokenizer=context.tokenizer,
            text_stream=lambda params: text_stream(context.tokenizer, params),
            eos_token_ids=context.eos_token_ids,
            hooks=hooks,
            guard=self.guard,
            names={**self._names, "step": f"model '{runner.spec.family}' with {', '.join(involved)}"},
            budget=Budget(num_tokens=engine.max_step_tokens, num_seats=engine.max_num_seqs),
            limits=Limits(
                max_model_len=context.max_model_len,
                waiting_requests=engine.max_waiting_requests,
                waiting_tokens=engine.max_waiting_tokens,
                offload_bytes=engine.offload_memory,
                exits_when_full=engine.when_kv_full == "exit",
            ),
            verification=engine.verification,
            drafting_failed=cast(TargetAccess, context.target).revoke,
            planning=self._planning(scheduler),
        )

    def _planning(self, scheduler: Any) -> Callable[..., Planning] | None:
        """Of plans ahead and branches of drafts at most one can be: a drafter has its say before each plan."""
        if self._is_ahead:
            return partial(AheadPlanning, scheduler=scheduler)
        return BranchPlanning if "drafter" in self._slots else None

    def _tiers(self, context: BuildContext) -> Tiers:
        built = {name: tier.build(context) for name, tier in self._run.kv_tiers.items()}
        return KVTiers(built, self.guard, self._config.engine.kv_tier_timeout_s) if built else NoTiers()

    def _backend(self) -> Backend:
        part, engine = self._slots["backend"], self._config.engine
        reason = part.cls.unavailable()
        if reason is not None:
            raise PluginError(f"{part.entry} cannot run on this machine: {reason}")
        context = BackendContext(
            dtype=self._config.model.dtype, deterministic=engine.deterministic, num_threads=engine.num_threads
        )
        return cast(Backend, part.build(context))

    def _quantizer(self, backend: Backend) -> Quantizer | None:
        """None leaves the backend its own plain layers."""
        part = self._slots.get("quantizer")
        if part is None:
            return None
        return cast(Quantizer, part.build(backend.device, getattr(torch, self._config.model.dtype)))

    def _built_format(self, backend: Backend) -> KVFormat | None:
        """Checked and watched, as it works inside the attention. None stores keys and values as they are."""
        part = self._slots.get("kv_format")
        if part is None:
            return None
        built = part.build(backend.device, getattr(torch, self._config.model.dtype))
        name = self._names["kv_format"]
        return cast(KVFormat, Watched(CheckedFormat(built, name), self.guard, name))

    def _store(self, backend: Backend, layout: KVLayout, spec: ModelSpec) -> KVStore:
        if self._kv_format is None:
            return backend.allocate_kv(layout, spec)
        return cast(FormatBackend, backend).allocate_encoded_kv(layout, spec, self._kv_format)

    def _open(self, model: str, revision: str | None) -> Checkpoint:
        return self._services.open_checkpoint(self._services.resolve_model(model, revision, self._progress))

    def _family(self, checkpoint: Checkpoint, override: str | None) -> type[Model]:
        """The family class by `model_type`; an unknown one lists those that are known."""
        name = override or checkpoint.config.get("model_type")
        known = sorted({entry.name for entry in list_entries("model")})
        if not isinstance(name, str) or (name not in known and ":" not in name):
            hint = f"known families: {', '.join(known)}; install a plugin for it or set model.family"
            raise CheckpointError(f"{checkpoint.path}: model_type {name!r} is not a known family; {hint}")
        return cast(type[Model], load(locate(("model",), name, self._config.folder)))

    def _max_model_len(self, spec: ModelSpec) -> int:
        limit = self._config.model.max_model_len or spec.max_position
        if limit > spec.max_position:
            where = f"{self._config.source}: model.max_model_len"
            raise ConfigError(f"{where}: {limit} is more than the {spec.max_position} that the model has")
        return limit

    def _context(
        self,
        spec: ModelSpec,
        backend: Backend,
        checkpoint: Checkpoint,
        max_model_len: int,
        tokenizer: TokenizerView | None = None,
    ) -> BuildContext:
        config, engine = self._config, self._config.engine
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        if self._kv_format is not None:
            require_rows(self._kv_format, spec, backend.device, dtype, str(self._slots["kv_format"].entry))
        tokenizer = tokenizer or self._services.load_tokenizer(checkpoint)
        return BuildContext(
            spec=spec,
            device=backend.device,
            dtype=config.model.dtype,
            deterministic=engine.deterministic,
            max_num_seqs=engine.max_num_seqs,
            max_step_tokens=engine.max_step_tokens,
            max_model_len=max_model_len,
            kv_bytes=engine.kv_memory or backend.free_memory() // KV_SHARE,
            bytes_per_token=sum(token_bytes(one, dtype.itemsize, self._kv_format) for one in spec.layers),
            tokenizer=tokenizer,
            eos_token_ids=self._services.eos_token_ids(checkpoint, tokenizer),
            build_runner=lambda model: self._second_runner(backend, model),
            resolve_component=self._resolve_component,
            kv_format=self._kv_format,
            kernels=backend.kernels if isinstance(backend, KernelReport) else KernelLog(),
            tools=backend.tools if isinstance(backend, ToolOwner) else None,
        )

    def _runner(
        self,
        backend: Backend,
        family: type[Model],
        checkpoint: Checkpoint,
        built: Mapping[str, Any],
        make_linear: LinearFactory | None,
        keeps_hidden: bool = False,
    ) -> ModelRunner:
        """Weights, then KV memory. Attention and KV are watched, so that a failure in a step carries their names."""
        model = backend.load_model(family, checkpoint, make_linear, self._progress)
        attention = CheckedAttention(built["attention"], self._names["attention"])
        store = self._store(backend, built["kv"].layout, model.spec)
        manager = AheadKV(built["kv"]) if self._is_ahead else built["kv"]
        kv: Any = Watched(manager, self.guard, self._names["kv"])
        watched = Watched(attention, self.guard, self._names["attention"])
        if keeps_hidden:
            return RecordingRunner(backend, model, watched, kv, store)
        return ModelRunner(backend, model, watched, kv, store)

    def _plan(
        self, family: type[Model], checkpoint: Checkpoint, context: BuildContext, kv: Any, quantizer: Quantizer | None
    ) -> MemoryPlan | None:
        """What this model will take, None where that is not known. ConfigError when it does not fit."""
        layout: KVLayout = kv.layout
        model = PlannedModel(family=family, checkpoint=checkpoint, context=context, layout=layout, quantizer=quantizer)
        plan = self._memory.plan(model)
        if plan is not None:
            plan.require_fit(f"{self._config.source}: {checkpoint.path}")
        return plan

    def _target(self, context: BuildContext, backend: Backend) -> TargetAccess:
        """What the drafter may use of the model. Tiers keep what is evicted, and only until a step writes over it."""
        return TargetAccess(
            context.spec,
            self._names.get("drafter", "drafter"),
            lambda path: self._second_runner(backend, path, context.tokenizer)[0],
            may_evict=not self._run.kv_tiers,
            patience_s=self._config.engine.plugin_timeout_s,
        )

    def _second_runner(
        self, backend: Backend, model: str, tokenizer: TokenizerView | None = None
    ) -> tuple[Runner, TokenizerView]:
        """Another checkpoint on the same backend, with attention and KV of the same classes but of its own.

        tokenizer: of a checkpoint that has none.
        """
        checkpoint = self._open(model, None)
        try:
            family = self._family(checkpoint, None)
            spec = family.read_spec(checkpoint.config)
            # A shorter context than the run's is no error: what the second model is for must do without it there.
            limit = min(spec.max_position, self._config.model.max_model_len or spec.max_position)
            context = self._context(spec, backend, checkpoint, limit, tokenizer)
            built = {slot: self._slots[slot].build(context) for slot in ("attention", "kv")}
            self._plan(family, checkpoint, context, built["kv"], None)
            return self._runner(backend, family, checkpoint, built, None), context.tokenizer
        finally:
            checkpoint.close()

    def _resolve_component(self, kind: str, name: str, options: Mapping[str, Any]) -> tuple[type[Any], ComponentConfig]:
        entry = locate((kind,), name, self._config.folder)
        cls = load(entry)
        return cls, validate(cls.Config, dict(options), self._config.source, (kind, name))
