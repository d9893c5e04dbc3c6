"""How fast barter trains, as ratios measured in one run.

    python benchmarks/speed.py                       what this machine can run: all sections on CUDA, or the CPU's
    python benchmarks/speed.py --sections resnet18 htfe round clients
    python benchmarks/speed.py --data npz:cifar100.npz
    python benchmarks/speed.py --sections execution  torch.compile, CUDA graphs, and barter's kernels (execution.py)

`peers` is how the libraries of this field train: one client after the other, batches sent from the host, fp32, eager,
PyTorch's defaults. `ceiling` is a bare captured graph per client on streams of its own, on PyTorch's kernels, without
data or metrics. What barter reaches is measured inside a run, in its second round or later, from the seconds of its
record. Without --data the images are random: speed does not depend on them. Prints a Markdown table and writes a JSON
and a picture.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from barter import DFFKE, Experiment, FedAvg, Local
from barter.compute.fused import fuse
from barter.data.partition import Iid
from barter.data.task import Data
from barter.engines.local import LocalEngine
from barter.models import zoo

BATCH = 100
EARLIER = {
    "local_review": True,
    "decoder_steps": 100,
    "max_epochs": 5,
    "later_epochs": 5,
}  # than the mixed batches
Row = dict[str, Any]


def random_images(
    folder: Path, side: int, channels: int, classes: int, train: int, test: int
) -> str:
    """A source of random images."""
    path = folder / f"{side}-{channels}-{train}.npz"
    rng = np.random.default_rng(0)
    if not path.exists():
        shape = (side, side, channels)
        x = {
            name: rng.integers(0, 256, (n, *shape), dtype=np.uint8)
            for name, n in (("train", train), ("test", test))
        }
        y = {name: np.arange(n) % classes for name, n in (("train", train), ("test", test))}
        np.savez(path, x_train=x["train"], y_train=y["train"], x_test=x["test"], y_test=y["test"])
    return f"npz:{path}"


def federation(
    algorithm: Any, source: str, models: str, clients: int, **options: Any
) -> Experiment:
    data = Data(
        source=source,
        size=options.pop("size", None),
        augment=options.pop("augment", True),
        flip=True,
    )
    return Experiment(
        algorithm, data=data, partition=Iid(), clients=clients, models=models, **options
    )


def engine_of(experiment: Experiment) -> LocalEngine:
    assert isinstance(experiment.engine, LocalEngine)
    return experiment.engine


def barter_rate(
    source: str, models: str, clients: int, epochs: int, **options: Any
) -> tuple[float, float]:
    """Images per second in the local training of a run, after its first round; and the first round's seconds."""
    experiment = federation(Local(tau=None, max_epochs=epochs), source, models, clients, **options)
    images = epochs * sum(len(client.data) for client in engine_of(experiment).clients.values())
    seconds = [record.seconds["learn"] for record in experiment.rounds(3)]
    return images / statistics.fmean(seconds[1:]), seconds[0]


def peer_rate(experiment: Experiment, seconds: float) -> float:
    """Images per second of a plain loop over the same networks, one client after the other, batches from the host."""
    device, spec = experiment.device, experiment.task.spec
    shares = []
    for client in engine_of(experiment).clients.values():
        index = torch.arange(min(len(client.data), 2000), device=client.data.device)
        x, y = client.data.batch(index).cpu().contiguous(), client.data.labels[index].cpu()
        model = zoo.build_network(client.architecture, spec).to(device).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)

        def step(
            x: torch.Tensor, y: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer
        ) -> None:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            torch.autograd.backward(loss)
            optimizer.step()

        def epoch(
            x: torch.Tensor = x, y: torch.Tensor = y, step: Callable[..., None] = step
        ) -> int:
            order = torch.randperm(len(x))
            for part in torch.split(order, BATCH):
                step(x[part], y[part])
            return len(x)

        epoch()
        synchronize(device)
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds or not done:
            done += epoch()
            synchronize(device)
        shares.append((time.perf_counter() - start) / done)
    return len(shares) / sum(shares)


def free() -> None:
    """Give back what earlier measurements held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bare_graph(name: str, spec: Any, *, fused: bool) -> Row:
    """A training step of a new network on a fixed batch, captured on a stream of its own."""
    model = zoo.build_network(name, spec).cuda().train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if fused:
        fuse(model)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-3, weight_decay=1e-5, fused=True, capturable=True
    )
    x = torch.randn(BATCH, *spec.shape, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(spec.classes, (BATCH,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        graph.capture_begin()
        step()
        graph.capture_end()
    return {"graph": graph, "stream": stream, "kept": (model, optimizer, x, y)}


def ceiling(name: str, spec: Any, clients: int, replays: int = 60, *, fused: bool = False) -> float:
    """Images per second of bare graphs replayed on a stream each."""
    graphs = [bare_graph(name, spec, fused=fused) for _ in range(clients)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(replays):
        for bare in graphs:
            with torch.cuda.stream(bare["stream"]):
                bare["graph"].replay()
    torch.cuda.synchronize()
    return replays * clients * BATCH / (time.perf_counter() - start)


KINDS = {  # by what a kernel's name contains
    "convolution": ("wgrad", "dgrad", "fprop", "implicit_gemm", "convolution"),
    "normalisation": ("batch_norm",),
    "optimizer": ("fusedoptimizer",),
    "elementwise": ("elementwise",),
}


OURS = ("statistics", "forward", "backward_sums", "backward")


def kind_of(kernel: str) -> str:
    if kernel in OURS:
        return "normalisation"
    return next(
        (kind for kind, parts in KINDS.items() if any(part in kernel.lower() for part in parts)),
        "other",
    )


def kernels(source: str, found: Row) -> None:
    """Microseconds of a step by kind of kernel, one after the other, and how fast ten such graphs are side by side."""
    spec = federation(Local(), source, "resnet18-3x3", 10, device="cuda").task.spec
    found["kernels"] = {}
    for name, fused in (("PyTorch's kernels", False), ("our own", True)):
        graph = bare_graph("resnet18-3x3", spec, fused=fused)["graph"]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        spent = dict.fromkeys([*KINDS, "other"], 0.0)
        for event in profile.events():
            if event.device_type.name == "CUDA":
                spent[kind_of(event.name)] += event.device_time
        spent["images_per_second"] = ceiling("resnet18-3x3", spec, 10, fused=fused)
        found["kernels"][name] = spent
        sys.stderr.write(json.dumps({name: spent}) + "\n")


def resnet18(source: str, rows: list[Row]) -> None:
    for side in (32, 128):
        peer_like = federation(Local(), source, "resnet18", 10, size=side, device="cuda")
        peers = peer_rate(peer_like, 0.5)
        top = ceiling("resnet18", peer_like.task.spec, 10)
        ours, first = barter_rate(source, "resnet18", 10, 4, size=side, device="cuda")
        rows.append(row(f"10 x ResNet-18, {side} px", peers, ours, top, first))


def htfe(source: str, rows: list[Row]) -> None:
    peer_like = federation(Local(), source, "htfe-10", 10, size=128, device="cuda")
    ours, first = barter_rate(source, "htfe-10", 10, 1, size=128, device="cuda")
    rows.append(row("HtFE-10, 128 px", peer_rate(peer_like, 0.5), ours, None, first))


def small(source: str, rows: list[Row]) -> None:
    peer_like = federation(Local(), source, "small-5", 10, device="cuda")
    ours, first = barter_rate(source, "small-5", 10, 4, device="cuda")
    rows.append(row("10 small CNNs, 32 px", peer_rate(peer_like, 0.5), ours, None, first))


def row(work: str, peers: float, ours: float, top: float | None, first: float) -> Row:
    share = None if top is None else ours / top
    found = {
        "work": work,
        "peers": peers,
        "barter": ours,
        "ratio": ours / peers,
        "ceiling": top,
        "share": share,
    }
    found["first_round_seconds"] = first
    sys.stderr.write(json.dumps(found) + "\n")
    return found


def dffke_seconds(
    source: str, models: str, clients: int, rounds: int = 3, **options: Any
) -> dict[str, float]:
    """The phases of the last of some rounds, with memory of those before it."""
    size, paper = options.pop("size", None), options.pop("paper", False)
    as_published = (
        {**DFFKE.presets["paper"], "local_review": True, "later_epochs": 1} if paper else {}
    )
    algorithm = DFFKE(**{**as_published, "max_epochs": 1, **options})
    records = list(
        federation(algorithm, source, models, clients, size=size, device="cuda").rounds(rounds)
    )
    seconds = dict(records[-1].seconds)
    seconds["memory_gb"] = records[-1].server["device_memory"] / 1e9
    sys.stderr.write(
        json.dumps({"models": models, "clients": clients, **options, **seconds}) + "\n"
    )
    return seconds


def dffke_round(source: str, found: Row) -> None:
    found["round"] = {
        f"default, resnet18, {s} px": dffke_seconds(source, "resnet18", 10, size=s)
        for s in (64, 128)
    }
    for name, fields in {"": {}, ", peers=4": {"peers": 4}}.items():
        seconds = dffke_seconds(source, "resnet18-3x3", 10, paper=True, **fields)
        found["round"][f"paper, resnet18-3x3, 32 px{name}"] = seconds


def by_clients(folder: Path, found: Row) -> None:
    """A thousand images for each client, however many there are."""
    found["clients"] = {"all peers": {}, "peers = 4": {}}
    for k in (2, 5, 10, 20, 50):
        source = random_images(folder, 32, 3, 100, 1000 * k, 1000)
        found["clients"]["all peers"][k] = dffke_seconds(source, "resnet18", k, 2)
        if k > 5:
            found["clients"]["peers = 4"][k] = dffke_seconds(source, "resnet18", k, 2, peers=4)
        free()


def within(source: str, budget: float | None) -> Row:
    """A hundred ResNet-18 clients, ten of them in a round, within a budget."""
    fedavg = FedAvg(fraction=0.1, epochs=1, batch_size=100)
    experiment = federation(fedavg, source, "resnet18", 100, device="cuda", device_memory=budget)
    records = list(experiment.rounds(3))
    peak = max(record.server["device_memory"] for record in records) / 2**30
    parked = 100 - len(engine_of(experiment).parking.sizes)
    return {"peak_gib": peak, "parked": parked, "seconds": records[-1].seconds}


def memory(source: str, found: Row) -> None:
    """Several budgets, each in a process of its own, which begins with nothing on the device."""
    found["memory"] = {}
    for budget in (None, 12.0, 8.0):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            found["memory"][str(budget)] = fresh.submit(within, source, budget).result()
        sys.stderr.write(json.dumps({"budget": budget, **found["memory"][str(budget)]}) + "\n")


def precision(source: str, found: Row) -> None:
    """Accuracy and seconds of DFFKE in each precision, over seeds."""
    found["precision"] = {}
    for name in ("fp32", "tf32", "bf16"):
        ends, seconds = [], []
        for seed in range(3):
            options: Row = {"device": "cuda", "precision": name, "seed": seed, "data": source}
            algorithm = DFFKE.preset("paper", EARLIER)
            records = list(Experiment(algorithm, clients=5, **options).rounds(2))
            ends.append((records[-1].mean("global"), records[-1].mean("local")))
            seconds.append(records[-1].seconds["round"])
        found["precision"][name] = {"global_local": ends, "seconds": statistics.fmean(seconds)}
        sys.stderr.write(json.dumps({name: found["precision"][name]}) + "\n")


CPU: Row = {"device": "cpu", "augment": False}


def plain_loop(source: str) -> float:
    return peer_rate(federation(Local(), source, "small-5", 5, **CPU), 0.7)


def cpu(folder: Path, rows: list[Row]) -> None:
    """The same models, batches and optimizer as the plain loop, which does not augment either.

    The plain loop has a process of its own, as a script would. The three ways take turns and each has the median of its
    eight turns, for what else a machine does comes and goes.
    """
    for side, images, epochs in ((8, 4000, 20), (28, 2000, 5), (28, 10_000, 2)):
        source = random_images(folder, side, 1, 10, images, 100)
        steps = epochs * images // 5 // BATCH
        both = [
            federation(Local(tau=None, max_epochs=epochs), source, "small-5", 5, **CPU)
            for _ in range(2)
        ]
        engine_of(both[1]).cores = 1  # one client after the other, all cores inside each kernel
        turns: list[tuple[float, ...]] = []
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as script:
            for ours, serial in zip(*(experiment.rounds(9) for experiment in both), strict=True):
                rates = [epochs * images / record.seconds["learn"] for record in (ours, serial)]
                turns.append((script.submit(plain_loop, source).result(), *rates))
                sys.stderr.write(
                    f"{side} px: "
                    + ", ".join(f"{rate:,.0f}" for rate in turns[-1])
                    + " images a second\n"
                )
        peers, side_by_side, serially = (
            statistics.median(rates) for rates in zip(*turns[1:], strict=True)
        )
        first = epochs * images / turns[0][1]
        work = f"5 small CNNs, {side} px, {steps} steps a turn, {torch.get_num_threads()} cores"
        found = row(work, peers, side_by_side, None, first)
        rows.append({**found, "one_after_the_other": serially})


def execution(folder: Path, found: Row, args: argparse.Namespace) -> None:
    """Ways to execute the same steps; the results so far are written after each."""
    from execution import compare_execution  # type: ignore[import-not-found]

    def save(results: Row) -> None:
        found["execution"] = results
        (args.out / "speed-execution.json").write_text(json.dumps(found, indent=1) + "\n")

    compare_execution(
        folder,
        save,
        only=args.only,
        device=args.device,
        seconds=args.seconds,
        small=args.tiny,
    )


def table(rows: list[Row], found: Row) -> str:
    lines = []
    if rows:
        lines = [
            "| local training, images per second | as peers | barter | ratio | ceiling | share |",
            "|---|---|---|---|---|---|",
        ]
    for r in rows:
        top = (
            ("-", "-")
            if r["ceiling"] is None
            else (f"{r['ceiling']:,.0f}", f"{100 * r['share']:.0f} %")
        )
        lines.append(
            f"| {r['work']} | {r['peers']:,.0f} | {r['barter']:,.0f} | {r['ratio']:.1f} | {top[0]} | {top[1]} |"
        )
    for name, seconds in found.get("round", {}).items():
        phases = ", ".join(
            f"{phase} {value:.2f}" for phase, value in seconds.items() if phase != "memory_gb"
        )
        lines += [
            "",
            f"One DFFKE round, 10 clients, {name}, seconds: {phases}; {seconds['memory_gb']:.1f} GB.",
        ]
    if "clients" in found:
        lines += [
            "",
            "| clients | round, all peers | exchange | round, peers = 4 | exchange |",
            "|---|---|---|---|---|",
        ]
        some = found["clients"]["peers = 4"]
        for k, seconds in found["clients"]["all peers"].items():
            cells = [
                f"{s[phase]:.1f} s"
                for s in (seconds, some.get(k, {}))
                if s
                for phase in ("round", "exchange")
            ]
            lines.append(f"| {k} | " + " | ".join([*cells, "-", "-"][:4]) + " |")
    for budget, kept in found.get("memory", {}).items():
        lines += [
            "",
            f"100 ResNet-18 clients, device_memory {budget}: peak {kept['peak_gib']:.1f} GiB, ",
        ]
        lines[-1] += f"{kept['parked']} parked, a round {kept['seconds']['round']:.1f} s."
    for name, spent in found.get("kernels", {}).items():
        kinds = ", ".join(
            f"{kind} {us:.0f}" for kind, us in spent.items() if kind != "images_per_second"
        )
        lines += [
            "",
            f"A step of ResNet-18 (3x3 stem, 32 px) on {name}, microseconds: {kinds}; ten side by side: ",
        ]
        lines[-1] += f"{spent['images_per_second']:,.0f} images a second."
    if "execution" in found:
        from execution import execution_table

        lines += ["", execution_table(found["execution"])]
    if "precision" in found:
        lines += [
            "",
            "| precision | global, by seed | own, by seed | seconds a round |",
            "|---|---|---|---|",
        ]
        for name, values in found["precision"].items():
            ends = [
                " ".join(f"{100 * v:.1f}" for v in column)
                for column in zip(*values["global_local"], strict=True)
            ]
            lines.append(f"| {name} | {ends[0]} | {ends[1]} | {values['seconds']:.1f} |")
    return "\n".join(lines) + "\n"


def picture(found: Row, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    for name, by_k in found["clients"].items():
        counts = list(by_k)
        axes.plot(counts, [by_k[k]["exchange"] / k for k in counts], marker="o", label=name)
    axes.set_xlabel("clients K")
    axes.set_ylabel("seconds of exchange per client")
    axes.set_title("What the exchange costs each client, as K grows")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = [
        "resnet18",
        "htfe",
        "small",
        "kernels",
        "execution",
        "round",
        "clients",
        "memory",
        "precision",
        "cpu",
    ]
    default = sections[:-2] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--sections", nargs="+", choices=sections, default=default)
    parser.add_argument(
        "--data",
        help="a source of 32 px images, such as npz:cifar100.npz; random images without it",
    )
    parser.add_argument(
        "--real", help="a source of real images for `precision`, such as npz:fashion-mnist.npz"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="of `execution`: WORKLOAD or WORKLOAD/VARIANT"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of `execution`"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="of `execution`")
    parser.add_argument("--tiny", action="store_true", help="tiny workloads, of `execution`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if "precision" in args.sections and not args.real:
        parser.error("precision is about accuracy: give it --real SOURCE")
    if "execution" in args.sections:
        from execution import choose

        try:
            choose(args.only)
        except ValueError as error:
            parser.error(str(error))
    rows: list[Row] = []
    found: Row = {"torch": torch.__version__, "rows": rows}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    args.out.mkdir(parents=True, exist_ok=True)
    apart = ("cpu", "execution", "clients", "kernels")  # with a file of their own if run alone
    section = " ".join(args.sections)
    name = f"speed-{section}" if section in apart else "speed"
    with tempfile.TemporaryDirectory() as folder:
        images = args.data or random_images(Path(folder), 32, 3, 100, 50_000, 10_000)
        few = random_images(Path(folder), 32, 3, 100, 20_000, 1000)
        work: dict[str, Callable[[], None]] = {
            "resnet18": lambda: resnet18(images, rows),
            "htfe": lambda: htfe(few, rows),
            "small": lambda: small(images, rows),
            "kernels": lambda: kernels(few, found),
            "execution": lambda: execution(Path(folder), found, args),
            "round": lambda: dffke_round(images, found),
            "clients": lambda: by_clients(Path(folder), found),
            "memory": lambda: memory(images, found),
            "precision": lambda: precision(args.real, found),
            "cpu": lambda: cpu(Path(folder), rows),
        }
        for section in args.sections:
            start = time.perf_counter()
            work[section]()
            sys.stderr.write(f"{section}: {time.perf_counter() - start:.0f} s\n")
            free()
            (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    if "clients" in found:
        picture(found, args.out / "dffke-clients.png")
    sys.stdout.write(table(rows, found))


if __name__ == "__main__":
    main()
