"""Training steps: eager on the CPU, captured CUDA graphs on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn

from barter.compute import lanes, precision
from barter.compute.batches import Batch, flatten
from barter.compute.graphs import Captured, Graphs

__all__ = ["Anchor", "Optimizer", "Recipe", "Trainer", "adam", "recipe_by_name", "sgd"]

Optimizer: TypeAlias = Literal["sgd", "adam"]

Values: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recipe:
    """An optimizer and its settings; equal recipes compare equal."""

    kind: type[torch.optim.Optimizer]
    settings: tuple[tuple[str, Any], ...]
    clip: float | None = None  # largest norm of the gradient
    cosine: bool = False  # decay the learning rate to zero, see Trainer.anneal

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return a new optimizer of these parameters, with torch's fused implementation.

        `clip` and `cosine` are not part of it; `Trainer` applies them.
        """
        options: dict[str, Any] = {"fused": True, **dict(self.settings)}
        if self.kind is torch.optim.Adam and parameters[0].is_cuda:
            options["capturable"] = True
            if self.cosine:  # A captured graph reads the learning rate from the device.
                options["lr"] = torch.tensor(options["lr"], device=parameters[0].device)
        return self.kind(parameters, **options)


def adam(
    lr: float,
    weight_decay: float = 0.0,
    clip: float | None = None,
    *,
    cosine: bool = False,
    beta1: float = 0.9,
) -> Recipe:
    """Return a recipe of Adam.

    Args:
        lr: Learning rate.
        weight_decay: Weight decay.
        clip: Largest norm of the gradient; None for no limit.
        cosine: Let the learning rate fall to zero by a cosine, see `Trainer.anneal`.
        beta1: β1, the decay of the first moment; β2 is 0.999.
    """
    settings = (("lr", lr), ("weight_decay", weight_decay), ("betas", (beta1, 0.999)))
    return Recipe(torch.optim.Adam, settings, clip, cosine)


def sgd(
    lr: float, momentum: float = 0.0, weight_decay: float = 0.0, clip: float | None = None
) -> Recipe:
    """Return a recipe of stochastic gradient descent.

    Args:
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay.
        clip: Largest norm of the gradient; None for no limit.
    """
    settings = (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay))
    return Recipe(torch.optim.SGD, settings, clip)


def recipe_by_name(
    optimizer: Optimizer,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Recipe:
    """Return the recipe of an optimizer by name; Adam ignores the momentum."""
    if optimizer == "adam":
        return adam(lr, weight_decay, clip)
    return sgd(lr, momentum, weight_decay, clip)


class Anchor(nn.Module):
    """A quadratic penalty that pulls parameters towards given values during training.

    A step adds the gradient of strength / 2 times the squared distance directly, which costs less
    than a term of the loss.

    Args:
        places: Target values, one for each trainable parameter in order.
        strength: Weight of the penalty.
    """

    strength: Tensor

    def __init__(self, places: Iterable[Tensor], strength: float) -> None:
        super().__init__()
        self.places = [
            nn.Parameter(place.detach().clone(), requires_grad=False) for place in places
        ]
        for i, place in enumerate(self.places):
            self.register_parameter(f"place{i}", place)
        self.register_buffer("strength", torch.tensor(strength, device=self.places[0].device))

    @torch.no_grad()
    def pull(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add strength * (parameter - place) to each gradient; None gradients stay None."""
        gradients: list[Tensor] = []
        values: list[Tensor] = []
        targets: list[Tensor] = []
        for parameter, place in zip(parameters, self.places, strict=True):
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                values.append(parameter)
                targets.append(place)
        pull = torch._foreach_sub(values, targets)
        torch._foreach_mul_(pull, self.strength)
        torch._foreach_add_(gradients, pull)


class Trainer(Graphs):
    """Modules and the optimizer of their parameters; `step` is a training step."""

    def __init__(
        self, modules: Sequence[nn.Module], recipe: Recipe, anchor: Anchor | None = None
    ) -> None:
        super().__init__(modules if anchor is None else [*modules, anchor])
        self.anchor = anchor
        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer = recipe.optimizer(self.parameters)
        self.recipe = recipe

    @classmethod
    def of(
        cls, modules: nn.Module | Sequence[nn.Module], recipe: Recipe, anchor: Anchor | None = None
    ) -> Trainer:
        """Return the trainer of these modules with a new optimizer state.

        If the current lane holds all the modules, their trainer and its captured graphs are reused:
        an earlier result of the same call is the same object, and its state is reset too.

        Args:
            modules: The modules to train in place: their parameters that require gradients now.
                Training modes stay.
            recipe: Optimizer and learning rate.
            anchor: Pulls the trainable parameters towards given values.
        """
        chosen = [modules] if isinstance(modules, nn.Module) else list(modules)
        needed = chosen if anchor is None else [*chosen, anchor]
        lane = lanes.current_lane()
        if lane is None or not all(module in lane.modules.values() for module in needed):
            return cls(chosen, recipe, anchor)
        key = (
            *needed,
            recipe,
            *(p.requires_grad for module in chosen for p in module.parameters()),
        )
        trainer: Trainer = lane.trainer(key, lambda: cls(chosen, recipe, anchor))
        trainer.renew()
        return trainer

    def renew(self) -> None:
        """Reset the optimizer's state, and drop graphs whose tensors have moved."""
        tensors = []
        for values in self.optimizer.state.values():
            tensors += [value for value in values.values() if isinstance(value, Tensor)]
        if tensors:
            torch._foreach_zero_(tensors)
        self.anneal(0.0)
        self.steps = {
            key: step
            for key, step in self.steps.items()
            if isinstance(step, Captured) or step.objection
        }
        super().renew()

    def moments(self) -> list[dict[str, Tensor]]:
        """Return a copy of the optimizer's state of each trainable parameter, in order.

        Each is a dict by name, such as exp_avg; it is empty before the first step.
        """
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        return [{name: tensor.clone() for name, tensor in state.items()} for state in states]

    def recall(self, moments: Sequence[dict[str, Tensor]]) -> None:
        """Continue with an optimizer state from `moments`, which is copied.

        An empty sequence changes nothing; otherwise there is one dict per trainable parameter.
        """
        for parameter, saved in zip(self.parameters if moments else (), moments, strict=True):
            state = self.optimizer.state[parameter]
            for name, tensor in saved.items():
                if name in state:  # A captured graph may point to this tensor.
                    state[name].copy_(tensor)
                else:
                    state[name] = tensor.clone()

    def anneal(self, done: float) -> None:
        """Set the learning rate of a cosine schedule; other recipes keep theirs.

        It is lr * (1 + cos(π done)) / 2.

        Args:
            done: Fraction of the training that is complete, from 0 to 1.
        """
        if not self.recipe.cosine:
            return
        rate = dict(self.recipe.settings)["lr"] * 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @overload
    def step(self, loss: Callable[..., Tensor], *batch: Batch) -> Tensor: ...
    @overload
    def step(self, loss: Callable[..., Values], *batch: Batch) -> Values: ...
    def step(self, loss: Callable[..., Any], *batch: Batch) -> Any:
        """Take one optimizer step on a batch and return the loss before it.

        Args:
            loss: Called with the items of the batch. If it returns several values, the first is
                minimised.
            *batch: Arguments of the loss: tensors, None, and tuples or NamedTuples of them.

        Returns:
            What the loss returned, detached: a tensor or a tuple of tensors. A graph overwrites
            them in the next step, so clone what is needed longer.
        """
        return self.take(loss, batch)

    def eager(self, work: Callable[..., Any], batch: Sequence[Batch]) -> Any:
        """Take an optimizer step without a graph; return the loss's detached values."""
        self.tidy()
        with precision.autocast(self._device(batch)):
            values = work(*batch)
        torch.autograd.backward(values[0] if isinstance(values, tuple) else values)
        self.descend()
        return tuple(v.detach() for v in values) if isinstance(values, tuple) else values.detach()

    def tidy(self) -> None:
        """Release the parameters' gradients, which live within a step."""
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    def descend(self) -> None:
        """Take an optimizer step with the parameters' current gradients.

        First the anchor, if any, pulls; then the norm of all gradients together is clipped.
        """
        if self.anchor is not None:
            self.anchor.pull(self.parameters)
        if self.recipe.clip is not None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            # The optimizer's fused kernel divides by the scale, which saves a pass over gradients.
            scale = (norm / self.recipe.clip).clamp(min=1).float()
            self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self.optimizer.step()

    def _device(self, batch: Sequence[Batch]) -> torch.device:
        """Return the device of a step."""
        tensors = flatten(batch)
        return tensors[0].device if tensors else next(self.modules[0].parameters()).device
