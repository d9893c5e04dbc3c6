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
from barter.privacy.side_information import (
    BESIDE,
    ERRORS,
    HARMLESS,
    HELLO,
    PIXELS,
    RESULTS,
    said_of_itself,
)

__all__ = ["TESTS", "TRAINED", "Row", "Statement", "statement"]

RELATION = (
    "two runs are neighbours if one training image of one client, with its label, is replaced by any other; "
    "how many images there are, and which classes the run is about, are public"
)
LEFT_OUT = "Not counted: whether a client answers, when, and how long it takes."
HERE = "The experimenter, in one process, sees what sites would withhold: whoever is shown that has no promise."
VALIDATION = "Validation images count as test images: they are held out from training."
TRAINED, TESTS = "training images", "test images"
WITHHELD, AS_WITHHELD = "withheld by the site", "seen here; withheld by sites with `epsilon`"


@dataclass(frozen=True)
class Row:
    """One part of an answer that left clients, or what left beside answers."""

    part: str
    what: str  # crosses up, as the method says
    protection: str  # empty: none
    releases: int  # the most by one client
    epsilon: float  # of the client that told most
    given: str = ""  # what ε takes for granted
    about: str = TRAINED  # whose ε this is

    @property
    def bare(self) -> bool:
        """Whether it left as it was computed."""
        return math.isinf(self.epsilon) and not self.protection


@dataclass(frozen=True)
class Statement:
    """What holds for every training image of every client, and what was told of test images."""

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
        return any(row.protection and row.releases for row in self.rows)

    @property
    def of_tests(self) -> float:
        """ε of every test image of every client."""
        return max((row.epsilon for row in self.rows if row.about == TESTS), default=0.0)

    def to_json(self) -> str:
        """As a file; what is infinite is a word there."""
        tree = asdict(self)
        tree["rows"] = [{**row, "epsilon": _word(row["epsilon"])} for row in tree["rows"]]
        tree |= {
            "epsilon": _word(self.epsilon),
            "clients": {str(k): _word(e) for k, e in self.clients.items()},
        }
        return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Statement:
        """From a file of what `to_json` wrote."""
        return understood(path, cls.from_json)

    @classmethod
    def from_json(cls, text: str) -> Statement:
        """From what `to_json` wrote."""
        tree: dict[str, Any] = json.loads(text)
        tree["rows"] = tuple(
            Row(**{**row, "epsilon": float(row["epsilon"])}) for row in tree["rows"]
        )
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
    start: str = "",
    validation: bool = False,
    selection: bool = False,
) -> Statement:
    """Of what came up from each client, part by part; clients that told us of a larger ε of theirs are believed.

    Where noise is not secret, all clients are in one process: what leaves beside answers is what sites would tell that
    can take part in such a run. `start` is the run with whose networks this one began, `validation` says that clients
    hold images out, and `selection` that their accuracies decide which round is kept, or when the run stops.
    """
    plan = Plan(privacy, algorithm)
    beside = {
        k: {part: n for part, n in seen.items() if part in BESIDE} for k, seen in crossed.items()
    }
    if not secret:
        hello = said_of_itself(numbered=False, pixels=not plan.promised)
        if plan.promised:
            # Whoever chooses by results that sites would withhold reveals them.
            used = {RESULTS} if selection else set()
            beside = {
                k: {**{part: n for part, n in seen.items() if part in used}, **hello}
                for k, seen in beside.items()
            }
        else:
            beside = {k: {**seen, **hello} for k, seen in beside.items()}
    crossed = {
        k: {part: n for part, n in seen.items() if part not in BESIDE}
        for k, seen in crossed.items()
    }
    spoke = {k for k, seen in crossed.items() if any(seen.values()) or beside[k].get(RESULTS)}
    said = dict.fromkeys(part for parts in plan.parts.values() for part in parts)
    parts = [*said, *sorted({part for seen in crossed.values() for part in seen} - said.keys())]
    most = {
        part: max((seen.get(part, 0) for seen in crossed.values()), default=0) for part in parts
    }
    crosses = getattr(type(algorithm), "crosses", {})
    unsaid = 0.0 if plan.training is None else math.inf  # what training cost, only a client knows
    told = {k: told.get(k, unsaid if k in spoke else 0.0) for k in crossed}
    rows = [_row(plan, crosses, part, count, told) for part, count in most.items() if count]
    rows = _around(plan, beside, rows, told, WITHHELD if secret else AS_WITHHELD)
    clients = {
        k: max(plan.cost(plan.released(seen)), told[k]) for k, seen in sorted(crossed.items())
    }
    bare = ", ".join(row.part for row in rows if row.about == TRAINED and row.bare)
    why = [f"{bare} left as computed"] if bare else []
    why += [
        f"{row.part} left with noise that promises nothing"
        for row in rows
        if row.part in plan.covers and math.isinf(row.epsilon)
    ]
    why += [
        f"{row.part}: {row.given} comes from private images without protection"
        for row in rows
        if row.given
    ]
    why += [
        f"client {k} names no finite ε of what it told"
        for k, cost in clients.items()
        if math.isinf(cost)
    ]
    left = any(row.releases and row.part not in HARMLESS for row in rows)
    if start and left:
        why.append(
            f"it began with the networks of {start}, and what that run told of the same images is not counted"
        )
    epsilon = math.inf if why else max(clients.values(), default=0.0) if left else 0.0
    noise = (
        "the operating system of each site"
        if secret
        else "the run's seed: whoever knows it can take it away"
    )
    left_out = [LEFT_OUT]
    if plan.promised and not secret:
        left_out.append(HERE)
    if validation:
        left_out.append(VALIDATION)
    return Statement(
        type(algorithm).__name__,
        tuple(rows),
        epsilon,
        privacy.delta,
        privacy.epsilon,
        clients,
        tuple(why),
        noise,
        left_out=" ".join(left_out),
    )


def _around(
    plan: Plan,
    beside: Mapping[int, Mapping[str, int]],
    rows: list[Row],
    told: Mapping[int, float],
    withheld: str,
) -> list[Row]:
    """The rows, before them those of what clients said of themselves, behind them of what they measured."""
    most = {
        part: max((seen.get(part, 0) for seen in beside.values()), default=0) for part in BESIDE
    }

    def row(part: str, about: str = TRAINED) -> Row:
        count, trained = (
            most[part],
            part == RESULTS and about == TRAINED and plan.training is not None,
        )
        if not count:
            return Row(part, BESIDE[part], withheld, 0, 0.0, about=about)
        if part in HARMLESS:
            return Row(part, BESIDE[part], "", count, 0.0)
        if trained:
            return Row(part, BESIDE[part], str(plan.training), count, max(told.values()))
        return Row(part, BESIDE[part], "", count, math.inf, about=about)

    if not beside:
        return rows
    hello = [row(part) for part in HELLO if most[part] or part == PIXELS]
    errors = [row(ERRORS, about) for about in (TRAINED, TESTS) if most[ERRORS]]
    return [*hello, *rows, row(RESULTS), row(RESULTS, TESTS), *errors]


def _row(
    plan: Plan, crosses: Mapping[str, str], part: str, count: int, told: Mapping[int, float]
) -> Row:
    text = crosses.get(part.partition(".")[0], "up: what the method does not say")
    what = text.rpartition("up:")[2].partition("; down:")[0].strip() if "up:" in text else text
    if part in plan.covers:
        name = plan.covers[part]
        protection = (
            str(plan.mechanisms[name]) if name == part else f"{plan.mechanisms[name]} ({name})"
        )
        if not plan.mechanisms[name].promises:
            return Row(part, what, f"{protection}, which promises nothing", count, math.inf)
        return Row(part, what, protection, count, plan.cost({name: count}), plan.given(part))
    if plan.tells.get(part) == "nothing":
        return Row(part, what, "", count, 0.0)
    if plan.training is not None:
        return Row(part, what, str(plan.training), count, max(told.values()))
    return Row(part, what, "", count, math.inf)
