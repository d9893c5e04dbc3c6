"""Run a recipe; print its result beside the paper's figure and published runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from barter.cli.common import make_console
from barter.cli.recipe_list import format_accuracy
from barter.compare.comparison import run_all
from barter.core.errors import BarterError, Interrupted
from barter.recipes.recipe import find_recipe
from barter.recipes.reproduction import (
    Reproduction,
    changed_settings,
    plan_reproduction,
    store_run,
)
from barter.recipes.stored import StoredRun, common_hardware, write_stored_runs
from barter.runs.progress import ManyRuns, format_duration, pluralise

__all__ = ["reproduce_recipe"]

RESULTS_FILE = "results.jsonl"


def _duration(runs: Sequence[StoredRun], until: int) -> str:
    """Return the mean duration of a run, up to a round."""
    totals = [run.total("seconds", until) for run in runs]
    known = [total for total in totals if total is not None]
    return format_duration(sum(known) / len(known)) if known else "-"


def reproduce_recipe(
    name: str,
    seeds: str | None,
    rounds: int | None,
    device: str | None,
    data: Path | None,
    out: Path | None,
    jobs: int,
    *,
    download: bool,
) -> None:
    """Run `barter reproduce NAME`: run a recipe, store results, print the comparison.

    Finished runs in the folder are not run again. Results go to `RESULTS_FILE` in it.

    Args:
        name: The recipe.
        seeds: Seeds such as 0-2; None for those of the recipe.
        rounds: The number of rounds; None for that of the recipe.
        device: The device; None for that of the recipe.
        data: The file of the data set; None for the default one.
        out: The folder of the runs; None for runs/reproduce-NAME.
        jobs: The number of runs at the same time.
        download: Fetch the data set with torchvision instead.

    Raises:
        BarterError: A run failed; the others are kept, and the same command continues.
        Interrupted: The user pressed Ctrl-C.
    """
    recipe = find_recipe(name)
    data_settings = recipe.data_setting(data, download=download)
    console = make_console()
    console.print(f"{name}: {recipe.title}")
    changed = changed_settings(recipe)
    for key, (before, now) in changed.items():
        console.print(f"the published runs had {key}={before}, today's default is {now}")
    folder = out or Path("runs") / f"reproduce-{name}"
    comparison, planned = plan_reproduction(recipe, folder, seeds, rounds, device, data_settings)
    requested = planned[0].config
    console.print(
        f"{pluralise(len(planned), 'seed')}, {pluralise(requested.rounds, 'round')}, "
        f"{requested.device}; folder {folder}"
    )
    with ManyRuns(console) as many:
        try:
            failed = run_all(planned, jobs, many.show, many.show_line)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; the same command with --out {folder} continues") from None
    if failed:
        raise BarterError(
            f"{len(failed)} of {pluralise(len(planned), 'run')} failed: "
            f"{'; '.join(map(str, failed))}"
        )
    finished, _ = comparison.results()
    runs = [store_run(recipe.row, job.config, finished[name][job.seed]) for job in planned]
    write_stored_runs(folder / RESULTS_FILE, runs)
    if recipe.published:
        _print_result(Reproduction(recipe, runs))
    else:
        console.print("no published run yet: nothing to compare with")
    console.print(f"curves and settings: {folder / RESULTS_FILE}")


def _print_result(result: Reproduction) -> None:
    """Print the paper's, the published and this result side by side, and the verdict."""
    recipe = result.recipe
    paper = recipe.paper
    table = Table("", "paper", "barter, published", "this run", box=box.SIMPLE_HEAD)
    table.add_row(
        f"{recipe.metric}, %",
        "-" if paper is None else str(paper),
        format_accuracy(result.published),
        format_accuracy(result.obtained),
    )
    table.add_row(
        "lowest to highest",
        "-",
        f"{100 * result.published.low:.1f} to {100 * result.published.high:.1f}",
        f"{100 * result.obtained.low:.1f} to {100 * result.obtained.high:.1f}",
    )
    note = "-" if paper is None else "see below" if paper.note else "-"
    table.add_row("after round", note, str(result.last), str(result.last))
    table.add_row(
        "one seed took",
        "-",
        _duration(recipe.published, result.last),
        _duration(result.runs, result.last),
    )
    table.add_row("on", "-", common_hardware(recipe.published), common_hardware(result.runs))
    console = make_console(wide=True)
    console.print(table)
    curves = result.columns()
    shown = Table("round", *curves, box=box.SIMPLE_HEAD)
    for at in sorted({at for curve in curves.values() for at in curve}):
        values = (curve.get(at) for curve in curves.values())
        shown.add_row(str(at), *("" if value is None else f"{100 * value:.1f}" for value in values))
    console.print(shown)
    if paper is not None:
        console.print(f"paper: {paper.source}. {paper.note}".rstrip())
    console.print(f"verdict: {result.verdict}")
