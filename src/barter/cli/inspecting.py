"""Commands that look at something: a run, a comparison, a network, a method, a split."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from barter.attacks.attack import attacked
from barter.cli.common import Settings, asked, optional, screen
from barter.cli.describing import print_fields
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
from barter.setup.config import COMPARISON, read, resolve
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
        config = Path(name)
        name = None
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
    print_fields(console, type(resolved.partition), "partition.", resolved.partition)
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


def show_images(run: Path, out: Path | None, columns: int) -> None:
    for path in sheets(begun(run), out or run / "images", columns):
        screen().print(f"picture: {path}")
