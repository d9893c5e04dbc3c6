"""One step of training: eager on the CPU, a captured graph on CUDA."""

from __future__ import annotations

import dataclasses
import gc
import math
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn

from barter.compute import lanes, precision
from barter.compute.lanes import Lane

__all__ = ["Anchor", "Recipe", "Trainer", "adam", "sgd"]

Values: TypeAlias = tuple[Tensor, ...]

GRAPHS = 128  # how many kinds of steps a trainer remembers
WARM_UP = 2  # eager steps before a capture: they fill the optimizer's state and choose kernels


@dataclass(frozen=True)
class Recipe:
    """An optimizer and its settings; the same recipe twice is the same value."""

    kind: type[torch.optim.Optimizer]
    settings: tuple[tuple[str, Any], ...]
    clip: float | None = None  # the largest norm a gradient may have
    cosine: bool = False  # whether the learning rate falls to zero as training goes on; see Trainer.anneal

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer of this kind, with one fused kernel for all parameters."""
        options: dict[str, Any] = {"fused": True, **dict(self.settings)}
        if self.kind is torch.optim.Adam and parameters[0].is_cuda:
            options["capturable"] = True
            if self.cosine:  # a graph reads the rate from the device
                options["lr"] = torch.tensor(options["lr"], device=parameters[0].device)
        return self.kind(parameters, **options)


def adam(lr: float, weight_decay: float = 0.0, *, cosine: bool = False, beta1: float = 0.9) -> Recipe:
    """Adam."""
    settings = ("lr", lr), ("weight_decay", weight_decay), ("betas", (beta1, 0.999))
    return Recipe(torch.optim.Adam, settings, cosine=cosine)


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0, clip: float | None = None) -> Recipe:
    """Stochastic gradient descent."""
    return Recipe(torch.optim.SGD, (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)), clip)


class Anchor(nn.Module):
    """Where parameters are drawn to while they are trained, and how strongly.

    A step adds the gradient of strength / 2 times the squared distance, which costs less than a term of the loss.
    """

    strength: Tensor

    def __init__(self, places: Iterable[Tensor], strength: float) -> None:
        super().__init__()
        self.places = [nn.Parameter(place.detach().clone(), requires_grad=False) for place in places]
        for i, place in enumerate(self.places):
            self.register_parameter(f"place{i}", place)
        self.register_buffer("strength", torch.tensor(strength, device=self.places[0].device))

    @torch.no_grad()
    def pull(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add what draws these parameters to their places to the gradients that they have."""
        drawn = [(p.grad, p, place) for p, place in zip(parameters, self.places, strict=True) if p.grad is not None]
        slopes, here, there = ([row[i] for row in drawn] for i in range(3))
        way = torch._foreach_sub(here, there)
        torch._foreach_mul_(way, self.strength)
        torch._foreach_add_(slopes, way)


class Trainer:
    """Modules and the optimizer of their parameters; every step of every method is one call of `step`.

    On CUDA a step is captured once for each loss and shape of batch, and replayed from then on. A loss is known by its
    code and by what it holds (its closure, the arguments of a `partial`): modules, tensors and plain values. Whatever
    else changes from step to step must come in with the batch.
    """

    def __init__(self, modules: Sequence[nn.Module], recipe: Recipe, anchor: Anchor | None = None) -> None:
        self.modules, self.anchor = tuple(modules), anchor
        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer, self.recipe = recipe.optimizer(self.parameters), recipe
        self.parts = [part for module in modules for part in module.modules()]
        self.steps: dict[Hashable, _Captured | _Eager] = {}

    @classmethod
    def of(cls, modules: nn.Module | Sequence[nn.Module], recipe: Recipe, anchor: Anchor | None = None) -> Trainer:
        """The trainer of these modules, its optimizer as new. For modules that a lane keeps, graphs are kept too.

        An anchor has a place for each of the parameters that are trained.
        """
        chosen = [modules] if isinstance(modules, nn.Module) else list(modules)
        needed = chosen if anchor is None else [*chosen, anchor]
        lane = lanes.current()
        if lane is None or not all(module in lane.modules.values() for module in needed):
            return cls(chosen, recipe, anchor)
        key = (*needed, recipe, *(p.requires_grad for module in chosen for p in module.parameters()))
        trainer: Trainer = lane.trainer(key, lambda: cls(chosen, recipe, anchor))
        trainer.renew()
        return trainer

    def renew(self) -> None:
        """Forget what the optimizer has gathered; graphs stay valid where all they point to is where it was."""
        state = [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        if state:
            torch._foreach_zero_(state)
        self.anneal(0.0)
        for key, step in list(self.steps.items()):
            if not (step.still_valid() if isinstance(step, _Captured) else step.objection):
                del self.steps[key]
        while len(self.steps) > GRAPHS:
            del self.steps[next(iter(self.steps))]

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
        lane = lanes.current()
        if lane is None:
            return self._eager(loss, batch)
        lane.breathe()
        key = (_identity(loss), self._modes(loss), *((b.shape, b.dtype) for b in batch), precision.current())
        try:
            step = self.steps.get(key)
        except TypeError as error:  # something in the loss has no hash
            _say_once(loss, str(error))
            return self._eager(loss, batch)
        if step is None:
            step = self.steps[key] = _Eager(_objection(loss))
            if step.objection:
                _say_once(loss, step.objection)
        if isinstance(step, _Eager):
            if step.objection or step.taken < WARM_UP:
                step.taken += 1
                return self._eager(loss, batch)
            self.steps[key] = step = self._capture(lane, loss, batch)
            if isinstance(step, _Eager):
                _say_once(loss, step.objection)
                return self._eager(loss, batch)
        return step.replay(batch)

    def _eager(self, loss: Callable[..., Any], batch: Sequence[Tensor]) -> Any:
        self.optimizer.zero_grad()
        with precision.autocast(self._device(batch)):
            values = loss(*batch)
        torch.autograd.backward(values[0] if isinstance(values, tuple) else values)
        self.descend()
        return tuple(v.detach() for v in values) if isinstance(values, tuple) else values.detach()

    def descend(self) -> None:
        """Go down the gradients that the parameters have."""
        if self.anchor is not None:
            self.anchor.pull(self.parameters)
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        self.optimizer.step()

    def _device(self, batch: Sequence[Tensor]) -> torch.device:
        return batch[0].device if batch else next(self.modules[0].parameters()).device

    def _modes(self, loss: Callable[..., Any]) -> tuple[bool, ...]:
        return tuple([part.training for part in self.parts] + [m.training for m in _modules(_contents(loss))])

    def _capture(self, lane: Lane, loss: Callable[..., Any], batch: Sequence[Tensor]) -> _Captured | _Eager:
        """The step as a graph or, where it cannot be captured, the reason. Nothing is computed here."""
        inputs = [b.clone() for b in batch]
        seed, offset = lane.generator.initial_seed(), lane.generator.get_offset()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        collecting = gc.isenabled()
        gc.disable()  # what a collection frees must not end up in the graph
        try:
            graph.capture_begin(pool=lane.pool, capture_error_mode="thread_local")
            try:
                values = self._eager(loss, inputs)
            finally:
                graph.capture_end()
        except (RuntimeError, TypeError) as error:
            # A capture that failed leaves its generator unusable, and older graphs draw from it.
            for trainer in (self, *lane.trainers.values()):
                trainer.steps = {key: step for key, step in trainer.steps.items() if isinstance(step, _Eager)}
            lane.generator = torch.Generator(lane.device).manual_seed(seed)
            lane.generator.set_offset(offset)
            lane.draw_here()
            return _Eager(str(error).splitlines()[0])
        finally:
            if collecting:
                gc.enable()
            self.optimizer.zero_grad()  # gradients live and die within a graph
            torch.cuda.empty_cache()  # and the eager steps' memory is not needed again
        anchored = [] if self.anchor is None else [self.anchor]
        return _Captured(graph, inputs, values, [*self.modules, *anchored, *_modules(_contents(loss))])


class _Eager:
    """A step that is not captured: not yet, or for a reason."""

    def __init__(self, objection: str = "") -> None:
        self.objection, self.taken = objection, 0


class _Captured:
    """A step that is replayed."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: list[Tensor], values: Any, modules: Sequence[nn.Module]
    ) -> None:
        self.graph, self.inputs, self.values, self.modules = graph, inputs, values, modules
        self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        tensors = [t for module in self.modules for t in (*module.parameters(), *module.buffers())]
        return [torch._C._data_address(t) for t in tensors]  # type: ignore[attr-defined]

    def still_valid(self) -> bool:
        return self.addresses == self._addresses()

    def replay(self, batch: Sequence[Tensor]) -> Any:
        if batch:
            torch._foreach_copy_(self.inputs, list(batch), non_blocking=True)
        self.graph.replay()
        torch.autograd.graph.increment_version(self.values)
        return self.values


def _held(loss: Any) -> tuple[Any, list[Any]]:
    """The code of a loss, and what it holds: arguments of a partial, what a method is bound to, a closure, defaults."""
    match loss:
        case partial():
            return loss.func, [*loss.args, *(item for pair in sorted(loss.keywords.items()) for item in pair)]
        case types.MethodType():
            return loss.__func__, [loss.__self__]
        case types.FunctionType():
            cells = [cell.cell_contents for cell in loss.__closure__ or ()]
            named = [item for pair in sorted((loss.__kwdefaults__ or {}).items()) for item in pair]
            return loss.__code__, [*(loss.__defaults__ or ()), *named, *cells]
    return loss, []


def _is_code(item: Any) -> bool:
    return isinstance(item, partial | types.MethodType | types.FunctionType)


def _identity(loss: Any, depth: int = 4) -> Hashable:
    """What makes two losses the same: their code and what they hold, also through functions that they hold."""
    code, held = _held(loss)
    inner = [code, *held] if isinstance(loss, partial) else held
    parts = tuple(_identity(item, depth - 1) if _is_code(item) and depth else item for item in _flat(inner))
    return parts if isinstance(loss, partial) else (code, *parts)


def _contents(loss: Any, depth: int = 4) -> list[Any]:
    """All that a loss holds, also through functions that it holds."""
    code, held = _held(loss)
    inner = [code, *held] if isinstance(loss, partial) else held
    found: list[Any] = []
    for item in _flat(inner):
        found += _contents(item, depth - 1) if _is_code(item) and depth else [item]
    return found


def _flat(items: Sequence[Any]) -> Iterator[Any]:
    """The items, and those in tuples among them: a tuple cannot change."""
    for item in items:
        yield from _flat(item) if isinstance(item, tuple) else [item]


def _modules(contents: Sequence[Any]) -> list[nn.Module]:
    return [item for item in contents if isinstance(item, nn.Module)]


def _objection(loss: Any) -> str:
    """Why a graph of this loss could grow stale: it holds something that may change behind the graph's back."""
    for item in _contents(loss):
        plain = isinstance(item, nn.Module | Tensor | str | int | float | bool | None | type)
        frozen = dataclasses.is_dataclass(item) and item.__dataclass_params__.frozen  # type: ignore[union-attr]
        if not plain and not frozen and not isinstance(item, types.BuiltinFunctionType):
            return f"it holds a {type(item).__name__}; give it the modules, tensors and values it needs of that"
    return ""


_said: set[str] = set()


def _say_once(loss: Any, reason: str) -> None:
    inner = loss.func if isinstance(loss, partial) else loss
    name = getattr(inner, "__qualname__", type(inner).__name__)
    if name not in _said:
        _said.add(name)
        warnings.warn(f"{name} runs step by step, not as a graph: {reason}", RuntimeWarning, stacklevel=3)
