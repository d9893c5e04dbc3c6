"""A run's rounds as TensorBoard shows them; needs the extra of this name."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from barter.core.record import Round
from barter.runs.folder import records

__all__ = ["FOLDER", "TensorBoard"]

FOLDER = "tensorboard"


class TensorBoard:
    """Writes each round into the run's folder when it is done; the first time, also those before it.

    So the log of a run that was resumed is whole, and says nothing twice: what it said before is taken back.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._writer: SummaryWriter | None = None

    def __call__(self, record: Round) -> None:
        known = [record]
        if self._writer is None:
            known = [
                *(earlier for earlier in records(self.run) if earlier.round < record.round),
                record,
            ]
            self._writer = SummaryWriter(str(self.run / FOLDER), purge_step=1)
        for one in known:
            for name, value in one.scalars().items():
                self._writer.add_scalar(name, value, one.round)
        self._writer.flush()
