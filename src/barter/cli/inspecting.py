"""Commands that look at something: a run, a comparison, a network, a method, a split."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from barter.attacks.attack import attacked
from barter.cli.common import Settings, asked, optional, screen
from barter.core.errors import BarterError, CheckpointError, ConfigError, Interrupted
from barter.core.params import describe
from barter.data.sources import load as load_data
from barter.data.splits import write_split
from barter.data.task import anchored, make_task
from barter.privacy.show import shown
from barter.privacy.statement import Statement
from barter.report.image_sheets import sheets
from barter.runs.folder import PRIVACY, begun
from barter.runs.picture import Kinds, bubbles
from barter.runs.progress import Work
from barter.runs.tables import accuracy_table, count_table
from barter.setup.config import COMPARISON, algorithm_named, read, resolve, to_toml
from barter.setup.hardware import device_named
from barter.testing.conformance import CHECKS, examined
from barter.trained.export import export as write_network
from barter.trained.model import judged, load, load_all

__all__ = [
    "attack",
    "check",
    "evaluate",
    "export",
    "privacy",
    "report",
    "show_algorithm",
    "show_config",
    "show_images",
    "show_partition",
]


def report(what: Path, to: Path | None, *, live: bool, images: bool) -> None:
    pages, target, console = optional("report.report"), to or what / "report.html", screen()
    subject, shown = pages.report_of(what, live=live, images=images), -1
    try:
        while live and not subject.finished:
            if subject.done != shown:
                shown = subject.done
                pages.write(target, subject.page(live=True))
                console.print(f"report: {target}, {subject.progress}")
            time.sleep(1)
    except KeyboardInterrupt:
        pages.write(target, subject.page(live=False))
        raise Interrupted(f"stopped; {target} shows what there is") from None
    pages.write(target, subject.page(live=False))
    console.print(f"report: {target}")


def privacy(run: Path) -> None:
    if not (begun(run) / PRIVACY).is_file():
        raise CheckpointError(
            f"{run} says nothing of privacy: there is no {PRIVACY} in it, which a round leaves there"
        )
    for line in shown(Statement.read(run / PRIVACY)):
        screen(wide=True).print(line)


def attack(run: Path, shadows: int) -> None:
    for line in attacked(begun(run), shadows, Work(screen())):
        screen(wide=True).print(line)


def evaluate(run: Path, source: str, client: int | None) -> None:
    networks = load_all(begun(run)) if client is None else [load(begun(run), client)]
    spec, own = networks[0].spec, resolve(read(run / "config.toml")).data
    dataset = load_data(
        source, root=own.root, size=spec.height if spec.height == spec.width else None
    )
    new = anchored(replace(own, source=source)).source != anchored(own).source
    count, values = judged(networks, dataset, new=new, device=device_named("auto"))
    screen().print(f"accuracy in % on {count:,} images of {source}\n")
    screen(wide=True).print(
        accuracy_table([(kept.owner, kept.architecture) for kept in networks], values)
    )


def export(run: Path, to: Path, client: int | None) -> None:
    kept = load(begun(run), client)
    write_network(kept, to)
    screen().print(f"{kept.owner} of {run}, {kept.architecture} after round {kept.round}: {to}")


def check(name: str, settings: Settings) -> None:
    algorithm, failed, console = resolve(asked(None, name, settings)).algorithm, 0, screen()
    for what, problem in examined(algorithm):
        failed += bool(problem)
        console.print(f"no  {what}\n    {problem}" if problem else f"ok  {what}")
    if failed:
        raise BarterError(f"{name} does not keep to {failed} of {len(CHECKS)}")


def show_algorithm(name: str) -> None:
    kind, console = algorithm_named(name), screen(wide=True)
    console.print(kind.citation())
    console.print("\nWhat crosses the wire:")
    for method, what in kind.crosses.items():
        console.print(f"  {method}: {what}")
    _fields(console, kind, "algorithm.")
    for preset, values in kind.presets.items():
        changes = ", ".join(f"{key}={value}" for key, value in values.items()) or "the defaults"
        console.print(f"preset {preset}: {changes}")


def _fields(console: Console, kind: type, where: str, chosen: object = None) -> None:
    """The fields of a kind, with their defaults or with the values of one that was chosen."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for field in describe(kind):
        value = field.default if chosen is None else getattr(chosen, field.name)
        table.add_row(
            f"{where}{field.name} = {'none' if value is None else value}",
            f"{field.meaning} [{field.kind}]",
        )
    console.print()
    console.print(table)
    console.print()


def show_partition(
    name: str | None,
    config: Path | None,
    settings: Settings,
    out: Path,
    title: str | None,
    save: Path | None,
) -> None:
    if name is not None and Path(name).suffix == ".toml":
        if config is not None:
            raise ConfigError(f"{name} and --config {config}: give one configuration")
        name, config = None, Path(name)
    first = [] if name is None else [f"partition.name={name}"]
    tree = asked(config, None, [*first, *(settings or [])])
    tree.pop(COMPARISON, None)  # all runs of a comparison have one split
    resolved = resolve(tree)
    task = make_task(
        resolved.data, resolved.partition, resolved.clients, resolved.seed, torch.device("cpu")
    )
    kinds, console = [Kinds("class", task.classes, task.class_table().tolist())], screen(wide=True)
    if len(task.domains) > 1:
        kinds.append(Kinds("domain", task.domains, task.domain_table.tolist()))
    for kind in kinds:
        console.print(count_table(kind.title, kind.counts, kind.names))
    _fields(console, type(resolved.partition), "partition.", resolved.partition)
    if title is None:
        rule = ", ".join(
            f"{f.name} {getattr(resolved.partition, f.name)}"
            for f in describe(type(resolved.partition))
        )
        title = f"{type(resolved.partition).__name__} on {resolved.data.source}, seed {resolved.seed}\n{rule}"
    bubbles(kinds, "" if title == "none" else title, out)
    console.print(f"picture: {out}")
    if save is not None:
        write_split(save, task.train, task.local_tests, task.global_test, task.classes)
        console.print(f"split: {save}; data.source=clients:{save}")


def show_config(config: Path | None, algorithm: str | None, settings: Settings) -> None:
    sys.stdout.write(to_toml(resolve(asked(config, algorithm, settings))))


def show_images(run: Path, out: Path | None, columns: int) -> None:
    for path in sheets(begun(run), out or run / "images", columns):
        screen().print(f"picture: {path}")
