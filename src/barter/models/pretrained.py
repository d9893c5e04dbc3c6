"""Pretrained image generators: load, sample latent vectors, generate images."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from barter.core.errors import ConfigError, summarise_error
from barter.core.images import Spec
from barter.core.params import call_user_code, import_object

__all__ = ["generate_pixels", "latent_dim", "pretrained_generator", "sample_latents"]

WANTED = (
    "a TorchScript file, or package.module:function that returns a torch module, with its weights "
    "or with those of a safetensors file (weights=FILE). It has a number latent_dim and makes "
    "images (N, channels, height, width) between -1 and 1 of latent vectors (N, latent_dim); "
    "docs/background/fedktl-generator.md says where to get one"
)
GENERATE_CHUNK = 8  # Images generated at a time, because such generators are large.


@lru_cache(maxsize=1)
def pretrained_generator(place: str, weights: str, device: torch.device) -> nn.Module:
    """Load a pretrained generator, frozen and in evaluation mode.

    Loading TorchScript executes code in the file: use only files from people you trust. A
    safetensors file holds nothing but numbers. The last generator is cached: the same arguments
    give the same module.

    Args:
        place: A TorchScript file, or `package.module:function` that returns a torch module.
        weights: A safetensors file to load into it; "" keeps its weights.
        device: Device of the generator.

    Raises:
        ConfigError: If there is no generator at this place, what is there is no module with an int
            `latent_dim`, or the weights do not fit.
    """
    if not place:
        raise ConfigError(
            f"generator='': this method needs an image generator that is trained already: {WANTED}"
        )
    if Path(place).is_file():
        try:
            generator: Any = torch.jit.load(place, map_location=device)  # type: ignore[no-untyped-call]
        except Exception as error:  # A damaged file can raise anything.
            raise ConfigError(
                f"generator={place!r} is not TorchScript ({summarise_error(error)}): {WANTED}"
            ) from error
    elif ":" in place:
        generator = call_user_code(f"generator={place!r}", import_object(place, "the generator"))
    else:
        raise ConfigError(f"generator={place!r}: there is no such file. A generator is {WANTED}")
    has_width = isinstance(getattr(generator, "latent_dim", None), int)
    if not isinstance(generator, nn.Module) or not has_width:
        raise ConfigError(
            f"generator={place!r} is a {type(generator).__name__} without latent_dim. It is {WANTED}"
        )
    if weights:
        _load(generator, weights)
    for parameter in generator.parameters():  # A script module has no requires_grad_.
        parameter.requires_grad_(False)
    return generator.to(device).eval()


def _load(generator: nn.Module, weights: str) -> None:
    """Load the weights of a safetensors file into a generator.

    Raises:
        ConfigError: If the file cannot be read, or names or shapes do not fit.
    """
    try:
        generator.load_state_dict(load_file(weights))
    # torch raises RuntimeError if names or shapes do not fit.
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(
            f"weights={weights!r} are not those of this generator: {summarise_error(error)}"
        ) from error


def latent_dim(generator: nn.Module) -> int:
    """Return the width of a generator's latent vectors."""
    width: Any = generator.latent_dim
    return int(width)


def sample_latents(generator: nn.Module, count: int, device: torch.device) -> Tensor:
    """Sample latent vectors (count, latent_dim) for a generator.

    They come from the generator's own `latents(count)` if it has this method, and are standard
    normal otherwise.

    Raises:
        ConfigError: If the generator's own latent vectors have the wrong shape.
    """
    own: Any = getattr(generator, "latents", None)
    if own is None:
        return torch.randn(count, latent_dim(generator), device=device)
    vectors = call_user_code("the generator's latents", lambda: own(count))
    if not isinstance(vectors, Tensor) or vectors.shape != (count, latent_dim(generator)):
        raise ConfigError(
            f"the generator's latents({count}) are {_kind(vectors)}. A generator is {WANTED}"
        )
    return vectors.to(device)


def _kind(value: object) -> str:
    """Describe a value for a message: the shape of a tensor, else its type."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _not_images(result: object, codes: Tensor) -> ConfigError:
    """Return the error for a generator that did not return images of the codes."""
    return ConfigError(
        f"the generator made {_kind(result)} of {tuple(codes.shape)}. A generator is {WANTED}"
    )


@torch.no_grad()
def generate_pixels(generator: nn.Module, codes: Tensor, spec: Spec) -> Tensor:
    """Generate images as bytes, in the format of the clients' images.

    The result is (N, channels, height, width). The generator's pixels are clamped to -1..1 and
    scaled to 0..255. Another number of channels is replaced by their mean, another size is resized.

    Args:
        generator: The generator.
        codes: Latent vectors (N, latent_dim).
        spec: Size and channels of the images.

    Raises:
        ConfigError: If the generator does not return N images.
    """
    chunks = [
        call_user_code("the generator", partial(generator, part))
        for part in torch.split(codes, GENERATE_CHUNK)
    ]
    for chunk in chunks:
        if not isinstance(chunk, Tensor) or chunk.ndim != 4:
            raise _not_images(chunk, codes)
    images = call_user_code("the generator", lambda: torch.cat(chunks).float())
    if len(images) != len(codes):
        raise _not_images(images, codes)
    if images.shape[1] != spec.channels:
        images = images.mean(1, keepdim=True).expand(-1, spec.channels, -1, -1)
    if images.shape[-2:] != spec.shape[1:]:
        shrunk = images.shape[-2] > spec.height or images.shape[-1] > spec.width
        images = F.interpolate(images, spec.shape[1:], mode="bilinear", antialias=shrunk)
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
