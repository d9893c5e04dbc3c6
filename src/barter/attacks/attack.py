"""Run all attacks on a run and save their results in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from barter.attacks.copies import measure_copies
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

DATA = "attack.json"
SHEET = "attack.png"


def attacked(run: Path, shadows: int, monitor: Monitor) -> Iterator[Table | str]:
    """Attack a run and yield its results as tables and text.

    Args:
        run: The folder of the run.
        shadows: The number of shadow runs for membership inference; must be even.
        monitor: Shows progress.
    """
    results, paths = attack(run, shadows, monitor)
    yield from shown(results)
    yield f"kept: {', '.join(map(str, paths))}"


def attack(run: Path, shadows: int, monitor: Monitor) -> tuple[list[Result], list[Path]]:
    """Run one more round under the same protection, and attack what clients upload in it.

    Args:
        run: The folder of the run, where results are saved.
        shadows: The number of shadow runs for membership inference; must be even.
        monitor: Shows progress.

    Returns:
        The results, and the paths of the files that hold them.

    Raises:
        ConfigError: If the number of shadow runs is odd, or results cannot be written.
    """
    if shadows % 2:
        raise ConfigError(
            f"--shadows {shadows}: shadow runs come in pairs that share out the images; give an "
            "even number"
        )
    experiment = Experiment.revisited(run, unlimited=True)
    name = type(experiment.algorithm).__name__
    before = experiment.round
    with threaded(experiment.config.threads):
        with monitor.phase(f"round {before + 1}, overheard", 1):
            uploads = overheard(experiment)
        experiment.engine.watched = monitor
        public, others = split_test(experiment)
        results, rows = inversion(experiment, uploads, public)
        results += measure_copies(experiment)
        results += membership(experiment, uploads, public, others, shadows, monitor)
        results += labels(experiment, uploads, public)
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
        title = (
            f"{name} after round {before}: private images, their best reconstruction from uploads,\n"
            "and the best guess from the class. Experimenter's view only"
        )
        sheet(rows, title, run / SHEET)
        paths.append(run / SHEET)
    return results, paths
