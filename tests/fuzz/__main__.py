"""Run a fuzzer for longer than the tests do.

python -m tests.fuzz answers --count 20000 --seed 0 --jobs 15 --minutes 8
python -m tests.fuzz answers --case fedavg:17
python -m tests.fuzz files --seconds 600 --seed 7
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.fuzz import answers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_answers = commands.add_parser("answers", help="mutated answers of one client")
    of_answers.add_argument("--count", type=int, default=500, help="answers over all algorithms")
    of_answers.add_argument("--seed", type=int, default=0)
    of_answers.add_argument("--jobs", type=int, default=1, help="processes")
    of_answers.add_argument("--minutes", type=float, default=60.0, help="stop after this time")
    of_answers.add_argument("--only", default="", help="algorithms, separated by commas")
    of_answers.add_argument("--known", action="store_true", help="leave out KNOWN_OPEN")
    of_answers.add_argument("--out", type=Path, help="write counts and findings to a JSON file")
    of_answers.add_argument("--case", help="run one case, such as fedavg:17, and describe it")
    of_files = commands.add_parser("files", help="checkpoints, npz, pictures, TOML, messages")
    of_files.add_argument("--seconds", type=float, default=60.0, help="of each fuzzer")
    of_files.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.command == "files":
        return fuzz_files(arguments.seconds, arguments.seed)
    if arguments.case:
        return describe(arguments.case, arguments.seed, arguments.known)
    return fuzz_answers(arguments)


def fuzz_files(seconds: float, seed: int) -> int:
    """Run the fuzzers that are tests."""
    import pytest

    here = str(Path(__file__).parent)
    return pytest.main([here, "--fuzz-seconds", str(seconds), "--fuzz-seed", str(seed)])


def describe(case_name: str, seed: int, known: bool) -> int:
    """Run one case and print all about it."""
    name, _, index = case_name.partition(":")
    without = answers.KNOWN_OPEN if known else ()
    with answers.scratch() as folder:
        subject = answers.Subject(name, folder)
        case = subject.case(seed, int(index), without)
        print(f"{name}, call {case.call} ({case.method}) after {case.begin} rounds")
        print(f"{case.mutation.kind} at {case.mutation.at}")
        print(str(case.mutation.answer)[:2000])
        outcome = subject.run(case)
    print(f"{outcome.verdict}: {outcome.reason}")
    return int(outcome.verdict in answers.FINDINGS)


def fuzz_answers(arguments: argparse.Namespace) -> int:
    """Distribute cases over processes; print the counts of each algorithm."""
    from barter import ALGORITHMS

    names = arguments.only.split(",") if arguments.only else list(ALGORITHMS)
    without = answers.KNOWN_OPEN if arguments.known else frozenset()
    tallies = {name: answers.Tally(name) for name in names}
    start = time.time()
    end = start + 60 * arguments.minutes
    # Few cases per task keep all processes busy to the end; preparing one takes about a second.
    share = -(-arguments.count // len(names))
    size = min(share, 64)
    tasks = list(answers.chunks(names, arguments.count, size))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        waiting = {
            pool.submit(answers.examine, name, arguments.seed, indices, without, end): name
            for name, indices in tasks
        }
        for done, task in enumerate(as_completed(waiting), start=1):
            try:
                tallies[waiting[task]].add(task.result())
            except Exception as error:
                print(f"{waiting[task]}: the fuzzer itself failed: {error!r}", flush=True)
                tallies[waiting[task]].verdicts["fuzzer failed"] += 1
            if sys.stderr.isatty() or not done % 35:
                count = sum(tally.verdicts.total() for tally in tallies.values())
                seconds = time.time() - start
                print(f"{done}/{len(tasks)} tasks, {count} answers, {seconds:.0f} s", flush=True)
    show(list(tallies.values()))
    seconds = time.time() - start
    print(f"{seconds:.0f} s with {arguments.jobs} processes, seed {arguments.seed}")
    if arguments.out:
        command = " ".join(["python -m tests.fuzz", *sys.argv[1:]])
        arguments.out.write_text(answers.to_json(list(tallies.values()), command, seconds))
    bad = (*answers.FINDINGS, "fuzzer failed")
    return int(any(tally.verdicts[verdict] for tally in tallies.values() for verdict in bad))


def show(tallies: list[answers.Tally]) -> None:
    """Print counts by algorithm, and findings by kind."""
    columns = ("answers", "rounds run", *answers.VERDICTS)
    print(f"{'':12}" + "".join(f"{column:>12}" for column in columns))
    total = answers.Tally("all")
    for tally in tallies:
        total.add(tally)
    for tally in [*tallies, total]:
        counts = [tally.verdicts.total(), tally.ran]
        counts += [tally.verdicts[verdict] for verdict in answers.VERDICTS]
        print(f"{tally.name:12}" + "".join(f"{count:12}" for count in counts))
    kinds: Counter[str] = total.kinds
    for kind, count in kinds.most_common():
        print(f"{count:6} {kind}")
    shown: set[tuple[str, str, str]] = set()
    for finding in total.findings:
        name = finding["case"].partition(":")[0]
        key = (name, finding["verdict"], finding["kind"])
        if key not in shown:
            shown.add(key)
            print(
                f"{finding['case']}: {finding['verdict']}, {finding['kind']} at {finding['at']} "
                f"of {finding['method']}: {finding['reason'][:160]}"
            )


if __name__ == "__main__":
    sys.exit(main())
