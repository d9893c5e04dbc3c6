"""Generators of images that somebody else trained: where they are, and what they must be able to do."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from barter.core.errors import ConfigError, in_short
from barter.core.images import Spec
from barter.core.params import imported, made

__all__ = ["drawn", "latent_dim", "latents", "pretrained"]

WANTED = (
    "a TorchScript file, or package.module:function that returns a torch module, with its weights or with those of a "
    "safetensors file (weights=FILE). It has a number latent_dim and makes "
    "images (N, channels, height, width) between -1 and 1 of latent vectors (N, latent_dim); "
    "docs/algorithms/generators.md says where to get one"
)
CHUNK = 8  # images at a time: such generators are large


@lru_cache(maxsize=1)
def pretrained(place: str, weights: str, device: torch.device) -> nn.Module:
    """The generator at this place, frozen, with weights of a safetensors file if one is named.

    Loading TorchScript runs what is in it: take it from people you trust. Weights are only numbers.
    """
    if not place:
        raise ConfigError(
            f"generator='': this method needs an image generator that is trained already: {WANTED}"
        )
    if Path(place).is_file():
        try:
            generator: Any = torch.jit.load(place, map_location=device)  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever a damaged file makes go wrong
            raise ConfigError(
                f"generator={place!r} is not TorchScript ({in_short(error)}): {WANTED}"
            ) from error
    elif ":" in place:
        generator = made(f"generator={place!r}", imported(place, "the generator"))
    else:
        raise ConfigError(f"generator={place!r}: there is no such file. A generator is {WANTED}")
    if not isinstance(generator, nn.Module) or not isinstance(
        getattr(generator, "latent_dim", None), int
    ):
        raise ConfigError(
            f"generator={place!r} is a {type(generator).__name__} without latent_dim. It is {WANTED}"
        )
    if weights:
        _load(generator, weights)
    for parameter in generator.parameters():  # a script module has no requires_grad_
        parameter.requires_grad_(False)
    return generator.to(device).eval()


def _load(generator: nn.Module, weights: str) -> None:
    try:
        generator.load_state_dict(load_file(weights))
    except (
        OSError,
        SafetensorError,
        RuntimeError,
    ) as error:  # the last: names or shapes that it does not have
        raise ConfigError(
            f"weights={weights!r} are not those of this generator: {in_short(error)}"
        ) from error


def latent_dim(generator: nn.Module) -> int:
    """The width of a generator's latent vectors."""
    width: Any = generator.latent_dim
    return int(width)


def latents(generator: nn.Module, count: int, device: torch.device) -> Tensor:
    """So many latent vectors as the generator knows them: its own `latents(count)`, else standard normal."""
    own: Any = getattr(generator, "latents", None)
    if own is None:
        return torch.randn(count, latent_dim(generator), device=device)
    drawn = made("the generator's latents", lambda: own(count))
    if not isinstance(drawn, Tensor) or drawn.shape != (count, latent_dim(generator)):
        raise ConfigError(
            f"the generator's latents({count}) are {_kind(drawn)}. A generator is {WANTED}"
        )
    return drawn.to(device)


def _kind(made: object) -> str:
    return str(tuple(made.shape)) if isinstance(made, Tensor) else f"a {type(made).__name__}"


@torch.no_grad()
def drawn(generator: nn.Module, codes: Tensor, spec: Spec) -> Tensor:
    """The images of these latent vectors as bytes, in the size and with the channels of the clients' images."""
    some = [made("the generator", partial(generator, part)) for part in torch.split(codes, CHUNK)]
    wrong = next((part for part in some if not isinstance(part, Tensor) or part.ndim != 4), None)
    images = (
        torch.empty(0)
        if wrong is not None
        else made("the generator", lambda: torch.cat(some).float())
    )
    if wrong is not None or len(images) != len(codes):
        shown = _kind(images if wrong is None else wrong)
        raise ConfigError(
            f"the generator made {shown} of {tuple(codes.shape)}. A generator is {WANTED}"
        )
    if images.shape[1] != spec.channels:
        images = images.mean(1, keepdim=True).expand(-1, spec.channels, -1, -1)
    if images.shape[-2:] != spec.shape[1:]:
        shrunk = images.shape[-2] > spec.height or images.shape[-1] > spec.width
        images = F.interpolate(images, spec.shape[1:], mode="bilinear", antialias=shrunk)
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
