"""Average the accuracies of those clients alone that have taken part in a federation.

    python -m benchmarks.paper_tables --suite benchmarks/suites/paper-dffke-memory.toml --data DIR \\
        --measure benchmarks.participants:average_participants --out results.jsonl

With few clients per round (`fraction`), some have not been sampled yet and their networks are
untrained; with `collaboration`, some train alone for good. Means over all clients, which are a
run's usual columns, mix them with the others.

The samples are drawn again here, because a record counts every client that answered any call, such
as one that trains alone or only receives prototypes. Sampled clients whose answers failed count.
"""

from __future__ import annotations

import torch

from barter.core import seeds
from barter.core.record import Round
from barter.experiment import Experiment


def average_participants(experiment: Experiment, record: Round) -> dict[str, float]:
    """Return the number of clients sampled so far, and means of their accuracies.

    The means are on the global test and on local tests ("own"); they are left out in rounds
    without evaluation.
    """
    algorithm = experiment.algorithm
    sampled = find_sampled(
        experiment.config.clients,
        float(getattr(algorithm, "collaboration", 1.0)),
        float(getattr(algorithm, "fraction", 1.0)),
        experiment.config.seed,
        record.round,
    )
    columns = {"participants": float(len(sampled))}
    for metric, column in (("global", "participants-global"), ("local", "participants-own")):
        values = record.values(metric, sampled)
        if values:
            columns[column] = sum(values.values()) / len(values)
    return columns


def find_sampled(
    clients: int, collaboration: float, fraction: float, seed: int, rounds: int
) -> set[int]:
    """Return the clients that were sampled in any of the first rounds of a run.

    Args:
        clients: Number of clients.
        collaboration: Share of the clients that take part in the federation, the first ones.
        fraction: Share of these that is sampled in a round.
        seed: The run's seed.
        rounds: The number of rounds.
    """
    group = max(1, round(collaboration * clients))
    size = max(1, round(fraction * group))
    found: set[int] = set()
    for t in range(1, rounds + 1):
        generator = torch.Generator().manual_seed(seeds.stream_seed(seed, t, "sample"))
        found.update(torch.randperm(group, generator=generator)[:size].tolist())
    return found
