"""EOS ids of a model, and which tokenizer a checkpoint gets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models

from pluglm.kernel.errors import CheckpointError, TokenizerError
from pluglm.text.eos import eos_token_ids
from pluglm.text.load import load_tokenizer
from pluglm.text.tokenizer import Tokenizer


def tiny_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.add_tokens([AddedToken("</s>", special=True)])
    return backend


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_backend(), source="test", special_tokens={"eos_token": "</s>"}, extra_eos_token_ids=[1])


def test_eos_is_the_union_of_all_sources() -> None:
    tokenizer = tiny_tokenizer()
    assert eos_token_ids({}, {}, None) == frozenset()
    assert eos_token_ids({"eos_token_id": None}, {}, tokenizer) == {1, 2}
    assert eos_token_ids({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, tokenizer) == {1, 2, 5, 7, 8}
    assert eos_token_ids({"eos_token_id": [5, 0]}, {"eos_token_id": 9}, None) == {0, 5, 9}


@pytest.mark.parametrize("bad", ["2", -1, True, 1.0, [1, None], [[1]], {"a": 1}])
def test_bad_eos_values_name_the_file_and_the_key(bad: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^generation_config.json: eos_token_id is "):
        eos_token_ids({}, {"eos_token_id": bad}, None)
    with pytest.raises(CheckpointError, match=r"^config.json: eos_token_id is "):
        eos_token_ids({"eos_token_id": bad}, {}, None)


def test_a_folder_gets_its_own_tokenizer(tmp_path: Path) -> None:
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    checkpoint = SimpleNamespace(folder=tmp_path, path=tmp_path)
    assert load_tokenizer(checkpoint).encode("ab</s>") == [0, 1, 2]


def test_a_gguf_file_without_a_vocabulary_is_refused() -> None:
    checkpoint = SimpleNamespace(metadata={"general.architecture": "llama"}, path=Path("x.gguf"))
    with pytest.raises(TokenizerError, match=r"^x.gguf: holds no tokenizer .*; use a file converted"):
        load_tokenizer(checkpoint)


def test_a_checkpoint_of_another_kind_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"^x.bin: SimpleNamespace has neither"):
        load_tokenizer(SimpleNamespace(path=Path("x.bin")))
