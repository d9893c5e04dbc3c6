"""Select a run's best round, and stop early, by validation accuracy only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from barter.core.record import Round

__all__ = ["Selection", "Stop", "best_round", "validation_accuracy"]


def validation_accuracy(record: Round) -> float | None:
    """Return the accuracy by which rounds are compared; None if none was recorded.

    It is the primary model's accuracy on all validation images: that of the server's model, or the
    mean over clients. Where every site has only its own images, it is the clients' mean on those.
    """
    found = record.headline("val")
    if found is not None or not record.values("val_local"):
        return found
    return record.mean("val_local")


def best_round(records: Iterable[Round]) -> Round | None:
    """Return the first round with the highest validation accuracy, None without one."""
    best = None
    highest = -1.0
    for record in records:
        value = validation_accuracy(record)
        if value is not None and value > highest:
            best, highest = record, value
    return best


@dataclass(frozen=True)
class Stop:
    """An early stop, as the run's folder keeps it."""

    round: int  # the last finished round
    best: int  # the round with the highest validation accuracy
    accuracy: float  # the validation accuracy of that round
    patience: int
    overruled: bool = False  # whether the user continued the run nevertheless

    def __str__(self) -> str:
        rounds = f"{self.patience} round{'s' * (self.patience > 1)}"
        return (
            f"stopped early after round {self.round}: validation accuracy was best in round "
            f"{self.best} "
            f"({self.accuracy:.1%}) and did not improve for {rounds}"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Stop:
        """Parse the JSON text of an early stop.

        Raises:
            ValueError: The text is not what `to_json` returns.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"no record of an early stop: {error}") from error


class Selection:
    """The best round by validation so far, and whether to stop early."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.best: int | None = None
        self.highest = -1.0
        self.restart = 0  # the round after which patience is counted again
        self.measured: list[int] = []  # rounds that recorded a validation accuracy

    def add(self, record: Round) -> None:
        """Update the best round with a finished round's validation accuracy.

        A round without one is ignored, and one as good as the best does not replace it.
        """
        value = validation_accuracy(record)
        if value is None:
            return
        self.measured.append(record.round)
        if value > self.highest:
            self.best, self.highest = record.round, value

    def ignore_stop(self, stop: Stop) -> Stop:
        """Ignore an early stop: count patience again from its round on.

        Returns:
            The stop, marked as overruled for the run's folder.
        """
        self.restart = stop.round
        return replace(stop, overruled=True)

    def stop(self) -> Stop | None:
        """Return the early stop that is due now, or None if the run continues.

        It is due if at least `patience` rounds recorded a validation accuracy since the best round,
        or since the round of an ignored stop if that is later. Other rounds do not count.
        """
        if self.patience is None or self.best is None:
            return None
        since = max(self.best, self.restart)
        if sum(measured > since for measured in self.measured) < self.patience:
            return None
        return Stop(self.measured[-1], self.best, self.highest, self.patience)
