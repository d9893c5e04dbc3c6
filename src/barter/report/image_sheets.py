"""What the rounds of a finished or running run made of private images, for the experimenter's eyes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.images import Spec, statistics
from barter.core.nodes import Client, Server
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.runs.picture import Row, sheet
from barter.setup.config import read, resolve

__all__ = ["pictures", "sheets"]


def sheets(run: Path, out: Path, columns: int) -> Iterator[Path]:
    """A sheet for every round that the run's clients remember: real images beside what was made of them."""
    name = type(resolve(read(run / "config.toml")).algorithm).__name__
    for t, rows in pictures(run, columns):
        private = any(real is not None for _, real, _, _ in rows)
        what = "private images and what was made of them" if private else "images that were made"
        title = f"{name}, round {t}: {what}. Experimenter's view only"
        _make(out)
        sheet(rows, title, out / f"round-{t:03d}.png")
        yield out / f"round-{t:03d}.png"


def pictures(run: Path, columns: int) -> Iterator[tuple[int, list[Row]]]:
    """Every round that the run's parties remember, with a row for each client: its images and what was made of them.

    The last round also has what parties made of no single image, such as a generator's.
    """
    config = resolve(read(run / "config.toml"))
    kind = type(config.algorithm)
    none = ConfigError(f"{run}: {kind.__name__} as configured made no images, or remembers none")
    if (
        kind.gallery is Algorithm.gallery
        and kind.creations is Algorithm.creations
        and config.engine != "flower"
    ):
        raise none
    experiment, found = Experiment.revisited(run), 0
    engine = experiment.engine
    assert isinstance(engine, LocalEngine)
    for t in range(1, experiment.round + 1):
        rows = [
            row
            for client in engine.clients.values()
            for row in _row(experiment, client, t, columns)
        ]
        if t == experiment.round:
            parties: list[Server | Client] = [experiment.server, *engine.clients.values()]
            rows += [row for party in parties for row in _created(experiment, party, columns)]
        if rows:
            found += 1
            yield t, rows
    if not found:
        raise none


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}") from error


def _row(experiment: Experiment, client: Client, t: int, columns: int) -> Iterator[Row]:
    pictures = experiment.algorithm.gallery(
        client, t, partial(_one_of_each_class, client.data.labels, columns)
    )
    if pictures is not None:
        places, made = pictures
        real, classes = (
            client.data.batch(places),
            [experiment.task.classes[c] for c in client.data.labels[places]],
        )
        spec = experiment.task.spec
        yield (
            f"{client.id} {client.architecture}",
            _visible(real, spec),
            _visible(made, spec),
            classes,
        )


def _created(experiment: Experiment, party: Server | Client, columns: int) -> Iterator[Row]:
    with seeds.scope(experiment.config.seed, "gallery"):
        created = experiment.algorithm.creations(party, lambda labels: _spread(labels, columns))
    if created is not None:
        labels, made = created
        name = f"{party.id} {party.architecture}" if isinstance(party, Client) else "server"
        yield (
            name,
            None,
            _visible(made, experiment.task.spec),
            [experiment.task.classes[c] for c in labels],
        )


def _one_of_each_class(labels: Tensor, columns: int, places: Tensor) -> Tensor:
    """Which of these places to show."""
    return _spread(labels[places], columns)


def _spread(labels: Tensor, columns: int) -> Tensor:
    """Which of these to show: one of every class, then a second of each, and so on."""
    seen, rank = dict[int, int](), []
    for label in labels.tolist():
        seen[label] = seen.get(label, 0) + 1
        rank.append((seen[label], label))
    return torch.tensor(sorted(range(len(rank)), key=rank.__getitem__)[:columns])


def _visible(images: Tensor, spec: Spec) -> Tensor:
    """Normalised images as one looks at them: between 0 and 1, channels last."""
    mean, std = statistics(spec, images.device)
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
