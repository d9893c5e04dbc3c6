"""What a run told of private images: every part that left a client, how it was protected, and what that promises."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from barter.core.algorithm import Algorithm
from barter.core.files import understood
from barter.privacy.settings import Plan, Privacy

__all__ = ["Row", "Statement", "statement"]

RELATION = (
    "two runs are neighbours if one image of one client, with its label, is replaced by any other; "
    "how many images there are, and the shapes of what is sent, are public"
)
LEFT_OUT = (
    "Not counted: the accuracies and other numbers of the round's record, which clients compute for the experimenter; "
    "on Flower, what a site says of itself before round 1: number of images, classes, mean and deviation of pixels. "
    "Test images are not protected."
)


@dataclass(frozen=True)
class Row:
    """One part of an answer that left clients."""

    part: str
    what: str  # crosses up, as the method says
    protection: str  # empty: none
    releases: int  # the most by one client
    epsilon: float  # of the client that told most
    given: str = ""  # what ε takes for granted


@dataclass(frozen=True)
class Statement:
    """What holds for every image of every client."""

    method: str
    rows: tuple[Row, ...]
    epsilon: float  # of the whole run
    delta: float
    budget: float | None
    clients: dict[int, float]  # ε of what is protected, by client
    why: tuple[str, ...]  # ε is infinite
    noise: str  # where it came from
    relation: str = RELATION
    left_out: str = LEFT_OUT

    @property
    def protected(self) -> bool:
        """Whether anything is."""
        return any(row.protection for row in self.rows)

    def to_json(self) -> str:
        """As a file; what is infinite is a word there."""
        tree = asdict(self)
        tree["rows"] = [{**row, "epsilon": _word(row["epsilon"])} for row in tree["rows"]]
        tree |= {"epsilon": _word(self.epsilon), "clients": {str(k): _word(e) for k, e in self.clients.items()}}
        return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Statement:
        """From a file of what `to_json` wrote."""
        return understood(path, cls.from_json)

    @classmethod
    def from_json(cls, text: str) -> Statement:
        """From what `to_json` wrote."""
        tree: dict[str, Any] = json.loads(text)
        tree["rows"] = tuple(Row(**{**row, "epsilon": float(row["epsilon"])}) for row in tree["rows"])
        tree |= {"epsilon": float(tree["epsilon"]), "why": tuple(tree["why"])}
        return cls(**{**tree, "clients": {int(k): float(e) for k, e in tree["clients"].items()}})


def _word(epsilon: float) -> float | str:
    return epsilon if math.isfinite(epsilon) else "infinity"


def statement(
    privacy: Privacy,
    algorithm: Algorithm[Any, Any],
    crossed: Mapping[int, Mapping[str, int]],
    told: Mapping[int, float],
    *,
    secret: bool,
) -> Statement:
    """Of what came up from each client, part by part; clients that told us of a larger ε of theirs are believed."""
    plan = Plan(privacy, algorithm)
    said = dict.fromkeys(part for parts in plan.parts.values() for part in parts)
    parts = [*said, *sorted({part for seen in crossed.values() for part in seen} - said.keys())]
    most = {part: max((seen.get(part, 0) for seen in crossed.values()), default=0) for part in parts}
    crosses = getattr(type(algorithm), "crosses", {})
    unsaid = 0.0 if plan.training is None else math.inf  # what training cost, only a client knows
    told = {k: told.get(k, unsaid if any(seen.values()) else 0.0) for k, seen in crossed.items()}
    rows = [_row(plan, crosses, part, count, told) for part, count in most.items() if count]
    clients = {k: max(plan.cost(plan.released(seen)), told[k]) for k, seen in sorted(crossed.items())}
    bare = ", ".join(row.part for row in rows if math.isinf(row.epsilon) and not row.protection)
    why = [f"{bare} left as computed"] if bare else []
    why += [
        f"{row.part} left with noise that promises nothing"
        for row in rows
        if row.part in plan.covers and math.isinf(row.epsilon)
    ]
    why += [f"{row.part}: {row.given} learnt from private images without protection" for row in rows if row.given]
    why += [f"client {k} names no finite ε of what it told" for k, cost in clients.items() if math.isinf(cost)]
    epsilon = math.inf if why else max(clients.values(), default=0.0) if rows else 0.0
    noise = "the operating system of each site" if secret else "the run's seed: whoever knows it can take it away"
    return Statement(
        type(algorithm).__name__, tuple(rows), epsilon, privacy.delta, privacy.epsilon, clients, tuple(why), noise
    )


def _row(plan: Plan, crosses: Mapping[str, str], part: str, count: int, told: Mapping[int, float]) -> Row:
    text = crosses.get(part.partition(".")[0], "up: what the method does not say")
    what = text.rpartition("up:")[2].partition("; down:")[0].strip() if "up:" in text else text
    if part in plan.covers:
        name = plan.covers[part]
        protection = str(plan.mechanisms[name]) if name == part else f"{plan.mechanisms[name]} ({name})"
        if not plan.mechanisms[name].promises:
            return Row(part, what, f"{protection}, which promises nothing", count, math.inf)
        return Row(part, what, protection, count, plan.cost({name: count}), plan.given(part))
    if plan.tells.get(part) == "nothing":
        return Row(part, what, "", count, 0.0)
    if plan.training is not None:
        return Row(part, what, str(plan.training), count, max(told.values()))
    return Row(part, what, "", count, math.inf)
