"""The privacy statement of a run: released parts, their protection and ε."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from barter.core.algorithm import Algorithm, Crossing
from barter.core.files import parse_file
from barter.privacy.settings import Plan, Privacy
from barter.privacy.side_information import (
    ERRORS,
    FAILURES,
    HELLO,
    PIXELS,
    PROGRESS,
    PUBLIC_DATA_FACT,
    PUBLIC_FACTS,
    RESULTS,
    SIDE_INFORMATION,
    facts_in_hello,
)

__all__ = ["TEST_IMAGES", "TRAINED", "ReleaseRow", "Statement", "make_statement"]

RELATION = (
    "two runs are neighbours if one training image of one client, with its label, is replaced by "
    "any other; the number of images and the classes of the run are public"
)
LEFT_OUT = (
    "Not counted: whether a client answers or fails (of a failure, a site sends the same words "
    "whatever the reason), when, and how long it takes. Sites without `epsilon` also report the "
    "progress of long calls."
)
LOCAL_FACTS = (
    "In one process the experimenter sees what sites would withhold; passing it on voids the "
    "guarantee."
)
VALIDATION = "Validation images count as test images: they are held out from training."
TRAINED = "training images"
TEST_IMAGES = "test images"
WITHHELD = "withheld by the site"
AS_WITHHELD = "seen here; withheld by sites with `epsilon`"
ONE_WORD = "the same words for every reason; not counted"


@dataclass(frozen=True)
class ReleaseRow:
    """One part of the clients' answers, or one kind of side information."""

    part: str
    what: str  # description by the algorithm
    protection: str  # empty: none
    releases: int  # largest number of releases by one client
    epsilon: float  # ε of the client with most releases
    given: str = ""  # what ε assumes to be public
    about: str = TRAINED  # the images that ε refers to

    @property
    def bare(self) -> bool:
        """Return whether it depends on private images and left without any protection."""
        return math.isinf(self.epsilon) and not self.protection


@dataclass(frozen=True)
class Statement:
    """A run's privacy guarantee for training images, and what test images reveal."""

    method: str
    rows: tuple[ReleaseRow, ...]
    epsilon: float  # ε of the whole run
    delta: float
    budget: float | None
    clients: dict[int, float]  # ε of protected parts, by client
    why: tuple[str, ...]  # reasons for an infinite ε
    noise: str  # source of the noise
    relation: str = RELATION
    left_out: str = LEFT_OUT

    @property
    def protected(self) -> bool:
        """Return whether any part with a protection was released; False without releases."""
        return any(row.protection and row.releases for row in self.rows)

    @property
    def of_tests(self) -> float:
        """Return the ε of every test image of every client; 0 if nothing reveals any."""
        return max((row.epsilon for row in self.rows if row.about == TEST_IMAGES), default=0.0)

    def to_json(self) -> str:
        """Return the statement as JSON, in which an infinite ε is the string "infinity"."""
        tree = asdict(self)
        for row in tree["rows"]:
            row["epsilon"] = _json_epsilon(row["epsilon"])
        tree["epsilon"] = _json_epsilon(self.epsilon)
        tree["clients"] = {str(k): _json_epsilon(e) for k, e in self.clients.items()}
        return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Statement:
        """Read a statement from a file that `to_json` wrote.

        Raises:
            CheckpointError: If the file cannot be read or is damaged.
        """
        return parse_file(path, cls.from_json)

    @classmethod
    def from_json(cls, text: str) -> Statement:
        """Build a statement from the text that `to_json` returned."""
        tree: dict[str, Any] = json.loads(text)
        tree["rows"] = tuple(
            ReleaseRow(**{**row, "epsilon": float(row["epsilon"])}) for row in tree["rows"]
        )
        tree["epsilon"] = float(tree["epsilon"])
        tree["why"] = tuple(tree["why"])
        tree["clients"] = {int(k): float(e) for k, e in tree["clients"].items()}
        return cls(**tree)


def _json_epsilon(epsilon: float) -> float | str:
    """Return ε as a value for JSON, which has no infinity."""
    return epsilon if math.isfinite(epsilon) else "infinity"


def make_statement(
    privacy: Privacy,
    algorithm: Algorithm[Any, Any],
    crossed: Mapping[int, Mapping[str, int]],
    reported: Mapping[int, float],
    *,
    secret: bool,
    start: str = "",
    validation: bool = False,
    selection: bool = False,
    public: str = "",
    overlap: int = 0,
    tests_by_labels: bool = False,
) -> Statement:
    """State what a run has revealed about private images.

    ε of the run is infinite if there is a reason for it (`why`), 0 if nothing was revealed, and
    otherwise the largest over clients.

    Args:
        privacy: The run's privacy settings.
        algorithm: Its algorithm.
        crossed: For each client, how often each part and kind of side information left it.
        reported: ε that clients report themselves; the larger of it and the computed ε counts.
        secret: Whether noise is secret. If not, all clients are in one process, and the side
            information is what sites would send that can take part in such a run.
        start: The run whose networks this one started from.
        validation: Whether clients hold out validation images.
        selection: Whether accuracies decide which round is kept, or when the run stops.
        public: The source of public images; empty: none.
        overlap: The number of public images that are training images too, as far as is known.
        tests_by_labels: Whether the choice of clients' local test or validation images depends on
            training labels.
    """
    plan = Plan(privacy, algorithm)
    side = {
        k: {p: n for p, n in seen.items() if p in SIDE_INFORMATION} for k, seen in crossed.items()
    }
    answers = {
        k: {p: n for p, n in seen.items() if p not in SIDE_INFORMATION}
        for k, seen in crossed.items()
    }
    if not secret:
        side = {k: _as_site(plan, seen, selection) for k, seen in side.items()}
    declared = [part for parts in plan.parts.values() for part in parts]
    observed = {part for seen in answers.values() for part in seen}
    parts = [*dict.fromkeys(declared), *sorted(observed - set(declared))]
    spent = {k: _reported_epsilon(plan, reported, k, seen, side[k]) for k, seen in answers.items()}
    crosses = getattr(type(algorithm), "crosses", {})
    rows = []
    for part in parts:
        count = max((seen.get(part, 0) for seen in answers.values()), default=0)
        if count:
            rows.append(_row(plan, crosses, part, count, spent))
    withheld = WITHHELD if secret else AS_WITHHELD
    rows = _with_side_information(
        plan, side, rows, spent, withheld, tests_by_labels=tests_by_labels
    )
    clients = {
        k: max(plan.cost(plan.count_releases(seen)), spent[k])
        for k, seen in sorted(answers.items())
    }
    why = _reasons(plan, rows, clients)
    revealing = any(row.releases and row.part not in PUBLIC_FACTS for row in rows)
    if public and rows:
        what = f"{public}; every party has them, and uses them without protection"
        rows.append(ReleaseRow(PUBLIC_DATA_FACT, what, "", 1, math.inf if overlap else 0.0))
    if overlap and revealing:
        images = f"{overlap:,} public image{'s are' if overlap > 1 else ' is'}"
        why.append(f"{images} among the training images, and whatever uses them is unprotected")
    if start and revealing:
        why.append(
            f"it started from the networks of {start}, and what that run revealed about the same "
            "images is not counted"
        )
    epsilon = 0.0
    if why:
        epsilon = math.inf
    elif revealing:
        epsilon = max(clients.values(), default=0.0)
    noise = "the run's seed: anyone who knows the seed can remove the noise"
    if secret:
        noise = "the operating system of each site"
    left_out = [LEFT_OUT]
    if plan.promised and not secret:
        left_out.append(LOCAL_FACTS)
    if validation:
        left_out.append(VALIDATION)
    return Statement(
        method=type(algorithm).__name__,
        rows=tuple(rows),
        epsilon=epsilon,
        delta=privacy.delta,
        budget=privacy.epsilon,
        clients=clients,
        why=tuple(why),
        noise=noise,
        left_out=" ".join(left_out),
    )


def _as_site(plan: Plan, seen: Mapping[str, int], selection: bool) -> dict[str, int]:
    """Return the side information that a client would send as a site.

    Args:
        plan: The privacy settings.
        seen: The side information of a client in this process.
        selection: Whether accuracies decide which round is kept, or when the run stops.
    """
    hello = facts_in_hello(numbered=False, pixels=not plan.promised)
    if not plan.promised:
        return {**seen, **hello}
    # Sites would withhold their results, but selecting by results reveals them.
    used = {FAILURES, RESULTS} if selection else {FAILURES}
    return {**{part: n for part, n in seen.items() if part in used}, **hello}


def _reported_epsilon(
    plan: Plan,
    reported: Mapping[int, float],
    k: int,
    answers: Mapping[str, int],
    side: Mapping[str, int],
) -> float:
    """Return the ε that a client reports, or a default.

    Only a client knows the cost of its private training. If it has released anything without
    reporting that cost, ε is infinite.
    """
    released = any(answers.values()) or side.get(RESULTS)
    unknown = math.inf if plan.training is not None and released else 0.0
    return reported.get(k, unknown)


def _reasons(plan: Plan, rows: Sequence[ReleaseRow], clients: Mapping[int, float]) -> list[str]:
    """Return the reasons for an infinite ε of the run."""
    why = []
    bare = [row.part for row in rows if row.about == TRAINED and row.bare]
    if bare:
        why.append(f"{', '.join(bare)} left without protection")
    for row in rows:
        if row.part in plan.covers and math.isinf(row.epsilon):
            why.append(f"{row.part} left with noise that gives no guarantee")
    for row in rows:
        if row.given:
            why.append(f"{row.part}: {row.given} depends on private images and is not protected")
    for k, cost in clients.items():
        if math.isinf(cost):
            why.append(f"client {k} reports no finite ε")
    return why


def _with_side_information(
    plan: Plan,
    side: Mapping[int, Mapping[str, int]],
    rows: list[ReleaseRow],
    spent: Mapping[int, float],
    withheld: str,
    *,
    tests_by_labels: bool,
) -> list[ReleaseRow]:
    """Add rows of side information to those of answers.

    What clients send before round 1 comes first, evaluations last.

    Args:
        plan: The privacy settings.
        side: The side information of each client.
        rows: Rows of the answers' parts.
        spent: ε that each client reports.
        withheld: The protection of side information that was not sent.
        tests_by_labels: Whether the choice of test images depends on training labels.
    """
    if not side:
        return rows
    counts = {part: max(seen.get(part, 0) for seen in side.values()) for part in SIDE_INFORMATION}

    def row(part: str, about: str = TRAINED) -> ReleaseRow:
        count = counts[part]
        if not count:
            return ReleaseRow(part, SIDE_INFORMATION[part], withheld, 0, 0.0, about=about)
        if part in PUBLIC_FACTS:
            return ReleaseRow(
                part, SIDE_INFORMATION[part], ONE_WORD if part == FAILURES else "", count, 0.0
            )
        follows = part == PROGRESS or (part == RESULTS and not tests_by_labels)
        if follows and about == TRAINED and plan.training is not None:
            # As far as training images matter, they follow from privately trained networks.
            return ReleaseRow(
                part, SIDE_INFORMATION[part], str(plan.training), count, max(spent.values())
            )
        return ReleaseRow(part, SIDE_INFORMATION[part], "", count, math.inf, about=about)

    hello = [row(part) for part in HELLO if counts[part] or part == PIXELS]
    errors = [row(ERRORS, about) for about in (TRAINED, TEST_IMAGES) if counts[ERRORS]]
    during = [row(part) for part in (PROGRESS, FAILURES) if counts[part]]
    return [*hello, *rows, *during, row(RESULTS), row(RESULTS, TEST_IMAGES), *errors]


def _row(
    plan: Plan, crosses: Mapping[str, Crossing], part: str, count: int, spent: Mapping[int, float]
) -> ReleaseRow:
    """Return the statement's row for a released part: its protection and ε.

    ε is 0 for a part that depends on no image, and infinite for one without protection.

    Args:
        plan: The privacy settings.
        crosses: The algorithm's descriptions of its methods.
        part: The part.
        count: The largest number of releases by one client.
        spent: ε that each client reports.
    """
    crossing = crosses.get(part.partition(".")[0], Crossing(up="not described by the method"))
    what = crossing.up or str(crossing)
    name = plan.covers.get(part)
    harmless = plan.tells.get(part) == "nothing"
    # Protecting a method as a whole leaves those parts as they are that depend on no image.
    if name is not None and (name == part or not harmless):
        mechanism = plan.mechanisms[name]
        protection = str(mechanism) if name == part else f"{mechanism} ({name})"
        if not mechanism.promises:
            return ReleaseRow(part, what, f"{protection}, without a guarantee", count, math.inf)
        return ReleaseRow(
            part, what, protection, count, plan.cost({name: count}), plan.public_assumption(part)
        )
    if harmless:
        return ReleaseRow(part, what, "", count, 0.0)
    if plan.training is not None:
        return ReleaseRow(part, what, str(plan.training), count, max(spent.values()))
    return ReleaseRow(part, what, "", count, math.inf)
