"""The next rounds of a run in several ways, all from where it stands: what a change brings, without a run of its own.

    python benchmarks/onward.py runs/mine --rounds 2 "algorithm.lr=0.002" "algorithm.share=1 algorithm.memory=9"

First as the run is, then with each of these settings. The run itself stays as it is. Prints a row of a Markdown table
after each round, and writes what clients came to as a line of JSON to --out, if that is given.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from barter.experiment import Experiment
from barter.runs.folder import read_finished_round
from barter.setup.config import read_toml, resolve, with_settings


def onward(run: Path, settings: list[str]) -> Experiment:
    """The experiment of a run with some settings changed, as the run's last round left it."""
    experiment = Experiment.from_config(
        resolve(with_settings(read_toml(run / "config.toml"), settings))
    )
    experiment.round, state = read_finished_round(run)
    experiment.server.recall(state["server"])
    experiment.engine.recall(state["clients"])
    return experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("run", type=Path, help="the folder of a run with a checkpoint")
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="SETTINGS",
        help="key=value, several with spaces between them",
    )
    parser.add_argument("--rounds", type=int, default=1, help="how many more")
    parser.add_argument("--out", type=Path, help="a file for the numbers of each client")
    args = parser.parse_intermixed_args()
    sys.stdout.write("| settings | round | global | own | seconds |\n|---|---|---|---|---|\n")
    for variant in ["", *args.variants]:
        experiment = onward(args.run, variant.split())
        for record in experiment.rounds(experiment.round + args.rounds, progress=False):
            values = " | ".join(f"{100 * record.mean(name):.1f}" for name in ("global", "local"))
            name = f"`{variant}`" if variant else "as it is"
            sys.stdout.write(
                f"| {name} | {record.round} | {values} | {record.seconds['round']:.1f} |\n"
            )
            sys.stdout.flush()
            if args.out is not None:
                with args.out.open("a") as file:
                    clients = {str(k): told for k, told in record.clients.items()}
                    file.write(
                        json.dumps({"settings": variant, "round": record.round, "clients": clients})
                        + "\n"
                    )


if __name__ == "__main__":
    main()
