"""Commands that describe a method or a configuration, with few imports."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from barter.cli.common import SettingTexts, make_console, requested_values
from barter.core.params import describe_fields
from barter.setup.config import find_algorithm, resolve, to_toml

__all__ = ["print_algorithm", "print_config", "print_fields"]


def print_algorithm(name: str) -> None:
    """Run `barter show algorithm`."""
    kind = find_algorithm(name)
    console = make_console(wide=True)
    console.print(kind.citation())
    console.print("\nWhat crosses the wire:")
    for method, crossing in kind.crosses.items():
        console.print(f"  {method}: {crossing}")
    print_fields(console, kind, "algorithm.")
    for preset, values in kind.presets.items():
        changes = ", ".join(f"{key}={value}" for key, value in values.items()) or "the defaults"
        console.print(f"preset {preset}: {changes}")


def print_config(config: Path | None, algorithm: str | None, settings: SettingTexts) -> None:
    """Run `barter show config`."""
    sys.stdout.write(to_toml(resolve(requested_values(config, algorithm, settings))))


def print_fields(console: Console, kind: type, where: str, chosen: object = None) -> None:
    """Print the fields of a dataclass with their meanings, by heading.

    Args:
        console: Where to print.
        kind: The dataclass.
        where: The prefix of its keys, such as "algorithm.".
        chosen: An instance whose values are printed; None for the defaults.
    """
    fields = describe_fields(kind)
    settings = {}
    for field in fields:
        value = field.default if chosen is None else getattr(chosen, field.name)
        settings[field.name] = f"{where}{field.name} = {'none' if value is None else value}"
    width = max(map(len, settings.values()), default=0)
    console.print()
    for heading, group in groupby(fields, key=lambda field: field.heading):
        if heading:
            console.print(f"{heading}:")
        # All tables have the same widths, so that the groups are aligned.
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, min_width=width)
        table.add_column()
        for field in group:
            table.add_row(settings[field.name], f"{field.meaning} [{field.kind}]")
        console.print(table)
        console.print()
