"""A small generator of images for FedKTL: the decoder of a variational autoencoder, trained on an npz data set.

    python benchmarks/generator.py fashion-public.npz fashion-generator.safetensors
    barter run --algorithm fedktl --set data.source=npz:fashion-10k.npz \\
        --set algorithm.generator=benchmarks.generator:grey28 --set algorithm.weights=fashion-generator.safetensors

Its images should be others than the clients' own. Beside the weights it writes a sheet of what it draws (.png).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

LATENT, WIDTH = 32, 24


class Painter(nn.Module):
    """Latent vectors to images between -1 and 1, whose sides are multiples of four."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.latent_dim, start = LATENT, (2 * WIDTH, height // 4, width // 4)
        self.body = nn.Sequential(
            nn.Linear(LATENT, math.prod(start)),
            nn.Unflatten(1, start),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, channels, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, codes: Tensor) -> Tensor:
        images: Tensor = self.body(codes)
        return images


def grey28() -> Painter:
    """For images of 28 x 28 pixels and one channel."""
    return Painter(1, 28, 28)


def colour32() -> Painter:
    """For images of 32 x 32 pixels and three channels."""
    return Painter(3, 32, 32)


def trained(images: Tensor, epochs: int) -> Painter:
    """A decoder whose codes of these images are spread like standard normal ones."""
    _, channels, height, width = images.shape
    painter = Painter(channels, height, width)
    reader = nn.Sequential(
        nn.Conv2d(channels, WIDTH, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * WIDTH * (height // 4) * (width // 4), 2 * LATENT),
    )
    optimizer = torch.optim.Adam([*painter.parameters(), *reader.parameters()], lr=1e-3)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for index in torch.split(torch.randperm(len(images)), 50):
            x = images[index]
            mean, log_variance = reader(x).chunk(2, 1)
            code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
            away = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
            loss = F.mse_loss(painter(code), x, reduction="sum") / len(x) + away
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(x)
        if epoch % 10 == 0 or epoch == epochs:
            sys.stdout.write(f"epoch {epoch} of {epochs}: loss {total / len(images):.1f}\n")
    return painter.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    with np.load(args.source) as archive:
        images = torch.from_numpy(archive["x_train"]).permute(0, 3, 1, 2).float() / 127.5 - 1
    if images.shape[2] % 4 or images.shape[3] % 4:
        sys.exit(
            f"{args.source}: images of {images.shape[2]} x {images.shape[3]} pixels; sides must be multiples of four"
        )
    painter = trained(images, args.epochs)
    save_file(painter.state_dict(), args.out)
    with torch.no_grad():
        drawn = (painter(torch.randn(60, LATENT)) + 1) / 2
    rows = (
        drawn.permute(0, 2, 3, 1)
        .unflatten(0, (6, 10))
        .permute(0, 2, 1, 3, 4)
        .flatten(0, 1)
        .flatten(1, 2)
    )
    matplotlib.image.imsave(args.out.with_suffix(".png"), rows.expand(-1, -1, 3).numpy())
    sys.stdout.write(f"{args.out}, {args.out.with_suffix('.png')}\n")


if __name__ == "__main__":
    main()
