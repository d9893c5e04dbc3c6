"""Commands that describe a method or a configuration, with few imports."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from barter.cli.common import SettingTexts, make_console, requested_values
from barter.core.answers import largest_fields
from barter.core.params import describe_fields
from barter.core.wire_settings import list_fields
from barter.runs.progress import format_bytes
from barter.setup.config import find_algorithm, resolve, to_toml

__all__ = ["print_algorithm", "print_config", "print_fields", "print_wire"]

# Bytes of a float32 number that is encoded; WebP depends on the images.
BYTES_PER_VALUE = {"half": 2.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5, "uint8": 1.0}


def print_algorithm(name: str) -> None:
    """Run `barter show algorithm`: print the citation, messages, fields and presets."""
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
    """Run `barter show config`: write the full configuration as TOML to stdout.

    Raises:
        ConfigError: The file cannot be read, or a value is malformed, unknown or out of range.
    """
    sys.stdout.write(to_toml(resolve(requested_values(config, algorithm, settings))))


def print_wire(config: Path | None, algorithm: str | None, settings: SettingTexts) -> None:
    """Run `barter show wire`: print each exchanged field's encoding and largest size.

    The run's data and networks are loaded for that. Sizes are those of client 0's answers.

    Raises:
        ConfigError: The file cannot be read, or a value is malformed, unknown or out of range.
    """
    tree = requested_values(config, algorithm, settings)
    resolved = resolve(tree)
    # Here, because it loads torchvision, which the other descriptions do not need.
    from barter.setup.assembly import assemble

    federation = assemble(resolved)
    client = federation.engine.client_ids[0]
    known = federation.engine.knowledge_of(federation.server, client)
    table = Table(box=None, pad_edge=False)
    for heading in ("direction", "field", "holds", "encoding"):
        table.add_column(heading)
    table.add_column("exact", justify="right")
    table.add_column("encoded", justify="right")
    limits: dict[str, int | None] = {}
    for method in resolved.algorithm.crosses:
        limits |= largest_fields(resolved.algorithm, method, known)
    absent = tuple(f"{path}." for path, limit in limits.items() if limit == 0)
    for row in list_fields(resolved.algorithm):
        is_absent = limits.get(row.path) == 0 or row.path.startswith(absent)
        if row.direction == "up" and is_absent:
            continue  # This configuration does not send it.
        encoding = resolved.wire.encoding_of(row.path, row.kind)
        limit = limits.get(row.path) if row.direction == "up" else None
        exact = "" if limit is None else format_bytes(limit)
        encoded = ""
        if limit is not None and encoding == "exact":
            encoded = exact
        elif limit is not None and encoding in BYTES_PER_VALUE and row.kind != "images":
            per_value = min(BYTES_PER_VALUE[encoding], row.itemsize)
            encoded = format_bytes(limit * per_value / row.itemsize)
        table.add_row(row.direction, row.path, row.kind, encoding, exact, encoded)
    console = make_console(wide=True)
    console.print(f"{type(resolved.algorithm).__name__}, profile {resolved.wire}")
    if tree.get("wire", {}).get("profile", "auto") == "auto":
        console.print(
            "It is chosen by the default, auto: lean on Flower (engine=flower) and over a simulated "
            "[network], exact in one process."
        )
    console.print()
    console.print(table)
    console.print(
        f"\nBytes are those of one answer of client {client}, at most, where shapes are known before "
        "the run. Vectors, integers and numbers are always exact. `metrics.jsonl` has the bytes "
        "that were sent."
    )


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
