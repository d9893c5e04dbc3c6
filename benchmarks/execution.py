"""Compare ways to execute the same training steps, on one machine and in one run.

    python benchmarks/speed.py --sections execution
    python benchmarks/speed.py --sections execution --only resnet18-32 small-resnet-32/kernels

The variants run the same federation with the same batches, bf16 and fused Adam, and differ in how
a step is executed:

- eager: PyTorch's kernels, launched one by one;
- compile, compile-overhead: the loss and its gradients by `torch.compile`, in mode "default" and
  "reduce-overhead", clients one after the other;
- graphs: barter's CUDA graphs on streams, with PyTorch's kernels;
- kernels: the same with barter's own kernels (`compute/fused.py`), as barter runs;
- compile-graphs: the same with the kernels of `torch.compile` in place of barter's.

Every variant has a process of its own with empty compiler caches. The processes of a workload warm
up at the same time; then each is measured alone. Each result is written when it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from speed import engine_of, federation, random_images  # type: ignore[import-not-found]
from torch import Tensor

from barter import DFFKE, Algorithm, Experiment, Local
from barter.compute import fused
from barter.compute.fused import FusedNorm
from barter.compute.graphs import Captured
from barter.core.images import Augment, Spec, augment_images
from barter.core.images import channel_statistics as pixel_statistics
from barter.core.metrics import Evaluation
from barter.core.model import Classifier
from barter.engines.local import LocalEngine
from barter.ops import fit

VARIANTS = ("eager", "compile", "compile-overhead", "graphs", "kernels", "compile-graphs")
ON_LANES = ("graphs", "kernels", "compile-graphs")
MODES = {
    "compile": "default",
    "compile-overhead": "reduce-overhead",
    "compile-graphs": "default",
}
COMPILE_LIMIT = 90.0  # Seconds after which a variant that is not ready is given up.
MEASURE_LIMIT = 45.0  # Seconds that one variant's measurement may take.
LEAST_SECONDS = 25.0  # A workload is not started if less time is left.

Row = dict[str, Any]
Say = Callable[[Row], None]


@dataclass(frozen=True)
class Workload:
    """A federation, and the variants that are compared on it by default."""

    models: str
    side: int  # pixels; images of 32 pixels are resized in the step
    images: int  # of each client
    variants: tuple[str, ...]
    method: str = "local"  # "local" is measured by its training, "dffke" by its whole round
    epochs: int = 2
    clients: int = 10
    classes: int = 100
    steps: int | None = None  # of DFFKE's decoder and exchange; None for its defaults


WORKLOADS = {
    "resnet18-32": Workload("resnet18", 32, 2000, VARIANTS),
    "small-resnet-32": Workload("small-resnet", 32, 2000, VARIANTS, epochs=4),
    "resnet18-128": Workload("resnet18", 128, 1000, ("graphs", "kernels")),
    "dffke-32": Workload("resnet18", 32, 1000, ("graphs", "kernels"), "dffke", clients=5),
    "vit-tiny-32": Workload("vit-tiny", 32, 1000, ("graphs", "kernels")),
    "small-mlp-32": Workload("small-mlp", 32, 2000, ("graphs", "kernels"), epochs=4),
}


def tiny(workload: Workload) -> Workload:
    """Return a workload that a CPU finishes in seconds."""
    models = "small-cnn" if workload.models.startswith("resnet") else workload.models
    return replace(
        workload, models=models, side=16, images=40, clients=2, epochs=1, classes=10, steps=2
    )


# In a child process: one variant


# Set by `switch`.
compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
by_trees = False  # The compiler makes CUDA graphs, and must know where a step begins.


def classify(
    model: Classifier,
    augment: Augment,
    side: tuple[int, int],
    pixels: Tensor,
    labels: Tensor,
    mean: Tensor,
    std: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute what `ops.fit.classification` computes, for `torch.compile`.

    The normalisation's constants are arguments: a compiler would make them anew in every step, on
    the host, and give up CUDA graphs for that.
    """
    x = (augment_images(pixels, augment).float() - mean) / std
    if x.shape[-2:] != side:
        x = F.interpolate(x, side, mode="bilinear")
    logits = model(x.contiguous(memory_format=torch.channels_last))
    return F.cross_entropy(logits, labels), (logits.detach().argmax(1) == labels).sum()


def classify_compiled(
    model: Classifier,
    spec: Spec,
    augment: Augment,
    pixels: Tensor,
    labels: Tensor,
    by_class: None = None,
    *,
    loss: object = None,
    adjust: object = None,
) -> tuple[Tensor, Tensor]:
    """Stand in for `ops.fit.classification`.

    The compiled function is a global variable, since a loss that held it could not be captured.
    """
    assert compiled is not None
    if by_trees:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    mean, std = pixel_statistics(spec, pixels.device, 255.0)
    return compiled(model, augment, spec.shape[1:], pixels, labels, mean, std)


def switch(engine: LocalEngine, variant: str) -> None:
    """Make an engine execute its steps by this variant."""
    global compiled, by_trees
    if variant not in ON_LANES:
        engine.lanes = []
        engine.server_lane = None
    if variant != "kernels":
        for lane in all_lanes(engine):
            lane.tune = None
    if variant in MODES:
        compiled = torch.compile(classify, mode=MODES[variant], dynamic=False)
        by_trees = MODES[variant] == "reduce-overhead"
        fit.classification = classify_compiled  # type: ignore[assignment]


def all_lanes(engine: LocalEngine) -> list[Any]:
    return [*engine.lanes, *([] if engine.server_lane is None else [engine.server_lane])]


def evidence(engine: LocalEngine) -> Row:
    """Count what was executed: captured graphs, fused layers, compiled graphs."""
    found: Row = {"graphs": 0, "fused_layers": 0}
    for lane in all_lanes(engine):
        for trainer in lane.trainers.values():
            found["graphs"] += sum(isinstance(step, Captured) for step in trainer.steps.values())
        for module in lane.modules.values():
            found["fused_layers"] += sum(isinstance(part, FusedNorm) for part in module.modules())
    if found["fused_layers"]:
        found["kernels_available"] = fused._launch() is not None
    compiler = sys.modules.get("torch._dynamo.utils")  # loaded with the first compilation
    counters = {} if compiler is None else compiler.counters
    found["compiled_graphs"] = counters.get("stats", {}).get("unique_graphs", 0)
    found["cudagraph_skips"] = counters.get("inductor", {}).get("cudagraph_skips", 0)
    return found


def contradiction(variant: str, found: Row, models: str) -> str:
    """Return what shows that a variant was executed by another way than its name says; or ""."""
    normalised = models not in ("vit-tiny", "small-mlp")  # the networks have batch normalisation
    if bool(found["graphs"]) != (variant in ON_LANES):
        return f"{found['graphs']} graphs were captured"
    if bool(found["fused_layers"]) != (variant == "kernels" and normalised):
        return f"{found['fused_layers']} layers are fused"
    if not found.get("kernels_available", True):
        return "barter's kernels cannot be compiled here"
    if bool(found["compiled_graphs"]) != (variant in MODES):
        return f"{found['compiled_graphs']} graphs were compiled"
    return ""


def build(workload: Workload, source: str, device: str) -> Experiment:
    algorithm: Algorithm[Any, Any] = Local(tau=None, max_epochs=workload.epochs)
    if workload.method == "dffke":
        steps = workload.steps
        fewer: Row = {} if steps is None else {"decoder_steps": steps, "exchange_steps": steps}
        algorithm = DFFKE(max_epochs=1, **fewer)
    experiment: Experiment = federation(
        algorithm,
        source,
        workload.models,
        workload.clients,
        size=workload.side,
        device=device,
        rounds=10_000,
        evaluate=Evaluation(every=5_000),
    )
    return experiment


def run_round(experiment: Experiment, workload: Workload) -> Row:
    """Run a round and return the seconds of its phases."""
    seconds = experiment.step().seconds
    phase = "round" if workload.method == "dffke" else "learn"
    return {"measured": seconds[phase], **seconds}


def run_variant(
    workload: Workload, variant: str, source: str, device: str, say: Say, wait: Callable[[], Any]
) -> None:
    """Warm a variant up, say so, wait for the permission, and say what was measured."""
    experiment = build(workload, source, device)
    engine = engine_of(experiment)
    switch(engine, variant)
    first = run_round(experiment, workload)["measured"]
    say({"first_round_seconds": first})
    wait()
    run_round(experiment, workload)  # Steps that the first round did not yet capture.
    rounds: list[Row] = []
    start = time.perf_counter()
    while len(rounds) < 2 or (time.perf_counter() - start < 2.0 and len(rounds) < 20):
        rounds.append(run_round(experiment, workload))
    phases = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    steady = phases.pop("measured")
    found = evidence(engine)
    wrong = contradiction(variant, found, workload.models)
    if wrong and device == "cuda":
        raise RuntimeError(f"this is not the variant {variant!r}: {wrong}")
    result = {
        "seconds": steady,
        "rounds": len(rounds),
        "prepare_seconds": first - steady,
        "phases": phases,
        **found,
    }
    if workload.method == "local":
        images = workload.epochs * sum(len(client.data) for client in engine.clients.values())
        result["images_per_second"] = images / steady
    if device == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    say(result)


def serve(task: Row) -> None:
    """Run one variant in this process; results are JSON lines on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print must not be taken for a result.

    def say(row: Row) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    workload = Workload(**{**task["workload"], "variants": tuple(task["workload"]["variants"])})
    if task["variant"] in MODES:
        torch._dynamo.config.recompile_limit = 64  # Clients have networks of their own.
    try:
        run_variant(
            workload, task["variant"], task["source"], task["device"], say, sys.stdin.readline
        )
    except Exception as error:
        traceback.print_exc()
        reason = (str(error) or "no message").splitlines()[0]
        say({"error": f"{type(error).__name__}: {reason}"})
    out.flush()
    sys.stderr.flush()
    os._exit(0)  # Threads of lanes and of compilers need not be waited for.


# In the parent: all variants


class Child:
    """A process that runs one variant."""

    def __init__(self, name: str, task: Row, folder: Path, cores: int) -> None:
        self.name = name
        self.variant: str = task["variant"]
        self.ready: Row | None = None
        self.log = folder / f"{name.replace('/', '-')}.log"
        caches = {key: str(folder / name / key) for key in CACHES}
        environment = {**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": str(cores)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def receive(self, seconds: float, late: str) -> Row:
        """Return the child's next report; one with an "error" if it is late or the child died."""
        try:
            line = self.lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return {"error": late}
        if line:
            row: Row = json.loads(line)
            return row
        tail = self.log.read_text().strip().splitlines()[-1:] or ["no message"]
        return {"error": f"exit status {self.process.wait()}: {tail[0]}"}

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def choose(only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the variants of each chosen workload.

    Args:
        only: Names of workloads, or of single variants as WORKLOAD/VARIANT; empty for the defaults.

    Raises:
        ValueError: If there is no workload or variant of a name.
    """
    if not only:
        return {name: workload.variants for name, workload in WORKLOADS.items()}
    chosen: dict[str, tuple[str, ...]] = {}
    for name in only:
        work, _, variant = name.partition("/")
        if work not in WORKLOADS:
            raise ValueError(f"no workload {work!r}; there are {', '.join(WORKLOADS)}")
        if variant and variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
        chosen[work] = (*chosen.get(work, ()), variant) if variant else WORKLOADS[work].variants
    return chosen


def compare_execution(
    folder: Path,
    save: Say,
    *,
    only: Sequence[str] = (),
    device: str = "cuda",
    seconds: float = 240.0,
    small: bool = False,
) -> Row:
    """Measure all chosen variants and return their results by workload and variant.

    Args:
        folder: For data, caches and logs.
        save: Called with all results so far, after each.
        only: Workloads and variants, see `choose`.
        device: "cuda" or "cpu".
        seconds: Time for all of it; workloads that do not fit are reported as not run.
        small: Use tiny workloads.
    """
    deadline = time.perf_counter() + seconds
    found: Row = {}
    for name, variants in choose(only).items():
        results = found[name] = {}
        workload = tiny(WORKLOADS[name]) if small else WORKLOADS[name]
        if device == "cpu":
            for variant in set(variants) & set(ON_LANES):
                results[variant] = {"error": "needs CUDA"}
            variants = tuple(variant for variant in variants if variant not in ON_LANES)
        if deadline - time.perf_counter() < LEAST_SECONDS:
            results.update({variant: {"error": "not run: no time left"} for variant in variants})
        else:
            for variant, result in measure(name, workload, variants, device, folder, deadline):
                results[variant] = result
                sys.stderr.write(json.dumps({f"{name}/{variant}": result}) + "\n")
                save(found)
        save(found)
    return found


def measure(
    name: str,
    workload: Workload,
    variants: Sequence[str],
    device: str,
    folder: Path,
    deadline: float,
) -> Iterator[tuple[str, Row]]:
    """Yield each variant of a workload with its result.

    All warm up at the same time; each is measured while the others wait.
    """
    images = workload.clients * workload.images
    source = random_images(folder, 32, 3, workload.classes, images, 2 * workload.classes)
    compiling = max(1, len(set(variants) & set(MODES)))
    cores = max(1, (os.cpu_count() or 1) // compiling)
    start = time.perf_counter()
    children = []
    try:
        for variant in variants:
            task = {
                "workload": asdict(workload),
                "variant": variant,
                "source": source,
                "device": device,
            }
            children.append(Child(f"{name}/{variant}", task, folder, cores))
        for child in children:
            limit = min(start + COMPILE_LIMIT, deadline) - time.perf_counter()
            waited = time.perf_counter() - start + max(0.0, limit)
            child.ready = child.receive(limit, f"not ready after {waited:.0f} s")
            if "error" in child.ready:
                child.end()
        for child in children:
            assert child.ready is not None
            if "error" in child.ready:
                yield child.variant, child.ready
                continue
            child.go()
            limit = min(MEASURE_LIMIT, max(5.0, deadline - time.perf_counter()))
            result = child.receive(limit, f"not measured within {limit:.0f} s")
            child.end()
            yield child.variant, {**child.ready, **result}
    finally:
        for child in children:
            child.end()


def execution_table(found: Row) -> str:
    """Return the results as a Markdown table; ratios are to the variant "graphs"."""
    lines = [
        "| workload | execution | images per second | a round, s | compared with graphs | "
        "compiling and capturing, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, results in found.items():
        base = results.get("graphs", {}).get("seconds")
        for variant in VARIANTS:
            if variant not in results:
                continue
            result = results[variant]
            if "error" in result:
                lines.append(f"| {name} | {variant} | {result['error']} | - | - | - |")
                continue
            rate = result.get("images_per_second")
            cells = [
                "-" if rate is None else f"{rate:,.0f}",
                f"{result['seconds']:.3f}",
                "-" if base is None else f"{base / result['seconds']:.2f}",
                f"{result['prepare_seconds']:.1f}",
            ]
            lines.append(f"| {name} | {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one variant; see speed.py for all of them.")
    parser.add_argument("--child", type=json.loads, required=True)
    serve(parser.parse_args().child)


if __name__ == "__main__":
    main()
