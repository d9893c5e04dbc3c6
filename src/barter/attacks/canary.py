"""Test a privacy guarantee by how well an attacker tells two images apart.

Carlini et al., "The Secret Sharer", USENIX Security 2019 (arXiv:1802.08232) introduced canaries;
Jagielski et al., "Auditing Differentially Private Machine Learning", NeurIPS 2020 (arXiv:2006.07709)
and Nasr et al., IEEE S&P 2021 (arXiv:2101.04535) turn them into a lower bound of ε.

1. In each try a round is played twice: a client's first image is black in one, white in the other.
2. The attacker sees what leaves that client. Its score is the projection on the difference that the
   image makes without noise, which it knows.
3. A threshold is chosen on one half of the tries. On the other half, the rates of hits and of false
   alarms have Clopper-Pearson intervals, and (ε, δ)-privacy requires hits <= e^ε alarms + δ.

The result is a bound from below, and holds with the stated confidence. If it exceeds the ε that the
account charges, the guarantee is broken. If it does not, nothing is proved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.table import Table
from scipy.special import betaincinv
from torch import Tensor

from barter.attacks.overheard import clients_of, guard_of
from barter.compute.precision import use_precision
from barter.compute.threads import limit_threads
from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients
from barter.core.errors import BarterError, ConfigError
from barter.core.images import Images
from barter.core.nodes import Client, Monitor
from barter.core.payload import Payload, isolate, leaves
from barter.core.wire import Direction, Wire
from barter.core.wire_codec import WireCodec
from barter.experiment import Experiment
from barter.privacy.guard import Guard
from barter.privacy.mechanisms import Additive, ClassMeans, Response
from barter.privacy.parts import take_part
from barter.privacy.prices import TRAINING, Account, Description, protected_epsilon, step_noise

__all__ = ["EpsilonBound", "canary_lines", "play_canary_game", "prove_epsilon"]

FILE = "canary.json"
CONFIDENCE = 0.99
TOGETHER = "all of it together"
QUIET_NOISE = 1e-9  # noise multiplier of the tries from which the attacker learns the directions
CERTAIN = 60.0  # ε of randomised response in these tries
QUIET_TRIES = 4
QUANTILES = 41  # number of thresholds from which one is chosen
CANARY_COLOURS = (0, 255)  # of the client's first image in the two rounds of a try


@dataclass(frozen=True)
class EpsilonBound:
    """The lower bound of ε that a canary game proved, of a part or of training."""

    part: str
    stated: float  # ε of one round by the account
    given: str  # what that ε assumes to be public; empty if nothing
    proved: float  # ε is at least this, with the stated confidence
    provable: float  # what a perfect attack would prove with as many tries
    hits: tuple[float, float]  # interval of the rate of hits
    alarms: tuple[float, float]  # interval of the rate of false alarms
    tries: int
    delta: float
    confidence: float

    @property
    def is_broken(self) -> bool:
        """Return whether the guarantee is broken: more is proved than stated.

        An ε that assumes something else to be public is no guarantee, and cannot be broken.
        """
        return self.proved > self.stated and not self.given


def prove_epsilon(
    without: Tensor, including: Tensor, delta: float, confidence: float = CONFIDENCE
) -> tuple[float, tuple[float, float], tuple[float, float]]:
    """Return a lower bound of ε, then intervals of the hit and false-alarm rates.

    Intervals are (low, high). A threshold is chosen among quantiles of every second try's scores;
    bound and intervals are those of the other tries. The bound is at least 0.

    Args:
        without: The attacker's score of each try with one image (tries,), at least two.
        including: Its scores of tries with the other image. Either group may have the higher ones.
        delta: δ, the probability that ε does not hold.
        confidence: The probability with which the bound holds.
    """
    chosen = [scores[::2] for scores in (without, including)]
    held_out = [scores[1::2] for scores in (without, including)]
    levels = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    thresholds = torch.quantile(torch.cat(chosen).double(), levels).tolist()
    best: tuple[float, float, bool] = (-math.inf, 0.0, True)
    for threshold in thresholds:
        for above in (True, False):
            bound, _, _ = _bound_at(chosen, threshold, above, delta, confidence)
            best = max(best, (bound, threshold, above))
    bound, hits, alarms = _bound_at(held_out, best[1], best[2], delta, confidence)
    return max(0.0, bound), hits, alarms


def _bound_at(
    scores: Sequence[Tensor], threshold: float, above: bool, delta: float, confidence: float
) -> tuple[float, tuple[float, float], tuple[float, float]]:
    """Return the lower bound of ε by one threshold, and the intervals of both rates.

    The bound is log((least hit rate - δ) / largest false-alarm rate); it may be negative.

    Args:
        scores: Scores without, then with the image.
        threshold: The threshold.
        above: Whether the attacker looks for tries with the image, by scores above the threshold;
            otherwise for tries without, by scores that are not. Hits are tries of this kind that it
            finds, false alarms those of the other kind.
        delta: δ, the probability that ε does not hold.
        confidence: The probability with which the bound holds.
    """
    without, including = ((values > threshold) == above for values in scores)
    hit, alarm = (including, without) if above else (without, including)
    hits = _rate_interval(int(hit.sum()), len(hit), confidence)
    alarms = _rate_interval(int(alarm.sum()), len(alarm), confidence)
    bound = math.log(max(hits[0] - delta, 1e-300) / alarms[1])
    return bound, hits, alarms


def _rate_interval(count: int, total: int, confidence: float) -> tuple[float, float]:
    """Return an interval of a rate (Clopper and Pearson).

    Both rates enter a bound, each with one end, so each end errs with half of the probability.
    """
    error = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(betaincinv(count, total - count + 1, error))
    high = 1.0 if count == total else float(betaincinv(count + 1, total - count, 1 - error))
    return low, high


class Tap(Wire):
    """A wire that records every answer of one client."""

    def __init__(
        self, may_be_infinite: frozenset[str], codec: WireCodec | None, client: int
    ) -> None:
        super().__init__(may_be_infinite, codec)
        self.client = client
        self.answers: list[tuple[str, Payload]] = []

    def carry(
        self,
        tree: Any,
        method: str,
        client: int,
        direction: Direction,
        device: torch.device | None = None,
        size: int | None = None,
    ) -> Any:
        arrived = super().carry(tree, method, client, direction, device, size)
        is_answer = direction == "up" and method != Algorithm.evaluate.__name__
        if is_answer and client == self.client:
            self.answers.append((method, isolate(arrived)))
        return arrived


class UncountedGuard(Guard):
    """A guard that charges nothing, for rounds that the attacker simulates."""

    def _spend(self, client: Client, more: Account, method: str) -> None:
        pass


class Game:
    """Rounds from the same start, with a client's first image black or white."""

    def __init__(self, experiment: Experiment, images: int) -> None:
        self.experiment = experiment
        self.engine = experiment.engine
        for client in clients_of(experiment).values():
            data = client.data
            # Without augmentation, whose chance would only hide the canary.
            client.data = Images(data.pixels[:images], data.labels[:images], data.spec)
        self.client: Client = next(iter(clients_of(experiment).values()))
        codec = self.engine.wire.codec
        self.tap = Tap(experiment.algorithm.may_be_infinite, codec, self.client.id)
        self.engine.wire = self.tap
        self.start = isolate((experiment.server.memory(), self.engine.memory()))
        privacy = experiment.config.privacy
        # The budget does not limit the number of rounds; each is as private as one of the run.
        self.guard = Guard(replace(privacy, epsilon=None), experiment.algorithm)
        self.plan = guard_of(experiment).plan
        self.images = [self._with_canary(world) for world in range(2)]
        self.released: Account = {}

    def _with_canary(self, world: int) -> Images:
        """Return the client's images, the first replaced by the world's canary.

        The canary is black in world 0 and white in world 1. Its label differs too if labels are
        protected: elsewhere, opposite images of one class are as different as two images can be.
        """
        data = self.client.data
        has_labels = any(isinstance(m, Response) for m in self.plan.mechanisms.values())
        pixels = data.pixels.clone()
        labels = data.labels.clone()
        pixels[0] = CANARY_COLOURS[world]
        labels[0] = world if has_labels else 0
        return Images(pixels, labels, data.spec)

    def play(self, world: int, number: int, guard: Guard) -> dict[str, Tensor] | None:
        """Play the algorithm's setup and one round from the state at the game's start.

        The guard and the images stay in place afterwards. `released` is set if the client answered.

        Args:
            world: 0 if the client's first image is black in this round, 1 if it is white.
            number: With the run's seed, seeds all randomness of the round.
            guard: Protects the answers.

        Returns:
            By part, all numbers of the client's protected answers in one vector; None if the client
            gave no answer.
        """
        server, memories = isolate(self.start)
        experiment = self.experiment
        # From round 2 on, engines do not evaluate what clients learn on their own.
        self.engine.round = number + 2
        experiment.server.recall(server)
        self.engine.recall(memories)
        for k, client in clients_of(experiment).items():
            client.released = {}
            client.report = {}
            for method in experiment.algorithm.crosses:
                self.engine.repeat(method, k, 0)
        self.client.data = self.images[world]
        self.engine.guard = guard  # type: ignore[attr-defined]
        self.engine.participants.clear()
        self.tap.answers.clear()
        all_clients = Clients(self.engine, self.engine.client_ids)
        seed = experiment.config.seed
        with seeds.scope(seed, number, "canary", device=experiment.device):
            experiment.algorithm.setup(experiment.server, all_clients)
            experiment.algorithm.round(experiment.server, all_clients, 1)
        self.engine.wire.take_bytes()
        if not self.tap.answers:
            return None
        self.released = dict(self.client.released)
        return self._numbers()

    def _numbers(self) -> dict[str, Tensor]:
        """Return, by protected part, the numbers that the client sent, as one vector.

        Private training counts as one part, with the numbers of all answers.
        """
        found: dict[str, list[Tensor]] = {}
        for method, answer in self.tap.answers:
            if self.plan.training is not None:
                found.setdefault(TRAINING, []).append(self._flat(answer))
            for name, mechanism in self.plan.of(method).items():
                key = name.partition(".")[2]
                keys = [key] if mechanism.second_key is None else [key, mechanism.second_key]
                values = [value for key in keys for value in take_part(answer, key)]
                found.setdefault(name, []).append(self._flat(values))
        return {name: torch.cat(vectors) for name, vectors in found.items()}

    def _flat(self, answer: Payload) -> Tensor:
        """Return all numbers of an answer in one vector; labels are one-hot.

        Tensors that are not floats are taken for labels. Integers outside of tensors, strings and
        None are left out.
        """
        classes = self.client.data.spec.classes
        pieces = [torch.zeros(0, dtype=torch.float64)]
        for _, leaf in leaves(answer):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                pieces.append(leaf.detach().double().cpu().flatten())
            elif isinstance(leaf, Tensor):
                labels = leaf.detach().cpu().flatten().long().clamp(0, classes - 1)
                pieces.append(F.one_hot(labels, classes).double().flatten())
            elif isinstance(leaf, float):
                pieces.append(torch.tensor([leaf], dtype=torch.float64))
        return torch.cat(pieces)

    def quiet_guard(self) -> Guard:
        """Return a guard whose mechanisms add almost no noise and charge nothing."""
        guard = UncountedGuard(self.guard.plan.privacy, self.experiment.algorithm)
        plan = guard.plan
        for name, mechanism in plan.mechanisms.items():
            if isinstance(mechanism, Response):
                plan.mechanisms[name] = replace(mechanism, epsilon=CERTAIN)
            elif isinstance(mechanism, Additive | ClassMeans):
                plan.mechanisms[name] = replace(mechanism, noise=QUIET_NOISE)
        if plan.training is not None:
            plan.training = replace(plan.training, noise=QUIET_NOISE, epsilon=None, rounds=None)
        return guard

    def directions(self) -> dict[str, Tensor]:
        """Return, by part, the answer with the white image minus that with the black one.

        They are computed almost without noise and summed over `QUIET_TRIES` rounds. The dict is
        empty if the client was not asked in any of these.
        """
        guard = self.quiet_guard()
        sums: dict[str, Tensor] = {}
        for number in range(QUIET_TRIES):
            one, other = (self.play(world, number, guard) for world in range(2))
            for name in one or {}:
                assert one is not None
                assert other is not None
                sums[name] = sums.get(name, 0.0) + (other[name] - one[name])
        return sums


def play_canary_game(
    experiment: Experiment,
    tries: int,
    images: int,
    monitor: Monitor,
    confidence: float = CONFIDENCE,
) -> list[EpsilonBound]:
    """Play the canary game; return a lower bound of ε for each protected part.

    If there are several parts, a bound for all of them together comes last.

    Args:
        experiment: A run in this process that has not begun. It cannot be used afterwards.
        tries: The number of rounds with each of the two images, at least 20.
        images: The number of images that each client keeps. One image among few matters most.
        monitor: Shows progress.
        confidence: The probability with which each bound holds.

    Raises:
        ConfigError: If nothing is protected, there are fewer than 20 tries, or the client sends no
            protected answer.
    """
    if not guard_of(experiment).promised:
        raise ConfigError(
            "--canary: the run protects nothing: set privacy.parts or privacy.training"
        )
    if tries < 20:
        raise ConfigError(f"--tries {tries}: at least 20 are needed to bound a rate")
    game = Game(experiment, images)
    with (
        limit_threads(experiment.config.threads),
        use_precision(experiment.precision),
        experiment.engine.on_server_stream(),
        experiment.server.use_lane_module(),
        monitor.phase(f"canary, {2 * tries} rounds", 2 * tries),
    ):
        directions = game.directions()
        if not directions:
            raise ConfigError(f"--canary: client {game.client.id} sends no protected answer")
        game.play(0, 0, game.guard)
        noise = step_noise(game.released)
        if noise is not None and game.guard.plan.training is not None:
            # A client finds its noise once. Here it would find it again in each try.
            fixed = replace(game.guard.plan.training, noise=noise, epsilon=None, rounds=None)
            game.guard.plan.training = fixed
        scores = [_score(game, world, tries, directions, monitor) for world in range(2)]
    delta = experiment.config.privacy.delta
    names = list(directions)
    bounds = []
    for i, name in enumerate(names):
        own = {t: n for t, n in game.released.items() if Description.read(t).part == name}
        bounds.append(_conclude(name, [s[:, i] for s in scores], own, delta, confidence))
    if len(names) > 1:
        combined = _combine(scores)
        bounds.append(_conclude(TOGETHER, combined, game.released, delta, confidence))
    return bounds


def _score(
    game: Game, world: int, tries: int, directions: dict[str, Tensor], monitor: Monitor
) -> Tensor:
    """Play rounds with one image and return their scores (tries, parts).

    Args:
        game: The game.
        world: Which image the client holds.
        tries: The number of rounds.
        directions: For each part, the difference that the image makes; a score is the dot product
            with it.
        monitor: Shows progress.

    Raises:
        ConfigError: If the server hardly ever asks the client, or a part's shape changes.
    """
    rows: list[list[float]] = []
    number = QUIET_TRIES + world
    while len(rows) < tries:
        numbers = game.play(world, number, game.guard)
        number += 2
        if numbers is None:  # The client was not among those that the server asked.
            if number > 100 * tries:
                raise ConfigError(f"--canary: the server hardly ever asks client {game.client.id}")
            continue
        row = []
        for name, direction in directions.items():
            if numbers[name].shape != direction.shape:
                raise ConfigError(f"--canary: the shape of {name} changes from round to round")
            row.append(float(numbers[name] @ direction))
        rows.append(row)
        monitor.advance(1)
    return torch.tensor(rows, dtype=torch.float64)


def _combine(scores: Sequence[Tensor]) -> list[Tensor]:
    """Combine all parts' scores into one score per try, by a linear discriminant.

    A part's weight is (mean with - mean without the canary) / (sum of the two variances). Weights
    come from the even tries, on which the threshold is chosen too; the odd tries stay held out.

    Args:
        scores: Scores (tries, parts) of the tries without the canary, then of those with it.

    Returns:
        Scores (tries,) in the same order; higher ones speak for the canary.
    """
    without, including = (values[::2] for values in scores)
    spread = without.var(0) + including.var(0)
    weights = (including.mean(0) - without.mean(0)) / spread.clamp(min=1e-300)
    return [values @ weights for values in scores]


def _conclude(
    name: str, scores: Sequence[Tensor], released: Account, delta: float, confidence: float
) -> EpsilonBound:
    """Return the lower bound of ε by these scores, and the ε of the account.

    Args:
        name: The part.
        scores: The attacker's scores of tries with one image, then with the other.
        released: What the account charges for one round, from which the stated ε follows.
        delta: δ, the probability that ε does not hold.
        confidence: The probability with which the bound holds.
    """
    without, including = scores
    stated = protected_epsilon(released, delta)
    assumptions = [Description.read(text).given for text in released]
    given = next(filter(None, assumptions), "")
    proved, hits, alarms = prove_epsilon(without, including, delta, confidence)
    n_held_out = len(without) // 2
    low, _ = _rate_interval(n_held_out, n_held_out, confidence)
    _, high = _rate_interval(0, n_held_out, confidence)
    provable = max(0.0, math.log(max(low - delta, 1e-300) / high))
    return EpsilonBound(
        name, stated, given, proved, provable, hits, alarms, len(without), delta, confidence
    )


def canary_lines(
    experiment: Experiment, folder: Path | None, tries: int, images: int, monitor: Monitor
) -> Iterator[Table | str]:
    """Play the game and yield its result as a table and text.

    Args:
        experiment: A run that has not begun.
        folder: The run's folder, where the result is saved as canary.json; None to save nothing.
        tries: The number of rounds with each of the two images.
        images: The number of images that each client keeps.
        monitor: Shows progress.

    Raises:
        BarterError: If the guarantee is broken, after everything was yielded and saved.
        ConfigError: If the game cannot be played, or the result cannot be saved.
    """
    bounds = play_canary_game(experiment, tries, images, monitor)
    table = Table(
        "part",
        "ε stated",
        "ε is at least",
        "could be proved",
        "hits",
        "false alarms",
        box=box.SIMPLE_HEAD,
    )
    for bound in bounds:
        rates = [f"{low:.1%} to {high:.1%}" for low, high in (bound.hits, bound.alarms)]
        stated = "∞" if math.isinf(bound.stated) else f"{bound.stated:.3g}"
        if bound.given:
            stated += f" given {bound.given}"
        table.add_row(bound.part, stated, f"{bound.proved:.3g}", f"{bound.provable:.3g}", *rates)
    yield table
    yield (
        f"One round of clients with {images} images, {tries} tries with either image, δ = "
        f"{bounds[0].delta:g}; each bound holds with a confidence of {bounds[0].confidence:.0%}."
    )
    if folder is not None:
        path = folder / FILE
        try:
            path.write_text(_to_json(bounds))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error
        yield f"kept: {path}"
    broken = [bound.part for bound in bounds if bound.is_broken]
    if broken:
        raise BarterError(
            f"the guarantee is broken: {', '.join(broken)} reveals more than its ε allows"
        )
    yield "No bound exceeds the stated ε. That is no proof: another attack may be better."


def _to_json(bounds: Sequence[EpsilonBound]) -> str:
    """Return bounds as JSON, in which an infinite ε is a string."""
    trees = [asdict(bound) for bound in bounds]
    for tree in trees:
        if math.isinf(tree["stated"]):
            tree["stated"] = "infinity"
    return json.dumps({"bounds": trees}, indent=2, ensure_ascii=False) + "\n"
