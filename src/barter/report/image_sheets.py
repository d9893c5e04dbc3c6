"""Save sheets of private and synthetic images, for the experimenter only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from barter.core import seeds
from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.images import Spec, channel_statistics
from barter.core.nodes import Client, Server
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.runs.picture import ImageRow, draw_sheet
from barter.setup.trust import read_run

__all__ = ["pictures", "sheets"]


def sheets(run: Path, out: Path, columns: int) -> Iterator[Path]:
    """Save a sheet for every round whose images clients remember; yield files.

    Args:
        run: The run's folder.
        out: The folder for the sheets.
        columns: The largest number of images of each client.

    Yields:
        The file of each sheet, once it is written.

    Raises:
        ConfigError: There are no such images, or the folder cannot be made.
    """
    name = type(read_run(run).algorithm).__name__
    for t, rows in pictures(run, columns):
        private = any(real is not None for _, real, _, _ in rows)
        contents = (
            "private images and those synthesised from them" if private else "synthetic images"
        )
        title = f"{name}, round {t}: {contents}. Experimenter's view only"
        _make(out)
        path = out / f"round-{t:03d}.png"
        draw_sheet(rows, title, path)
        yield path


def pictures(run: Path, columns: int) -> Iterator[tuple[int, list[ImageRow]]]:
    """Yield each round whose synthetic images clients remember, with its rows.

    There is a row for each such client. A row holds private images and those synthesised from them.
    The last round also has rows of images that were synthesised from no single image, such as a
    generator's. The run is restored from its last checkpoint; nothing in its folder changes.

    Args:
        run: The run's folder.
        columns: The largest number of images in a row.

    Raises:
        ConfigError: There are no such images, or the run was on Flower.
        CheckpointError: No finished round is kept, or its checkpoint does not fit.
    """
    config = read_run(run)
    kind = type(config.algorithm)
    no_images = ConfigError(
        f"{run}: {kind.__name__} as configured made no images, or remembers none"
    )
    if (
        kind.gallery is Algorithm.gallery
        and kind.creations is Algorithm.creations
        and config.engine != "flower"
    ):
        raise no_images
    experiment = Experiment.restore(run)
    found = 0
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
        raise no_images


def _make(folder: Path) -> None:
    """Create a folder and its parents unless it exists; raise ConfigError on failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}") from error


def _row(experiment: Experiment, client: Client, t: int, columns: int) -> Iterator[ImageRow]:
    """Yield a client's row for a round, if it remembers the synthetic images."""
    choose = partial(_choose_indices, client.data.labels, columns)
    remembered = experiment.algorithm.gallery(client, t, choose)
    if remembered is not None:
        indices, synthetic = remembered
        private = client.data.batch(indices)
        classes = [experiment.task.classes[c] for c in client.data.labels[indices]]
        spec = experiment.task.spec
        name = f"{client.id} {client.architecture}"
        yield name, _visible(private, spec), _visible(synthetic, spec), classes


def _created(experiment: Experiment, party: Server | Client, columns: int) -> Iterator[ImageRow]:
    """Yield a party's row of images synthesised from no single image, if any."""
    with seeds.scope(experiment.config.seed, "gallery"):
        created = experiment.algorithm.creations(party, lambda labels: _spread(labels, columns))
    if created is not None:
        labels, synthetic = created
        name = f"{party.id} {party.architecture}" if isinstance(party, Client) else "server"
        classes = [experiment.task.classes[c] for c in labels]
        yield name, None, _visible(synthetic, experiment.task.spec), classes


def _choose_indices(labels: Tensor, columns: int, indices: Tensor) -> Tensor:
    """Choose which of these image indices to show; return positions in `indices`."""
    return _spread(labels[indices], columns)


def _spread(labels: Tensor, columns: int) -> Tensor:
    """Choose images to show: one of every class, then a second of each, and so on.

    Returns:
        At most `columns` indices; within a turn by class, of a class the first images.
    """
    counts: dict[int, int] = {}
    ranks = []
    for label in labels.tolist():
        counts[label] = counts.get(label, 0) + 1
        ranks.append((counts[label], label))
    return torch.tensor(sorted(range(len(ranks)), key=ranks.__getitem__)[:columns])


def _visible(images: Tensor, spec: Spec) -> Tensor:
    """Undo the normalisation of images: pixels between 0 and 1, channels last."""
    mean, std = channel_statistics(spec, images.device)
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
