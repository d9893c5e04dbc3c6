"""One step of training: eager on the CPU, a captured graph on CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn

from barter.compute import lanes, precision
from barter.compute.graphs import Captured, Graphs

__all__ = ["Anchor", "Optimizer", "Recipe", "Trainer", "adam", "by_name", "sgd"]

Optimizer: TypeAlias = Literal["sgd", "adam"]

Values: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recipe:
    """An optimizer and its settings; the same recipe twice is the same value."""

    kind: type[torch.optim.Optimizer]
    settings: tuple[tuple[str, Any], ...]
    clip: float | None = None  # the largest norm a gradient may have
    # whether the learning rate falls to zero as training goes on; see Trainer.anneal
    cosine: bool = False

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer of this kind, with one fused kernel for all parameters."""
        options: dict[str, Any] = {"fused": True, **dict(self.settings)}
        if self.kind is torch.optim.Adam and parameters[0].is_cuda:
            options["capturable"] = True
            if self.cosine:  # a graph reads the rate from the device
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
    """Adam."""
    settings = ("lr", lr), ("weight_decay", weight_decay), ("betas", (beta1, 0.999))
    return Recipe(torch.optim.Adam, settings, clip, cosine)


def sgd(
    lr: float, momentum: float = 0.0, weight_decay: float = 0.0, clip: float | None = None
) -> Recipe:
    """Stochastic gradient descent."""
    return Recipe(
        torch.optim.SGD, (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)), clip
    )


def by_name(
    optimizer: Optimizer,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Recipe:
    """The recipe of an optimizer that a field names; Adam has momenta of its own."""
    return (
        adam(lr, weight_decay, clip)
        if optimizer == "adam"
        else sgd(lr, momentum, weight_decay, clip)
    )


class Anchor(nn.Module):
    """Where parameters are drawn to while they are trained, and how strongly.

    A step adds the gradient of strength / 2 times the squared distance, which costs less than a term of the loss.
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
        """Add what draws these parameters to their places to the gradients that they have."""
        drawn = [
            (p.grad, p, place)
            for p, place in zip(parameters, self.places, strict=True)
            if p.grad is not None
        ]
        slopes, here, there = ([row[i] for row in drawn] for i in range(3))
        way = torch._foreach_sub(here, there)
        torch._foreach_mul_(way, self.strength)
        torch._foreach_add_(slopes, way)


class Trainer(Graphs):
    """Modules and the optimizer of their parameters; every step of every method is one call of `step`."""

    def __init__(
        self, modules: Sequence[nn.Module], recipe: Recipe, anchor: Anchor | None = None
    ) -> None:
        super().__init__(modules if anchor is None else [*modules, anchor])
        self.anchor = anchor
        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer, self.recipe = recipe.optimizer(self.parameters), recipe

    @classmethod
    def of(
        cls, modules: nn.Module | Sequence[nn.Module], recipe: Recipe, anchor: Anchor | None = None
    ) -> Trainer:
        """The trainer of these modules, its optimizer as new. For modules that a lane keeps, graphs are kept too.

        An anchor has a place for each of the parameters that are trained.
        """
        chosen = [modules] if isinstance(modules, nn.Module) else list(modules)
        needed = chosen if anchor is None else [*chosen, anchor]
        lane = lanes.current()
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
        """Forget what the optimizer has gathered; graphs stay valid where all they point to is where it was."""
        state = [
            t
            for values in self.optimizer.state.values()
            for t in values.values()
            if isinstance(t, Tensor)
        ]
        if state:
            torch._foreach_zero_(state)
        self.anneal(0.0)
        self.steps = {
            key: step
            for key, step in self.steps.items()
            if isinstance(step, Captured) or step.objection
        }
        super().renew()

    def moments(self) -> list[dict[str, Tensor]]:
        """What the optimizer has gathered for each parameter, to be remembered."""
        gathered = (self.optimizer.state[parameter] for parameter in self.parameters)
        return [{name: tensor.clone() for name, tensor in state.items()} for state in gathered]

    def recall(self, moments: Sequence[dict[str, Tensor]]) -> None:
        """Go on with what an optimizer of this kind has gathered; with nothing, from the start."""
        for parameter, gathered in zip(self.parameters if moments else (), moments, strict=True):
            state = self.optimizer.state[parameter]
            for name, tensor in gathered.items():
                if name in state:  # a graph may know its place
                    state[name].copy_(tensor)
                else:
                    state[name] = tensor.clone()

    def anneal(self, done: float) -> None:
        """Set the learning rate for the part of the training that is done, from 0 to 1, if the recipe is to fall."""
        if not self.recipe.cosine:
            return
        rate = dict(self.recipe.settings)["lr"] * 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @overload
    def step(self, loss: Callable[..., Tensor], *batch: Tensor) -> Tensor: ...
    @overload
    def step(self, loss: Callable[..., Values], *batch: Tensor) -> Values: ...
    def step(self, loss: Callable[..., Any], *batch: Tensor) -> Any:
        """One step down the gradient of the loss on this batch; what the loss gave before it, until the next step.

        A loss that gives several values is trained on the first.
        """
        return self.take(loss, batch)

    def eager(self, work: Callable[..., Any], batch: Sequence[Tensor]) -> Any:
        self.tidy()
        with precision.autocast(self._device(batch)):
            values = work(*batch)
        torch.autograd.backward(values[0] if isinstance(values, tuple) else values)
        self.descend()
        return tuple(v.detach() for v in values) if isinstance(values, tuple) else values.detach()

    def tidy(self) -> None:
        for parameter in self.parameters:  # gradients live and die within a graph
            parameter.grad = None
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    def descend(self) -> None:
        """Go down the gradients that the parameters have."""
        if self.anchor is not None:
            self.anchor.pull(self.parameters)
        if self.recipe.clip is not None:
            slopes = [p.grad for p in self.parameters if p.grad is not None]
            length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(slopes)))
            # The optimizer's kernel divides by it as it goes, which spares a pass over all gradients.
            scale = (length / self.recipe.clip).clamp(min=1).float()
            self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self.optimizer.step()

    def _device(self, batch: Sequence[Tensor]) -> torch.device:
        return batch[0].device if batch else next(self.modules[0].parameters()).device
