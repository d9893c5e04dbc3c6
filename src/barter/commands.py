"""What the commands of the command line do. Importing this loads torch: `cli` does so when there is something to do."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from barter.attacks.attack import attacked
from barter.comparison import Comparison, Request, run_all
from barter.compute.threads import free
from barter.config import Config, algorithm_named, read, resolve, to_toml, with_settings
from barter.conformance import CHECKS, examined
from barter.core.algorithm import Algorithm
from barter.core.errors import BarterError, CheckpointError, ConfigError, Interrupted, PrivacyError
from barter.core.params import describe
from barter.core.record import Round
from barter.data.sources import load as load_data
from barter.data.splits import write_split
from barter.data.task import SITES, Task, anchored, make_task
from barter.experiment import Experiment
from barter.export import export as write_network
from barter.gallery import sheets
from barter.kept import judged, load, load_all
from barter.machine import device_named
from barter.parties import names_of
from barter.privacy.show import shown
from barter.privacy.statement import Statement
from barter.runs.folder import PRIVACY, records, unborn
from barter.runs.picture import Kinds, bubbles
from barter.runs.progress import ManyRuns, Watcher, Work
from barter.runs.summary import cells
from barter.runs.tables import accuracy_table, closing_table, count_table

__all__ = [
    "attack",
    "check",
    "compare",
    "evaluate",
    "export",
    "flower_init",
    "flower_start",
    "privacy",
    "report",
    "resume",
    "run",
    "show_algorithm",
    "show_config",
    "show_images",
    "show_partition",
    "site",
]

Settings = Sequence[str] | None


def _console(*, wide: bool = False) -> Console:
    """Names and paths are printed as they are; outside of a terminal tables may be wide."""
    width = 140 if wide and not sys.stdout.isatty() else None
    return Console(highlight=False, markup=False, width=width, soft_wrap=not sys.stdout.isatty() and not wide)


def run(
    config: Path | None,
    algorithm: str | None,
    settings: Settings,
    out: Path | None,
    chosen: Mapping[str, object],
    *,
    simulate: bool,
    tensorboard: bool,
) -> None:
    tree = _tree(config, algorithm, settings) | {key: value for key, value in chosen.items() if value is not None}
    resolved = resolve(tree)
    if out is None:
        name = str(tree.get("algorithm", {}).get("name", "dffke")).replace(":", "-")
        source = resolved.data.source.partition(":")[0]
        out = Path("runs") / f"{name}-{source}-seed{resolved.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if simulate and resolved.engine != "flower":
        raise ConfigError("--simulate is Flower's simulation: add --engine flower")
    _drive(resolved, out, resume=False, simulate=simulate, tensorboard=tensorboard)


def resume(run: Path, rounds: int | None, threads: int | None, *, tensorboard: bool) -> None:
    if unborn(run):
        raise CheckpointError(f"{run} was interrupted before its run began: there is nothing to continue, run it again")
    simulated = (run / "flower").is_dir() and not (run / "flower" / "sites").exists()
    config = resolve(read(run / "config.toml"))
    if rounds is not None and rounds < (done := len(records(run))):
        raise ConfigError(f"--rounds {rounds}: {run} has done {done} already")
    if rounds is not None and rounds != config.rounds and config.engine == "flower":
        raise ConfigError(f"--rounds {rounds}: a run on Flower keeps the {config.rounds} rounds it was begun with")
    tensorboard = tensorboard or (run / "tensorboard").is_dir()  # a log that was begun goes on
    if threads is not None and config.engine == "flower":
        raise ConfigError(f"--threads {threads}: a run on Flower keeps those that it was begun with")
    config = replace(config, rounds=rounds or config.rounds, threads=threads or config.threads)
    _drive(config, run, resume=True, simulate=simulated, tensorboard=tensorboard)


def compare(
    what: Path | None,
    algorithms: str,
    seeds: str | None,
    settings: Settings,
    vary: Settings,
    only: Settings,
    out: Path | None,
    asked: Mapping[str, object],
    jobs: int,
) -> None:
    if what is not None and what.is_dir():
        if algorithms or seeds or settings or vary or only or out:
            raise ConfigError(f"{what} is looked at; to go on, give the command that began it with --out {what}")
        comparison = Comparison.at(what)
        comparison.question |= {key: item for key, item in asked.items() if item is not None}
        comparison.check()
        _print_comparison(comparison)
        return
    tree = {} if what is None else read(what)
    request = Request.of(tree, algorithms, seeds, settings or [], vary or [], asked, only or [])
    folder = out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    comparison, runs = Comparison.planned(folder, request)
    console = _console()
    console.print(f"{len(request.variants)} methods, {len(request.seeds)} seeds, {len(runs)} runs; folder {folder}")
    with ManyRuns(console) as many:
        try:
            failed = run_all(runs, jobs, many.show, many.tell)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; the same command with --out {folder} continues") from None
    if len(failed) < len(runs):
        _print_comparison(comparison)
    if failed:
        raise BarterError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(map(str, failed))}")


def _print_comparison(comparison: Comparison) -> None:
    compared, missing, paths = comparison.write()
    headings, rows = cells(compared)
    table = Table(*map(escape, headings), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(f"[bold]{escape(text)}[/bold]" if best else escape(text) for text, best in row))
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    if missing:
        more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
        _console().print(f"not finished: {'; '.join(missing[:8])}{more}")
    if comparison.question.get("baseline") not in (None, compared.question.baseline):
        _console().print(f"no run of the baseline {comparison.question['baseline']!r} is finished: no differences yet")
    _console().print(f"table and curves: {', '.join(map(str, paths))}")


def report(what: Path, to: Path | None, *, live: bool, images: bool) -> None:
    pages, target, console = _optional("report"), to or what / "report.html", _console()
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
    if not (run / PRIVACY).is_file():
        raise CheckpointError(f"{run} says nothing of privacy: there is no {PRIVACY} in it, which a round leaves there")
    for line in shown(Statement.read(run / PRIVACY)):
        _console(wide=True).print(line)


def attack(run: Path, shadows: int) -> None:
    for line in attacked(run, shadows, Work(_console())):
        _console(wide=True).print(line)


def evaluate(run: Path, source: str, client: int | None) -> None:
    networks = load_all(run) if client is None else [load(run, client)]
    spec, own = networks[0].spec, resolve(read(run / "config.toml")).data
    dataset = load_data(source, root=own.root, size=spec.height if spec.height == spec.width else None)
    new = anchored(replace(own, source=source)).source != anchored(own).source
    count, values = judged(networks, dataset, new=new, device=device_named("auto"))
    _console().print(f"accuracy in % on {count:,} images of {source}\n")
    _console(wide=True).print(accuracy_table([(kept.owner, kept.architecture) for kept in networks], values))


def export(run: Path, to: Path, client: int | None) -> None:
    kept = load(run, client)
    write_network(kept, to)
    _console().print(f"{kept.owner} of {run}, {kept.architecture} after round {kept.round}: {to}")


def check(name: str, settings: Settings) -> None:
    algorithm, failed, console = resolve(_tree(None, name, settings)).algorithm, 0, _console()
    for what, problem in examined(algorithm):
        failed += bool(problem)
        console.print(f"no  {what}\n    {problem}" if problem else f"ok  {what}")
    if failed:
        raise BarterError(f"{name} does not keep to {failed} of {len(CHECKS)}")


def _tree(config: Path | None, algorithm: str | None, settings: Sequence[str] | None) -> dict[str, Any]:
    first = [] if algorithm is None else [f"algorithm.name={algorithm}"]
    return with_settings({} if config is None else read(config), [*first, *(settings or [])])


def _drive(config: Config, out: Path, *, resume: bool, simulate: bool, tensorboard: bool) -> None:
    console = _console()
    watcher = Watcher(console, config.rounds, _optional("runs.tensorboard").TensorBoard(out) if tensorboard else None)
    if config.engine == "flower":
        _drive_flower(config, out, watcher, resume=resume, simulate=simulate)
        return
    experiment = Experiment.from_config(config, out, resume=resume, monitor=watcher)
    assert experiment.folder is not None
    architectures = len(set(experiment.architectures))
    console.print(
        f"{type(config.algorithm).__name__} on {config.data.source}: {config.clients} clients, "
        f"{architectures} architecture{'s' * (architectures > 1)}, {config.rounds} rounds, "
        f"{experiment.device.type}{_said(experiment.config.threads)}; folder {out}"
    )
    if experiment.round:
        console.print(f"{experiment.round} of {config.rounds} rounds are done already")
    records = experiment.folder.records()
    watcher.begin(experiment.round)
    try:
        for record in experiment.rounds(config.rounds):
            records.append(record)
            watcher.finish(record)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped in round {experiment.round + 1}; `barter resume {out}` continues") from None
    except PrivacyError:
        if records:
            _close(records, experiment.architectures, experiment.task, out, config.algorithm)
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}; when that is mended, `barter resume {out}` continues") from error
    _close(records, experiment.architectures, experiment.task, out, config.algorithm)


def _said(threads: int | None) -> str:
    """How many threads of the CPU there are, and whether there could be more; nothing where nobody chose."""
    if threads is None:
        return ""
    most = torch.get_num_threads()
    return f", {threads} of {most} threads" if threads < most else f", {threads} thread{'s' * (threads > 1)}"


def _close(
    records: Sequence[Round], architectures: Sequence[str], task: Task, out: Path, algorithm: Algorithm[Any, Any]
) -> None:
    held = [[c for c, n in enumerate(row) if n] for row in task.class_table().tolist()]
    samples = [len(images) for images in task.train]
    _console(wide=True).print(closing_table(records, architectures, samples, held))
    console = _console()
    for remark in algorithm.remarks(records):
        console.print(f"note: {remark}", style="yellow")
    _end(out)


def _end(out: Path) -> None:
    if (out / PRIVACY).is_file() and Statement.read(out / PRIVACY).protected:
        privacy(out)
    elif (out / PRIVACY).is_file():
        _console().print(f"nothing is protected: `barter privacy {out}` says what left the clients")
    _console().print(f"run folder: {out}")


def _drive_flower(config: Config, out: Path, watcher: Watcher, *, resume: bool, simulate: bool) -> None:
    """A SuperLink and a site for each client, all on this machine; or Flower's simulation of them."""
    loopback = _optional("flower.loopback")
    if simulate:
        _optional("ray")
    if config.threads is None and device_named(config.device).type == "cpu":
        config = replace(config, threads=free())
    task = make_task(config.data, config.partition, config.clients, config.seed, torch.device("cpu"))
    names = names_of(config.algorithm, config.models, config.clients)
    place = "clients in Flower's simulation" if simulate else "Flower sites on this machine"
    watcher.console.print(
        f"{type(config.algorithm).__name__} on {config.data.source}: {config.clients} {place}, {config.rounds} rounds"
        f"{_said(config.threads)}; folder {out}"
    )
    try:
        records = (loopback.simulate if simulate else loopback.run_here)(config, out, watcher, resume=resume)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; `barter resume {out}` continues") from None
    _close(records, names, task, out, config.algorithm)


EXTRAS = {
    "flwr": ("Flower", "flower"),
    "cryptography": ("Flower", "flower"),
    "ray": ("Ray", "simulation"),
    "plotly": ("Plotly", "report"),
    "tensorboard": ("TensorBoard", "tensorboard"),
}


def _optional(module: str) -> Any:
    """A module of ours that needs what an extra installs, or Ray, on which Flower simulates."""
    try:
        return importlib.import_module(module if module == "ray" else f"barter.{module}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        what, extra = EXTRAS[missing]
        raise ConfigError(f"{what} is not installed here: pip install 'barter-fl[{extra}]'") from None


def flower_init(
    folder: Path, sites: str, address: str, config: Path | None, algorithm: str | None, settings: Settings
) -> None:
    tree = _tree(config, algorithm, settings)
    names = [name.strip() for name in sites.split(",")]
    shared = tree.get("data", {}).get("source", SITES) != SITES
    if not shared:
        tree = with_settings(tree, [f"data.source={SITES}"])
    resolved = resolve({**tree, "clients": len(names), "engine": "flower"})
    own = [
        {"data": "folder:/path/to/images", "model": "small-cnn"} if not shared else {"share": k}
        for k in range(len(names))
    ]
    setups = [{"name": name, **setup} for name, setup in zip(names, own, strict=True)]
    _optional("flower.deploy").init(folder, resolved, setups, address)
    _console().print(f"{folder / 'README.md'} says how to go on")


def flower_start(folder: Path, host: str, *, insecure: bool) -> None:
    config = resolve(read(folder / "run.toml"))
    watcher = Watcher(_console(), config.rounds)
    try:
        _optional("flower.loopback").coordinate(folder, host, watcher, insecure=insecure)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; `barter flower start {folder}` continues") from None
    _end(folder / "run")


def site(file: Path, worker: Path | None) -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    supervise = _optional("flower.supervise")
    supervise.site(file) if worker is None else supervise.work(file, worker)


def show_algorithm(name: str) -> None:
    kind, console = algorithm_named(name), _console(wide=True)
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
        table.add_row(f"{where}{field.name} = {'none' if value is None else value}", f"{field.meaning} [{field.kind}]")
    console.print()
    console.print(table)
    console.print()


def show_partition(
    name: str | None, config: Path | None, settings: Settings, out: Path, title: str | None, save: Path | None
) -> None:
    first = [] if name is None else [f"partition.name={name}"]
    resolved = resolve(_tree(config, None, [*first, *(settings or [])]))
    task = make_task(resolved.data, resolved.partition, resolved.clients, resolved.seed, torch.device("cpu"))
    kinds, console = [Kinds("class", task.classes, task.class_table().tolist())], _console(wide=True)
    if len(task.domains) > 1:
        kinds.append(Kinds("domain", task.domains, task.domain_table.tolist()))
    for kind in kinds:
        console.print(count_table(kind.title, kind.counts, kind.names))
    _fields(console, type(resolved.partition), "partition.", resolved.partition)
    if title is None:
        rule = ", ".join(f"{f.name} {getattr(resolved.partition, f.name)}" for f in describe(type(resolved.partition)))
        title = f"{type(resolved.partition).__name__} on {resolved.data.source}, seed {resolved.seed}\n{rule}"
    bubbles(kinds, "" if title == "none" else title, out)
    console.print(f"picture: {out}")
    if save is not None:
        write_split(save, task.train, task.local_tests, task.global_test, task.classes)
        console.print(f"split: {save}; data.source=clients:{save}")


def show_config(config: Path | None, algorithm: str | None, settings: Settings) -> None:
    sys.stdout.write(to_toml(resolve(_tree(config, algorithm, settings))))


def show_images(run: Path, out: Path | None, columns: int) -> None:
    for path in sheets(run, out or run / "images", columns):
        _console().print(f"picture: {path}")
