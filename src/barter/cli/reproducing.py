"""The command that runs recipes and compares them with papers and with published runs."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from barter.cli.common import make_console
from barter.core.errors import BarterError, ConfigError, Interrupted
from barter.recipes.recipe import PublishedRecipe, find_recipe, recipe_names
from barter.recipes.stored import SeedSpread, StoredRun, common_hardware, write_stored_runs
from barter.runs.progress import ManyRuns, format_duration, pluralise

__all__ = ["print_recipes", "reproduce_recipe"]

RESULTS = "results.jsonl"


def print_recipes() -> None:
    """Run `barter reproduce` without a name: list the recipes."""
    table = Table("recipe", "data", "device", "one seed", "paper", "barter", box=box.SIMPLE_HEAD)
    for name in recipe_names():
        recipe = find_recipe(name)
        table.add_row(
            name,
            recipe.data,
            recipe.device,
            _duration(recipe.published, None),
            "-" if recipe.paper is None else str(recipe.paper),
            _published(recipe),
        )
    console = make_console(wide=True)
    console.print(table)
    console.print(
        "barter reproduce NAME runs a recipe and compares. Accuracies in %; barter: after the last "
        "published round, with the number of seeds."
    )


def _published(recipe: PublishedRecipe) -> str:
    last = [run.value(recipe.metric) for run in recipe.published]
    known = tuple(value for value in last if value is not None)
    if not known:
        return "-"
    rounds = max(run.rounds[-1] for run in recipe.published)
    return f"{_accuracy(SeedSpread(known))}, {pluralise(rounds, 'round')}"


def _accuracy(spread: SeedSpread) -> str:
    """Return mean, standard deviation and number of seeds as text."""
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.1f}"
    return f"{100 * spread.mean:.1f}{deviation} ({pluralise(len(spread.values), 'seed')})"


def _duration(runs: tuple[StoredRun, ...] | list[StoredRun], until: int | None) -> str:
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
    """Run `barter reproduce NAME`.

    Raises:
        BarterError: A run failed; the others are kept, and the same command continues.
    """
    recipe = find_recipe(name)
    data_settings = recipe.data_setting(data, download=download)
    from barter.compare.comparison import run_all
    from barter.recipes import reproduction

    console = make_console()
    console.print(f"{name}: {recipe.title}")
    changed = reproduction.changed_settings(recipe)
    for key, (before, now) in changed.items():
        console.print(f"the published runs had {key}={before}, today's default is {now}")
    folder = out or Path("runs") / f"reproduce-{name}"
    comparison, planned = reproduction.plan_reproduction(
        recipe, folder, seeds, rounds, device, data_settings
    )
    requested = planned[0].config
    console.print(
        f"{pluralise(len(planned), 'seed')}, {pluralise(requested.rounds, 'round')}, "
        f"{requested.device}; folder {folder}"
    )
    with ManyRuns(console) as many:
        try:
            failed = run_all(planned, jobs, many.show, many.tell)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; the same command with --out {folder} continues") from None
    if failed:
        raise BarterError(
            f"{len(failed)} of {pluralise(len(planned), 'run')} failed: "
            f"{'; '.join(map(str, failed))}"
        )
    finished, _ = comparison.results()
    runs = [reproduction.store_run(name, job.config, finished[name][job.seed]) for job in planned]
    write_stored_runs(folder / RESULTS, runs)
    if recipe.published:
        _print_result(reproduction.Reproduction(recipe, runs))
    else:
        console.print("no published run yet: nothing to compare with")
    console.print(f"curves and settings: {folder / RESULTS}")


def _print_result(result: object) -> None:
    """Print the paper's figure, the published result and this run side by side, and the verdict."""
    from barter.recipes.reproduction import Reproduction

    assert isinstance(result, Reproduction)
    recipe = result.recipe
    paper = recipe.paper
    runs = list(result.runs)
    table = Table("", "paper", "barter, published", "this run", box=box.SIMPLE_HEAD)
    table.add_row(
        f"{recipe.metric}, %",
        "-" if paper is None else str(paper),
        _accuracy(result.published),
        _accuracy(result.obtained),
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
        _duration(runs, result.last),
    )
    table.add_row("on", "-", common_hardware(recipe.published), common_hardware(runs))
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


def require_name(name: str | None, options: dict[str, object]) -> None:
    """Raise if options are given without the name of a recipe."""
    given = [f"--{option}" for option, value in options.items() if value]
    if name is None and given:
        raise ConfigError(f"{given[0]} is for a recipe: barter reproduce NAME {given[0]} ...")
