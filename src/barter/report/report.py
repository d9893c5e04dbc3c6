"""Make the report of a run or comparison: one HTML file that works offline."""

from __future__ import annotations

from pathlib import Path

from barter.core.errors import CheckpointError
from barter.report.comparison import ComparisonReport
from barter.report.page import write_page
from barter.report.run import RunReport

__all__ = ["ComparisonReport", "RunReport", "make_report", "write_page"]


def make_report(folder: Path, *, live: bool, images: bool) -> RunReport | ComparisonReport:
    """Return the report of a run or a comparison.

    Args:
        folder: The folder of a run or of a comparison.
        live: Accept a folder without finished rounds or runs.
        images: Show private and synthetic images.

    Raises:
        CheckpointError: The folder is neither, or has nothing to show yet.
    """
    report: RunReport | ComparisonReport
    if (folder / "comparison.toml").is_file():
        report = ComparisonReport(folder)
        unit = "run"
    elif (folder / "config.toml").is_file():
        report = RunReport(folder, images=images)
        unit = "round"
    else:
        raise CheckpointError(
            f"{folder} is neither a run nor a comparison: there is no config.toml or "
            "comparison.toml"
        )
    if report.empty and not live:
        raise CheckpointError(f"{folder} has no finished {unit} yet: --live waits for the first")
    return report
