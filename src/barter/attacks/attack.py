"""Run all attacks on a run and save their results in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from barter.attacks.copies import measure_copies
from barter.attacks.inversion import inversion_attacks
from barter.attacks.labels import label_attacks
from barter.attacks.membership import membership_attacks
from barter.attacks.overheard import RecordingWire, collect_uploads, record_wire, split_test
from barter.attacks.result import Result, result_tables, results_to_json
from barter.compute.threads import limit_threads
from barter.core.errors import ConfigError
from barter.core.nodes import Monitor
from barter.experiment import Experiment
from barter.runs.picture import draw_sheet
from barter.setup.config import Config
from barter.setup.trust import read_run

__all__ = ["attack_tables", "replay_first_rounds", "run_attacks"]

DATA = "attack.json"
SHEET = "attack.png"


def attack_tables(run: Path, shadows: int, monitor: Monitor) -> Iterator[Table | str]:
    """Attack a run by `run_attacks` and yield its results as tables and text.

    Args:
        run: The folder of the run, where results are saved.
        shadows: The number of shadow runs for membership inference; must be even.
        monitor: Shows progress.

    Raises:
        ConfigError: As `run_attacks`.
    """
    results, paths = run_attacks(run, shadows, monitor)
    yield from result_tables(results)
    yield f"kept: {', '.join(map(str, paths))}"


def run_attacks(run: Path, shadows: int, monitor: Monitor) -> tuple[list[Result], list[Path]]:
    """Run one more round, protected as before, and attack what clients upload.

    The round is not added to the run, and a privacy budget does not limit it. If the method asks
    each client only once in a run for some answers (`Algorithm.once`), the run is played again until
    every client has been asked, and these answers are attacked too.

    Args:
        run: The folder of the run, where results are saved.
        shadows: The number of shadow runs for membership inference; must be even, and 0 leaves out
            the attack that needs them.
        monitor: Shows progress.

    Returns:
        The results, and the paths of the files that hold them.

    Raises:
        ConfigError: If the number of shadow runs is odd, there are too few test images, or results
            cannot be written.
    """
    if shadows % 2:
        raise ConfigError(
            f"--shadows {shadows}: shadow runs come in pairs that share out the images; give an "
            "even number"
        )
    experiment = Experiment.restore(run, unlimited=True)
    name = type(experiment.algorithm).__name__
    before = experiment.round
    with limit_threads(experiment.config.threads):
        earlier = None
        if experiment.algorithm.once:
            with monitor.phase("first rounds again, overheard", 1):
                config = replace(experiment.config, start=read_run(run).start)
                earlier = replay_first_rounds(config, before)
        with monitor.phase(f"round {before + 1}, overheard", 1):
            uploads = collect_uploads(experiment, earlier)
        experiment.engine.watched = monitor
        public, others = split_test(experiment)
        results, rows = inversion_attacks(experiment, uploads, public)
        results += measure_copies(experiment)
        results += membership_attacks(experiment, uploads, public, others, shadows, monitor)
        results += label_attacks(experiment, uploads, public)
    about = {
        "algorithm": name,
        "round": before + 1,
        "shadows": shadows,
        "public": len(public),
        "others": len(others),
    }
    paths = [run / DATA]
    try:
        paths[0].write_text(results_to_json(about, results))
    except OSError as error:
        raise ConfigError(f"{paths[0]} cannot be written: {error}") from error
    if rows:
        title = (
            f"{name} after round {before}: private images, their best reconstruction from uploads,\n"
            "and the best guess from the class. Experimenter's view only"
        )
        draw_sheet(rows, title, run / SHEET, made="reconstructed", only_made="from the class")
        paths.append(run / SHEET)
    return results, paths


def replay_first_rounds(config: Config, rounds: int) -> RecordingWire:
    """Play the first rounds of a configuration again and return a record of them; write nothing.

    It ends when every client has answered the methods that are asked once (`Algorithm.once`), which
    is after the first round unless clients are sampled or fail.

    Args:
        config: The configuration.
        rounds: The largest number of rounds. After these the record is returned as it is.
    """
    experiment = Experiment.from_config(config)
    wire = record_wire(experiment)
    for _ in range(rounds):
        experiment.step()
        asked = [
            k for k, answers in wire.answers.items() if experiment.algorithm.once <= answers.keys()
        ]
        if len(asked) == config.clients:
            break
    return wire
