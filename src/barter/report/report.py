"""One page for a run or a comparison: everything in one file, which opens from disk and asks nobody for anything."""

from __future__ import annotations

from pathlib import Path

from barter.core.errors import CheckpointError
from barter.report.comparison import ComparisonReport
from barter.report.page import write
from barter.report.run import RunReport

__all__ = ["ComparisonReport", "RunReport", "report_of", "write"]


def report_of(folder: Path, *, live: bool, images: bool) -> RunReport | ComparisonReport:
    """The report of what is in a folder; nothing but a live one may be empty."""
    report: RunReport | ComparisonReport
    if (folder / "comparison.toml").is_file():
        report, unit = ComparisonReport(folder), "run"
    elif (folder / "config.toml").is_file():
        report, unit = RunReport(folder, images=images), "round"
    else:
        raise CheckpointError(
            f"{folder} is neither a run nor a comparison: there is no config.toml or comparison.toml"
        )
    if report.empty and not live:
        raise CheckpointError(f"{folder} has no finished {unit} yet: --live waits for the first")
    return report
