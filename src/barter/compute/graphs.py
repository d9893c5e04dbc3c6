"""CUDA graphs of repeated work: captured once per shape of batch, then replayed."""

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
from barter.compute.batches import Batch, flatten, refill, shape_key
from barter.compute.flops import add_flops, set_aside
from barter.compute.lanes import Lane

__all__ = [
    "Captured",
    "Forward",
    "Graphs",
    "contents",
    "has_hooks",
    "identity",
    "modules_of",
    "objection",
]

GRAPHS = 128  # Most kinds of steps that are cached.
WARM_UP = 2  # Eager steps before a capture, which fill an optimizer's state and choose kernels.


class Graphs:
    """Modules and the cached graphs of steps that use them.

    On CUDA a step is captured once for each kind of work and shape of batch, and then replayed.
    Work is identified by its code and by what it holds (its closure, the arguments of a `partial`):
    modules, tensors and plain values. Everything else that changes from step to step must be in the
    batch.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self.parts = [part for module in modules for part in module.modules()]
        self.steps: dict[Hashable, Captured | Eager] = {}

    def eager(self, work: Callable[..., Any], batch: Sequence[Batch]) -> Any:
        """Run a step without a graph and return its values; subclasses implement this."""
        raise NotImplementedError

    def tidy(self) -> None:
        """Release tensors that live within a step; called before and after a capture."""

    def renew(self) -> None:
        """Drop graphs whose tensors have moved, and the oldest steps beyond `GRAPHS`."""
        self.steps = {
            key: step
            for key, step in self.steps.items()
            if not isinstance(step, Captured) or step.still_valid()
        }
        while len(self.steps) > GRAPHS:
            del self.steps[next(iter(self.steps))]

    def take(self, work: Callable[..., Any], batch: Sequence[Batch]) -> Any:
        """Run a step on this batch and return its values, valid until the next step.

        The first `WARM_UP` steps of a kind run eagerly, the next is captured as a CUDA graph, and
        replayed from then on. Steps are of one kind if work, training modes, shapes and precision
        are equal. Without a lane, or if it cannot be captured, a step always runs eagerly; the
        latter warns once for each function.

        Args:
            work: Called with the items of the batch.
            batch: Tensors, None, and tuples or NamedTuples of them.
        """
        lane = lanes.current_lane()
        if lane is None:
            return self.eager(work, batch)
        lane.throttle()
        tensors = flatten(batch)
        key = (identity(work), self._modes(work), shape_key(batch), precision.current_precision())
        try:
            step = self.steps.get(key)
        except TypeError as error:  # The work holds something that cannot be hashed.
            _warn_once(work, str(error))
            return self.eager(work, batch)
        if step is None:
            step = self.steps[key] = Eager(objection(work))
            if step.objection:
                _warn_once(work, step.objection)
        if isinstance(step, Eager):
            if step.objection or step.taken < WARM_UP:
                step.taken += 1
                return self.eager(work, batch)
            self.steps[key] = step = self._capture(lane, work, batch)
            if isinstance(step, Eager):
                _warn_once(work, step.objection)
                return self.eager(work, batch)
        return step.replay(tensors)

    def _modes(self, work: Callable[..., Any]) -> tuple[bool, ...]:
        """Return the training modes of all modules involved; part of a graph's key."""
        return tuple(
            [part.training for part in self.parts]
            + [m.training for m in modules_of(contents(work))]
        )

    def _capture(
        self, lane: Lane, work: Callable[..., Any], batch: Sequence[Batch]
    ) -> Captured | Eager:
        """Capture a step as a graph, without running it.

        Returns:
            The graph, or an `Eager` with the reason if the capture failed.
        """
        inputs = [tensor.clone() for tensor in flatten(batch)]
        seed = lane.generator.initial_seed()
        offset = lane.generator.get_offset()
        graph = torch.cuda.CUDAGraph()
        self.tidy()
        collecting = gc.isenabled()
        gc.disable()  # Memory that a collection frees must not become part of the graph.
        try:
            graph.capture_begin(pool=lane.pool, capture_error_mode="thread_local")
            try:
                with set_aside() as count:
                    values = self.eager(work, refill(batch, inputs))
            finally:
                graph.capture_end()
        except (RuntimeError, TypeError) as error:
            # A failed capture leaves the lane's generator unusable, and older graphs use it.
            for other in (self, *lane.trainers.values(), *lane.forwards.values()):
                other.steps = {
                    key: step for key, step in other.steps.items() if isinstance(step, Eager)
                }
            lane.generator = torch.Generator(lane.device).manual_seed(seed)
            lane.generator.set_offset(offset)
            lane.draw_here()
            # The failed capture may still be recorded in the pool, where no other could begin.
            lane.pool = torch.cuda.graph_pool_handle()
            return Eager(str(error).splitlines()[0])
        finally:
            if collecting:
                gc.enable()
            self.tidy()
            torch.cuda.empty_cache()  # The eager steps' memory is not needed again.
        modules = [*self.modules, *modules_of(contents(work))]
        return Captured(graph, inputs, values, modules, count.total)


class Forward(Graphs):
    """Forward passes of modules, without gradients."""

    @classmethod
    def of(cls, work: Callable[..., Tensor]) -> Forward | None:
        """Return the current lane's graphs for this work, or None if it must run eagerly.

        That is so without a lane, and if the work holds tensors, no module, a module that the lane
        does not keep, or something that may change (`objection`). A graph would give different
        results for modules in training mode, and for those that normalise by the batch, since the
        last batch is padded; modules with hooks run eagerly too. Call `take` of the result with
        the work and a batch.
        """
        lane = lanes.current_lane()
        if lane is None or objection(work):
            return None
        items = contents(work)
        modules = tuple(dict.fromkeys(modules_of(items)))
        on_lane = bool(modules) and all(module in lane.modules.values() for module in modules)
        if not on_lane or any(isinstance(item, Tensor) for item in items):
            return None
        if any(_unfit(part) for module in modules for part in module.modules()):
            return None
        forward: Forward = lane.forward(modules, lambda: cls(modules))
        forward.renew()
        return forward

    @torch.no_grad()
    def eager(self, work: Callable[..., Tensor], batch: Sequence[Batch]) -> Tensor:
        """Return work(*batch), without gradients and a graph, in the run's precision."""
        with precision.autocast(flatten(batch)[0].device):
            return work(*batch)


def _unfit(part: nn.Module) -> bool:
    """Return whether a layer mixes images, is in training mode, or has hooks."""
    by_batch = isinstance(part, _BatchNorm) and part.running_mean is None
    return part.training or by_batch or has_hooks(part)


def has_hooks(*layers: nn.Module) -> bool:
    """Return whether any of these layers has forward or backward hooks.

    Hooks of submodules do not count.
    """
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(layer, kind) for layer in layers for kind in kinds)


class Eager:
    """A step that is not captured: too early, or for the reason in `objection`."""

    def __init__(self, objection: str = "") -> None:
        self.objection = objection
        self.taken = 0  # steps so far


class Captured:
    """A captured step."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[Tensor],
        values: Any,
        modules: Sequence[nn.Module],
        flops: int = 0,
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        self.values = values
        self.modules = modules
        self.flops = flops  # Operations of a replay, if they were counted at the capture.
        self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        """Return the memory addresses of all parameters and buffers."""
        tensors = [t for module in self.modules for t in (*module.parameters(), *module.buffers())]
        return [torch._C._data_address(t) for t in tensors]  # type: ignore[attr-defined]

    def still_valid(self) -> bool:
        """Return whether all tensors are where they were at the capture."""
        return self.addresses == self._addresses()

    def replay(self, tensors: list[Tensor]) -> Any:
        """Copy a batch's tensors into the graph's inputs, run it, and return its outputs."""
        if tensors:
            torch._foreach_copy_(self.inputs, tensors, non_blocking=True)
        self.graph.replay()
        add_flops(self.flops)
        torch.autograd.graph.increment_version(self.values)
        return self.values


def _code_and_values(work: Any) -> tuple[Any, list[Any]]:
    """Return the code of work, and the values it holds.

    These are the arguments of a partial, the object that a method is bound to, a function's closure
    and its defaults.
    """
    match work:
        case partial():
            keywords = [item for pair in sorted(work.keywords.items()) for item in pair]
            return work.func, [*work.args, *keywords]
        case types.MethodType():
            return work.__func__, [work.__self__]
        case types.FunctionType():
            cells = [_cell_value(cell) for cell in work.__closure__ or ()]
            defaults = sorted((work.__kwdefaults__ or {}).items())
            keywords = [item for pair in defaults for item in pair]
            return work.__code__, [*(work.__defaults__ or ()), *keywords, *cells]
        case nn.Module():
            return type(work), [work]
    return work, []


def _cell_value(cell: types.CellType) -> Any:
    """Return the value of a closure's cell, or an unset cell itself.

    An unset cell is an objection to capturing.
    """
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _is_code(item: Any) -> bool:
    """Return whether an item is a function that may hold further values."""
    return isinstance(item, partial | types.MethodType | types.FunctionType)


def identity(work: Any, depth: int = 4) -> Hashable:
    """Return a key that is equal for functions with the same code and values.

    Args:
        work: A function, bound method or partial; functions in its values are included.
        depth: Levels of nested functions to compare by their code.
    """
    code, values = _code_and_values(work)
    inner = [code, *values] if isinstance(work, partial) else values
    parts = tuple(
        identity(item, depth - 1) if _is_code(item) and depth else item for item in _flat(inner)
    )
    return parts if isinstance(work, partial) else (code, *parts)


def contents(work: Any, depth: int = 4) -> list[Any]:
    """Return all values that a function holds, also through nested functions.

    See `_code_and_values` for these values.

    Args:
        work: A function, bound method, partial or module.
        depth: Levels of nested functions to follow.
    """
    code, values = _code_and_values(work)
    inner = [code, *values] if isinstance(work, partial) else values
    items: list[Any] = []
    for item in _flat(inner):
        items += contents(item, depth - 1) if _is_code(item) and depth else [item]
    return items


def _flat(items: Sequence[Any]) -> Iterator[Any]:
    """Yield the items, with nested tuples, which cannot change, replaced by theirs."""
    for item in items:
        yield from _flat(item) if isinstance(item, tuple) else [item]


def modules_of(contents: Sequence[Any]) -> list[nn.Module]:
    """Return the modules among items, in order; a module may occur several times."""
    return [item for item in contents if isinstance(item, nn.Module)]


def objection(work: Any) -> str:
    """Return why a graph of this work could become stale; "" if it could not.

    This is so if the work holds something that may change without the graph noticing: anything but
    modules, tensors, plain values, classes, frozen dataclasses and built-in functions.
    """
    for item in contents(work):
        plain = isinstance(item, nn.Module | Tensor | str | int | float | bool | None | type)
        frozen = dataclasses.is_dataclass(item) and item.__dataclass_params__.frozen  # type: ignore[union-attr]
        if not plain and not frozen and not isinstance(item, types.BuiltinFunctionType):
            return (
                f"it holds a {type(item).__name__}; "
                "pass the modules, tensors and values that it needs instead"
            )
    return ""


_warned: set[str] = set()


def _warn_once(work: Any, reason: str) -> None:
    """Warn that work runs without a graph, once for each function."""
    inner = work.func if isinstance(work, partial) else work
    name = getattr(inner, "__qualname__", type(inner).__name__)
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} runs step by step, not as a graph: {reason}", RuntimeWarning, stacklevel=4
        )
