"""Export a trained network to a file, with a description of the input it expects."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from barter.core.errors import ConfigError, install_command, summarise_error
from barter.trained.model import TrainedModel
from barter.version import __version__

__all__ = ["EXPORT_FORMATS", "export_metadata", "export_model"]

INPUT = "images"
OUTPUT = "logits"
FLAT = torch.contiguous_format


def export_model(model: TrainedModel, to: Path) -> None:
    """Export a network to a file of suffix .safetensors, .onnx or .pt2.

    The file has the metadata of `export_metadata`. ONNX weights of more than 2 GB are in further
    files beside it. No part of the file remains if writing fails.

    Raises:
        ConfigError: The file exists, has another suffix, or cannot be written; the network cannot
            be traced (.onnx and .pt2); or ONNX is not installed.
    """
    write = EXPORT_FORMATS.get(to.suffix)
    if write is None:
        raise ConfigError(f"{to}: the file's name must end in {', '.join(EXPORT_FORMATS)}")
    if to.exists():
        raise ConfigError(f"{to} exists: choose another name")
    try:
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as folder, _quiet():
            write(model, Path(folder) / to.name)
            # There may be several files: ONNX stores weights of more than 2 GB separately.
            for file in Path(folder).iterdir():
                file.chmod(0o644)
                file.rename(to.parent / file.name)
    # Each format reports a full or read-only disk with another error.
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{to} cannot be written: {summarise_error(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and log messages of torch's exporters about torch itself."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def export_metadata(model: TrainedModel) -> dict[str, str]:
    """Return the metadata that a file holds with its weights, as text; lists as JSON.

    They describe the network, its input with normalisation, its output, and names of the classes.
    """
    spec = model.spec
    return {
        "made_by": f"barter {__version__}, {model.owner} after round {model.round}",
        "architecture": model.architecture,
        "input": f"{INPUT}: float32 (N, {spec.channels}, {spec.height}, {spec.width}), (pixels - mean) / std "
        "by channel, with pixels in 0..1, resized bilinearly to the size",
        "output": f"{OUTPUT}: float32 (N, {spec.classes}), one for each class",
        "channels": str(spec.channels),
        "size": json.dumps([spec.height, spec.width]),
        "mean": json.dumps(spec.mean),
        "std": json.dumps(spec.std),
        "classes": json.dumps(model.classes),
    }


def _safetensors(model: TrainedModel, to: Path) -> None:
    weights = {
        name: tensor.clone(memory_format=FLAT)
        for name, tensor in model.network.state_dict().items()
    }
    save_file(weights, to, export_metadata(model))


def _onnx(model: TrainedModel, to: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise ConfigError(f"ONNX is not installed here: {install_command('onnx')}")
    named = partial(torch.onnx.export, input_names=[INPUT], output_names=[OUTPUT])
    program = _traced(model, "ONNX", partial(named, dynamo=True, verbose=False))
    program.model.metadata_props.update(export_metadata(model))
    program.save(to)


def _pt2(model: TrainedModel, to: Path) -> None:
    program = _traced(model, "a PT2 program", torch.export.export)
    buffer = io.BytesIO()  # torch's own writer aborts the process if the disk is full.
    torch.export.save(
        program, buffer, extra_files={"barter.json": json.dumps(export_metadata(model))}
    )
    to.write_bytes(buffer.getbuffer())


def _traced(model: TrainedModel, what: str, trace: Callable[..., Any]) -> Any:
    """Trace the network as a graph for any number of images.

    Args:
        model: The network.
        what: The format, for messages.
        trace: A function of torch such as `torch.export.export`.

    Raises:
        ConfigError: The network cannot be traced.
    """
    batch = torch.export.Dim("batch")
    example = torch.zeros(2, *model.spec.shape)
    try:
        return trace(model.network, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:
        lines = str(_root_cause(error)).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigError(
            f"{model.architecture} cannot be written as {what} ({reason}): use .safetensors"
        ) from error


def _root_cause(error: BaseException) -> BaseException:
    """Return the original error, which torch wraps in long advice."""
    return error if error.__cause__ is None else _root_cause(error.__cause__)


EXPORT_FORMATS: dict[str, Callable[[TrainedModel, Path], None]] = {
    ".safetensors": _safetensors,
    ".onnx": _onnx,
    ".pt2": _pt2,
}
