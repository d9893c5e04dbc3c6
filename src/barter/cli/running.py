"""Commands that run a federation, here or on Flower, a comparison, or a site."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from barter.cli.common import (
    SettingTexts,
    import_optional,
    make_console,
    open_config,
    parse_round,
    requested_values,
)
from barter.cli.inspecting import print_privacy
from barter.compare.comparison import Comparison, run_all
from barter.compare.specification import ComparisonSpec
from barter.compute.threads import free_cores
from barter.core.algorithm import Algorithm
from barter.core.errors import (
    BarterError,
    CheckpointError,
    ConfigError,
    Interrupted,
    PrivacyError,
    is_out_of_memory,
    summarise_error,
)
from barter.core.record import Round
from barter.core.variant import describe_variant
from barter.data.task import SITES, Task, make_task
from barter.experiment import Experiment
from barter.privacy.statement import Statement
from barter.runs.folder import (
    PRIVACY,
    Which,
    early_stop,
    has_stopped_early,
    never_began,
    read_records,
    require_run,
)
from barter.runs.progress import ManyRuns, Watcher, pluralise
from barter.runs.summary import summary_cells
from barter.runs.tables import closing_table
from barter.setup.config import (
    Config,
    describe_wire,
    read_run_values,
    resolve,
    with_settings,
)
from barter.setup.hardware import resolve_devices
from barter.setup.participants import architecture_names, require_apart
from barter.setup.trust import DEPLOYMENT, read_run, require_consent

__all__ = [
    "compare_variants",
    "init_deployment",
    "resume_run",
    "run_experiment",
    "start_deployment",
    "start_site",
]


def run_experiment(
    config: Path | None,
    algorithm: str | None,
    settings: SettingTexts,
    out: Path | None,
    chosen: Mapping[str, object],
    *,
    simulate: bool,
    tensorboard: bool,
) -> None:
    """Run `barter run`; `chosen` are the values of options that are config keys.

    Options that are not None win over --set, --algorithm and the file. Without `out`, the folder is
    runs/ALGORITHM-SOURCE-seedN-TIME.

    Raises:
        ConfigError: A value is invalid, or --simulate is given without Flower.
    """
    options = {key: value for key, value in chosen.items() if value is not None}
    tree = requested_values(config, algorithm, settings) | options
    resolved = resolve(tree)
    if out is None:
        name = str(tree.get("algorithm", {}).get("name", "dffke")).replace(":", "-")
        source = resolved.data.source.partition(":")[0]
        out = Path("runs") / f"{name}-{source}-seed{resolved.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if simulate and resolved.engine != "flower":
        raise ConfigError("--simulate is Flower's simulation: add --engine flower")
    _drive(resolved, out, resume=False, simulate=simulate, tensorboard=tensorboard)


def resume_run(
    run: Path,
    rounds: int | None,
    threads: int | None,
    patience: int | None,
    after_round: str,
    *,
    tensorboard: bool,
) -> None:
    """Run `barter resume`: continue a run after its last round, or an earlier one.

    None for an option keeps the run's value. A run that stopped early is only reported, unless
    --rounds, an earlier --round or a larger --patience is given.

    Raises:
        CheckpointError: It is no run, never began, or its checkpoint does not fit.
        ConfigError: An option cannot be changed: fewer rounds than are done, or on Flower any.
    """
    if never_began(run):
        raise CheckpointError(
            f"{run} was interrupted before its run began: there is nothing to continue, run it "
            "again"
        )
    simulated = (run / "flower").is_dir() and not (run / "flower" / "sites").exists()
    config = read_run(require_run(run))
    if config.engine == "flower":
        require_consent(run, [DEPLOYMENT])
    which = parse_round(after_round)
    if which == "last" and rounds is not None and rounds < (done := len(read_records(run))):
        raise ConfigError(f"--rounds {rounds}: {run} has done {done} already")
    if rounds is not None and rounds != config.rounds and config.engine == "flower":
        raise ConfigError(
            f"--rounds {rounds}: a run on Flower keeps the {pluralise(config.rounds, 'round')} it "
            "was begun with"
        )
    # A TensorBoard log that was begun is continued.
    tensorboard = tensorboard or (run / "tensorboard").is_dir()
    if threads is not None and config.engine == "flower":
        raise ConfigError(
            f"--threads {threads}: a run on Flower keeps those that it was begun with"
        )
    if config.engine == "flower" and (patience is not None or which != "last"):
        option = f"--round {after_round}" if patience is None else f"--patience {patience}"
        raise ConfigError(
            f"{option}: sites of a run on Flower know its last round, and keep its configuration"
        )
    stop = early_stop(run) if has_stopped_early(run) else None
    longer = stop is not None and patience is not None and patience > stop.patience
    if stop is not None and rounds is None and which == "last" and not longer:
        make_console().print(f"{run} {stop}; --rounds or a larger --patience continues")
        return
    config = replace(
        config,
        rounds=rounds or config.rounds,
        threads=threads or config.threads,
        patience=patience or config.patience,
    )
    _drive(
        config,
        run,
        resume=True,
        simulate=simulated,
        tensorboard=tensorboard,
        after_round=which,
        ignore_stop=rounds is not None,
    )


def compare_variants(
    what: Path | None,
    algorithms: str,
    seeds: str | None,
    settings: SettingTexts,
    vary: SettingTexts,
    only: SettingTexts,
    out: Path | None,
    question: Mapping[str, object],
    jobs: int,
) -> None:
    """Run `barter compare`; `question` has baseline, metric and target or None.

    The folder of a comparison is shown without running anything. Otherwise unfinished runs are run,
    `jobs` at the same time, and the table is shown if one of them succeeded.

    Raises:
        ConfigError: The options are malformed, or given together with a folder.
        Interrupted: The user pressed Ctrl-C.
        BarterError: A run failed.
    """
    if what is not None and what.is_dir():
        if algorithms or seeds or settings or vary or only or out:
            raise ConfigError(
                f"{what} is only shown; to continue it, repeat the command that began it with "
                f"--out {what}"
            )
        comparison = Comparison.at(what)
        comparison.question |= {key: item for key, item in question.items() if item is not None}
        comparison.check()
        _print_comparison(comparison)
        return
    tree = {} if what is None else open_config(what)
    request = ComparisonSpec.of(
        tree, algorithms, seeds, settings or [], vary or [], question, only or []
    )
    folder = out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    comparison, runs = Comparison.plan(folder, request)
    console = make_console()
    console.print(
        f"{pluralise(len(request.variants), 'method')}, {pluralise(len(request.seeds), 'seed')}, "
        f"{pluralise(len(runs), 'run')}; folder {folder}"
    )
    with ManyRuns(console) as many:
        try:
            failed = run_all(runs, jobs, many.show, many.show_line)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; the same command with --out {folder} continues") from None
    if len(failed) < len(runs):
        _print_comparison(comparison)
    if failed:
        raise BarterError(
            f"{len(failed)} of {pluralise(len(runs), 'run')} failed: {'; '.join(map(str, failed))}"
        )


def _print_comparison(comparison: Comparison) -> None:
    """Write the comparison's files; print its table and what is missing."""
    compared, missing, paths = comparison.write()
    headings, rows = summary_cells(compared)
    table = Table(*map(escape, headings), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(
            *(f"[bold]{escape(text)}[/bold]" if best else escape(text) for text, best in row)
        )
    make_console(wide=True, columns=200, markup=True).print(table)
    if missing:
        more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
        make_console().print(f"not finished: {'; '.join(missing[:8])}{more}")
    if comparison.question.get("baseline") not in (None, compared.question.baseline):
        make_console().print(
            f"no run of the baseline {comparison.question['baseline']!r} is finished: no "
            "differences yet"
        )
    for note in comparison.variant_notes():
        make_console().print(note)
    make_console().print(f"table and curves: {', '.join(map(str, paths))}")


def _print_variant(console: Console, algorithm: Algorithm[Any, Any]) -> None:
    """Print that a run is not the published method, if it is not.

    So it is not reported as the published one by accident.
    """
    variant = describe_variant(algorithm)
    if variant:
        console.print(variant)


def _drive(
    config: Config,
    out: Path,
    *,
    resume: bool,
    simulate: bool,
    tensorboard: bool,
    after_round: Which = "last",
    ignore_stop: bool = False,
) -> None:
    """Run or resume an experiment; print its progress, results and remarks.

    Args:
        config: The configuration.
        out: The run's folder.
        resume: Continue the run in the folder.
        simulate: Use Flower's simulation instead of local sites; only with engine "flower".
        tensorboard: Also write a TensorBoard log.
        after_round: The round after which a resumed run continues; not used with Flower.
        ignore_stop: Continue although the run stopped early; not used with Flower.

    Raises:
        BarterError: The run failed or was interrupted; the message says how to continue.
    """
    console = make_console()
    log_round = import_optional("runs.tensorboard").TensorBoard(out) if tensorboard else None
    watcher = Watcher(console, config.rounds, log_round)
    if config.engine == "flower":
        _drive_flower(config, out, watcher, resume=resume, simulate=simulate)
        return
    try:
        experiment = Experiment.from_config(
            config,
            out,
            resume=resume,
            monitor=watcher,
            after_round=after_round,
            ignore_stop=ignore_stop,
        )
    except KeyboardInterrupt:
        raise Interrupted("interrupted before the first round: nothing was run") from None
    assert experiment.folder is not None
    architectures = len(set(experiment.architectures))
    console.print(experiment.task.summary(config.data.source))
    console.print(
        f"{type(config.algorithm).__name__} on {config.data.source}: "
        f"{pluralise(config.clients, 'client')}, "
        f"{pluralise(architectures, 'architecture')}, {pluralise(config.rounds, 'round')}, "
        f"{', '.join(map(str, experiment.devices))}{_thread_count(experiment.config.threads)}"
        f"{_wire_profile(config)}; folder {out}"
    )
    _print_variant(console, config.algorithm)
    if experiment.round:
        verb = "is" if experiment.round == 1 else "are"
        console.print(
            f"{experiment.round} of {pluralise(config.rounds, 'round')} {verb} done already"
        )
    records = experiment.folder.records()
    watcher.begin(experiment.round)
    try:
        for record in experiment.rounds(config.rounds):
            records.append(record)
            watcher.finish(record)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped in round {experiment.round + 1}; `barter resume {out}` continues"
        ) from None
    except PrivacyError:
        if records:
            _close(records, experiment.architectures, experiment.task, out, config.algorithm)
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; when that is fixed, `barter resume {out}` continues"
        ) from error
    except (BarterError, OSError):
        raise
    except Exception as error:  # An error in the server's part of the method.
        if is_out_of_memory(error):
            raise
        message = f"the server stopped in round {experiment.round + 1}: {summarise_error(error)}"
        if (out / "config.toml").exists():
            message += f"; finished rounds are kept, `barter resume {out}` continues"
        stopped = BarterError(message)
        # The traceback, as for errors of clients: authors of methods need it.
        stopped.add_note("".join(traceback.format_exception(error)))
        raise stopped from error
    if experiment.stopped is not None and experiment.round < config.rounds:
        console.print(str(experiment.stopped))
    _close(records, experiment.architectures, experiment.task, out, config.algorithm)


def _thread_count(threads: int | None) -> str:
    """Return the number of CPU threads as text for the header; empty if None."""
    if threads is None:
        return ""
    available = torch.get_num_threads()
    if threads < available:
        return f", {threads} of {available} threads"
    return f", {pluralise(threads, 'thread')}"


def _wire_profile(config: Config) -> str:
    """Describe how payloads are encoded, for the run's header.

    Empty if they are exact and stay in this process.
    """
    if config.wire.is_exact and config.engine == "local":
        return ""
    return f", wire {describe_wire(config)}"


def _close(
    records: Sequence[Round],
    architectures: Sequence[str],
    task: Task,
    out: Path,
    algorithm: Algorithm[Any, Any],
) -> None:
    """Print the closing table, the method's remarks and the privacy statement."""
    classes = [[c for c, n in enumerate(row) if n] for row in task.class_table().tolist()]
    samples = [len(images) for images in task.train]
    make_console(wide=True).print(closing_table(records, architectures, samples, classes))
    console = make_console()
    for record in records:
        for warning in record.warnings:
            console.print(f"round {record.round}: {warning}", style="yellow")
    for remark in algorithm.remarks(records):
        console.print(f"note: {remark}", style="yellow")
    _end(out)


def _end(out: Path) -> None:
    """Print the privacy statement and the run's folder."""
    if (out / PRIVACY).is_file() and Statement.read(out / PRIVACY).protected:
        print_privacy(out)
    elif (out / PRIVACY).is_file():
        make_console().print(
            f"nothing is protected: `barter privacy {out}` shows what clients released"
        )
    make_console().print(f"run folder: {out}")


def _drive_flower(
    config: Config, out: Path, watcher: Watcher, *, resume: bool, simulate: bool
) -> None:
    """Run on Flower and print the results: sites here, or Flower's simulation."""
    loopback = import_optional("flower.loopback")
    if simulate:
        import_optional("ray")
    if config.threads is None and resolve_devices(config.device)[0].type == "cpu":
        config = replace(config, threads=free_cores())
    task = make_task(
        config.data, config.partition, config.clients, config.seed, torch.device("cpu")
    )
    require_apart(config, task.overlap)  # The sites do so too, when all processes have started.
    names = architecture_names(config.algorithm, config.models, config.clients)
    place = "clients in Flower's simulation" if simulate else "Flower sites on this machine"
    for note in task.notes:
        watcher.console.print(f"{config.data.source}: {note}")
    watcher.console.print(task.summary(config.data.source))
    watcher.console.print(
        f"{type(config.algorithm).__name__} on {config.data.source}: {config.clients} {place}, "
        f"{pluralise(config.rounds, 'round')}"
        f"{_thread_count(config.threads)}{_wire_profile(config)}; folder {out}"
    )
    _print_variant(watcher.console, config.algorithm)
    execute = loopback.simulate if simulate else loopback.run_here
    try:
        records = execute(config, out, watcher, resume=resume)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; `barter resume {out}` continues") from None
    _close(records, names, task, out, config.algorithm)


def init_deployment(
    folder: Path,
    sites: str,
    address: str,
    config: Path | None,
    algorithm: str | None,
    settings: SettingTexts,
) -> None:
    """Run `barter flower init`: write the deployment folder of a new federation.

    If the configuration names a data source, each site gets a share of it. Otherwise each has its
    own data, with a placeholder in its site.toml.

    Args:
        folder: The deployment folder.
        sites: The sites' names, separated by commas; they determine the number of clients.
        address: The coordinator's address, HOST:PORT, as the sites reach it.
        config: The configuration file; None for the defaults.
        algorithm: The value of --algorithm.
        settings: The values of --set.
    """
    tree = requested_values(config, algorithm, settings)
    names = [name.strip() for name in sites.split(",")]
    # Either all sites take their shares of one source, or each has images of its own.
    shared = tree.get("data", {}).get("source", SITES) != SITES
    if not shared:
        tree = with_settings(tree, [f"data.source={SITES}"])
    resolved = resolve({**tree, "clients": len(names), "engine": "flower"})
    setups: list[dict[str, Any]] = []
    for k, name in enumerate(names):
        if shared:
            setups.append({"name": name, "share": k})
        else:
            setups.append({"name": name, "data": "folder:/path/to/images", "model": "small-cnn"})
    import_optional("flower.deploy").create_deployment(folder, resolved, setups, address)
    make_console().print(f"{folder / 'README.md'} describes the next steps")


def start_deployment(folder: Path, host: str, *, insecure: bool) -> None:
    """Run `barter flower start`: coordinate a deployment until its run has ended.

    Args:
        folder: The deployment folder.
        host: The host or address on which to listen for sites.
        insecure: Whether sites connect without TLS and keys.

    Raises:
        Interrupted: The user pressed Ctrl-C; the same command continues.
    """
    config = resolve(read_run_values(folder, "run.toml"))
    watcher = Watcher(make_console(), config.rounds)
    watcher.console.print(
        f"{type(config.algorithm).__name__} at {pluralise(config.clients, 'site')}, "
        f"{pluralise(config.rounds, 'round')}{_wire_profile(config)}"
    )
    try:
        import_optional("flower.loopback").coordinate(folder, host, watcher, insecure=insecure)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; `barter flower start {folder}` continues") from None
    _end(folder / "run")


def start_site(file: Path, worker: Path | None) -> None:
    """Run `barter site` until this process is terminated.

    Args:
        file: The site's site.toml.
        worker: The unix socket at which to serve as the site's worker, the process that holds its
            client; None to supervise worker and node.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    supervise = import_optional("flower.supervise")
    supervise.run_site(file) if worker is None else supervise.run_worker(file, worker)
