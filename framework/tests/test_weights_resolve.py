"""`resolve_model`: paths before registered names before hub ids, and one clear line for each way it can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.registered import registered_names
from pluglm.weights.resolve import require_known_model, resolve_model

MODULE = """
from pathlib import Path
from pluglm.kernel.errors import CheckpointError

def here():
    return Path(__file__)

def missing():
    raise CheckpointError("not installed; run: pip install it")

def broken():
    raise RuntimeError("two\\nlines")

def nowhere():
    return Path("/nonexistent/model.gguf")

def text():
    return __file__
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An import path of its own, with distributions `alpha` and `beta` in it, and an empty current folder."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "weights_test_module.py").write_text(MODULE)
    functions = ("here", "missing", "broken", "nowhere", "text", "absent")
    lines = [f"m-{name} = weights_test_module:{name}" for name in functions]
    distribution(site, "alpha", "1.0", [*lines, "shared = weights_test_module:here", "gone = no_such_module:f"])
    distribution(site, "beta", "2.5", ["shared = weights_test_module:here"])
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "weights_test_module", raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return site


def distribution(site: Path, name: str, version: str, lines: list[str]) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text("\n".join(["[pluglm.weights]", *lines, ""]))


def refusal_of(name: str, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name, revision=revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_registered_names_are_found_without_loading(packages: Path) -> None:
    assert {"m-here", "shared", "gone", "smollm2-135m-instruct", "gemma-3-270m"} <= set(registered_names())
    assert resolve_model("m-here") == packages / "weights_test_module.py"
    assert resolve_model("alpha:m-here") == packages / "weights_test_module.py"


def test_a_path_goes_before_a_name(packages: Path) -> None:
    Path("m-here").mkdir()
    assert resolve_model("m-here") == Path("m-here")
    Path("org/model").mkdir(parents=True)
    assert resolve_model("org/model") == Path("org/model")
    assert resolve_model(str(packages)) == packages


def test_two_packages_with_one_name(packages: Path) -> None:
    message = refusal_of("shared")
    assert "'shared' is registered by" in message
    assert "alpha 1.0" in message
    assert "beta 2.5" in message
    assert resolve_model("beta:shared") == packages / "weights_test_module.py"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("m-broken", "RuntimeError: two lines"),
        ("m-absent", "AttributeError"),
        ("gone", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("m-nowhere", "gave '/nonexistent/model.gguf', not a path that exists"),
        ("m-text", "not a path that exists"),
    ],
)
@pytest.mark.usefixtures("packages")
def test_a_broken_entry_point_is_named(name: str, cause: str) -> None:
    message = refusal_of(name)
    assert f"model '{name}' of alpha 1.0 (entry point " in message
    assert cause in message


@pytest.mark.usefixtures("packages")
def test_a_package_says_itself_how_to_install() -> None:
    assert refusal_of("m-missing") == "not installed; run: pip install it"


@pytest.mark.usefixtures("packages")
def test_unknown_names_list_the_choices_and_the_nearest() -> None:
    message = refusal_of("smollm2-135m-instrct")
    assert "gemma-3-270m" in message
    assert message.endswith("did you mean 'smollm2-135m-instruct'?")
    assert "did you mean" not in refusal_of("zzz")
    assert "''" in refusal_of("")


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["./none", "/none/at/all", "../x/y", "model.gguf", "org/model.safetensors/..", "a\\b"])
def test_paths_that_are_not_there(name: str) -> None:
    assert "check the path" in refusal_of(name) or "no path" in refusal_of(name)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["a\nb", "x" * 5000, "a\0b", "~nobody-of-that-name/x"])
def test_names_that_no_file_system_takes(name: str) -> None:
    assert refusal_of(name).startswith("model ")


@pytest.mark.usefixtures("packages")
def test_a_revision_is_only_for_the_hub() -> None:
    assert "is not a hub id, so revision 'main' means nothing" in refusal_of("m-here", revision="main")


def test_resolving_loads_neither_torch_nor_the_hub_library() -> None:
    program = "import sys, pluglm.weights.resolve as r, pluglm.weights.packaged; r.registered_names();"
    program += "sys.exit(', '.join({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["smollm2-135m-instrct", "", "./none", "a\nb", "x" * 5000, "a\0b", "~nobody-at-all/x"])
def test_what_is_known_to_be_no_model_is_told_without_a_look_into_it(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        require_known_model(name)
    assert str(caught.value) == refusal_of(name)


def test_what_may_be_a_model_passes_unopened(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No package's code runs, be it broken, and no hub is asked."""
    monkeypatch.setattr("pluglm.weights.resolve.fetch_from_hub", lambda *_: pytest.fail("the hub was asked"))
    for name in ("m-broken", "alpha:m-here", "shared", "org/model", str(packages)):
        require_known_model(name)
    assert "weights_test_module" not in sys.modules
    require_known_model("org/model", "main")
    with pytest.raises(CheckpointError, match="'m-here' is not a hub id, so revision 'main' means nothing"):
        require_known_model("m-here", "main")
