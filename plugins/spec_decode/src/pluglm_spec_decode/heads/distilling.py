"""Trains a draft head: what it says of the next tokens is brought near to what the target says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import smooth_l1_loss
from torch.nn.utils.rnn import pad_sequence

from pluglm_spec_decode.heads.collecting import Trace
from pluglm_spec_decode.heads.module import DraftHead
from pluglm_spec_decode.heads.teacher import Teacher

# B: texts, T: entries of the longest, R: entries that are compared, D: hidden size, V: the target's logits

Report = Callable[[int, int, float], None]  # (epochs done, of how many, mean loss of the last one)


def distill(
    head: DraftHead,
    traces: Sequence[Trace],
    teacher: Teacher,
    *,
    num_epochs: int,
    batch_size: int = 8,
    learning_rate: float = 1e-3,
    feature_weight: float | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> list[float]:
    """Trains in place and returns the mean loss of each epoch; Adam, with the texts in an order of the seed.

    The loss is the cross-entropy (nats a token) of the head's next-token distributions to the target's own, the mean
    over the blocks, plus feature_weight times the smooth L1 distance of its features to the target's. That weight is 1
    for eagle, whose features are fed back, and 0 for mtp, unless given. Texts need two tokens more than the head has
    blocks, shorter ones are left out. ValueError when none is left, for no epoch and for an empty batch. Sources: EAGLE
    (arXiv 2401.15077, section 4.2) and DeepSeek-V3 (arXiv 2412.19437, section 2.2), with the target's distribution in
    place of the text's next token.
    """
    for name, value in (("num_epochs", num_epochs), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; give 1 or more")
    usable = _usable(traces, len(head.layers))
    weight = float(head.config["kind"] == "eagle") if feature_weight is None else feature_weight
    optimizer = torch.optim.Adam(head.parameters(), learning_rate)
    order, losses = torch.Generator().manual_seed(seed), list[float]()
    for epoch in range(num_epochs):
        total = 0.0
        for batch in _batches(usable, batch_size, order):
            loss = _loss(head, batch, teacher, weight)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(usable))
        if report is not None:
            report(epoch + 1, num_epochs, losses[-1])
    return losses


def _usable(traces: Sequence[Trace], num_blocks: int) -> list[Trace]:
    if not traces:
        raise ValueError("there are no traces to train on; collect some of the texts that the head will meet")
    usable = [trace for trace in traces if len(trace.features_nD) > num_blocks]
    if not usable:
        raise ValueError(
            f"no text is longer than {num_blocks + 1} tokens, so a head of {num_blocks} blocks has no target"
        )
    return usable


def _batches(traces: Sequence[Trace], size: int, order: torch.Generator) -> Iterator[list[Trace]]:
    places = torch.randperm(len(traces), generator=order).tolist()
    for start in range(0, len(places), size):
        yield [traces[place] for place in places[start : start + size]]


def _loss(head: DraftHead, batch: Sequence[Trace], teacher: Teacher, feature_weight: float) -> torch.Tensor:
    device = next(head.parameters()).device
    # States that were computed for inference take part in no gradient; copies of them may.
    rows = [trace.features_nD.to(device, torch.float32, copy=True) for trace in batch]
    ids = [torch.tensor(trace.token_ids[1:], device=device) for trace in batch]
    features_BTD, embeddings_BTD = pad_sequence(rows, True), teacher.embed(pad_sequence(ids, True))
    lengths_B = torch.tensor([len(one) for one in rows], device=device)
    said = head(embeddings_BTD, features_BTD)
    return torch.stack([
        _distance(said_BTD[:, :-1], features_BTD[:, ahead + 1 :], lengths_B - ahead - 1, teacher, feature_weight)
        for ahead, said_BTD in enumerate(said)
    ]).mean()  # fmt: skip


def _distance(
    said_BTD: torch.Tensor, features_BTD: torch.Tensor, lengths_B: torch.Tensor, teacher: Teacher, feature_weight: float
) -> torch.Tensor:
    """Of the first lengths_B entries of each text."""
    is_real_BT = torch.arange(said_BTD.shape[1], device=said_BTD.device) < lengths_B[:, None]
    said_RD, true_RD = said_BTD[is_real_BT], features_BTD[is_real_BT]
    with torch.no_grad():
        target_RV = teacher.logits(true_RD).softmax(-1)
    entropy = -(target_RV * teacher.logits(said_RD).log_softmax(-1)).sum(-1).mean()
    return entropy + feature_weight * smooth_l1_loss(said_RD, true_RD) if feature_weight else entropy
