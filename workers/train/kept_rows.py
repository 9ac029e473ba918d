"""KeptRows: what a train rank computes for the rows that the driver records, see ``record_rows`` in
`workers.data.rollout_data`. Log-probabilities are those of the training's own forward passes, so keeping them costs no
other pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workers.data.micro_batches import MicroBatch
from workers.data.rollout_data import RECORD_ROWS
from workers.train.train_model import TokenLoss, TokenOutputs

COMPUTED = ("advantages", "ref_log_probs", "values", "correction_weights")
"""Entries that a rank adds to its rows."""


class KeptRows:
    """The rows of one rollout that a rank keeps.

    Args:
        data: the rank's rows.
        of_others: whether their ``old_log_probs`` are of other weights than those before the first step.
    """

    def __init__(self, data: Mapping[str, torch.Tensor], *, of_others: bool) -> None:
        self._data = data
        self.of_others = of_others
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._log_probs: dict[int, torch.Tensor] = {}

    def watch(self, loss: TokenLoss, part: Mapping[str, torch.Tensor]) -> TokenLoss:
        """Return a loss that also keeps the log-probabilities of the step's rows, unless those of an earlier step are
        kept. They stay on the device until `take`.

        Args:
            loss: the loss.
            part: the rows of the optimizer step.
        """
        numbers = part[RECORD_ROWS].tolist()

        def watched(outputs: TokenOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if outputs.log_probs is not None:
                of_tokens = outputs.log_probs.detach()
                for at, row in enumerate(micro_batch.rows.tolist()):
                    if numbers[row] >= 0 and numbers[row] not in self._log_probs:
                        self._pending.append((numbers[row], of_tokens[at]))
            return loss(outputs, micro_batch)

        return watched

    def take(self) -> None:
        """Copy what the step has kept from the device, after the step."""
        if self._pending:
            values = torch.cat([value for _, value in self._pending]).float().cpu()
            parts = values.split([len(value) for _, value in self._pending])
            self._log_probs |= {number: part for (number, _), part in zip(self._pending, parts, strict=True)}
            self._pending = []

    def arrays(self) -> dict[str, Any]:
        """Return the rows, padding left out: ``numbers`` and ``lengths``, int64 (rows,), and ``columns``: name ->
        float32 (tokens of all rows,)."""
        data = self._data
        at = (data[RECORD_ROWS] >= 0).nonzero()[:, 0]
        real = data["attention_mask"][at].bool()
        numbers, lengths = data[RECORD_ROWS][at], real.sum(1)
        columns = {
            name: data[name][at].expand(real.shape)[real].float().numpy()
            for name in COMPUTED
            if name in data and data[name].dim() == 2
        }
        if self._log_probs:
            of_rows = [
                self._log_probs[number][:length] if number in self._log_probs else torch.full((length,), torch.nan)
                for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True)
            ]
            columns["log_probs"] = torch.cat(of_rows).numpy()
        elif "old_log_probs" in data and not self.of_others:
            columns["log_probs"] = data["old_log_probs"][at][real].float().numpy()
        return {"numbers": numbers.numpy(), "lengths": lengths.numpy(), "columns": columns}
