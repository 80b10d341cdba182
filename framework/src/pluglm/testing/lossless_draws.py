"""Runs a rule on many windows at once: coins swept over midpoints, or drawn with everything else from one seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pluglm.testing.lossless_boxes import Floats, Ints
from pluglm.testing.lossless_chains import Chain, cases
from pluglm.testing.lossless_runs import Verifier, run_cases
from pluglm.verification import Windows

# N: windows, k: most drafts of a window, V: vocabulary


class Tally(NamedTuple):
    """counts: windows whose k + 1 tokens were these, [V ** (k + 1)]. kept: those with i + 1 drafts kept or more."""

    counts: Ints
    kept: Ints


def sweep_first_token(verifier: Verifier, chain: Chain, num_steps: int) -> Floats:
    """The law of the first token when k = 1, [V]: both uniforms over num_steps midpoints, proposals by their chance."""
    middles = (np.arange(num_steps) + 0.5) / num_steps
    coins, recover = (axis.reshape(-1) for axis in np.meshgrid(middles, middles, indexing="ij"))
    law = np.zeros(chain.num_tokens)
    for some in cases([chain], verifier.proposes):
        num_drafts = some.drafts_Cn.shape[1]
        for case, chance in enumerate(some.chance_C):
            case_N = np.full(len(coins), case)
            kept_N, last_N = run_cases(verifier, some, case_N, coins[:, None][:, :num_drafts], recover)
            first_N = np.where(kept_N > 0, some.drafts_Cn[case, 0], last_N) if num_drafts else last_N
            law += chance * np.bincount(first_N, minlength=chain.num_tokens) / len(coins)
    return law


def draw_windows(verifier: Verifier, chain: Chain, num_windows: int, seed: int) -> Tally:
    """Proposals, coins and the tokens behind a run are drawn; all windows are one batch, ragged where drafts are."""
    random = np.random.Generator(np.random.Philox(seed))
    most, width = len(chain.draft), chain.num_tokens
    drafts, length_N = _propose(verifier, chain, num_windows, random)
    windows = _windows(verifier, chain, drafts, length_N, random)
    verdict = verifier.rule(windows)
    kept_N, last_N = verdict.num_kept_S.numpy(), verdict.last_S.numpy()
    cell_N = np.zeros(num_windows, dtype=np.int64)
    for place in range(most + 1):
        token_N = _pick(chain.target[place][cell_N], uniforms(random, num_windows))
        token_N = np.where(place == kept_N, last_N, token_N)
        if place < most:
            token_N = np.where(place < kept_N, drafts[:, place], token_N)
        cell_N = cell_N * width + token_N
    kept = np.array([(kept_N > place).sum() for place in range(most)])
    return Tally(np.bincount(cell_N, minlength=width ** (most + 1)), kept)


def uniforms(random: np.random.Generator, *shape: int) -> Floats:
    """Midpoints of 2 ** 52 equal parts, in the open interval."""
    coins: Floats = (random.integers(0, 2**52, shape).astype(np.float64) + 0.5) * 2.0**-52
    return coins


def _pick(rows_NV: Floats, coins_N: Floats) -> Ints:
    running_NV = rows_NV.cumsum(1)
    ids_N: Ints = (running_NV <= coins_N[:, None] * running_NV[:, -1:]).sum(1)
    return ids_N


def _propose(verifier: Verifier, chain: Chain, num: int, random: np.random.Generator) -> tuple[Ints, Ints]:
    """drafts [N, k], and how many of them there are."""
    most, width = len(chain.draft), chain.num_tokens
    drafts, length_N, context_N = np.zeros((num, most), np.int64), np.zeros(num, np.int64), np.zeros(num, np.int64)
    for place in range(most):
        id_N = _pick(verifier.proposes(chain.draft[place])[context_N], uniforms(random, num))
        goes_on_N = (length_N == place) & (id_N < width)
        length_N += goes_on_N
        drafts[:, place] = np.where(goes_on_N, id_N, 0)
        context_N = context_N * width + drafts[:, place]
    return drafts, length_N


def _windows(verifier: Verifier, chain: Chain, drafts: Ints, length_N: Ints, random: np.random.Generator) -> Windows:
    num, most = drafts.shape
    target, draft, context_N = list[Floats](), list[Floats](), np.zeros(num, np.int64)
    for place in range(most + 1):
        target.append(chain.target[place][context_N])
        if place < most:
            draft.append(chain.draft[place][context_N])
            context_N = context_N * chain.num_tokens + drafts[:, place]
    is_draft = np.arange(most) < length_N[:, None]
    is_row = np.arange(most + 1) <= length_N[:, None]
    shown = torch.from_numpy(np.stack(draft, 1)[is_draft].astype(np.float32)) if verifier.shows_rows else None
    return Windows(
        num_drafts=length_N.tolist(),
        drafts_D=torch.from_numpy(drafts[is_draft]),
        target_TV=torch.from_numpy(np.stack(target, 1)[is_row].astype(np.float32)),
        proposal_DV=shown,
        coins_D=torch.from_numpy(uniforms(random, int(is_draft.sum()))),
        recover_S=torch.from_numpy(uniforms(random, num)),
    )
