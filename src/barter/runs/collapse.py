"""Detect a collapsed run: accuracy at chance after having been far above it."""

from __future__ import annotations

from barter.core.record import Round

__all__ = ["AccuracyWatch"]

# Shares of the way from chance to perfect accuracy.
FAR_ABOVE = 0.2  # An accuracy from here on shows that the model has learned.
AT_CHANCE = 0.05  # An accuracy up to here is chance.


class AccuracyWatch:
    """The primary model's accuracy so far, and the last round in which it was good.

    Args:
        chance: The accuracy of a model that always predicts the most frequent class.
    """

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self.good: int | None = None  # the last evaluated round that had not collapsed
        self.accuracy = 0.0  # of that round
        self.highest = 0.0
        self.collapsed = False

    def add(self, record: Round) -> str:
        """Take a finished round into account; one without a headline accuracy is ignored.

        With progress (accuracy - chance) / (1 - chance), accuracy has collapsed if the highest
        earlier progress was at least `FAR_ABOVE` and now it is at most `AT_CHANCE`.

        Returns:
            A warning in the first round of a collapse, otherwise an empty string.
        """
        accuracy = record.headline()
        if accuracy is None:
            return ""
        progress = (accuracy - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0
        before = (self.highest - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0
        was_collapsed = self.collapsed
        self.highest = max(self.highest, accuracy)
        self.collapsed = before >= FAR_ABOVE and progress <= AT_CHANCE
        if not self.collapsed:
            self.good = record.round
            self.accuracy = accuracy
        elif not was_collapsed:
            return (
                f"accuracy fell to chance: {accuracy:.1%} after {self.accuracy:.1%} in round "
                f"{self.good}"
            )
        return ""
