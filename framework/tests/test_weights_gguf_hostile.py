"""Damaged and lying GGUF files: always CheckpointError in one line, never another exception, never a wrong read."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pluglm.kernel.errors import CheckpointError
from pluglm.weights.gguf import GGUFCheckpoint

U32, U64, F32, STRING, ARRAY = 4, 10, 6, 8, 9
TYPE_F32, TYPE_Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def u32(key: str, value: int) -> bytes:
    return field(key, U32, struct.pack("<I", value))


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


FIELDS = [
    field("general.architecture", STRING, text("llama")),
    u32("llama.embedding_length", 32),
    u32("llama.feed_forward_length", 32),
    u32("llama.block_count", 1),
    u32("llama.context_length", 64),
    u32("llama.attention.head_count", 2),
    field("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
    field("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("é") + text("")),
    field("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ3f", F32, 3, 0, 1, 2)),
]
TENSORS = [
    tensor("token_embd.weight", (32, 3), TYPE_Q8_0, 0),
    tensor("blk.0.attn_q.weight", (32, 32), TYPE_F32, 128),
    tensor("rope_freqs.weight", (8,), TYPE_F32, 128 + 4096),
]
DATA = b"\x00\x3c" * (64 + 2048) + struct.pack("<8f", *[1.0] * 8)


def build(
    fields: list[bytes] = FIELDS,
    tensors: list[bytes] = TENSORS,
    *,
    data: bytes = DATA,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def with_field(raw: bytes) -> bytes:
    return build([*FIELDS, raw])


def with_tensor(raw: bytes) -> bytes:
    return build(tensors=[*TENSORS[:2], raw])


HUGE = (1 << 64) - 1
LIES = {
    "magic": (b"GGML" + build()[4:], "is not a GGUF file"),
    "version 1": (build(version=1), "has GGUF version 1"),
    "version 4": (build(version=4), "has GGUF version 4"),
    "big-endian": (build(version=3 << 24), "is a big-endian GGUF file"),
    "tensor count": (build(counts=(HUGE, 9)), "claims 18446744073709551615 tensors"),
    "field count": (build(counts=(3, HUGE)), "claims 18446744073709551615 metadata entries"),
    "one field more": (build(counts=(3, 10)), "damaged file"),
    "one tensor more": (build(counts=(4, 9)), "damaged file"),
    "key length": (with_field(struct.pack("<Q", HUGE) + b"x" * 40), "a metadata key at byte"),
    "key too long": (with_field(u32("x" * 70_000, 1)), "a metadata key at byte 450 claims 70000 bytes"),
    "key not UTF-8": (with_field(text(b"\xff\xfe") + struct.pack("<II", U32, 1)), "is not UTF-8"),
    "key twice": (with_field(u32("llama.block_count", 1)), "metadata key 'llama.block_count' appears twice"),
    "value type": (with_field(field("x", 77, b"")), "metadata 'x' has the unknown value type 77"),
    "text length": (with_field(field("x", STRING, struct.pack("<Q", 1 << 40))), "runs past the end"),
    "text length wraps": (with_field(field("x", STRING, struct.pack("<Q", HUGE - 7))), "runs past the end"),
    "array count": (with_field(field("x", ARRAY, struct.pack("<IQ", F32, 1 << 60))), "claims 46116860184273879"),
    "text array count": (with_field(field("x", ARRAY, struct.pack("<IQ", STRING, 1 << 60))), "texts in metadata 'x'"),
    "nested array": (with_field(field("x", ARRAY, struct.pack("<IQ", ARRAY, 1))), "an array of arrays"),
    "alignment zero": (with_field(u32("general.alignment", 0)), "general.alignment is not"),
    "alignment odd": (with_field(u32("general.alignment", 24)), "general.alignment is not"),
    "alignment huge": (with_field(u32("general.alignment", 1 << 31)), "general.alignment is not"),
    "alignment text": (with_field(field("general.alignment", STRING, text("32"))), "general.alignment is not"),
    "no architecture": (build(FIELDS[1:]), "does not say its general.architecture"),
    "architecture number": (build([u32("general.architecture", 1), *FIELDS[1:]]), "does not say its"),
    "architecture not UTF-8": (
        build([field("general.architecture", STRING, text(b"\xff")), *FIELDS[1:]]),
        "metadata 'general.architecture' cannot be decoded",
    ),
    "tensor twice": (with_tensor(tensor("token_embd.weight", (8,), 0, 4224)), "'token_embd.weight' appears twice"),
    "tensor name": (with_tensor(tensor("a\nb", (8,), 99, 4224)), "tensor 'a\\nb' has the unknown type number 99"),
    "removed type": (with_tensor(tensor("x", (32,), 4, 4224)), "has the unknown type number 4"),
    "unread type": (with_tensor(tensor("x", (256,), 20, 0)), "tensor 'x' is of type IQ4_NL"),
    "integer type": (with_tensor(tensor("x", (8,), 26, 4224)), "tensor 'x' is of type I32"),
    "no dimensions": (with_tensor(tensor("x", (), 0, 4224)), "claims 0 dimensions"),
    "five dimensions": (with_tensor(tensor("x", (1, 1, 1, 1, 8), 0, 4224)), "claims 5 dimensions"),
    "dimension zero": (with_tensor(tensor("x", (8, 0), 0, 4224)), "has the shape [0, 8]"),
    "product wraps to 8": (with_tensor(tensor("x", (8, (1 << 63) + 1, 2), 0, 4224)), "which F32 cannot have"),
    "product": (with_tensor(tensor("x", (1 << 40, 1 << 40), 0, 4224)), "which F32 cannot have"),
    "size": (with_tensor(tensor("x", (9,), 0, 4224)), "ends at byte"),
    "part of a block": (with_tensor(tensor("x", (16, 2), TYPE_Q8_0, 4224)), "which Q8_0 cannot have"),
    "offset": (with_tensor(tensor("x", (8,), 0, 1 << 50)), "ends at byte"),
    "offset wraps": (with_tensor(tensor("x", (8,), 0, HUGE - 31)), "ends at byte"),
    "offset unaligned": (with_tensor(tensor("x", (8,), 0, 4225)), "not a multiple of 32"),
    "overlap": (with_tensor(tensor("x", (8,), 0, 4192)), "overlaps the one before it"),
    "long divisors": (with_tensor(tensor("rope_freqs.weight", (4, 2), 0, 4224)), "not a short float32 vector"),
}


def open_and_read(path: Path) -> None:
    """Open, and read everything there is."""
    checkpoint = GGUFCheckpoint(path)
    try:
        for name in sorted(checkpoint.names()):
            got = checkpoint.tensor(name, torch.float32)
            if tuple(got.shape) != checkpoint.shape(name):
                raise AssertionError(f"{name} has shape {got.shape}")
        for key in checkpoint.metadata:
            checkpoint.metadata[key]
    finally:
        checkpoint.close()


def refusal_of(path: Path, content: bytes) -> str | None:
    path.write_bytes(content)
    try:
        open_and_read(path)
    except CheckpointError as error:
        return str(error)
    return None


def test_the_file_that_the_lies_are_made_from_is_good(tmp_path: Path) -> None:
    for version in (2, 3):
        assert refusal_of(tmp_path / "m.gguf", build(version=version)) is None
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert checkpoint.metadata["tokenizer.ggml.scores"] == [0.0, 1.0, 2.0]
    checkpoint.close()


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_named_in_one_line(tmp_path: Path, lie: str) -> None:
    content, expected = LIES[lie]
    message = refusal_of(tmp_path / "m.gguf", content)
    assert message is not None
    assert message.startswith(f"{tmp_path / 'm.gguf'}: ")
    assert expected in message
    assert "\n" not in message


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = build()
    for length in range(len(content)):
        message = refusal_of(tmp_path / "m.gguf", content[:length])
        assert message is not None, length
        assert "\n" not in message


def test_a_lying_length_allocates_nothing(tmp_path: Path) -> None:
    tracemalloc.start()
    for content, _ in LIES.values():
        refusal_of(tmp_path / "m.gguf", content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_file_cut_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build())
    checkpoint = GGUFCheckpoint(path)
    with path.open("r+b") as file:
        file.truncate(2048)
    with pytest.raises(CheckpointError, match="ends inside"):
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", torch.float32)
    checkpoint.close()


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be opened: No such file"):
        GGUFCheckpoint(tmp_path / "none.gguf")


HEADER_BYTES = len(build()) - len(DATA)
MUTATIONS = st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(mutations=MUTATIONS, cut=st.one_of(st.none(), st.integers(0, len(build()))))
def test_random_damage_opens_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, mutations: list[tuple[int, int]], cut: int | None
) -> None:
    content = bytearray(build())
    for at, byte in mutations:
        content[at] = byte
    message = refusal_of(tmp_path_factory.getbasetemp() / "fuzzed.gguf", bytes(content[:cut]))
    assert message is None or "\n" not in message


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes_after_the_magic_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    message = refusal_of(path, b"GGUF\x03\x00\x00\x00" + data)
    assert message is not None
    assert "\n" not in message
