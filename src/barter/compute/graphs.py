"""What is done again and again with batches of the same shapes: on CUDA captured once, and replayed from then on."""

from __future__ import annotations

import dataclasses
import gc
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from barter.compute import lanes, precision
from barter.compute.lanes import Lane

__all__ = [
    "Captured",
    "Forward",
    "Graphs",
    "contents",
    "identity",
    "modules_of",
    "objection",
    "watched",
]

GRAPHS = 128  # how many kinds of steps are remembered
WARM_UP = 2  # eager steps before a capture: they fill an optimizer's state and choose kernels


class Graphs:
    """Some modules, and what is done with them step by step.

    On CUDA a step is captured once for each kind of work and shape of batch, and replayed from then on. Work is known
    by its code and by what it holds (its closure, the arguments of a `partial`): modules, tensors and plain values.
    Whatever else changes from step to step must come in with the batch.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self.parts = [part for module in modules for part in module.modules()]
        self.steps: dict[Hashable, Captured | Eager] = {}

    def eager(self, work: Callable[..., Any], batch: Sequence[Tensor]) -> Any:
        """A step, here and now."""
        raise NotImplementedError

    def tidy(self) -> None:
        """Before a capture and after it: nothing is left that lives and dies within a step."""

    def renew(self) -> None:
        """Graphs stay where all they point to is where it was."""
        self.steps = {
            k: s for k, s in self.steps.items() if not isinstance(s, Captured) or s.still_valid()
        }
        while len(self.steps) > GRAPHS:
            del self.steps[next(iter(self.steps))]

    def take(self, work: Callable[..., Any], batch: Sequence[Tensor]) -> Any:
        """A step on this batch; what it gives, until the next."""
        lane = lanes.current()
        if lane is None:
            return self.eager(work, batch)
        lane.breathe()
        key = (
            identity(work),
            self._modes(work),
            *((b.shape, b.dtype) for b in batch),
            precision.current(),
        )
        try:
            step = self.steps.get(key)
        except TypeError as error:  # something in the work has no hash
            _say_once(work, str(error))
            return self.eager(work, batch)
        if step is None:
            step = self.steps[key] = Eager(objection(work))
            if step.objection:
                _say_once(work, step.objection)
        if isinstance(step, Eager):
            if step.objection or step.taken < WARM_UP:
                step.taken += 1
                return self.eager(work, batch)
            self.steps[key] = step = self._capture(lane, work, batch)
            if isinstance(step, Eager):
                _say_once(work, step.objection)
                return self.eager(work, batch)
        return step.replay(batch)

    def _modes(self, work: Callable[..., Any]) -> tuple[bool, ...]:
        return tuple(
            [part.training for part in self.parts]
            + [m.training for m in modules_of(contents(work))]
        )

    def _capture(
        self, lane: Lane, work: Callable[..., Any], batch: Sequence[Tensor]
    ) -> Captured | Eager:
        """The step as a graph or, where it cannot be captured, the reason. Nothing is computed here."""
        inputs = [b.clone() for b in batch]
        seed, offset = lane.generator.initial_seed(), lane.generator.get_offset()
        graph = torch.cuda.CUDAGraph()
        self.tidy()
        collecting = gc.isenabled()
        gc.disable()  # what a collection frees must not end up in the graph
        try:
            graph.capture_begin(pool=lane.pool, capture_error_mode="thread_local")
            try:
                values = self.eager(work, inputs)
            finally:
                graph.capture_end()
        except (RuntimeError, TypeError) as error:
            # A capture that failed leaves its generator unusable, and older graphs draw from it.
            for other in (self, *lane.trainers.values(), *lane.forwards.values()):
                other.steps = {
                    key: step for key, step in other.steps.items() if isinstance(step, Eager)
                }
            lane.generator = torch.Generator(lane.device).manual_seed(seed)
            lane.generator.set_offset(offset)
            lane.draw_here()
            return Eager(str(error).splitlines()[0])
        finally:
            if collecting:
                gc.enable()
            self.tidy()
            torch.cuda.empty_cache()  # the eager steps' memory is not needed again
        return Captured(graph, inputs, values, [*self.modules, *modules_of(contents(work))])


class Forward(Graphs):
    """What modules make of batches, without gradients."""

    @classmethod
    def of(cls, work: Callable[..., Tensor]) -> Forward | None:
        """For work that holds nothing but modules that this lane keeps, and plain values.

        None where a graph could give something else: to modules in training or those that normalise by their batch,
        which is filled up, and those that somebody's hooks watch.
        """
        lane = lanes.current()
        if lane is None or objection(work):
            return None
        held = contents(work)
        modules = tuple(dict.fromkeys(modules_of(held)))
        kept = bool(modules) and all(module in lane.modules.values() for module in modules)
        if not kept or any(isinstance(item, Tensor) for item in held):
            return None
        if any(_unfit(part) for module in modules for part in module.modules()):
            return None
        forward: Forward = lane.forward(modules, lambda: cls(modules))
        forward.renew()
        return forward

    @torch.no_grad()
    def eager(self, work: Callable[..., Tensor], batch: Sequence[Tensor]) -> Tensor:
        with precision.autocast(batch[0].device):
            return work(*batch)


def _unfit(part: nn.Module) -> bool:
    """Whether what a layer gives for one image depends on others, or somebody looks at it."""
    by_batch = isinstance(part, _BatchNorm) and part.running_mean is None
    return part.training or by_batch or watched(part)


def watched(*layers: nn.Module) -> bool:
    """Whether somebody's hooks look at what these layers see."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(layer, kind) for layer in layers for kind in kinds)


class Eager:
    """A step that is not captured: not yet, or for a reason."""

    def __init__(self, objection: str = "") -> None:
        self.objection, self.taken = objection, 0


class Captured:
    """A step that is replayed."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[Tensor],
        values: Any,
        modules: Sequence[nn.Module],
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


def _held(work: Any) -> tuple[Any, list[Any]]:
    """The code of work, and what it holds: arguments of a partial, what a method is bound to, a closure, defaults."""
    match work:
        case partial():
            return work.func, [
                *work.args,
                *(item for pair in sorted(work.keywords.items()) for item in pair),
            ]
        case types.MethodType():
            return work.__func__, [work.__self__]
        case types.FunctionType():
            cells = [_filled(cell) for cell in work.__closure__ or ()]
            named = [item for pair in sorted((work.__kwdefaults__ or {}).items()) for item in pair]
            return work.__code__, [*(work.__defaults__ or ()), *named, *cells]
        case nn.Module():
            return type(work), [work]
    return work, []


def _filled(cell: types.CellType) -> Any:
    """What a closure holds in this cell; the cell itself, which is an objection, where that is yet to come."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _is_code(item: Any) -> bool:
    return isinstance(item, partial | types.MethodType | types.FunctionType)


def identity(work: Any, depth: int = 4) -> Hashable:
    """What makes two kinds of work the same: their code and what they hold, also through functions that they hold."""
    code, held = _held(work)
    inner = [code, *held] if isinstance(work, partial) else held
    parts = tuple(
        identity(item, depth - 1) if _is_code(item) and depth else item for item in _flat(inner)
    )
    return parts if isinstance(work, partial) else (code, *parts)


def contents(work: Any, depth: int = 4) -> list[Any]:
    """All that work holds, also through functions that it holds."""
    code, held = _held(work)
    inner = [code, *held] if isinstance(work, partial) else held
    found: list[Any] = []
    for item in _flat(inner):
        found += contents(item, depth - 1) if _is_code(item) and depth else [item]
    return found


def _flat(items: Sequence[Any]) -> Iterator[Any]:
    """The items, and those in tuples among them: a tuple cannot change."""
    for item in items:
        yield from _flat(item) if isinstance(item, tuple) else [item]


def modules_of(contents: Sequence[Any]) -> list[nn.Module]:
    return [item for item in contents if isinstance(item, nn.Module)]


def objection(work: Any) -> str:
    """Why a graph of this work could grow stale: it holds something that may change behind the graph's back."""
    for item in contents(work):
        plain = isinstance(item, nn.Module | Tensor | str | int | float | bool | None | type)
        frozen = dataclasses.is_dataclass(item) and item.__dataclass_params__.frozen  # type: ignore[union-attr]
        if not plain and not frozen and not isinstance(item, types.BuiltinFunctionType):
            return f"it holds a {type(item).__name__}; give it the modules, tensors and values it needs of that"
    return ""


_said: set[str] = set()


def _say_once(work: Any, reason: str) -> None:
    inner = work.func if isinstance(work, partial) else work
    name = getattr(inner, "__qualname__", type(inner).__name__)
    if name not in _said:
        _said.add(name)
        warnings.warn(
            f"{name} runs step by step, not as a graph: {reason}", RuntimeWarning, stacklevel=4
        )
