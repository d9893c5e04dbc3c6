"""Log a run's rounds for TensorBoard; needs the extra `tensorboard`."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from barter.core.record import Round
from barter.runs.folder import read_records

__all__ = ["FOLDER", "TensorBoard"]

FOLDER = "tensorboard"


class TensorBoard:
    """A callback that logs each finished round in the run's folder.

    The first call also logs the earlier rounds and purges older entries, so that the log of a
    resumed run is complete and has no duplicates.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._writer: SummaryWriter | None = None

    def __call__(self, record: Round) -> None:
        new = [record]
        if self._writer is None:
            earlier = [known for known in read_records(self.run) if known.round < record.round]
            new = [*earlier, record]
            self._writer = SummaryWriter(str(self.run / FOLDER), purge_step=1)
        for entry in new:
            for name, value in entry.scalars().items():
                self._writer.add_scalar(name, value, entry.round)
        self._writer.flush()
