"""The command line: barter run | resume | compare | list | show | flower | site."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import click
import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from barter.algorithms import ALGORITHMS
from barter.comparison import Comparison, named_variants, run_all, seeds_of, variants_of, varied
from barter.config import Config, algorithm_named, read, resolve, with_settings
from barter.core.errors import BarterError, CheckpointError, ConfigError
from barter.core.params import describe
from barter.data.partition import PARTITIONS
from barter.data.sources import PATH_SOURCES, SOURCES
from barter.data.task import SITES, Task, make_task
from barter.experiment import Experiment, names_of
from barter.gallery import sheets
from barter.models.families import FAMILIES
from barter.models.zoo import ZOO
from barter.runs.picture import bubbles
from barter.runs.progress import ManyRuns, Watcher
from barter.runs.record import Round
from barter.runs.summary import cells
from barter.runs.tables import class_table, closing_table
from barter.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="barter",
    help="Heterogeneous federated learning: clients that share neither data nor architecture trade knowledge.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
show = typer.Typer(help="Show an algorithm, a partition of a data set, or a run's images.", no_args_is_help=True)
app.add_typer(show, name="show")
flower = typer.Typer(help="Federations across machines, on Flower.", no_args_is_help=True)
app.add_typer(flower, name="flower")


class Interrupted(BarterError):
    """The user pressed Ctrl-C."""


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value, such as rounds=10 or algorithm.share=0.5."),
]


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Arithmetic(StrEnum):
    """How to compute."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class Place(StrEnum):
    """Where clients live."""

    local = "local"
    flower = "flower"


class Listing(StrEnum):
    """What can be listed."""

    algorithms = "algorithms"
    models = "models"
    families = "families"
    datasets = "datasets"
    partitions = "partitions"


def _console(*, wide: bool = False) -> Console:
    """Names and paths are printed as they are; outside of a terminal tables may be wide."""
    width = 140 if wide and not sys.stdout.isatty() else None
    return Console(highlight=False, markup=False, width=width, soft_wrap=not sys.stdout.isatty() and not wide)


def _version(wanted: bool) -> None:
    if wanted:
        _console().print(f"barter {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="A name from `barter list algorithms`, or module:Class.")
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; without one, a new one under runs/.")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to compute.")] = None,
    precision: Annotated[
        Arithmetic | None, typer.Option(help="How to compute; without it, bf16 on CUDA and fp32 on the CPU.")
    ] = None,
    device_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Stay within so much of a CUDA device's memory.")
    ] = None,
    engine: Annotated[
        Place | None, typer.Option(help="Where clients live: in this process, or each in a Flower site of its own.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="With --engine flower: in Flower's simulation, for many clients.")
    ] = False,
) -> None:
    """Run a federation, as CONFIG.toml says or by the defaults, and keep its metrics and checkpoint in a folder."""
    tree = _tree(config, algorithm, settings)
    chosen = {"device": device, "precision": precision, "device_memory": device_memory, "engine": engine}
    tree |= {key: getattr(value, "value", value) for key, value in chosen.items() if value is not None}
    resolved = resolve(tree)
    if out is None:
        name = str(tree.get("algorithm", {}).get("name", "dffke")).replace(":", "-")
        source = resolved.data.source.partition(":")[0]
        out = Path("runs") / f"{name}-{source}-seed{resolved.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if simulate and resolved.engine != "flower":
        raise ConfigError("--simulate is Flower's simulation: add --engine flower")
    _drive(resolved, out, resume=False, simulate=simulate)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Until so many are done; without, as configured.")] = None,
) -> None:
    """Continue the run in the folder RUN behind its last finished round, as if it had never been interrupted."""
    simulated = (run / "flower").is_dir() and not (run / "flower" / "sites").exists()
    config = resolve(read(run / "config.toml"))
    _drive(config if rounds is None else replace(config, rounds=rounds), run, resume=True, simulate=simulated)


@app.command()
def compare(
    what: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml | DIR]", help="A configuration for all runs, or a comparison to look at."),
    ] = None,
    algorithms: Annotated[
        str, typer.Option(help="Methods, with fields if need be: local,dffke,dffke:preset=paper:share=0.3")
    ] = "",
    seeds: Annotated[str | None, typer.Option(help="Such as 0-4 or 0,3,7-9; 0-2 if nothing is said.")] = None,
    settings: Settings = None,
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Every method with each value: algorithm.tau=0.8,0.9")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="The method to compare others with, seed by seed.")] = None,
    metric: Annotated[str | None, typer.Option(help="Of curves and differences: global, own or server.")] = None,
    target: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Count the rounds until this accuracy, such as 0.8.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many runs at a time.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The folder; without one, a new one under runs/.")] = None,
) -> None:
    """Compare methods over seeds: run what is not there yet, then a table and curves; of DIR, of what is there."""
    given = {"baseline": baseline, "metric": metric, "target": target}
    if what is not None and what.is_dir():
        if algorithms or seeds or settings or vary or out:
            raise ConfigError(f"{what} is looked at; to go on, give the command that began it with --out {what}")
        comparison = Comparison.at(what)
        comparison.options |= {key: item for key, item in given.items() if item is not None}
        comparison.check([])
        _print_comparison(comparison)
        return
    named, table, rest = named_variants({} if what is None else read(what))
    options = {key: table.get(key) if item is None else item for key, item in given.items()}
    methods = {name: [*(settings or []), *own] for name, own in {**named, **variants_of(algorithms)}.items()}
    chosen = varied(methods, [*table.get("vary", []), *(vary or [])])
    wanted = seeds_of(seeds or str(table.get("seeds", "0-2")))
    folder = out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    comparison, runs = Comparison.planned(folder, rest, chosen, wanted, options)
    console = _console()
    console.print(f"{len(chosen)} methods, {len(wanted)} seeds, {len(runs)} runs; folder {folder}")
    with ManyRuns(console) as many:
        try:
            failed = run_all(runs, jobs, many.show, many.tell)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; the same command with --out {folder} continues") from None
    _print_comparison(comparison)
    if failed:
        raise BarterError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(map(str, failed))}")


def _print_comparison(comparison: Comparison) -> None:
    compared, missing, paths = comparison.write()
    headings, rows = cells(compared)
    table = Table(*headings, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(f"[bold]{escape(text)}[/bold]" if best else escape(text) for text, best in row))
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    if missing:
        _console().print(f"not finished: {'; '.join(missing)}")
    _console().print(f"table and curves: {', '.join(map(str, paths))}")


def _tree(config: Path | None, algorithm: str | None, settings: Sequence[str] | None) -> dict[str, Any]:
    first = [] if algorithm is None else [f"algorithm.name={algorithm}"]
    return with_settings({} if config is None else read(config), [*first, *(settings or [])])


def _drive(config: Config, out: Path, *, resume: bool, simulate: bool = False) -> None:
    console = _console()
    watcher = Watcher(console, config.rounds)
    if config.engine == "flower":
        _drive_flower(config, out, watcher, resume=resume, simulate=simulate)
        return
    experiment = Experiment.from_config(config, out, resume=resume, monitor=watcher)
    assert experiment.folder is not None
    architectures = len(set(experiment.architectures))
    console.print(
        f"{type(config.algorithm).__name__} on {config.data.source}: {config.clients} clients, "
        f"{architectures} architecture{'s' * (architectures > 1)}, {config.rounds} rounds, "
        f"{experiment.device.type}; folder {out}"
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
    _close(records, experiment.architectures, experiment.task, out)


def _close(records: Sequence[Round], architectures: Sequence[str], task: Task, out: Path) -> None:
    held = [[c for c, n in enumerate(row) if n] for row in task.class_table().tolist()]
    samples = [len(images) for images in task.train]
    _console(wide=True).print(closing_table(records, architectures, samples, held))
    _console().print(f"run folder: {out}")


def _drive_flower(config: Config, out: Path, watcher: Watcher, *, resume: bool, simulate: bool) -> None:
    """A SuperLink and a site for each client, all on this machine; or Flower's simulation of them."""
    loopback = _flower("loopback")
    if simulate:
        _flower("ray")
    task = make_task(config.data, config.partition, config.clients, config.seed, torch.device("cpu"))
    names = names_of(config.algorithm, config.models, config.clients)
    place = "clients in Flower's simulation" if simulate else "Flower sites on this machine"
    watcher.console.print(
        f"{type(config.algorithm).__name__} on {config.data.source}: {config.clients} {place}, {config.rounds} rounds; "
        f"folder {out}"
    )
    try:
        records = (loopback.simulate if simulate else loopback.run_here)(config, out, watcher, resume=resume)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; `barter resume {out}` continues") from None
    _close(records, names, task, out)


def _flower(module: str) -> Any:
    """A module that needs Flower, or Ray, on which Flower simulates."""
    try:
        return importlib.import_module(module if module == "ray" else f"barter.{module}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("flwr", "cryptography", "ray"):
            raise
        what, extra = ("Ray", "simulation") if missing == "ray" else ("Flower", "flower")
        raise ConfigError(f"{what} is not installed here: pip install 'barter-fl[{extra}]'") from None


@flower.command("init")
def flower_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    sites: Annotated[str, typer.Option(help="The sites' names, with commas between them.")],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the sites reach the coordinator.")],
    config: Annotated[Path | None, typer.Option(help="The run's configuration; without one, the defaults.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="A name from `barter list algorithms`.")] = None,
    settings: Settings = None,
) -> None:
    """Write the folder of a deployment: the run, certificates, and a folder with a key for every site."""
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
    _flower("deploy").init(folder, resolved, [{"name": n, **s} for n, s in zip(names, own, strict=True)], address)
    _console().print(f"{folder / 'README.md'} says how to go on")


@flower.command("start")
def flower_start(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 is all of this machine's.")] = "0.0.0.0",
    insecure: Annotated[
        bool, typer.Option(help="Without encryption and keys, for tests on one machine; sites must say so too.")
    ] = False,
) -> None:
    """Coordinate the run of a deployment folder: start the SuperLink, let the sites in, show the progress."""
    config = resolve(read(folder / "run.toml"))
    watcher = Watcher(_console(), config.rounds)
    try:
        _flower("loopback").coordinate(folder, host, watcher, insecure=insecure)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; `barter flower start {folder}` continues") from None
    watcher.console.print(f"run folder: {folder / 'run'}")


@app.command()
def site(
    file: Annotated[Path, typer.Argument(metavar="SITE.toml")],
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Be a site of a federation on Flower: hold the client of SITE.toml, and keep its SuperNode running."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    supervise = _flower("supervise")
    supervise.site(file) if worker is None else supervise.work(file, worker)


@app.command("list")
def list_(
    what: Annotated[Listing, typer.Argument(metavar="WHAT")],
) -> None:
    """List algorithms, models, families, datasets or partitions."""
    rows: dict[Listing, list[tuple[str, str]]] = {
        Listing.algorithms: [(name, (kind.__doc__ or "").split("\n")[0]) for name, kind in ALGORITHMS.items()],
        Listing.models: [(name, "in " + ", ".join(f for f, m in FAMILIES.items() if name in m)) for name in ZOO],
        Listing.families: [(name, ", ".join(members)) for name, members in FAMILIES.items()],
        Listing.datasets: [(name, text) for name, (_, text) in [*SOURCES.items(), *PATH_SOURCES.items()]],
        Listing.partitions: [(name, kind.summary) for name, kind in PARTITIONS.items()],
    }
    console = _console(wide=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in rows[what]:
        table.add_row(name, "" if text == "in " else text)
    console.print(table)


@show.command("algorithm")
def show_algorithm(
    name: Annotated[str, typer.Argument()],
) -> None:
    """Citation, what crosses the wire, and fields with defaults and symbols of an algorithm (or of module:Class)."""
    kind, console = algorithm_named(name), _console(wide=True)
    console.print(kind.citation())
    console.print("\nWhat crosses the wire:")
    for method, what in kind.crosses.items():
        console.print(f"  {method}: {what}")
    _fields(console, kind, "algorithm.")
    for preset, values in kind.presets.items():
        changes = ", ".join(f"{key}={value}" for key, value in values.items()) or "the defaults"
        console.print(f"preset {preset}: {changes}")


def _fields(console: Console, kind: type, where: str) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for field in describe(kind):
        default = "none" if field.default is None else str(field.default)
        table.add_row(f"{where}{field.name} = {default}", f"{field.meaning} [{field.kind}]")
    console.print()
    console.print(table)
    console.print()


@show.command("partition")
def show_partition(
    name: Annotated[str | None, typer.Argument()] = None,
    config: Annotated[Path | None, typer.Option(help="Take the rest from this configuration.")] = None,
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="Where to save the bubble picture.")] = Path("partition.png"),
) -> None:
    """Who gets how many samples of which class under a partition, as a table and as a picture."""
    first = [] if name is None else [f"partition.name={name}"]
    resolved = resolve(_tree(config, None, [*first, *(settings or [])]))
    task = make_task(resolved.data, resolved.partition, resolved.clients, resolved.seed, torch.device("cpu"))
    console, counts = _console(wide=True), task.class_table().tolist()
    console.print(class_table(counts, task.classes))
    _fields(console, type(resolved.partition), "partition.")
    rule = ", ".join(f"{f.name} {getattr(resolved.partition, f.name)}" for f in describe(type(resolved.partition)))
    bubbles(
        counts,
        task.classes,
        f"{type(resolved.partition).__name__} on {resolved.data.source}, seed {resolved.seed}\n{rule}",
        out,
    )
    console.print(f"picture: {out}")


@show.command("images")
def show_images(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="Where to save the sheets; without it, RUN/images.")] = None,
    columns: Annotated[int, typer.Option(min=1, max=100, help="Images of each client.")] = 10,
) -> None:
    """Save a sheet per round of RUN: private images beside what was made of them. No party of a run sees both."""
    for path in sheets(run, out or run / "images", columns):
        _console().print(f"picture: {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a mistake in what was asked, in one line; 1 for the rest."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that --algorithm module:Class finds a module in this folder
    try:
        status = app(args=None if arguments is None else list(arguments), prog_name="barter", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _fail(" ".join(error.format_message().split()), 2)
    except (ConfigError, CheckpointError) as error:
        return _fail(str(error), 2)
    except BarterError as error:
        return _fail("\n".join([str(error), *getattr(error, "__notes__", [])]), 1)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 1)
    except BrokenPipeError:
        return 1
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _fail(f"not enough memory: {error}", 1)


def _fail(message: str, status: int) -> int:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"barter: {message}")
    return status


if __name__ == "__main__":
    sys.exit(main())
