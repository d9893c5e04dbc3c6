"""The command line: barter run | resume | compare | report | privacy | attack | evaluate | export | check | list |
show | flower | site.

Options and help are defined here. `running` and `inspecting` do the work and load torch;
help and errors do not wait for it.
"""

from __future__ import annotations

import difflib
import io
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from barter.cli.options import (
    Arithmetic,
    Device,
    Listing,
    Patience,
    Place,
    RoundOf,
    Settings,
    TensorBoard,
    real_number,
    whole_number,
)
from barter.core.errors import BarterError, CheckpointError, ConfigError, lacks_memory
from barter.setup.catalogue import CHOICES, LISTINGS, known_keys
from barter.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="barter",
    help="Heterogeneous federated learning: clients that share neither data nor architecture trade knowledge.",
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


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="A name from `barter list algorithms`, or module:Class.")
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; without one, a new one under runs/.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Start from the networks that another run ended with."
        ),
    ] = None,
    device: Device = None,
    precision: Annotated[
        Arithmetic | None,
        typer.Option(help="How to compute; without it, bf16 on CUDA and fp32 on the CPU."),
    ] = None,
    device_memory: Annotated[
        float | None,
        typer.Option(
            parser=real_number(),
            metavar="GIB",
            help="Stay within so much of a CUDA device's memory.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(1),
            metavar="N",
            help="Of the CPU; without it, as many as cores that nobody else uses.",
        ),
    ] = None,
    engine: Annotated[
        Place | None,
        typer.Option(
            help="Where clients live: in this process, or each in a Flower site of its own."
        ),
    ] = None,
    patience: Patience = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="With --engine flower: in Flower's simulation, for many clients."
        ),
    ] = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Run a federation, as CONFIG.toml says or by the defaults, and keep its metrics and checkpoint in a folder."""
    from barter.cli import running

    where = {"start": start and str(start), "device": device, "engine": engine}
    chosen = {
        **where,
        "precision": precision,
        "device_memory": device_memory,
        "threads": threads,
        "patience": patience,
    }
    values = {key: getattr(value, "value", value) for key, value in chosen.items()}
    running.run(
        config, algorithm, settings, out, values, simulate=simulate, tensorboard=tensorboard
    )


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(1),
            metavar="N",
            help="Until so many are done; without, as configured.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(1),
            metavar="N",
            help="Of the CPU; without, as before. With others last digits differ.",
        ),
    ] = None,
    patience: Patience = None,
    behind: Annotated[
        str,
        typer.Option(
            "--round",
            metavar="best|last|N",
            help="Go back to this round, whose checkpoint is kept, and drop later ones.",
        ),
    ] = "last",
    tensorboard: TensorBoard = False,
) -> None:
    """Continue the run in the folder RUN behind its last finished round, as if it had never been interrupted.

    A run that stopped early continues with --rounds, or with more --patience.
    """
    from barter.cli import running

    running.resume(run, rounds, threads, patience, behind, tensorboard=tensorboard)


@app.command()
def compare(
    what: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml | DIR]",
            help="A configuration for all runs, or a comparison to look at.",
        ),
    ] = None,
    algorithms: Annotated[
        str,
        typer.Option(
            help="Methods, with fields if need be: local,dffke,dffke:preset=paper:share=0.3"
        ),
    ] = "",
    seeds: Annotated[
        str | None, typer.Option(help="Such as 0-4 or 0,3,7-9; 0-2 if nothing is said.")
    ] = None,
    settings: Settings = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Every method with each value: algorithm.tau=0.8,0.9"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of a file's variants this one; may be given again."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The method to compare others with, seed by seed.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Of curves and differences: primary (default: the server's model or the mean of "
            "clients, as the method has it), global, own, server, trained, trained-own, val, "
            "val-local, own-by-images, worst, worst-own, spread, or any metric of the records."
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            parser=real_number(0, 1),
            metavar="X",
            help="Count the rounds until this accuracy, such as 0.8.",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(parser=whole_number(1), metavar="N", help="How many runs at a time.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="The folder; without one, a new one under runs/.")
    ] = None,
) -> None:
    """Compare methods over seeds: run what is not there yet, then a table and curves; of DIR, of what is there."""
    from barter.cli import running

    asked = {"baseline": baseline, "metric": metric, "target": target}
    running.compare(what, algorithms, seeds, settings, vary, only, out, asked, jobs)


@app.command()
def report(
    what: Annotated[
        Path,
        typer.Argument(metavar="RUN | COMPARISON", help="The folder of a run or of a comparison."),
    ],
    to: Annotated[
        Path | None, typer.Option(help="The page; without it, report.html in the folder.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Write the page again after every round, until all are done."),
    ] = False,
    images: Annotated[
        bool,
        typer.Option("--images/--no-images", help="With private images and what was made of them."),
    ] = True,
) -> None:
    """Write one HTML page of all there is to see: curves, clients, split, images, traffic, time, configuration."""
    from barter.cli import inspecting

    inspecting.report(what, to, live=live, images=images)


@app.command()
def privacy(run: Annotated[Path, typer.Argument(metavar="RUN")]) -> None:
    """What left the clients of RUN, how each part was protected, and what that promises to whoever is in an image."""
    from barter.cli import inspecting

    inspecting.privacy(run)


@app.command()
def attack(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    shadows: Annotated[
        int,
        typer.Option(
            parser=whole_number(0),
            metavar="N",
            help="Runs like RUN, on half of the images, to compare its networks with; even.",
        ),
    ] = 4,
) -> None:
    """What a curious server can learn from what clients of RUN tell: images, whose they were, and classes."""
    from barter.cli import inspecting

    inspecting.attack(run, shadows)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    data: Annotated[
        str, typer.Option(metavar="SOURCE", help="A data set's name, npz:PATH or folder:PATH.")
    ],
    client: Annotated[
        int | None,
        typer.Option(parser=whole_number(0), metavar="N", help="Only this client's network."),
    ] = None,
    round: RoundOf = "last",
) -> None:
    """The accuracy of RUN's networks on other data: on its test images or, where it has no such part, on all of it."""
    from barter.cli import inspecting

    inspecting.evaluate(run, data, client, round)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="Ends in .safetensors, .onnx or .pt2.")],
    client: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(0),
            metavar="N",
            help="Whose network; without it, the server's model.",
        ),
    ] = None,
    round: RoundOf = "last",
) -> None:
    """Write a network of RUN into a file that says how images are to be prepared for it."""
    from barter.cli import inspecting

    inspecting.export(run, to, client, round)


@app.command()
def check(
    name: Annotated[
        str,
        typer.Argument(metavar="MODULE:CLASS", help="A method of your own, or one that is listed."),
    ],
    settings: Settings = None,
) -> None:
    """Run a method through what all of them keep to: wire, seeds, resumption, order, documentation."""
    from barter.cli import inspecting

    inspecting.check(name, settings)


@flower.command("init")
def flower_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    sites: Annotated[str, typer.Option(help="The sites' names, with commas between them.")],
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the sites reach the coordinator.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="The run's configuration; without one, the defaults.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="A name from `barter list algorithms`.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Write the folder of a deployment: the run, certificates, and a folder with a key for every site."""
    from barter.cli import running

    running.flower_init(folder, sites, address, config, algorithm, settings)


@flower.command("start")
def flower_start(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 is all of this machine's.")
    ] = "0.0.0.0",
    insecure: Annotated[
        bool,
        typer.Option(
            help="Without encryption and keys, for tests on one machine; sites must say so too."
        ),
    ] = False,
) -> None:
    """Coordinate the run of a deployment folder: start the SuperLink, let the sites in, show the progress."""
    from barter.cli import running

    running.flower_start(folder, host, insecure=insecure)


@app.command()
def site(
    file: Annotated[Path, typer.Argument(metavar="SITE.toml")],
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Be a site of a federation on Flower: hold the client of SITE.toml, and keep its node connected."""
    from barter.cli import running

    running.site(file, worker)


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
    """Citation, what crosses the wire, and fields with defaults and symbols of an algorithm (or of module:Class)."""
    from barter.cli import describing

    describing.show_algorithm(name)


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
        Path | None, typer.Option(help="Take the rest from this configuration.")
    ] = None,
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="Where to save the bubble picture.")] = Path(
        "partition.png"
    ),
    title: Annotated[str | None, typer.Option(help="Of the picture; none for none.")] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="A new folder for the split as files, which data.source=clients:PATH reads."
        ),
    ] = None,
) -> None:
    """Who gets how many samples of which class under a partition, as a table, a picture and files."""
    from barter.cli import inspecting

    inspecting.show_partition(name, config, settings, out, title, save)


@show.command("config")
def show_config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="A name from `barter list algorithms`, or module:Class.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Every value that a run would have, also those nobody set, as a file that `barter run` takes."""
    from barter.cli import describing

    describing.show_config(config, algorithm, settings)


@show.command("images")
def show_images(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option(help="Where to save the sheets; without it, RUN/images.")
    ] = None,
    columns: Annotated[
        int, typer.Option(parser=whole_number(1, 100), metavar="N", help="Images of each client.")
    ] = 10,
) -> None:
    """Save a sheet per round of RUN: private images beside what was made of them. No party of a run sees both."""
    from barter.cli import inspecting

    inspecting.show_images(run, out, columns)


INTERRUPTED = 128 + signal.SIGINT  # the exit status of a process that was interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a mistake in what was asked, in one line; 1 for the rest."""
    with _noticed_interrupts() as noticed:
        try:
            return _answer(arguments)
        except Exception:
            if not noticed:
                raise
            return _fail("interrupted", 1)


@contextmanager
def _noticed_interrupts() -> Iterator[list[int]]:
    """Collect the interrupts that come: a module that is interrupted while it loads may raise anything."""
    noticed: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        noticed.append(number)
        signal.default_int_handler(number, frame)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield noticed
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _answer(arguments: Sequence[str] | None) -> int:
    """Run the command and turn what it raises into a message and an exit status."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that --algorithm module:Class finds a module in this folder
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # names of files may be what no text can hold
    usage_error = _usage_error()
    try:
        status = app(
            args=None if arguments is None else list(arguments),
            prog_name="barter",
            standalone_mode=False,
        )
        if status == INTERRUPTED:  # typer makes this of a Ctrl-C that nobody answered
            return _fail("interrupted", 1)
        return status if isinstance(status, int) else 0
    except usage_error as error:
        return _refuse(error)
    except (ConfigError, CheckpointError) as error:
        return _fail(str(error), 2)
    except BarterError as error:
        return _fail("\n".join([str(error), *getattr(error, "__notes__", [])]), 1)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 1)
    except BrokenPipeError:
        return 1
    except OSError as error:  # what the machine refuses; whoever wrote a file has said which
        return _fail(
            ": ".join(str(part) for part in (error.filename, error.strerror or error) if part), 1
        )
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        return _fail(f"not enough memory: {error}", 1)


LIKELY = {  # options that one would expect, and what there is instead
    **{"model": "--set models=...", "dataset": "--set data.source=...", "output": "--out ..."},
    **{
        "gpu": "--device cuda",
        "cuda": "--device cuda",
        "config": "[CONFIG.toml] alone, without an option",
    },
    **{table: f"--set {key}=..." for table, key in CHOICES.items()},
}


INTERRUPTED = 130  # what newer typers return after Ctrl-C; older ones raise Abort


def _usage_error() -> type[Exception]:
    """Return the class of everything that typer raises for a wrong command line.

    Older typers raise exceptions of the installed click, newer ones of a copy of click that they bring along. The two
    are unrelated, so the class is found among the ancestors of one that every typer exports.
    """
    ancestors = typer.BadParameter.__mro__
    return ancestors[ancestors.index(Exception) - 1]


def _refuse(error: Any) -> int:
    """Print what is wrong with the command line; return the exit status.

    Kinds of errors are known by their names: which module they come from depends on typer's version.
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
    """What to write instead of an option that one would expect, where the command has it; nothing if it has not."""
    given = context.command.params if context else []
    has = {word for parameter in given for word in (*parameter.opts, parameter.metavar) if word}
    short = {key: key.rpartition(".")[2] for key in sorted(known_keys())}
    name = option.lstrip("-").replace("-", "_")
    if name not in {*LIKELY, *short, *short.values()}:
        near = difflib.get_close_matches(
            name, [*short.values(), *(word.strip("-") for word in has)], 1, 0.7
        )
        name = near[0] if near and f"--{near[0]}" not in has else ""
    words = LIKELY.get(name) or " or ".join(
        f"--set {key}=..." for key in short if name in (key, short[key])
    )
    return f"there is no {option}: write {words}" if words.partition(" ")[0] in has else ""


WORDING = {  # what versions of typer word differently, and what is printed with any of them
    r": Value error, ": ": ",  # pydantic, which newer typers ask
    r" for '\[(.*?)\]':": r" for '\1':",  # an argument that may be left out
    r"argument\(s\)": "argument",
}


def _message(error: Any) -> str:
    """Its sentences in one line, each once: click and typer both say what was perhaps meant."""
    words = " ".join(error.format_message().split())
    for pattern, common in WORDING.items():
        words = re.sub(pattern, common, words)
    return " ".join(dict.fromkeys(re.split(r"(?<=[.?]) ", words)))


def _fail(message: str, status: int) -> int:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"barter: {message}")
    return status


if __name__ == "__main__":
    sys.exit(main())
