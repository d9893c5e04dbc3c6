"""What the rounds of a finished or running run made of private images, for the experimenter's eyes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from barter.config import read, resolve
from barter.core.errors import CheckpointError, ConfigError
from barter.core.images import Images, statistics
from barter.core.nodes import Client
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from barter.runs.folder import last_checkpoint
from barter.runs.picture import Row, sheet

__all__ = ["pictures", "sheets"]


def sheets(run: Path, out: Path, columns: int) -> Iterator[Path]:
    """A sheet for every round that the run's clients remember: real images beside what was made of them."""
    name = type(resolve(read(run / "config.toml")).algorithm).__name__
    for t, rows in pictures(run, columns):
        title = f"{name}, round {t}: private images, and below what others see of them. Experimenter's view only"
        _make(out)
        sheet(rows, title, out / f"round-{t:03d}.png")
        yield out / f"round-{t:03d}.png"


def pictures(run: Path, columns: int) -> Iterator[tuple[int, list[Row]]]:
    """Every round that the run's clients remember, with a row for each client: its images and what was made of them."""
    config = dataclasses.replace(resolve(read(run / "config.toml")), device="cpu", precision="auto")
    name = type(config.algorithm).__name__
    if config.engine == "flower":
        raise ConfigError(f"{run} ran on Flower: its clients' images are at their sites, not here")
    last = last_checkpoint(run, torch.device("cpu"))
    if last is None:
        raise CheckpointError(f"{run} has no finished round yet")
    experiment, found = Experiment.from_config(config), 0
    engine = experiment.engine
    assert isinstance(engine, LocalEngine)
    try:
        engine.recall(last[1]["clients"])
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{run} holds the checkpoint of another experiment: {error}") from error
    for t in range(1, last[0] + 1):
        rows = [row for client in engine.clients.values() for row in _row(experiment, client, t, columns)]
        if rows:
            found += 1
            yield t, rows
    if not found:
        raise ConfigError(f"{run}: {name} as configured made no images of private ones, or remembers none")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}") from error


def _row(experiment: Experiment, client: Client, t: int, columns: int) -> Iterator[Row]:
    pictures = experiment.algorithm.gallery(client, t, partial(_one_of_each_class, client.data.labels, columns))
    if pictures is not None:
        places, made = pictures
        real, classes = client.data.batch(places), [experiment.task.classes[c] for c in client.data.labels[places]]
        yield f"{client.id} {client.architecture}", _visible(real, client.data), _visible(made, client.data), classes


def _one_of_each_class(labels: Tensor, columns: int, places: Tensor) -> Tensor:
    """Which of these places to show: one of every class, then a second of each, and so on."""
    seen, rank = dict[int, int](), []
    for label in labels[places].tolist():
        seen[label] = seen.get(label, 0) + 1
        rank.append((seen[label], label))
    return torch.tensor(sorted(range(len(rank)), key=rank.__getitem__)[:columns])


def _visible(images: Tensor, data: Images) -> Tensor:
    """Normalised images as one looks at them: between 0 and 1, channels last."""
    mean, std = statistics(data.spec, images.device)
    return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
