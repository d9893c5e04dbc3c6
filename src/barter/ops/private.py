"""DP-SGD: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.

Algorithm 1 (arXiv:1607.00133): each image is in a batch with a fixed probability (Poisson
sampling); its gradient is clipped to a norm, and Gaussian noise is added to the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from barter.compute import lanes
from barter.compute.trainer import Trainer
from barter.core.errors import ConfigError
from barter.core.images import Images, Sealed, prepare_batch
from barter.core.nodes import Client

__all__ = ["clipped_sum", "fit_privately"]

GRADIENT_CHUNK = 64  # Images whose gradients are in memory at a time.


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
    """Train the client's model by DP-SGD.

    In each step every image is in the batch with probability rate = batch_size / images, at most 1.
    The sum of the clipped gradients, plus normal noise of standard deviation clip * noise
    multiplier, is divided by rate * images, the mean batch size. The whole training is charged to
    the privacy budget before its first step.

    Args:
        client: The client, whose model is trained in place.
        sealed: Its images, with the parameters and the privacy budget of private training.
        trainer: Applies the gradients.
        loss: Called with logits and labels.
        epochs: Number of epochs.
        per_epoch: Steps in an epoch.
        batch_size: Mean number of images in a batch.

    Raises:
        ConfigError: If the network has batch normalisation, which mixes images.
        PrivacyError: If the budget does not allow this training.
    """
    data = sealed.open()
    privacy = sealed.training
    model = client.model.train()
    norms = [
        type(layer).__name__
        for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    if norms:
        raise ConfigError(f"privacy.training: {norms[0]} mixes images; use a network without it")
    rate = min(1.0, batch_size / len(data))
    deviation = privacy.clip * privacy.count(rate, epochs * per_epoch)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = [parameter.numel() for parameter in trained.values()]
    for epoch in client.track(range(1, epochs + 1)):
        for _ in range(per_epoch):
            chosen = (privacy.uniform(len(data)) < rate).nonzero()[:, 0].to(data.device)
            gradients = clipped_sum(model, trained, loss, data, chosen, privacy.clip)
            flat_noise = (deviation * privacy.normal(sum(sizes))).to(data.device)
            noises = torch.split(flat_noise, sizes)
            for parameter, gradient, noise in zip(trained.values(), gradients, noises, strict=True):
                # In double precision, and rounded once: noise that is rounded before it is added
                # takes fewer values, which would reveal the sum's last bits.
                noisy = (gradient.double() + noise.view_as(parameter)) / (rate * len(data))
                # empty_like gives the gradient the memory format of the parameter.
                parameter.grad = torch.empty_like(parameter).copy_(noisy)
            trainer.descend()
            lanes.throttle()
        trainer.anneal(epoch / epochs)
        lanes.wait_for_device()


def clipped_sum(
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    loss: Callable[[Tensor, Tensor], Tensor],
    data: Images,
    chosen: Tensor,
    clip: float,
) -> list[Tensor]:
    """Return the sum of the images' gradients, each clipped to norm `clip`.

    The norm is that of all parameters' gradients together. Images are augmented. Without chosen
    images the sum is zero.

    Args:
        model: The network.
        trained: Its trainable parameters by name.
        loss: Called with logits and labels.
        data: All images.
        chosen: Indices of the images in the batch.
        clip: Largest norm of an image's gradient. Entries that are not finite count as 0.

    Returns:
        One tensor per trainable parameter, in the order of `trained`.
    """
    fixed = {name: value for name, value in model.state_dict().items() if name not in trained}

    def image_loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, {**fixed, **parameters}, (image[None],))
        return loss(logits, label[None])

    image_gradients = vmap(grad(image_loss), in_dims=(None, 0, 0), randomness="different")
    total = [torch.zeros_like(parameter) for parameter in trained.values()]
    values = {name: parameter.detach() for name, parameter in trained.items()}
    for part in torch.split(chosen, GRADIENT_CHUNK) if len(chosen) else ():
        images = prepare_batch(data.pixels[part], data.spec, data.augment)
        gradients = image_gradients(values, images, data.labels[part])
        rows = [g.flatten(1).nan_to_num(0.0, 0.0, 0.0) for g in gradients.values()]
        norms = torch.stack([g.square().sum(1) for g in rows]).sum(0).sqrt()
        scale = clip / norms.clamp(min=clip)
        for partial_sum, g in zip(total, rows, strict=True):
            partial_sum += (scale @ g).view_as(partial_sum)
    return total
