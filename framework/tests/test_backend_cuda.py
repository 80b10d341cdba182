"""The CUDA backend where there is none, and its execution on the CPU device that torch always has."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from pluglm.arguments import silent
from pluglm.backends import triton_choice
from pluglm.backends.cuda import CudaBackend
from pluglm.backends.cuda_graphs import CudaGraphTools
from pluglm.backends.execute import inputs_on, picked_rows
from pluglm.backends.transfers import fill, sent
from pluglm.kernel.core import ModelInput
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.backend import BackendContext
from pluglm.kernel.interfaces.footprint import Footprint
from pluglm.triton_kernels.fuser import TritonFuser
from pluglm.triton_kernels.gather import gather_rows

CONTEXT = BackendContext(dtype="bfloat16", deterministic=False, num_threads=None)


def test_a_build_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert CudaBackend.unavailable() == "torch was built without CUDA"
    with pytest.raises(PluginError, match="torch was built without CUDA; use backend 'cpu'"):
        CudaBackend(CudaBackend.Config(), CONTEXT)


def test_a_machine_without_a_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CudaBackend.unavailable() == "no CUDA device is visible"


def test_an_index_beyond_the_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PluginError, match="index 2 is not visible, there are 2 devices"):
        CudaBackend(CudaBackend.Config(index=2), CONTEXT)
    assert CudaBackend(CudaBackend.Config(index=1), CONTEXT).device == "cuda:1"


def test_deterministic_runs_are_refused_with_a_reason() -> None:
    assert "batch" in CudaBackend.capabilities(CudaBackend.Config()).refuses["run:deterministic"]


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(ValidationError):
        CudaBackend.Config(index=-1)


def test_all_tensors_of_a_batch_move_and_the_rest_stays() -> None:
    tensors: dict[str, Any] = {name: torch.arange(3) for name in ("token_ids_T", "positions_T", "slots_T")}
    inputs = ModelInput(**tensors, logit_rows_R=torch.arange(1), segments=(), block_size=8, copies=((1, 2),))
    moved = inputs_on(inputs, "meta")
    for name in (*tensors, "logit_rows_R"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(inputs, name).shape
    assert (moved.segments, moved.block_size, moved.copies) == ((), 8, ((1, 2),))


def test_sizes_of_graphs_ascend_and_are_not_ignored() -> None:
    for sizes in ((), (0, 1), (1, 1), (2, 1)):
        with pytest.raises(ValidationError):
            CudaBackend.Config(graph_batch_sizes=sizes)
    with pytest.raises(ValidationError, match="graph_batch_sizes are given and graphs is false"):
        CudaBackend.Config(graphs=False, graph_batch_sizes=(1, 2))
    assert CudaBackend.Config(graph_batch_sizes=(3, 7)).graph_batch_sizes == (3, 7)


def test_graphs_are_there_unless_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert CudaBackend(CudaBackend.Config(), CONTEXT).graphs is not None
    assert CudaBackend(CudaBackend.Config(graphs=False), CONTEXT).graphs is None


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is visible and cannot be used."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_device")
def test_kernels_that_do_not_run_are_recorded_and_refused_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_choice, "why_not_triton", lambda device: f"nothing runs on {device}")
    for kernels, reason in (("auto", "nothing runs on cuda:0"), ("torch", "the config says kernels: torch")):
        choices = CudaBackend(CudaBackend.Config(kernels=kernels), CONTEXT).kernels.choices
        assert [(one.operation, one.kernel) for one in choices] == [("decoder layer", "torch"), ("head", "torch")]
        assert {one.refused for one in choices} == {(("triton", reason),)}
    with pytest.raises(PluginError, match="kernels: triton cannot be had here: nothing runs on cuda:0; set backend"):
        CudaBackend(CudaBackend.Config(kernels="triton"), CONTEXT)
    with pytest.raises(ValidationError):
        CudaBackend.Config(kernels="native")


@pytest.mark.usefixtures("one_device")
def test_kernels_that_run_are_offered_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_choice, "why_not_triton", lambda device: None)
    offered: list[Any] = []
    family: Any = SimpleNamespace(load=lambda checkpoint, context: offered.append(context.fuser))
    for kernels in ("auto", "triton", "torch"):
        backend = CudaBackend(CudaBackend.Config(kernels=kernels), CONTEXT)
        backend.load_model(family, SimpleNamespace(), None, silent)  # type: ignore[arg-type]
        # A tensor is sent to the device and used there: nothing of it exists twice.
        assert [backend.weight_footprint(12, "linear", parts) for parts in (1, 3)] == [Footprint(12, 0)] * 2
        assert backend._pick_rows is (picked_rows if kernels == "torch" else gather_rows)
    assert [type(fuser) for fuser in offered] == [TritonFuser, TritonFuser, type(None)]


@pytest.mark.usefixtures("one_device")
def test_a_device_that_cannot_be_used_leaves_layers_to_torch() -> None:
    (layer, head) = CudaBackend(CudaBackend.Config(), CONTEXT).kernels.choices
    assert (layer.kernel, head.kernel) == ("torch", "torch")
    assert layer.refused[0][1].startswith(("a first launch failed: ", "triton is not installed"))


class HostTensor:
    """Stands for a tensor in host memory, and writes down what is done with it."""

    is_cuda = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def pin_memory(self) -> HostTensor:
        self.calls.append(("pin_memory",))
        return self

    def to(self, device: str, non_blocking: bool = False) -> HostTensor:
        self.calls.append(("to", device, non_blocking))
        return self


def test_copies_to_a_gpu_come_from_pinned_memory_and_nobody_waits() -> None:
    host: Any = HostTensor()
    sent(host, "cuda:1")
    assert host.calls == [("pin_memory",), ("to", "cuda:1", True)]
    copied: list[tuple[Any, bool]] = []
    target: Any = SimpleNamespace(
        is_cuda=True, copy_=lambda source, non_blocking: copied.append((source, non_blocking))
    )
    host.calls.clear()
    fill(target, host)
    assert (host.calls, copied) == ([("pin_memory",)], [(host, True)])


def test_a_capture_comes_after_warm_ups_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that torch's documentation of CUDA graphs prescribes; all graphs share one pool."""
    calls: list[Any] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            calls.append((self.name, "waits for", other.name))

    @contextmanager
    def entered(*what: Any, **options: Any) -> Any:
        calls.append(("enter", *(getattr(one, "name", one) for one in what), options))
        yield
        calls.append("leave")

    graph = SimpleNamespace(name="graph", replay=lambda: calls.append("replayed"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    handles = iter([(0, 1), (0, 2)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, entered)
    tools, output = CudaGraphTools("cuda:1"), torch.ones(1)

    def step() -> torch.Tensor:
        calls.append("step")
        return output

    captured = tools.capture(step)
    device, capture = ("enter", torch.device("cuda:1"), {}), {"pool": (0, 1), "capture_error_mode": "thread_local"}
    warm_up = [("side", "waits for", "main"), ("enter", "side", {}), "step", "step", "leave"]
    after = [("main", "waits for", "side"), ("enter", "graph", capture), "step", "leave", "leave"]
    assert calls == [device, *warm_up, *after]
    captured.replay()
    assert calls[-1] == "replayed"
    assert captured.output is output
    tools.capture(step)
    assert calls.count(("enter", "graph", capture)) == 2
