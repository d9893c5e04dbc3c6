"""All attacks on a run, one after the other, and what is kept of them in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from barter.attacks.inversion import inversion
from barter.attacks.labels import labels
from barter.attacks.membership import membership
from barter.attacks.overheard import overheard, split_test
from barter.attacks.result import Result, shown, to_json
from barter.compute.threads import threaded
from barter.core.errors import ConfigError
from barter.core.nodes import Monitor
from barter.experiment import Experiment
from barter.runs.picture import sheet

__all__ = ["attack", "attacked"]

DATA, SHEET = "attack.json", "attack.png"


def attacked(run: Path, shadows: int, monitor: Monitor) -> Iterator[Table | str]:
    """What can be learnt from one more round of a run, through the same protection, for people and in its folder."""
    results, paths = attack(run, shadows, monitor)
    yield from shown(results)
    yield f"kept: {', '.join(map(str, paths))}"


def attack(run: Path, shadows: int, monitor: Monitor) -> tuple[list[Result], list[Path]]:
    """The same as data, and the files that hold it."""
    if shadows % 2:
        raise ConfigError(
            f"--shadows {shadows}: of two runs each has one half of the images; give an even number"
        )
    experiment = Experiment.revisited(run, unlimited=True)
    name, before = type(experiment.algorithm).__name__, experiment.round
    with threaded(experiment.config.threads):
        with monitor.phase(f"round {before + 1}, overheard", 1):
            told = overheard(experiment)
        experiment.engine.watched = monitor
        public, others = split_test(experiment)
        pictured, rows = inversion(experiment, told, public)
        results = [
            *pictured,
            *membership(experiment, told, public, others, shadows, monitor),
            *labels(experiment, told, public),
        ]
    about = {
        "algorithm": name,
        "round": before + 1,
        "shadows": shadows,
        "public": len(public),
        "others": len(others),
    }
    paths = [run / DATA]
    try:
        paths[0].write_text(to_json(about, results))
    except OSError as error:
        raise ConfigError(f"{paths[0]} cannot be written: {error}") from error
    if rows:
        title = f"{name} after round {before}: private images, the nearest that an attacker makes of what was told,\n"
        sheet(
            rows,
            f"{title}and the nearest by guessing from the class. Experimenter's view only",
            run / SHEET,
        )
        paths.append(run / SHEET)
    return results, paths
