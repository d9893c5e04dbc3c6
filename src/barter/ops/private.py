"""DP-SGD: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1 (arXiv:1607.00133).

Each image takes part in a step by the toss of a coin; its gradient is cut to a length, and noise is added to the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from barter.compute import lanes
from barter.compute.trainer import Trainer
from barter.core.errors import ConfigError
from barter.core.images import Images, Sealed, prepared
from barter.core.nodes import Client

__all__ = ["clipped_sum", "fit_privately"]

CHUNK = 64  # images whose gradients are held at a time


def fit_privately(
    client: Client,
    sealed: Sealed,
    trainer: Trainer,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    epochs: int,
    per_epoch: int,
    batch_size: int,
) -> None:
    """Train the client's model for so many epochs of steps; a batch has so many images on average."""
    data, how, model = sealed.opened(), sealed.training, client.model.train()
    mixing = [
        type(part).__name__
        for part in model.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
    ]
    if mixing:
        raise ConfigError(f"privacy.training: {mixing[0]} mixes images; use a network without it")
    rate = min(1.0, batch_size / len(data))
    deviation = how.clip * how.count(rate, epochs * per_epoch)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = [parameter.numel() for parameter in trained.values()]
    for epoch in client.track(range(1, epochs + 1)):
        for _ in range(per_epoch):
            chosen = (how.uniform(len(data)) < rate).nonzero()[:, 0].to(data.device)
            total = clipped_sum(model, trained, loss, data, chosen, how.clip)
            noise = (deviation * how.normal(sum(sizes))).to(data.device, torch.float32)
            for parameter, slope, own in zip(
                trained.values(), total, torch.split(noise, sizes), strict=True
            ):
                told = (slope + own.view_as(parameter)) / (rate * len(data))
                parameter.grad = torch.empty_like(parameter).copy_(
                    told
                )  # in the parameter's own memory format
            trainer.descend()
            lanes.breathe()
        trainer.anneal(epoch / epochs)
        lanes.rest()


def clipped_sum(
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    loss: Callable[[Tensor, Tensor], Tensor],
    data: Images,
    chosen: Tensor,
    clip: float,
) -> list[Tensor]:
    """The sum of these images' gradients, each of length `clip` at most."""
    fixed = {name: value for name, value in model.state_dict().items() if name not in trained}

    def one(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(model, {**fixed, **parameters}, (image[None],)), label[None])

    slopes = vmap(grad(one), in_dims=(None, 0, 0), randomness="different")
    total = [torch.zeros_like(parameter) for parameter in trained.values()]
    values = {name: parameter.detach() for name, parameter in trained.items()}
    for part in torch.split(chosen, CHUNK) if len(chosen) else ():
        images = prepared(data.pixels[part], data.spec, data.augment)
        each = [
            g.flatten(1).nan_to_num(0.0, 0.0, 0.0)
            for g in slopes(values, images, data.labels[part]).values()
        ]
        lengths = torch.stack([g.square().sum(1) for g in each]).sum(0).sqrt()
        scale = clip / lengths.clamp(min=clip)
        for held, g in zip(total, each, strict=True):
            held += (scale @ g).view_as(held)
    return total
