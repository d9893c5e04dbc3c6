"""Define the command line: commands, options and help.

The commands are run, resume, compare, reproduce, report, privacy, attack, evaluate, export, check, list, show,
flower and site.

Options and help are defined here and do not load torch. `running` and `inspecting` do the work, and
are imported when their command runs.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from barter.cli.options import (
    AlgorithmName,
    Arithmetic,
    ConfigFile,
    Device,
    Listing,
    Patience,
    Place,
    RoundOf,
    RunArgument,
    SettingsOption,
    TensorBoardOption,
    Trust,
    real_number,
    whole_number,
)
from barter.core.errors import (
    BarterError,
    CheckpointError,
    ConfigError,
    Interrupted,
    is_out_of_memory,
)
from barter.setup.catalogue import CHOICES, LISTINGS, known_keys
from barter.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="barter",
    help="Heterogeneous federated learning: clients share knowledge, but neither data nor architectures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
show = typer.Typer(
    help="Show an algorithm, a configuration, a split, or a run's images.", no_args_is_help=True
)
app.add_typer(show, name="show")
flower = typer.Typer(help="Federations across machines, on Flower.", no_args_is_help=True)
app.add_typer(flower, name="flower")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"barter {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _trusting(trust: bool) -> AbstractContextManager[None]:
    """Consent to the code that run folders name, if the command line says so."""
    from barter.setup.trust import trusting

    return trusting(trust)


@app.command()
def run(
    config: ConfigFile = None,
    algorithm: AlgorithmName = None,
    settings: SettingsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default a new one under runs/.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Start from the trained networks of this run."),
    ] = None,
    device: Device = None,
    precision: Annotated[
        Arithmetic | None,
        typer.Option(help="Numerical precision; by default bf16 on CUDA and fp32 on the CPU."),
    ] = None,
    device_memory: Annotated[
        float | None,
        typer.Option(
            parser=real_number,
            metavar="GIB",
            help="Use at most this much of a CUDA device's memory.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(1),
            metavar="N",
            help="Number of CPU threads; by default the number of idle cores.",
        ),
    ] = None,
    engine: Annotated[
        Place | None,
        typer.Option(help="Where clients run: in this process, or each at its own Flower site."),
    ] = None,
    patience: Patience = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="With --engine flower: use Flower's simulation, for many clients."
        ),
    ] = False,
    tensorboard: TensorBoardOption = False,
) -> None:
    """Run a federation and write its metrics and checkpoints to a folder.

    Settings come from CONFIG.toml, from the options below, and otherwise from the defaults.
    """
    from barter.cli import running

    chosen = {
        "start": start and str(start),
        "device": device,
        "engine": engine,
        "precision": precision,
        "device_memory": device_memory,
        "threads": threads,
        "patience": patience,
    }
    values = {key: getattr(value, "value", value) for key, value in chosen.items()}
    running.run_experiment(
        config, algorithm, settings, out, values, simulate=simulate, tensorboard=tensorboard
    )


@app.command()
def resume(
    run: RunArgument,
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(1),
            metavar="N",
            help="Continue until round N; by default as configured.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(1),
            metavar="N",
            help="Number of CPU threads; by default as before. Another number changes last digits.",
        ),
    ] = None,
    patience: Patience = None,
    after_round: Annotated[
        str,
        typer.Option(
            "--round",
            metavar="best|last|N",
            help="Go back to this round and drop later ones; its checkpoint must have been kept.",
        ),
    ] = "last",
    tensorboard: TensorBoardOption = False,
    trust: Trust = False,
) -> None:
    """Resume the run in the folder RUN after its last finished round.

    The result is the same as without the interruption. A run that stopped early continues only with
    --rounds or a larger --patience.
    """
    from barter.cli import running

    with _trusting(trust):
        running.resume_run(run, rounds, threads, patience, after_round, tensorboard=tensorboard)


@app.command()
def compare(
    what: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml | DIR]",
            help="A configuration for all runs, or the folder of a comparison to show.",
        ),
    ] = None,
    algorithms: Annotated[
        str,
        typer.Option(
            help="Methods, optionally with fields: local,dffke,dffke:preset=paper:share=0.3"
        ),
    ] = "",
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, such as 0-4 or 0,3,7-9; by default 0-2.")
    ] = None,
    settings: SettingsOption = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B", help="Run every method with each value: algorithm.tau=0.8,0.9"
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this variant of the file; can be repeated."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The method that others are compared with, seed by seed.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric of curves and differences: primary (default: the server's model or the mean "
            "of clients, depending on the method), global, own, server, trained, trained-own, val, "
            "val-local, own-by-images, worst, worst-own, spread, or any metric of the records."
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            parser=real_number,
            metavar="X",
            help="Count the rounds until the metric reaches this value: an accuracy such as 0.8, or a "
            "loss at most this.",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(parser=whole_number(1), metavar="N", help="Number of runs at the same time."),
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="The comparison's folder; by default a new one under runs/.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Run every method with every seed, and write a table and curves.

    Finished runs are skipped; interrupted runs resume. With DIR, show its results and run nothing.
    """
    from barter.cli import running

    question = {"baseline": baseline, "metric": metric, "target": target}
    with _trusting(trust):
        running.compare_variants(what, algorithms, seeds, settings, vary, only, out, question, jobs)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A recipe; without, list all of them.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, such as 0-2; by default those of the recipe.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(1),
            metavar="N",
            help="Number of rounds; the result is compared after the last common one.",
        ),
    ] = None,
    device: Device = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz", help="The data set; by default NAME.npz in this directory."
        ),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch the data set with torchvision instead.")
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(parser=whole_number(1), metavar="N", help="Number of runs at the same time."),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the runs; by default runs/reproduce-NAME."),
    ] = None,
) -> None:
    """Run a row of a published table; compare it with the paper and with barter's own result.

    Finished runs are skipped; interrupted runs resume.
    """
    if name is None:
        from barter.cli.recipe_list import print_recipes

        options = {"seeds": seeds, "rounds": rounds, "device": device, "data": data}
        print_recipes({**options, "download": download, "out": out})
        return
    from barter.cli import reproducing

    reproducing.reproduce_recipe(name, seeds, rounds, device, data, out, jobs, download=download)


@app.command()
def report(
    what: Annotated[
        Path,
        typer.Argument(metavar="RUN | COMPARISON", help="The folder of a run or of a comparison."),
    ],
    to: Annotated[
        Path | None, typer.Option(help="The page's file; by default report.html in the folder.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Update the page after every round until the last one."),
    ] = False,
    images: Annotated[
        bool,
        typer.Option(
            "--images/--no-images", help="Show private images and those synthesised from them."
        ),
    ] = True,
    trust: Trust = False,
) -> None:
    """Write an HTML report: curves, clients, split, images, traffic and time."""
    from barter.cli import inspecting

    with _trusting(trust):
        inspecting.write_report(what, to, live=live, images=images)


@app.command()
def privacy(
    run: Annotated[Path | None, typer.Argument(metavar="RUN")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            metavar="SITE",
            help="Show what a site released in all of its runs: its folder, or its ledger.jsonl.",
        ),
    ] = None,
) -> None:
    """Show what the clients of RUN released, and the resulting guarantee."""
    from barter.cli import inspecting

    inspecting.print_privacy(run, ledger)


@app.command()
def attack(
    run: RunArgument,
    shadows: Annotated[
        int,
        typer.Option(
            parser=whole_number(0),
            metavar="N",
            help="Number of shadow runs, even. Each repeats RUN on a random half of the images and takes "
            "about as long. 0 skips the attacks that need them.",
        ),
    ] = 4,
    canary: Annotated[
        bool,
        typer.Option(
            "--canary",
            help="Check the stated ε instead: replace one image in many rounds, and bound ε from "
            "below. RUN may be a configuration, too.",
        ),
    ] = False,
    tries: Annotated[
        int,
        typer.Option(
            parser=whole_number(20),
            metavar="N",
            help="Rounds with either image for --canary; N tries prove an ε of log(N / 11) at most.",
        ),
    ] = 1000,
    images: Annotated[
        int,
        typer.Option(
            parser=whole_number(1),
            metavar="N",
            help="Images that each client keeps for --canary; one among few matters most.",
        ),
    ] = 20,
    trust: Trust = False,
) -> None:
    """Attack RUN as a curious server: infer images, membership and classes."""
    from barter.cli import inspecting

    with _trusting(trust):
        inspecting.attack_run(run, shadows, canary=canary, tries=tries, images=images)


@app.command()
def evaluate(
    run: RunArgument,
    data: Annotated[
        str, typer.Option(metavar="SOURCE", help="A data set's name, npz:PATH or folder:PATH.")
    ],
    client: Annotated[
        int | None,
        typer.Option(parser=whole_number(0), metavar="N", help="Only this client's network."),
    ] = None,
    round: RoundOf = "last",
    trust: Trust = False,
) -> None:
    """Measure the accuracy of RUN's networks on other data.

    The test split is used if there is one, otherwise all images.
    """
    from barter.cli import inspecting

    with _trusting(trust):
        inspecting.evaluate_run(run, data, client, round)


@app.command()
def export(
    run: RunArgument,
    to: Annotated[
        Path, typer.Option(metavar="FILE", help="A file name with .safetensors, .onnx or .pt2.")
    ],
    client: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(0),
            metavar="N",
            help="Export this client's network; by default the server's model.",
        ),
    ] = None,
    round: RoundOf = "last",
    trust: Trust = False,
) -> None:
    """Export a network of RUN to a file, with a description of the input it expects."""
    from barter.cli import inspecting

    with _trusting(trust):
        inspecting.export_from_run(run, to, client, round)


@app.command()
def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:CLASS",
            help="A method of your own, or one from `barter list algorithms`.",
        ),
    ],
    settings: SettingsOption = None,
) -> None:
    """Check that a method follows barter's rules, such as for seeds and resuming."""
    from barter.cli import inspecting

    inspecting.check_method(name, settings)


@flower.command("init")
def flower_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    sites: Annotated[str, typer.Option(help="The sites' names, separated by commas.")],
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the sites reach the coordinator.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="The run's configuration; by default the defaults.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="A name from `barter list algorithms`.")
    ] = None,
    settings: SettingsOption = None,
) -> None:
    """Write a deployment folder: configuration, certificates, keys of the sites."""
    from barter.cli import running

    running.init_deployment(folder, sites, address, config, algorithm, settings)


@flower.command("start")
def flower_start(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 means all interfaces.")
    ] = "0.0.0.0",
    insecure: Annotated[
        bool,
        typer.Option(
            help="Use no encryption and no keys, for tests on one machine; sites need it too."
        ),
    ] = False,
) -> None:
    """Coordinate a deployment: start the SuperLink, admit sites, show progress."""
    from barter.cli import running

    running.start_deployment(folder, host, insecure=insecure)


@app.command()
def site(
    file: Annotated[Path, typer.Argument(metavar="SITE.toml")],
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a site of a Flower federation, with the client of SITE.toml."""
    from barter.cli import running

    running.start_site(file, worker)


@app.command("list")
def list_(what: Annotated[Listing | None, typer.Argument(metavar="WHAT")] = None) -> None:
    """List algorithms, models, families, datasets or partitions."""
    if what is None:
        typer.echo("\n".join(f"barter list {choice}" for choice in Listing))
        return
    rows = LISTINGS[what.value]()
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:{width}}  {text}".rstrip())


@show.command("algorithm")
def show_algorithm(
    name: Annotated[str, typer.Argument()],
) -> None:
    """Show an algorithm's citation, messages, and fields with their defaults."""
    from barter.cli import describing

    describing.print_algorithm(name)


@show.command("partition")
def show_partition(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME | CONFIG.toml]",
            help="A name from `barter list partitions`, module:Class, or a configuration.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Take all other settings from this configuration.")
    ] = None,
    settings: SettingsOption = None,
    out: Annotated[Path, typer.Option(help="Where to save the bubble chart.")] = Path(
        "partition.png"
    ),
    title: Annotated[
        str | None, typer.Option(help="The chart's title; `none` for no title.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Also write the split to this new folder, which data.source=clients:PATH reads."
        ),
    ] = None,
) -> None:
    """Show the number of samples by client and class, as a table, a chart and files."""
    from barter.cli import inspecting

    inspecting.print_partition(name, config, settings, out, title, save)


@show.command("config")
def show_config(
    config: ConfigFile = None,
    algorithm: AlgorithmName = None,
    settings: SettingsOption = None,
) -> None:
    """Print the full configuration of a run as TOML for `barter run`."""
    from barter.cli import describing

    describing.print_config(config, algorithm, settings)


@show.command("wire")
def show_wire(
    config: ConfigFile = None,
    algorithm: AlgorithmName = None,
    settings: SettingsOption = None,
) -> None:
    """Show how each field that server and clients exchange is encoded, and its size in bytes."""
    from barter.cli import describing

    describing.print_wire(config, algorithm, settings)


@show.command("images")
def show_images(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="Where to save the sheets; by default RUN/images.")
    ] = None,
    columns: Annotated[
        int,
        typer.Option(
            parser=whole_number(1, 100), metavar="N", help="Number of images of each client."
        ),
    ] = 10,
    trust: Trust = False,
) -> None:
    """Save a sheet for each round of RUN: private and synthetic images.

    No party of a run sees both.
    """
    from barter.cli import inspecting

    with _trusting(trust):
        inspecting.save_sheets(run, out, columns)


# The exit status of a process that SIGINT ended, as shells report it. Newer versions of typer return
# it after Ctrl-C; older ones raise Abort.
INTERRUPTED = 128 + signal.SIGINT
RESEND_DELAY = 0.05  # seconds until an interrupt that Python has discarded is sent again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: The arguments; None for those of this process.

    Returns:
        0 on success, 2 for an error of usage, configuration or checkpoint, 130 after Ctrl-C, 1 for
        other errors of barter, of the disk or of memory. Other exceptions are raised.
    """
    with _recorded_interrupts() as interrupts:
        try:
            return _run_command(arguments)
        except Exception:
            if not interrupts:
                raise
            return _fail("interrupted", INTERRUPTED)


@contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Yield a list to which every SIGINT is added before it raises KeyboardInterrupt.

    Modules may turn the exception into another one while importing. Python discards exceptions in
    callbacks such as those of the garbage collector; an interrupt that is discarded is sent again.
    Nothing is done outside the main thread, or if SIGINT has another handler.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    def handle_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            # In this thread it would be raised at once, and discarded again.
            timer = threading.Timer(RESEND_DELAY, os.kill, (os.getpid(), signal.SIGINT))
            timers.append(timer)
            timer.start()
        else:
            previous_hook(unraisable)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interrupts
        return
    timers: list[threading.Timer] = []
    previous_hook = sys.unraisablehook
    sys.unraisablehook = handle_unraisable
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = previous_hook


def _run_command(arguments: Sequence[str] | None) -> int:
    """Run the command; turn errors into a message and an exit status."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that --algorithm module:Class finds a module in this folder
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may hold bytes that are not valid text.
        sys.stdout.reconfigure(errors="backslashreplace")
    usage_error = _usage_error()
    try:
        status = app(
            args=None if arguments is None else list(arguments),
            prog_name="barter",
            standalone_mode=False,
        )
        if status == INTERRUPTED:
            return _fail("interrupted", INTERRUPTED)
        return status if isinstance(status, int) else 0
    except usage_error as error:
        return _refuse(error)
    except (ConfigError, CheckpointError) as error:
        return _fail(str(error), 2)
    except Interrupted as error:
        return _fail(str(error), INTERRUPTED)
    except BarterError as error:
        return _fail("\n".join([str(error), *getattr(error, "__notes__", [])]), 1)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return 1
    except OSError as error:
        parts = (error.filename, error.strerror or error)
        return _fail(": ".join(str(part) for part in parts if part), 1)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(f"not enough memory: {error}", 1)


# Options that users may expect, and what to write instead.
LIKELY = {
    "model": "--set models=...",
    "dataset": "--set data.source=...",
    "output": "--out ...",
    "gpu": "--device cuda",
    "cuda": "--device cuda",
    "config": "[CONFIG.toml] without an option",
    **{table: f"--set {key}=..." for table, key in CHOICES.items()},
}


def _usage_error() -> type[Exception]:
    """Return the base class of everything that typer raises for a wrong command line.

    Older versions of typer raise exceptions of the installed click, newer ones of their own copy of
    click. The two are unrelated, so the class is found among the ancestors of one that every
    version exports.
    """
    ancestors = typer.BadParameter.__mro__
    return ancestors[ancestors.index(Exception) - 1]


def _refuse(error: Any) -> int:
    """Print what is wrong with the command line; return the exit status.

    Errors are distinguished by the names of their classes: the module depends on typer's version.
    """
    kind = type(error).__name__
    if kind == "NoArgsIsHelpError":
        error.show()
        return 2
    if kind == "NoSuchOption":
        return _fail(_guess(error.option_name, error.ctx) or _no_such_option(error), 2)
    return _fail(_message(error), 2)


def _no_such_option(error: Any) -> str:
    near = " or ".join(repr(option) for option in sorted(error.possibilities or ()))
    return f"No such option '{error.option_name}'." + (f" Did you mean {near}?" if near else "")


def _guess(option: str, context: Any) -> str:
    """Return a message that says what to write instead of an unknown option.

    The message is empty if nothing similar exists, or if the command does not accept it.
    """
    parameters = context.command.params if context else []
    accepted = {
        word for parameter in parameters for word in (*parameter.opts, parameter.metavar) if word
    }
    short = {key: key.rpartition(".")[2] for key in sorted(known_keys())}
    name = option.lstrip("-").replace("-", "_")
    if name not in {*LIKELY, *short, *short.values()}:
        candidates = [*short.values(), *(word.strip("-") for word in accepted)]
        near = difflib.get_close_matches(name, candidates, 1, 0.7)
        name = near[0] if near and f"--{near[0]}" not in accepted else ""
    settings = [f"--set {key}=..." for key in short if name in (key, short[key])]
    advice = LIKELY.get(name) or " or ".join(settings)
    return f"there is no {option}: write {advice}" if advice.partition(" ")[0] in accepted else ""


# Patterns of wordings that differ between versions of typer, and what is printed with any of them.
WORDING = {
    r": Value error, ": ": ",  # from pydantic, which newer versions use
    r" for '\[(.*?)\]':": r" for '\1':",  # an optional argument
    r"argument\(s\)": "argument",
    # not a difference of versions: `barter show algorithms` is meant as `barter list algorithms`
    r"^No such command '(algorithms|models|families|datasets|partitions)'\.": (
        r"No such command '\1'. `barter list \1` lists them."
    ),
}


def _message(error: Any) -> str:
    """Return an error's message in one line, without repeated sentences.

    Both click and typer append a suggestion, so the same one may appear twice.
    """
    message = " ".join(error.format_message().split())
    for pattern, common in WORDING.items():
        message = re.sub(pattern, common, message)
    return " ".join(dict.fromkeys(re.split(r"(?<=[.?]) ", message)))


def _fail(message: str, status: int) -> int:
    """Print an error message; return the exit status."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"barter: {message}")
    return status


if __name__ == "__main__":
    sys.exit(main())
