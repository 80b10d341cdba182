"""Draft heads as torch modules that can be trained: the same blocks over whole texts, in plain functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from pluglm.models.activations import ACTIVATIONS
from pluglm.models.rope_frequencies import inverse_frequencies
from pluglm.models.settings import DecoderSettings
from pluglm.weights.open import open_checkpoint
from pluglm_spec_decode.heads.settings import read_settings_of

# B: texts, T: entries of each, D: hidden size, N: query heads, K: kv heads, H: head dim, F: H / 2

STEM = "model."  # of tensor names in the checkpoint, before those of the module


class DraftHead(nn.Module):
    """A head of any kind, made by `head_config`. Its state is the checkpoint's, but for the stem of the names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Random weights by torch's generator. Raises CheckpointError for a config that is no head's."""
        super().__init__()
        self.config = dict(config)
        settings = read_settings_of(config)
        self.layers = nn.ModuleList(HeadBlock(settings) for _ in settings.spec.layers)

    def forward(self, embeddings_BTD: torch.Tensor, features_BTD: torch.Tensor) -> list[torch.Tensor]:
        """Teacher-forced over whole texts of T + 1 tokens, padded behind their ends.

        embeddings_BTD: of the tokens behind the first. features_BTD: the target's, of all tokens but the last, so each
        has the next token's embedding beside it. Returns what each block d says, features of T - d entries: entry i of
        it is for the target's feature at i + d + 1.
        """
        said = list[torch.Tensor]()
        for ahead, block in enumerate(self.layers):
            num = embeddings_BTD.shape[1] - ahead
            features_BTD = block(embeddings_BTD[:, ahead:], features_BTD[:, :num])
            said.append(features_BTD)
        return said

    def save(self, folder: str | Path) -> None:
        """Writes config.json and model.safetensors; the folder is made."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        tensors = {STEM + name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Raises CheckpointError for what cannot be read or is no head's."""
        checkpoint = open_checkpoint(Path(folder))
        try:
            head = cls(checkpoint.config)
            names = head.state_dict()
            head.load_state_dict({name: checkpoint.tensor(STEM + name, torch.float32) for name in names})
        finally:
            checkpoint.close()
        return head


class HeadBlock(nn.Module):
    """RMSNorm of both inputs, a linear layer from the two side by side, and a pre-norm decoder layer."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        width, eps = settings.spec.hidden_size, settings.norm_eps
        self.embedding_norm, self.feature_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.fuse = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.self_attn, self.mlp = _SelfAttention(settings), _FeedForward(settings)

    def forward(self, embeddings_BTD: torch.Tensor, features_BTD: torch.Tensor) -> torch.Tensor:
        both = (self.embedding_norm(embeddings_BTD), self.feature_norm(features_BTD))
        x_BTD = self.fuse(torch.cat(both, -1))
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD))
        behind_BTD: torch.Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return behind_BTD


class _SelfAttention(nn.Module):
    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        layer, width, rope = settings.spec.layers[0], settings.spec.hidden_size, settings.ropes[0]
        self._layer, self._attention_factor = layer, rope.attention_factor
        queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, rows, bias=False) for rows in (queries, keys, keys))
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.register_buffer("_frequencies_F", inverse_frequencies(rope), persistent=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_BNTH, k_BKTH, v_BKTH = (
            one(x_BTD).unflatten(-1, (-1, self._layer.head_dim)).transpose(1, 2) for one in projections
        )
        q_BNTH, k_BKTH = self._rotated(q_BNTH), self._rotated(k_BKTH)
        out_BNTH = scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, is_causal=True, scale=self._layer.scale, enable_gqa=True
        )
        mixed_BTD: torch.Tensor = self.o_proj(out_BNTH.transpose(1, 2).flatten(2))
        return mixed_BTD

    def _rotated(self, x_BNTH: torch.Tensor) -> torch.Tensor:
        """RoPE (https://arxiv.org/abs/2104.09864), element i paired with i + H/2."""
        positions_T = torch.arange(x_BNTH.shape[2], device=x_BNTH.device, dtype=torch.float32)
        angles_TF = positions_T[:, None] * self.get_buffer("_frequencies_F")
        cos_TF, sin_TF = angles_TF.cos() * self._attention_factor, angles_TF.sin() * self._attention_factor
        first_BNTF, second_BNTF = x_BNTH.chunk(2, -1)
        turned = (first_BNTF * cos_TF - second_BNTF * sin_TF, second_BNTF * cos_TF + first_BNTF * sin_TF)
        return torch.cat(turned, -1)


class _FeedForward(nn.Module):
    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        width, inner = settings.spec.hidden_size, settings.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self._activation = ACTIVATIONS[settings.activation]

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        added_BTD: torch.Tensor = self.down_proj(self._activation(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return added_BTD
