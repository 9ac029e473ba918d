"""A batch of token rows, cut into micro-batches of one shape, as a pipeline needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the pipeline together; b rows of s tokens.

    A batch is a mapping (a dict or a TensorDict) with ``input_ids`` and, if need be, ``attention_mask``, ``loss_mask``
    and other tensors with the same rows.

    Attributes:
        input_ids: (b, s), int64.
        position_ids: (b, s), int64.
        real: (b, s), bool; the batch's ``attention_mask``: True for real tokens, with padding on either side of them.
        loss_mask: (b, s - 1), float32; 1 where the loss of a token counts, by the token that is predicted. The batch's
            (b, s) ``loss_mask`` without its first column, or else 1 for every real token after a real one: the first
            real token of a row is never predicted. 0 in rows that fill up.
        others: what else the batch has.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    real: torch.Tensor
    loss_mask: torch.Tensor
    others: Mapping[str, torch.Tensor]

    @property
    def attention_mask(self) -> torch.Tensor:
        """(b, 1, s, s), bool; True where a query must not look, as megatron's own attention has it. Made when it is
        asked for: those of a whole batch would take more memory than all else that it has."""
        tokens = self.real.shape[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=self.real.device).triu(1)
        return later | ~self.real[:, None, None, :]


def micro_batches(
    batch: Mapping[str, torch.Tensor], size: int, group: int, vocab_size: int, device: torch.device
) -> list[MicroBatch]:
    """Cut a batch, on every rank alike.

    All micro-batches have the same shape: the last ones are filled up with rows whose loss does not count. There is at
    least one, so that a rank without rows takes its part in the collectives of the others.

    Args:
        batch: see `MicroBatch`.
        size: rows of a micro-batch.
        group: the number of micro-batches is a multiple of it.
        vocab_size: tokens are below it.
        device: where they go.

    Raises:
        ValueError: ``input_ids`` is missing or not (rows, tokens) of integers, has fewer than two tokens or one that
            is not in the vocabulary, a mask has another shape, ``loss_mask`` counts padding or the first real token of
            a row, or ``size`` is not from 1.
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"micro_batch_size={size!r}: it is an integer from 1")
    given = {str(key): value for key, value in batch.items() if value is not None}
    ids = _checked(given, vocab_size)
    rows, tokens = ids.shape
    real = given.pop("attention_mask", torch.ones_like(ids)).bool()
    predicted = torch.zeros_like(real)
    predicted[:, 1:] = real[:, 1:] & real[:, :-1]
    counts = given.pop("loss_mask", predicted)
    _check_counts(counts != 0, predicted.to(counts.device))
    counts = counts[:, 1:].float()
    number = max(-(-rows // size), 1)
    number = -(-number // group) * group
    fill = number * size - rows
    if fill:
        # With no rows at all there is nothing to repeat.
        numbers = torch.arange(number * size) % max(rows, 1)
        ids, real, counts = _rows(ids, numbers), _rows(real, numbers), _rows(counts, numbers)
        counts[rows:] = 0
        given = {key: _rows(value, numbers) for key, value in given.items()}
    made = []
    for start in range(0, number * size, size):
        rows_of = slice(start, start + size)
        made.append(
            MicroBatch(
                ids[rows_of].to(device),
                torch.arange(tokens, device=device).expand(size, tokens),
                real[rows_of].to(device),
                counts[rows_of].to(device),
                {key: value[rows_of].to(device) for key, value in given.items()},
            )
        )
    return made


def _rows(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The rows of these numbers, or as many of zeros if there is none."""
    if len(tensor):
        return tensor[numbers.to(tensor.device)]
    return tensor.new_zeros(len(numbers), *tensor.shape[1:])


def _checked(given: dict[str, torch.Tensor], vocab_size: int) -> torch.Tensor:
    if "input_ids" not in given:
        raise ValueError(f"the batch has no 'input_ids', only {', '.join(given) or 'nothing'}")
    ids = given.pop("input_ids")
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 2:
        raise ValueError(
            f"input_ids is (rows, tokens) of integers, two tokens at least; got {ids.dtype} {tuple(ids.shape)}"
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        # Megatron's embedding would take them for tokens of another rank, and give zeros.
        raise ValueError(f"input_ids has tokens from {int(ids.min())} to {int(ids.max())}; vocab_size is {vocab_size}")
    for name in ("attention_mask", "loss_mask"):
        mask = given.get(name)
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"{name} is {tuple(mask.shape)}, input_ids {tuple(ids.shape)}: they have the same shape")
    return ids.long()


def _check_counts(counts: torch.Tensor, predicted: torch.Tensor) -> None:
    wrong = (counts & ~predicted).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the loss_mask of row {row} counts token {token}, which is padding or has no real token before it, so "
            "that nothing predicts it; set loss_mask to 0 there"
        )
