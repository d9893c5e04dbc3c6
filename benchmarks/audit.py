"""Compare barter's ε with that of dp-accounting and of Opacus.

    python benchmarks/audit.py

Every row is a setting: mechanisms, noise, sampling rate and number of steps. ε is for replacing one image,
with δ = 1e-5. The columns are

- barter: what the account charges,
- dp-accounting: Google's accountant, by events, on a grid ten times as fine,
- Opacus PRV and RDP: Opacus knows Gaussian noise on Poisson samples only, and one image that is added or removed.
  Without sampling, replacing an image is the same with half of the noise. With sampling there is no such equivalent:
  ε of adding or removing is below that of replacing, and ε with half of the noise is above. The table shows both.

Prints a Markdown table and writes results/audit.json.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import dp_accounting
from dp_accounting.pld import PLDAccountant
from opacus.accountants import PRVAccountant, RDPAccountant  # type: ignore[import-untyped]

from barter.privacy.account import (
    LOSS_GRID,
    GaussianRelease,
    PureRelease,
    Releases,
    SampledRelease,
    composed_epsilon,
)

HERE = Path(__file__).parent
DELTA = 1e-5
REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE
SETTINGS: dict[str, Releases] = {
    "gaussian z=2, 1 release": {GaussianRelease(2.0): 1},
    "gaussian z=5, 1 release": {GaussianRelease(5.0): 1},
    "gaussian z=5, 20 releases": {GaussianRelease(5.0): 20},
    "gaussian z=20, 100 releases": {GaussianRelease(20.0): 100},
    "gaussian z=100, 500 releases": {GaussianRelease(100.0): 500},
    "gaussian z=4 and z=8, 5 releases each": {GaussianRelease(4.0): 5, GaussianRelease(8.0): 5},
    "laplace z=4, 1 release": {PureRelease(0.5): 1},
    "laplace z=10, 20 releases": {PureRelease(0.2): 20},
    "response e=0.5, 10 releases": {PureRelease(0.5): 10},
    "gaussian z=5 and response e=0.3, 5 releases each": {
        GaussianRelease(5.0): 5,
        PureRelease(0.3): 5,
    },
    "gaussian z=10 and laplace z=8, 10 releases each": {
        GaussianRelease(10.0): 10,
        PureRelease(0.25): 10,
    },
    "dp-sgd z=4, q=1, 10 steps": {SampledRelease(4.0, 1.0): 10},
    "dp-sgd z=8, q=1, 100 steps": {SampledRelease(8.0, 1.0): 100},
    "dp-sgd z=1, q=0.01, 100 steps": {SampledRelease(1.0, 0.01): 100},
    "dp-sgd z=1, q=0.01, 1000 steps": {SampledRelease(1.0, 0.01): 1000},
    "dp-sgd z=1.5, q=0.02, 500 steps": {SampledRelease(1.5, 0.02): 500},
    "dp-sgd z=2, q=0.05, 200 steps": {SampledRelease(2.0, 0.05): 200},
    "dp-sgd z=2, q=0.145, 140 steps": {SampledRelease(2.0, 0.145): 140},
    "dp-sgd z=2, q=0.5, 20 steps": {SampledRelease(2.0, 0.5): 20},
    "dp-sgd z=0.7, q=0.1, 50 steps": {SampledRelease(0.7, 0.1): 50},
    "dp-sgd z=2, q=0.1, 50 steps, and gaussian z=6, 3 releases": {
        SampledRelease(2.0, 0.1): 50,
        GaussianRelease(6.0): 3,
    },
    "dp-sgd z=2, q=0.1 and z=3, q=0.2, 50 steps each": {
        SampledRelease(2.0, 0.1): 50,
        SampledRelease(3.0, 0.2): 50,
    },
}


def by_google(releases: Releases) -> float:
    """Compose the events with dp-accounting.

    With this relation, the accountant itself moves a sum by two for an image that is replaced. It counts randomised
    response once, whatever the number of times it is composed, so each release is composed by itself.
    """
    accountant = PLDAccountant(REPLACE, value_discretization_interval=LOSS_GRID / 10)
    for release, count in releases.items():
        if isinstance(release, GaussianRelease):
            event = dp_accounting.GaussianDpEvent(release.noise)
        elif isinstance(release, SampledRelease):
            noise = dp_accounting.GaussianDpEvent(release.noise)
            event = dp_accounting.PoissonSampledDpEvent(release.rate, noise)
        else:
            assert isinstance(release, PureRelease)
            # Response with two labels is the worst case of all ε-private mechanisms.
            chance = 2 / (1 + math.exp(release.epsilon))
            event = dp_accounting.RandomizedResponseDpEvent(chance, 2)
            for _ in range(count - 1):
                accountant.compose(event)
            count = 1
        accountant.compose(event, count)
    return float(accountant.get_epsilon(DELTA))


def by_opacus(kind: type[Any], releases: Releases, factor: float) -> float | None:
    """Compose steps with Opacus; None if a release is not Gaussian.

    Args:
        kind: The accountant.
        releases: The releases.
        factor: Multiplies the noise of steps on samples.
    """
    history = []
    for release, count in releases.items():
        if isinstance(release, GaussianRelease):
            history.append((release.noise / 2, 1.0, count))
        elif isinstance(release, SampledRelease):
            is_sampled = release.rate < 1
            noise = release.noise * factor if is_sampled else release.noise / 2
            history.append((noise, release.rate, count))
        else:
            return None
    accountant = kind()
    accountant.history = history
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(DELTA))


def measure(releases: Releases) -> dict[str, float | None]:
    """Return ε of a setting by each accountant."""
    sampled = any(isinstance(r, SampledRelease) and r.rate < 1 for r in releases)
    return {
        "barter": composed_epsilon(releases, DELTA),
        "dp_accounting": by_google(releases),
        "opacus_prv_below": by_opacus(PRVAccountant, releases, 1.0) if sampled else None,
        "opacus_prv": by_opacus(PRVAccountant, releases, 0.5),
        "opacus_rdp": by_opacus(RDPAccountant, releases, 0.5),
    }


def say(line: str) -> None:
    """Write a line to the terminal at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print the table and write it to results/audit.json."""
    results = {}
    say("| setting | barter | dp-accounting | barter / dp-accounting | Opacus PRV | Opacus RDP |")
    say("|---|---|---|---|---|---|")
    for name, releases in SETTINGS.items():
        row = measure(releases)
        results[name] = row
        texts = {key: "" if value is None else f"{value:.3f}" for key, value in row.items()}
        opacus = texts["opacus_prv"]
        if texts["opacus_prv_below"]:
            opacus = f"{texts['opacus_prv_below']} to {opacus}"
        assert row["barter"] is not None
        assert row["dp_accounting"] is not None
        ratio = row["barter"] / row["dp_accounting"]
        cells = [name, texts["barter"], texts["dp_accounting"], f"{ratio:.4f}", opacus]
        say(f"| {' | '.join([*cells, texts['opacus_rdp']])} |")
    tree = {"delta": DELTA, "relation": "replace one image", "epsilon": results}
    (HERE / "results" / "audit.json").write_text(json.dumps(tree, indent=2) + "\n")


if __name__ == "__main__":
    main()
