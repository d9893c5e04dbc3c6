"""The benchmark of ways to execute a step: its variants reach into the engine and the loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from barter.compute.fused import fuse
from barter.ops import fit


@pytest.fixture
def execution(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the benchmark's module; the loss that it may replace is restored afterwards."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.setattr(fit, "classification", fit.classification)
    return importlib.import_module("execution")


class FakeCompiler:
    """Stands in for `torch.compile`: notes the modes, and counts the calls of what it returns."""

    def __init__(self) -> None:
        self.modes: list[str] = []
        self.calls = 0

    def __call__(self, function: Callable[..., Any], *, mode: str, dynamic: bool) -> Any:
        self.modes.append(mode)

        def counted(*args: Any) -> Any:
            self.calls += 1
            return function(*args)

        return counted


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(torch, "compile", fake)
    return fake


@pytest.mark.parametrize(
    ("variant", "lanes", "tune", "modes"),
    [
        ("eager", 0, None, []),
        ("compile", 0, None, ["default"]),
        ("compile-overhead", 0, None, ["reduce-overhead"]),
        ("graphs", 3, None, []),
        ("kernels", 3, fuse, []),
        ("compile-graphs", 3, None, ["default"]),
    ],
)
def test_a_variant_switches_lanes_kernels_and_the_loss(
    execution: Any,
    compiler: FakeCompiler,
    variant: str,
    lanes: int,
    tune: Any,
    modes: list[str],
) -> None:
    plain = fit.classification
    two, home = [SimpleNamespace(tune=fuse) for _ in range(2)], SimpleNamespace(tune=fuse)
    engine = SimpleNamespace(lanes=two, server_lane=home)
    execution.switch(engine, variant)
    assert [lane.tune for lane in execution.all_lanes(engine)] == lanes * [tune]
    assert compiler.modes == modes
    assert fit.classification is (execution.classify_compiled if modes else plain)


@pytest.mark.parametrize("variant", ["eager", "compile"])
def test_a_measured_run_takes_the_compiled_loss(
    execution: Any, compiler: FakeCompiler, variant: str, tmp_path: Path
) -> None:
    workload = execution.tiny(execution.WORKLOADS["small-mlp-32"])
    source = execution.random_images(tmp_path, 32, 3, 10, 80, 20)
    said: list[dict[str, Any]] = []
    execution.run_variant(workload, variant, source, "cpu", said.append, lambda: None)
    ready, result = said
    assert ready["first_round_seconds"] > 0
    assert result["images_per_second"] == pytest.approx(80 / result["seconds"])
    # One step of each of two clients in the first round, in the next one, and in those measured.
    assert compiler.calls == (2 * (2 + result["rounds"]) if variant == "compile" else 0)


def test_the_compiled_loss_is_the_loss(execution: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from barter.core.images import Augment, Spec
    from barter.models import zoo

    spec = Spec(1, 8, 8, 10, (0.5,), (0.25,))
    model = zoo.build_network("small-mlp", spec)
    labels = torch.tensor([3, 1, 4])
    monkeypatch.setattr(execution, "compiled", execution.classify)
    for side in (8, 4):  # of the network's input, and to be enlarged
        pixels = torch.arange(3 * side**2).mul(7).to(torch.uint8).view(3, 1, side, side)
        expected = fit.classification(model, spec, Augment(), pixels, labels)
        found = execution.classify_compiled(model, spec, Augment(), pixels, labels)
        assert all(map(torch.equal, found, expected))


def test_a_variant_that_ran_by_another_way_is_found(execution: Any) -> None:
    nothing = {"graphs": 0, "fused_layers": 0, "compiled_graphs": 0}
    right = {
        "eager": nothing,
        "compile": {**nothing, "compiled_graphs": 1},
        "graphs": {**nothing, "graphs": 9},
        "kernels": {**nothing, "graphs": 9, "fused_layers": 5},
        "compile-graphs": {**nothing, "graphs": 9, "compiled_graphs": 1},
    }
    for variant in right:
        for other, evidence in right.items():
            wrong = execution.contradiction(variant, evidence, "resnet18")
            assert bool(wrong) == (variant != other), (variant, other)
    unavailable = {**right["kernels"], "kernels_available": False}
    assert "compiled" in execution.contradiction("kernels", unavailable, "resnet18")


def test_workloads_and_variants_are_chosen_by_name(execution: Any) -> None:
    assert set(execution.choose([])) == set(execution.WORKLOADS)
    chosen = execution.choose(["resnet18-32/eager", "dffke-32", "resnet18-32/kernels"])
    assert chosen == {"resnet18-32": ("eager", "kernels"), "dffke-32": ("graphs", "kernels")}
    for name, what in {"resnet": "no workload", "resnet18-32/fast": "no variant"}.items():
        with pytest.raises(ValueError, match=what):
            execution.choose([name])


@pytest.mark.slow
def test_variants_run_in_processes_and_results_come_one_by_one(
    execution: Any, tmp_path: Path
) -> None:
    saved: list[set[str]] = []
    found = execution.compare_execution(
        tmp_path,
        lambda results: saved.append(set(results["small-mlp-32"])),
        only=["small-mlp-32/eager", "small-mlp-32/kernels"],
        device="cpu",
        small=True,
    )
    assert saved[-1] == {"eager", "kernels"}
    assert found["small-mlp-32"]["kernels"] == {"error": "needs CUDA"}
    assert found["small-mlp-32"]["eager"]["images_per_second"] > 0
    assert "needs CUDA" in execution.execution_table(found)
