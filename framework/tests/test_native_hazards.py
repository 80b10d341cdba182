"""What could end the process or spoil its memory: it gives an error instead, or the right values."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pluglm.kernel.core import Segment
from pluglm.kernel.interfaces.kernels import KernelLog
from pluglm.kernel.interfaces.model import LayerParts, LayerSpec
from pluglm.native import build
from pluglm.native.attention import NativeAttention, slots_reached
from pluglm.native.build import NativeBuildError, default_cache, library_path
from pluglm.native.fuser import NativeFuser
from pluglm.native.isa import LEVELS
from pluglm.native.layers import NativeHead, NativeLayer
from pluglm.native.linear import NativeLinear
from pluglm.native.tools import NativeTools

Tools = Callable[..., NativeTools]

pytestmark = pytest.mark.usefixtures("native_tools")  # skips where there is no compiler

BASELINE = LEVELS[-1]
HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 4, 2, 8, 24, 40
LIMIT_S = 20


def make_linear(tools: NativeTools, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> NativeLinear:
    return NativeLinear(tools, torch.ones(outputs, inputs, dtype=dtype), None, always_native=True)


def make_parts(tools: NativeTools, **changed: object) -> LayerParts:
    parts = {
        "spec": LayerSpec(index=0, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=1.0),
        "activation": "silu",
        "eps": 1e-5,
        "attention_norm": torch.ones(WIDTH),
        "mlp_norm": torch.ones(WIDTH),
        "qkv": make_linear(tools, (HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
        "output": make_linear(tools, WIDTH, HEADS * HEAD_DIM),
        "gate_up": make_linear(tools, 2 * INNER, WIDTH),
        "down": make_linear(tools, WIDTH, INNER),
    }
    return LayerParts(**{**parts, **changed})  # type: ignore[arg-type]


@contextlib.contextmanager
def address_space(more: int) -> Iterator[None]:
    """At most so many bytes more than are mapped now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run_in_child(work: Callable[[], bool]) -> None:
    """work() in a forked child; one that hangs is ended by its alarm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: that there are threads is the point
        child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        done = False
        try:
            done = work()
        finally:
            os._exit(0 if done else 9)
    assert os.waitpid(child, 0)[1] == 0


def test_calls_of_two_threads_do_not_meet(native_tools: Tools) -> None:
    """A call that the engine gave up on still runs when it makes the next one."""
    tools = native_tools("baseline", 3)
    inputs = (257, 96)
    exact = {k: torch.full((40, 300), float(k)) for k in inputs}  # sums of k ones
    wrong = []

    def work(k: int) -> None:
        layer, x = make_linear(tools, 300, k, torch.bfloat16), torch.ones(40, k, dtype=torch.bfloat16)
        if not all(torch.equal(layer.native(x, torch.float32), exact[k]) for _ in range(300)):
            wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in inputs]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LIMIT_S)
    assert not any(one.is_alive() for one in threads)
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_process_computes_alone_and_closes() -> None:
    tools = NativeTools(3, "baseline")
    layer, x = make_linear(tools, 900, 64), torch.ones(2, 64)
    assert layer(x)[0, 0] == 64

    def work() -> bool:
        right = bool((layer(x) == 64).all())
        tools.close()
        return right

    run_in_child(work)
    assert bool((layer(x) == 64).all())  # the parent has its threads still
    tools.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_that_do_not_start_are_a_reason() -> None:
    NativeTools(1, "baseline").close()  # built

    def work() -> bool:
        with address_space(64 << 20), pytest.raises(NativeBuildError, match="does not start 100000 threads"):
            NativeTools(100_000, "baseline")
        return True

    run_in_child(work)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_is_not_there_is_an_error() -> None:
    layer = make_linear(NativeTools(1, "baseline"), 512, 1, torch.bfloat16)
    x = torch.ones(200_000, 1, dtype=torch.bfloat16)  # products: 205 MB, and 410 MB in float32 on the way

    def work() -> bool:
        with address_space(300 << 20), pytest.raises(MemoryError):
            layer(x)
        return bool((layer(x[:3]) == 1).all())

    run_in_child(work)


def test_a_thread_may_compute_while_the_interpreter_ends(native_tools: Tools) -> None:
    native_tools("baseline")  # built
    program = """
import threading, time, torch
from pluglm.native.linear import NativeLinear
from pluglm.native.tools import NativeTools
tools = NativeTools(2, "baseline")
layer = NativeLinear(tools, torch.ones(8000, 2000), None, always_native=True)
x, out = torch.ones(32, 2000), torch.empty(32, 8000)
call = (tools.handle, 0, layer.address, x.data_ptr(), 32, 0, out.data_ptr())
def work():
    while True:  # no call of torch's: a thread that the interpreter ends there takes the process with it
        tools.library.pluglm_linear(*call)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_runs_after_close() -> None:
    tools = NativeTools(2, "baseline")
    layer = make_linear(tools, 4, 4)
    tools.close()
    tools.close()
    with pytest.raises(AttributeError, match="handle"):
        layer(torch.ones(1, 4))


@pytest.mark.parametrize(
    "x", [torch.ones(2, 5), torch.ones(2, 6, dtype=torch.bfloat16), torch.ones(2, 1, 6), torch.ones(2, 6).to("meta")]
)
def test_a_product_checks_its_rows(native_tools: Tools, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"takes \[2, 6\] of torch\.float32 on the CPU"):
        make_linear(native_tools("baseline"), 4, 6)(x)
    with pytest.raises(ValueError, match="takes no norm"):
        NativeHead(native_tools("baseline"), torch.ones(5), 1e-5, make_linear(native_tools("baseline"), 4, 6))
    with pytest.raises(ValueError, match="takes no bias"):
        NativeLinear(native_tools("baseline"), torch.ones(4, 6), torch.ones(3))


def test_a_product_without_inputs_is_the_bias(native_tools: Tools) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = NativeLinear(
            native_tools("auto"), torch.ones(16, 0, dtype=dtype), torch.arange(16.0), always_native=True
        )
        assert torch.equal(layer.native(torch.ones(3, 0, dtype=dtype), torch.float32), torch.arange(16.0).expand(3, 16))


def test_a_layer_checks_its_rows_and_takes_any_strides(native_tools: Tools) -> None:
    layer = NativeLayer(native_tools("baseline"), make_parts(native_tools("baseline")))
    generator = torch.Generator().manual_seed(0)
    x, cosine, sine = torch.randn(3, WIDTH, generator=generator), torch.full((3, 1, 1), 0.6), torch.full((3, 1, 1), 0.8)
    cosine, sine = cosine.expand(3, 1, HEAD_DIM), sine.expand(3, 1, HEAD_DIM)
    plain = torch.cat(layer.pre_attention(x, cosine.contiguous(), sine.contiguous()), 1)
    assert torch.equal(torch.cat(layer.pre_attention(x.T.contiguous().T, cosine, sine), 1), plain)
    attended = torch.randn(3, HEADS, HEAD_DIM, generator=generator)
    rest = layer.post_attention(x, attended)
    assert torch.equal(
        layer.post_attention(x.T.contiguous().T, attended.transpose(0, 1).contiguous().transpose(0, 1)), rest
    )
    for wrong in (cosine.double(), cosine[..., :4]):
        with pytest.raises(ValueError, match="a native kernel takes"):
            layer.pre_attention(x, wrong, sine)
    with pytest.raises(ValueError, match=r"takes \[3, 1, 8\]"):
        layer.pre_attention(x, cosine, sine[:1])
    with pytest.raises(ValueError, match=r"takes \[3, 4, 8\]"):
        layer.post_attention(x, attended[:2])
    with pytest.raises(ValueError, match="a native kernel takes"):
        layer.post_attention(x.bfloat16(), attended)


def test_parts_that_do_not_fit_are_refused_with_the_reason(native_tools: Tools) -> None:
    tools, log = native_tools("baseline"), KernelLog()
    fuser = NativeFuser(tools, log, deterministic=False)
    down = make_linear(tools, WIDTH, INNER, torch.bfloat16)
    for name, part in (("down", down), ("output", make_linear(tools, WIDTH, 8)), ("mlp_out_norm", torch.ones(5))):
        assert fuser.layer(make_parts(tools, **{name: part})) is None
    assert [one.refused[0][1] for one in log.choices] == [
        "its products have 2 dtypes",
        "its output is [24, 8], not [24, 32]",
        "its mlp_out_norm is [5], not [24]",
    ]


@pytest.mark.parametrize("start", [-1, 2**31, 2**32 - 1, 2**32])
def test_a_row_that_no_int32_holds_is_refused(start: int, native_tools: Tools) -> None:
    attention = NativeAttention(native_tools("baseline"))
    with pytest.raises(ValueError, match="numbers of 31 bits from 0"):
        attention.plan([Segment(sequence_id=0, query_start=start, num_query=1, num_context=0, block_table=(0,))], 8)
    assert attention.plan(
        [Segment(sequence_id=0, query_start=2**31 - 2, num_query=1, num_context=0, block_table=(0,))], 8
    ).num_rows


def test_slots_with_gaps_are_named() -> None:
    with pytest.raises(ValueError, match=r"dense int64, not of stride \(2,\)"):
        slots_reached(torch.zeros(6, dtype=torch.int64)[::2])


def test_a_user_without_a_home_gets_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(NativeBuildError, match="the user has no home folder"):
        default_cache()


def test_a_cache_that_cannot_be_searched_gives_a_reason(tmp_path: Path) -> None:
    for cache in (tmp_path / ("long" * 100), Path("/proc/nowhere")):
        with pytest.raises(NativeBuildError, match="cannot be written"):
            library_path(BASELINE, cache)


def test_machines_that_share_a_home_do_not_share_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        names.add(build._digest(BASELINE, build.find_compiler()))
    assert len(names) == 2
