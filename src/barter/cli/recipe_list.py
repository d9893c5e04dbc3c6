"""List the recipes of `barter reproduce` without loading torch."""

from __future__ import annotations

from rich import box
from rich.table import Table

from barter.cli.common import make_console
from barter.core.errors import ConfigError
from barter.recipes.recipe import PublishedRecipe, find_recipe, recipe_names
from barter.recipes.stored import SeedSpread, spread_over_seeds

__all__ = ["format_accuracy", "print_recipes"]


def format_accuracy(spread: SeedSpread) -> str:
    """Return an accuracy over seeds in percent, such as "48.8 ± 0.3 (3 seeds)".

    A single seed has no deviation.
    """
    seeds = len(spread.values)
    return f"{_percent(spread)} ({seeds} {'seed' if seeds == 1 else 'seeds'})"


def _percent(spread: SeedSpread) -> str:
    """Return an accuracy in percent with its deviation over seeds."""
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.1f}"
    return f"{100 * spread.mean:.1f}{deviation}"


def print_recipes(options: dict[str, object]) -> None:
    """Run `barter reproduce` without a name: list the recipes.

    Args:
        options: The other options of the command; none may be given.

    Raises:
        ConfigError: An option is given, which means nothing without a recipe.
    """
    for option, value in options.items():
        if value:
            raise ConfigError(f"--{option} is for a recipe: barter reproduce NAME --{option} ...")
    headings = ("recipe", "paper, %", "barter, %", "seeds", "rounds", "one seed", "device")
    table = Table(*headings, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.columns[0].overflow = "fold"
    for name in recipe_names():
        recipe = find_recipe(name)
        spread = spread_over_seeds(recipe.published, recipe.metric)
        table.add_row(
            name,
            "-" if recipe.paper is None else str(recipe.paper),
            "-" if spread is None else _percent(spread),
            "-" if spread is None else str(len(spread.values)),
            str(recipe.config["rounds"]),
            _minutes(recipe),
            recipe.device,
        )
    console = make_console(wide=True, columns=100)
    console.print(table)
    console.print(
        "barter reproduce NAME runs a recipe, compares it with the figures of the paper and of barter,\n"
        "and names the hardware on which the time of one seed was measured."
    )
    for data in dict.fromkeys(find_recipe(name).data for name in recipe_names()):
        first = next(r for r in map(find_recipe, recipe_names()) if r.data == data)
        console.print(f"{data}: {first.describe_data()}", soft_wrap=True)


def _minutes(recipe: PublishedRecipe) -> str:
    """Return the mean duration of a published run."""
    totals = [run.total("seconds") for run in recipe.published]
    known = [total for total in totals if total is not None]
    return f"{sum(known) / len(known) / 60:.1f} min" if known else "-"
