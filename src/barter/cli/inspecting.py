"""Commands that inspect a run, a comparison, a network, a method or a split."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from barter.attacks.attack import attack_tables
from barter.attacks.canary import canary_lines
from barter.cli.common import (
    SettingTexts,
    import_optional,
    make_console,
    open_config,
    parse_round,
    requested_values,
)
from barter.cli.describing import print_fields
from barter.core.errors import BarterError, CheckpointError, ConfigError, Interrupted
from barter.core.params import describe_fields
from barter.data.sources import load_dataset as load_data
from barter.data.splits import write_split
from barter.data.task import make_task, with_absolute_paths
from barter.experiment import Experiment
from barter.privacy.ledger import Ledger, ledger_file
from barter.privacy.show import ledger_lines, statement_tables
from barter.privacy.statement import Statement
from barter.report.image_sheets import sheets
from barter.runs.folder import PRIVACY, require_run
from barter.runs.picture import Kinds, draw_bubbles
from barter.runs.progress import Work
from barter.runs.tables import accuracy_table, count_table
from barter.setup.config import COMPARISON, resolve
from barter.setup.hardware import resolve_device
from barter.setup.trust import read_run
from barter.testing.conformance import CHECKS, check_algorithm
from barter.trained.export import export_model as write_network
from barter.trained.model import evaluate_networks, load, load_all

__all__ = [
    "attack_run",
    "check_method",
    "evaluate_run",
    "export_from_run",
    "print_partition",
    "print_privacy",
    "save_sheets",
    "write_report",
]


def write_report(what: Path, to: Path | None, *, live: bool, images: bool) -> None:
    """Run `barter report`: write the HTML page of a run or of a comparison.

    With `live`, the page is written again after every round until the run has ended.

    Args:
        what: The folder of a run or of a comparison.
        to: The file; None for report.html in the folder.
        live: Wait for further rounds.
        images: Show private and synthetic images.

    Raises:
        Interrupted: The user pressed Ctrl-C; the page shows what there is.
    """
    pages = import_optional("report.report")
    target = to or what / "report.html"
    console = make_console()
    subject = pages.make_report(what, live=live, images=images)
    rounds_shown = -1
    try:
        if live and not subject.finished:
            # Large data take long to read, and a browser may already be waiting for this file.
            pages.write_page(target, subject.page(live=True, quick=True))
        while live and not subject.finished:
            if subject.done != rounds_shown:
                rounds_shown = subject.done
                pages.write_page(target, subject.page(live=True))
                console.print(f"report: {target}, {subject.progress}")
            time.sleep(1)
    except KeyboardInterrupt:
        pages.write_page(target, subject.page(live=False))
        raise Interrupted(f"stopped; {target} shows what there is") from None
    pages.write_page(target, subject.page(live=False))
    console.print(f"report: {target}")


def print_privacy(run: Path | None, ledger: Path | None = None) -> None:
    """Run `barter privacy` for a run's folder or a site's ledger.

    Raises:
        ConfigError: Neither or both are given.
        CheckpointError: There is no statement, or no ledger.
    """
    if (run is None) == (ledger is None):
        raise ConfigError("give either the folder of a run, or --ledger and the folder of a site")
    if ledger is not None:
        file = ledger_file(ledger)
        for line in ledger_lines(Ledger(file, file.parent)):
            make_console(wide=True).print(line)
        return
    assert run is not None
    if not (require_run(run) / PRIVACY).is_file():
        raise CheckpointError(
            f"{run} has no privacy statement: there is no {PRIVACY} in it, which every round writes"
        )
    for line in statement_tables(Statement.read(run / PRIVACY)):
        make_console(wide=True).print(line)


def attack_run(run: Path, shadows: int, *, canary: bool, tries: int, images: int) -> None:
    """Run `barter attack`: attack a run as a curious server and print the results.

    The attacks run on the CPU.

    Args:
        run: The folder of a run; with `canary` also a configuration file.
        shadows: The number of shadow runs for membership inference; must be even.
        canary: Play the canary game instead of the attacks.
        tries: The game's number of rounds with either image.
        images: The game's number of images of each client.
    """
    if canary:
        is_file = run.suffix == ".toml"
        config = resolve(open_config(run)) if is_file else read_run(require_run(run))
        if config.engine == "flower":
            raise ConfigError(f"{run} is for Flower: its clients' images are at their sites")
        # Uploads of a GPU and of the CPU have the same noise; here a round is played thousands of
        # times, in one process.
        experiment = Experiment.from_config(replace(config, device="cpu", start="", timeout=None))
        folder = None if is_file else run
        for line in canary_lines(experiment, folder, tries, images, Work(make_console())):
            make_console(wide=True).print(line)
        return
    for line in attack_tables(require_run(run), shadows, Work(make_console())):
        make_console(wide=True).print(line)


def evaluate_run(run: Path, source: str, client: int | None, round: str) -> None:
    """Run `barter evaluate`: print the accuracy of a run's networks on a data source.

    Args:
        run: The run's folder.
        source: The source of the data.
        client: The client whose network is evaluated; None for all, and the server's.
        round: The value of --round.
    """
    which = parse_round(round)
    folder = require_run(run)
    models = load_all(folder, which) if client is None else [load(folder, client, round=which)]
    spec = models[0].spec
    run_data = read_run(run).data
    size = spec.height if spec.height == spec.width else None
    dataset = load_data(source, root=run_data.root, size=size, hold_out=run_data.hold_out)
    new = (
        with_absolute_paths(replace(run_data, source=source)).source
        != with_absolute_paths(run_data).source
    )
    count, values = evaluate_networks(models, dataset, new=new, device=resolve_device("auto"))
    after = f"after round {models[0].round}"
    make_console().print(f"accuracy in % {after} on {count:,} images of {source}\n")
    rows = [(model.owner, model.architecture) for model in models]
    make_console(wide=True).print(accuracy_table(rows, values))


def export_from_run(run: Path, to: Path, client: int | None, round: str) -> None:
    """Run `barter export`: write one network of a run to a file, and print which.

    Args:
        run: The run's folder.
        to: The file, whose ending determines the format.
        client: The client whose network is exported; None for the server's model.
        round: The value of --round.
    """
    model = load(require_run(run), client, round=parse_round(round))
    write_network(model, to)
    make_console().print(
        f"{model.owner} of {run}, {model.architecture} after round {model.round}: {to}"
    )


def check_method(name: str, settings: SettingTexts) -> None:
    """Run `barter check`: print for each rule whether an algorithm keeps it.

    Raises:
        BarterError: It breaks a rule.
    """
    algorithm = resolve(requested_values(None, name, settings)).algorithm
    console = make_console()
    failed = 0
    for rule, problem in check_algorithm(algorithm):
        failed += bool(problem)
        console.print(f"no  {rule}\n    {problem}" if problem else f"ok  {rule}")
    if failed:
        raise BarterError(f"{name} breaks {failed} of {len(CHECKS)} rules")


def print_partition(
    name: str | None,
    config: Path | None,
    settings: SettingTexts,
    out: Path,
    title: str | None,
    save: Path | None,
) -> None:
    """Run `barter show partition`: print sample counts by client, and draw a chart.

    Args:
        name: The partition, or a configuration file (.toml); None for the configured partition.
        config: The configuration file; None for the defaults.
        settings: The values of --set.
        out: The chart's file.
        title: The chart's title; None for a description, "none" for no title.
        save: The folder to which the split is written too; None for none.

    Raises:
        ConfigError: Two configurations are given, or a value is invalid.
    """
    if name is not None and Path(name).suffix == ".toml":
        if config is not None:
            raise ConfigError(f"{name} and --config {config}: give one configuration")
        config = Path(name)
        name = None
    first = [] if name is None else [f"partition.name={name}"]
    tree = requested_values(config, None, [*first, *(settings or [])])
    tree.pop(COMPARISON, None)  # All runs of a comparison have the same split.
    resolved = resolve(tree)
    # Validation images belong to the clients as well, so none are held out here.
    data = replace(resolved.data, validation=0.0)
    task = make_task(data, resolved.partition, resolved.clients, resolved.seed, torch.device("cpu"))
    console = make_console(wide=True)
    kinds = [Kinds("class", task.classes, task.class_table().tolist())]
    if len(task.domains) > 1:
        kinds.append(Kinds("domain", task.domains, task.domain_table.tolist()))
    for kind in kinds:
        console.print(count_table(kind.title, kind.counts, kind.names))
    partition = resolved.partition
    print_fields(console, type(partition), "partition.", partition)
    if title is None:
        fields = [
            f"{f.name} {getattr(partition, f.name)}" for f in describe_fields(type(partition))
        ]
        heading = f"{type(partition).__name__} on {resolved.data.source}, seed {resolved.seed}"
        title = f"{heading}\n{', '.join(fields)}"
    draw_bubbles(kinds, "" if title == "none" else title, out)
    console.print(f"picture: {out}")
    if save is not None:
        write_split(save, task.train, task.local_tests, task.global_test, task.classes)
        console.print(f"split: {save}; data.source=clients:{save}")


def save_sheets(run: Path, out: Path | None, columns: int) -> None:
    """Run `barter show images`: save a sheet of images per round; print its file.

    Args:
        run: The run's folder.
        out: The folder for the sheets; None for images/ in the run's folder.
        columns: The largest number of images of each client.
    """
    for path in sheets(require_run(run), out or run / "images", columns):
        make_console().print(f"picture: {path}")
