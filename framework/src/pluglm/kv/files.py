"""Saves the KV of a prompt to a file and loads it in another process. What does not fit is a miss with a reason.

A file holds what the KV depends on, by name, beside the tokens and the tensors; a field that differs is a miss. Fields
and checksums find what is damaged or does not belong, not what was forged: trust a file as you trust the weights.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pluglm.kernel.admission import cache_namespace, check_ids
from pluglm.kernel.core import CacheKey
from pluglm.kernel.engine import EngineCore
from pluglm.kernel.errors import CheckpointError, ComponentFailure, RequestError
from pluglm.kv.cache_access import CacheAccess
from pluglm.kv.sealed import SealedFile, UnreadableFileError, read_bounded, seal, write_whole

KIND = "pluglm KV 1"
_HEADER_BYTES = 1 << 20  # all of a file but the tensors and the token ids is far below this
_BYTES_PER_ID = 16  # of a token id in JSON, at most


@dataclass(frozen=True, slots=True)
class SavedKV:
    """What save_kv wrote."""

    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedKV:
    """num_tokens: how many later requests can adopt; 0 with the reason in one line."""

    num_tokens: int
    reason: str = ""


class _Document(BaseModel):
    """fields: Parts.kv_fields. num_prompt: the length of the prompt where the KV depends on that, else None.

    salt: its BLAKE2b digest, keyed with the random salt_key, both in hexadecimal digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    fields: dict[str, str]
    num_prompt: int | None
    salt_key: str = Field(pattern="^[0-9a-f]{64}$")
    salt: str
    token_ids: list[int]


def save_kv(core: EngineCore, token_ids: Sequence[int], path: str | Path, salt: str) -> SavedKV:
    """Write the KV of the longest cached prefix of token_ids, which replaces the file that is there.

    Raises RequestError when nothing of it is cached, the KV manager caches no prefixes, the ids are none or the file
    cannot be written, CheckpointError when the weight files changed since they were loaded.
    """
    _check_text(path, salt)
    access, known = _access(core), tuple(token_ids)
    check_ids(known, core.parts, "save_kv: prompt")
    num_prompt = len(known) if core.parts.runner.spec.kv_of_prompt_length else None
    key = CacheKey(cache_namespace(core.parts, salt, len(known)), known, len(known))
    tensors = access.read(key)
    if not tensors:
        raise RequestError("save_kv: nothing of this prompt is cached; run it first, then save, with the same salt")
    num_tokens, salt_key = len(tensors[0]), secrets.token_hex(32)
    document = _Document(
        fields=dict(core.parts.kv_fields()),
        num_prompt=num_prompt,
        salt_key=salt_key,
        salt=_salt_digest(salt, salt_key),
        token_ids=list(known[:num_tokens]),
    )
    data = seal(KIND, document.model_dump(), dict(zip(access.part_names(), tensors, strict=True)))
    try:
        write_whole(Path(path), data)
    except (OSError, ValueError) as error:
        raise RequestError(f"save_kv: {path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return SavedKV(num_tokens, len(data))


def load_kv(core: EngineCore, path: str | Path, salt: str) -> LoadedKV:
    """Put a file's KV into the prefix cache. A file that does not fit changes nothing.

    Raises RequestError only when the KV manager caches no prefixes or an argument is of the wrong type.
    """
    _check_text(path, salt)
    access = _access(core)
    try:
        file = SealedFile(KIND, read_bounded(Path(path), _most_bytes(core, access)))
        key = _checked_key(core, file, salt)
        reason = access.fill(key, _checked_tensors(file, access.part_names(), access.shapes(key.limit)))
        num_tokens = access.probe(key)
    except (UnreadableFileError, CheckpointError, RequestError, ComponentFailure) as error:
        return LoadedKV(0, f"{path}: {error}")
    if reason:
        return LoadedKV(0, f"{path}: no room for its {key.limit} tokens: {reason}")
    if not num_tokens:
        size = core.kv.layout.block_size
        return LoadedKV(
            0, f"{path}: its {key.limit} tokens fill no block of {size} tokens, and only whole ones are kept"
        )
    return LoadedKV(num_tokens)


def _access(core: EngineCore) -> CacheAccess:
    if core.parts.prefix_cache is None:
        fix = "use one that does, such as kv: hash_prefix"
        raise RequestError(
            f"{core.parts.names['kv']} keeps no KV that requests could share, so none is saved or loaded; {fix}"
        )
    return CacheAccess(core, core.parts.prefix_cache)


def _check_text(path: object, salt: object) -> None:
    if not isinstance(path, str | Path):
        raise RequestError(f"path must be a string or a Path, not {type(path).__name__}")
    if not isinstance(salt, str):
        raise RequestError(f"salt must be a string, not {type(salt).__name__}")


def _most_bytes(core: EngineCore, access: CacheAccess) -> int:
    """Of a file that the KV pool could hold."""
    token_bytes = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in access.shapes(1))
    return _HEADER_BYTES + core.kv.max_request_tokens() * (token_bytes + _BYTES_PER_ID)


def _checked_key(core: EngineCore, file: SealedFile, salt: str) -> CacheKey:
    """Of a file that belongs to this run and this salt. Raises UnreadableFileError, and RequestError for its ids."""
    try:
        document = _Document.model_validate(file.document)
    except ValidationError as error:
        raise UnreadableFileError(f"has no document of kind '{KIND}'") from error
    _check_fields(document, core.parts.kv_fields())
    if not hmac.compare_digest(document.salt, _salt_digest(salt, document.salt_key)):
        raise UnreadableFileError("was saved with another salt")
    known, num_prompt = tuple(document.token_ids), document.num_prompt
    check_ids(known, core.parts, "its prompt")
    wanted = len(known) if core.parts.runner.spec.kv_of_prompt_length else None
    if not known or (num_prompt is None) != (wanted is None) or (num_prompt or 0) < (wanted or 0):
        raise UnreadableFileError(f"holds {len(known)} tokens of a prompt of {num_prompt}")
    return CacheKey(cache_namespace(core.parts, salt, num_prompt or 0), known, len(known))


def _checked_tensors(
    file: SealedFile, names: Sequence[str], shapes: list[tuple[torch.dtype, tuple[int, ...]]]
) -> list[torch.Tensor]:
    """Raises UnreadableFileError unless they are what the KV store takes."""
    expected = {name: (str(dtype), shape) for name, (dtype, shape) in zip(names, shapes, strict=True)}
    if {name: (f"torch.{one.dtype}", one.shape) for name, one in file.shapes.items()} != expected:
        raise UnreadableFileError("holds tensors of other names, types or shapes than this run has")
    tensors = file.tensors()
    return [tensors[name] for name in names]


def _check_fields(document: _Document, here: Mapping[str, str]) -> None:
    there = document.fields
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            both = f"{_short(there.get(name))} there, {_short(here.get(name))} here"
            raise UnreadableFileError(f"was saved with another {name}: {both}")


def _short(text: str | None) -> str:
    return "none" if text is None else text if len(text) <= 64 else f"{text[:61]}..."


def _salt_digest(salt: str, key: str) -> str:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=bytes.fromhex(key), digest_size=32).hexdigest()
