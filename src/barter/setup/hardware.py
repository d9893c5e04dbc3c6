"""Resolve hardware settings: device, device memory, precision, CPU threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from barter.compute.precision import Precision
from barter.compute.threads import free_cores
from barter.core.errors import ConfigError
from barter.setup.config import Config, read_toml

__all__ = [
    "limit_memory",
    "resolve_device",
    "resolve_devices",
    "resolve_precision",
    "with_threads",
]


def resolve_devices(names: str) -> tuple[torch.device, ...]:
    """Return the devices a configuration asks for; the server computes on the first.

    Args:
        names: The name of a device, see `resolve_device`, or several with commas between them. A
            device may be listed more than once.

    Raises:
        ConfigError: This machine does not have all of them.
    """
    return tuple(resolve_device(name) for name in names.split(","))


def resolve_device(name: str) -> torch.device:
    """Return the device of a name.

    Args:
        name: "cpu"; "cuda:N", the CUDA device of this number; "cuda", the current one; or "auto",
            the current CUDA device if there is one and otherwise the CPU.

    Raises:
        ConfigError: This machine has no such device.
    """
    kind, _, number = name.partition(":")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: this machine has no CUDA device; use auto or cpu")
    if not number:
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if int(number) >= count:
        listed = "1 CUDA device, cuda:0" if count == 1 else f"{count} CUDA devices, from cuda:0 on"
        raise ConfigError(f"device={name!r}: this machine has {listed}")
    return torch.device("cuda", int(number))


def resolve_precision(name: str, *devices: torch.device) -> Precision:
    """Return the precision that a configuration asks for on devices of one kind.

    "auto" is bf16, with fp32 weights, on GPUs that all support it, and fp32 elsewhere.

    Raises:
        ConfigError: The devices do not support this precision.
    """
    device = devices[0]
    if device.type != "cuda":
        if name not in ("auto", "fp32"):
            raise ConfigError(
                f"precision={name!r}: on the {device.type} there is fp32 only; use auto"
            )
        return "fp32"
    for known in get_args(Precision):
        if name == known:
            return known  # type: ignore[no-any-return]
    return "bf16" if all(map(_supports_bf16, devices)) else "fp32"


def _supports_bf16(device: torch.device) -> bool:
    """Return whether a GPU computes in bf16 natively."""
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def limit_memory(device: torch.device, gib: float | None) -> int:
    """Limit the device memory this process may allocate; return the limit in bytes.

    On the CPU nothing is limited, and the result is 0.

    Args:
        device: A device of the run.
        gib: The limit in GiB; None for all of the device's memory.

    Raises:
        ConfigError: The device has less memory than that.
    """
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    limit = total if gib is None else int(gib * 2**30)
    if limit > total:
        raise ConfigError(f"device_memory={gib}: {device} has {total / 2**30:.1f} GiB")
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    return limit


def with_threads(config: Config, out: Path | None, *, resume: bool) -> Config:
    """Return the configuration with its number of CPU threads set.

    It is the configured number, otherwise that in the folder `out` of the run to resume, otherwise
    the number of idle cores. On a GPU, the configuration is returned unchanged. Torch's own setting
    is not changed.

    Raises:
        ConfigError: This machine does not have the configured device, or the folder's configuration
            cannot be read.
    """
    if config.threads is not None or resolve_devices(config.device)[0].type != "cpu":
        return config
    before = None
    if resume and out is not None and (out / "config.toml").is_file():
        before = read_toml(out / "config.toml").get("threads")
    return replace(config, threads=before if isinstance(before, int) else free_cores())
