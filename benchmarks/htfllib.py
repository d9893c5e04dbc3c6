"""HtFLlib beside barter on one machine: seconds and accuracy by round, six methods.

    python benchmarks/htfllib.py --htfllib HtFLlib --data cifar100.npz --models htfe-1 --size 64

Both libraries train the same networks from the same initial weights, on the same images of each
client, and are tested on the same images. Every pair of a method and a library is a process of its
own, and libraries alternate. HtFLlib runs by its own main.py, from a patched copy of the checkout:
`PATCHES` has every change with its reason. Results are written after each run; a repeated command
skips the runs that the file has. What is measured, and what stays unequal, is in
docs/results/htfllib.md.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

# Before barter is imported, which sets how OpenMP's threads wait: HtFLlib gets the caller's
# environment. It runs in another folder, so paths of modules are made absolute.
ENVIRONMENT = dict(os.environ)
if ENVIRONMENT.get("PYTHONPATH"):
    MODULE_PATHS = ENVIRONMENT["PYTHONPATH"].split(os.pathsep)
    ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, MODULE_PATHS))

import argparse
import contextlib
import hashlib
import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from barter import ALGORITHMS, Experiment
from barter.core import seeds
from barter.core.errors import BarterError
from barter.core.images import Images, Spec
from barter.core.metrics import Evaluation
from barter.core.model import SplitClassifier
from barter.core.record import Round
from barter.data.partition import Dirichlet, Domains
from barter.data.splits import write_split
from barter.data.task import Data, Task, make_task
from barter.models import zoo
from barter.models.pooled import pool_features
from barter.ops import fit
from barter.setup.participants import initial_network

HERE = Path(__file__).parent
LIBRARIES = ("htfllib", "barter")
CHUNK = 1000  # images that are prepared at a time
GIVEN = "given"  # HtFLlib's name of the data set and of the family of networks that it is given
SHARED = "HTFLLIB_SHARED_NETWORK"  # the variable with the expression that builds the shared network
EVALUATION_LINE = "Seconds of evaluation:"  # printed by one of the patches
Run = Mapping[str, Any]  # a run as the file of results holds it
PACKAGES = ("torch", "torchvision", "numpy", "sklearn", "barter")


# --- HtFLlib's code ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """A replacement in a file of HtFLlib, which must occur exactly this number of times."""

    file: str  # below system/
    old: str
    new: str
    reason: str
    times: int = 1


PATCHES = (
    Patch(
        "main.py",
        "from flcore.servers.serverktl",
        "# from flcore.servers.serverktl",
        "FedKTL's three servers import code of StyleGAN and diffusers, which the six methods do not need",
        times=3,
    ),
    Patch(
        "main.py",
        "from flcore.servers.serverl2g",
        "# from flcore.servers.serverl2g",
        "FedL2G's two servers import the package `higher`, which the six methods do not need",
        times=2,
    ),
    Patch(
        "main.py",
        "from utils.mem_utils",
        "# from utils.mem_utils",
        "the report of memory at the end of a run needs the package `calmsize`",
    ),
    Patch("main.py", "reporter = MemReporter()", "", "the report of memory, as above"),
    Patch(
        "main.py",
        "from utils.result_utils",
        "# from utils.result_utils",
        "the summary at the end of a run needs the package `h5py`",
    ),
    Patch(
        "flcore/servers/serverbase.py",
        "import h5py",
        "",
        "results are read from the log; HtFLlib's file of results needs the package `h5py`",
    ),
    Patch(
        "main.py",
        'if args.model_family == "HtFE-img-2":',
        f'if args.model_family == "{GIVEN}":\n'
        '            args.models = ["by -mfn"]\n'
        f'            args.global_model = os.environ["{SHARED}"]\n'
        '        elif args.model_family == "HtFE-img-2":',
        "HtFLlib has no HtFE-1 and no HtFE-10: clients' networks are read from files by its option "
        "-mfn, and the shared network of FML and FedKD is given here",
    ),
    Patch(
        "flcore/servers/serverbase.py",
        "stats = self.test_metrics()",
        "evaluation_start = time.time()\n"
        "        stats = self.test_metrics()\n"
        f"        print('{EVALUATION_LINE}', time.time() - evaluation_start)",
        "HtFLlib's time of a round contains the evaluation before it; it is subtracted",
    ),
)
# Runs are ended before HtFLlib writes its file of results and its reports, so these stay as they are.
# torch 2.6 and later load only tensors by default; HtFLlib saves and loads whole modules.
LOAD_MODULES = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


class HtfllibError(Exception):
    """HtFLlib's checkout does not fit, or a run failed."""


def copy_checkout(checkout: Path, target: Path) -> None:
    """Copy the code of HtFLlib that the methods need to `target`/system, and patch it.

    Raises:
        HtfllibError: The folder is no checkout of HtFLlib, or a patch does not apply.
    """
    system = checkout / "system"
    if not (system / "main.py").is_file():
        raise HtfllibError(f"{checkout} is no checkout of HtFLlib: it has no system/main.py")
    ignored = shutil.ignore_patterns("stylegan*", "stable-diffusion", "__pycache__", "temp")
    shutil.copytree(system, target / "system", ignore=ignored)
    for patch in PATCHES:
        apply_patch(target / "system", patch)


def apply_patch(system: Path, patch: Patch) -> None:
    """Apply a patch to a copy of HtFLlib.

    Raises:
        HtfllibError: The text does not occur as often as the patch says.
    """
    path = system / patch.file
    text = path.read_text("utf-8") if path.is_file() else ""
    found = text.count(patch.old)
    if found != patch.times:
        raise HtfllibError(
            f"a patch no longer applies: {patch.file} has {patch.old.strip()!r} {found} times, "
            f"{patch.times} expected ({patch.reason}); adjust PATCHES of {Path(__file__).name}"
        )
    path.write_text(text.replace(patch.old, patch.new), "utf-8")


def find_commit(checkout: Path, given: str | None) -> str:
    """Return the commit of a checkout.

    Args:
        checkout: The folder.
        given: The commit, for a folder without git's data.

    Raises:
        HtfllibError: It is neither given nor known to git, or the two differ.
    """
    command = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        answer = ""
    top, _, commit = answer.strip().partition("\n")
    # A plain folder inside another repository would have that repository's commit.
    known = commit if top and Path(top).resolve() == checkout.resolve() else None
    if known and given and not known.startswith(given):
        raise HtfllibError(f"--commit {given}: {checkout} is at {known}")
    if not (known or given):
        raise HtfllibError(f"{checkout} is no git checkout: give its commit with --commit")
    return known or str(given)


def hash_code(checkout: Path) -> str:
    """Return a hash of the code that is measured, before patches; it identifies the commit."""
    digest = hashlib.sha256()
    system = checkout / "system"
    files = [system / "main.py", *system.glob("flcore/**/*.py"), *system.glob("utils/*.py")]
    for path in sorted(files):
        digest.update(f"{path.relative_to(system)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# --- What is measured -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Everything that both libraries are given, besides the method."""

    data: str = ""  # an npz file
    models: str = "htfe-1"  # a family, a network or several of them, by barter's names
    size: int = 64  # pixels of a side
    clients: int = 10
    alpha: float = 1.0  # of the balanced Dirichlet split
    seed: int = 0
    rounds: int = 5
    epochs: int = 1  # local epochs
    batch_size: int = 100
    lr: float = 0.01  # of plain SGD, the only optimizer of HtFLlib
    features: int = 512  # width of all networks' features
    shared: str = "cnn"  # the shared network of FML and FedKD
    test_images: int = 200  # at most as many test images per client
    train_images: int | None = None  # at most as many training images per client
    device: str = "cuda"
    in_order: bool = False  # whether barter takes HtFLlib's batches


@dataclass(frozen=True)
class Method:
    """A method in both libraries, with equal hyperparameters."""

    htfllib: str  # the value of -algo
    options: Mapping[str, float] = field(default_factory=dict)  # of HtFLlib's command line
    fields: Mapping[str, object] = field(default_factory=dict)  # of barter's algorithm
    # The metric of barter that HtFLlib's accuracy is: by the shared head, by prototypes, or the own.
    metric: str = "local"
    cost: float = 1.0  # a round beside one of local training, roughly, to estimate durations


def methods(settings: Settings) -> dict[str, Method]:
    """Return the six methods by barter's names."""
    common: dict[str, object] = {
        "batch_size": settings.batch_size,
        "lr": settings.lr,
        "optimizer": "sgd",
    }
    train = {**common, "epochs": settings.epochs}
    one_width = {**train, "features": settings.features}
    return {
        "local": Method(
            "Local",
            fields={**common, "max_epochs": settings.epochs, "tau": None, "weight_decay": 0.0},
        ),
        "lgfedavg": Method("LG-FedAvg", fields=one_width, metric="shared_local"),
        "fml": Method(
            "FML",
            options={"-al": 0.5, "-bt": 0.5},
            fields={**train, "shared": settings.shared, "momentum": 0.0, "alpha": 0.5, "beta": 0.5},
            cost=1.5,
        ),
        "fedkd": Method(
            "FedKD",
            options={"-mlr": settings.lr, "-Ts": 0.95, "-Te": 0.98},
            fields={
                **train,
                "shared": settings.shared,
                "energy_start": 0.95,
                "energy_end": 0.98,
                "energy_rounds": settings.rounds,
            },
            cost=2.5,
        ),
        "fedproto": Method(
            "FedProto", options={"-lam": 1.0}, fields={**one_width, "lam": 1.0}, cost=2.0
        ),
        "fedtgp": Method(
            "FedTGP",
            options={"-lam": 1.0, "-se": 100, "-mart": 100.0},
            fields={
                **one_width,
                "lam": 1.0,
                "server_epochs": 100,
                "server_lr": settings.lr,
                "tau": 100.0,
            },
            cost=2.5,
        ),
    }


# --- The split --------------------------------------------------------------------------------------


def split_data(settings: Settings) -> Data:
    """Return the source of the npz file, without augmentation, which HtFLlib has not."""
    return Data(source=f"npz:{settings.data}", size=settings.size, augment=False, flip=False)


def write_common_split(settings: Settings, folder: Path) -> None:
    """Write each client's training and test images as barter's partition chooses them.

    A client's training images are shuffled once, because HtFLlib's batches are those of the file's
    order. Test images are a random part of the client's local test: images of the npz file's test
    part with the class frequencies of the client's training images.
    """
    partition = Dirichlet(alpha=settings.alpha, balanced=True)
    device = torch.device("cpu")
    task = make_task(split_data(settings), partition, settings.clients, settings.seed, device)

    def choose(images: Images, most: int | None, *key: str | int) -> Images:
        with seeds.scope(settings.seed, "htfllib", *key):
            index = torch.randperm(len(images))[:most]
        return Images(images.pixels[index], images.labels[index], images.spec)

    train = [choose(x, settings.train_images, "train", k) for k, x in enumerate(task.train)]
    tests = [choose(x, settings.test_images, "test", k) for k, x in enumerate(task.local_tests)]
    write_split(folder, train, tests, task.global_test, task.classes)


def read_common_split(settings: Settings, folder: Path, device: str = "cpu") -> Task:
    """Return the task that barter makes of the split; HtFLlib's files are written from it."""
    data = split_source(settings, folder)
    return make_task(data, Domains(), settings.clients, settings.seed, torch.device(device))


def split_source(settings: Settings, folder: Path) -> Data:
    """Return the split as a source of barter."""
    return Data(source=f"clients:{folder}", size=settings.size, augment=False, flip=False)


def write_htfllib_data(task: Task, folder: Path) -> None:
    """Write the task's images in HtFLlib's format: train/0.npz ..., test/0.npz ...

    Images are the networks' inputs as barter makes them, normalised and resized, as float32.
    """
    for part, sets in (("train", task.train), ("test", task.local_tests)):
        (folder / part).mkdir(parents=True)
        for k, images in enumerate(sets):
            index = torch.arange(len(images))
            chunks = [images.batch(chunk) for chunk in torch.split(index, CHUNK)]
            inputs = torch.cat([chunk.contiguous() for chunk in chunks])
            content = {"x": inputs.numpy(), "y": images.labels.numpy()}
            np.savez(folder / part / f"{k}.npz", data=content)  # type: ignore[arg-type]


# --- Networks ---------------------------------------------------------------------------------------


def client_networks(settings: Settings, spec: Spec) -> dict[str, SplitClassifier]:
    """Return the initial network of each architecture, with features of one width.

    HtFLlib pools the features of all networks to one width, with any method; barter where a method
    needs it. Here all are pooled.
    """
    networks = {}
    for name in dict.fromkeys(zoo.client_architectures(settings.models, settings.clients)):
        with seeds.scope(settings.seed, "htfllib", "weights", name):
            network = pool_features(zoo.build_network(name, spec), settings.features)
        assert isinstance(network, SplitClassifier)
        networks[name] = network
    return networks


def as_htfllib_network(network: SplitClassifier) -> nn.Module:
    """Return a network of torch's own modules with the parts that HtFLlib uses, `base` and `head`."""
    body, head = network.body, network.head
    if isinstance(body, nn.Sequential) and type(body[-1]).__name__ == "Pool":
        body = nn.Sequential(*list(body)[:-1], nn.AdaptiveAvgPool1d(head.in_features))
    return nn.Sequential(OrderedDict(base=body, head=head))


def write_htfllib_networks(settings: Settings, spec: Spec, folder: Path) -> None:
    """Write the clients' networks as HtFLlib's -mfn reads them, and the shared one.

    The shared one has the initial weights of barter's, except for the head: HtFLlib makes a new one.
    """
    folder.mkdir(parents=True)
    networks = client_networks(settings, spec)
    for k, name in enumerate(zoo.client_architectures(settings.models, settings.clients)):
        torch.save(as_htfllib_network(networks[name]), folder / f"Client_{k}_model.pt")
    shared = initial_network(settings.shared, spec, settings.seed)
    assert isinstance(shared, SplitClassifier)
    if shared.feature_dim != settings.features:
        raise HtfllibError(
            f"--shared {settings.shared} has {shared.feature_dim} features and not "
            f"{settings.features}: HtFLlib would pool them and barter not"
        )
    whole = nn.Sequential(OrderedDict(body=shared.body, fc=shared.head))
    torch.save(whole, folder / "shared.pt")


def compare_networks(settings: Settings, spec: Spec, folder: Path) -> dict[str, list[int]]:
    """Compare the networks that the two libraries train, layer by layer.

    Returns:
        The number of parameters of each layer, by architecture.

    Raises:
        HtfllibError: A parameter differs in shape, or logits differ for the same images.
    """
    found = {}
    architectures = zoo.client_architectures(settings.models, settings.clients)
    for name, network in client_networks(settings, spec).items():
        file = folder / f"Client_{architectures.index(name)}_model.pt"
        theirs = torch.load(file, weights_only=False)
        ours_counts = layer_counts(network)
        their_counts = layer_counts(theirs)
        if ours_counts != their_counts:
            raise HtfllibError(f"{name}: {ours_counts} in barter, {their_counts} in HtFLlib")
        images = torch.linspace(-1, 1, 2 * spec.channels * spec.height * spec.width)
        images = images.reshape(2, *spec.shape)
        with torch.no_grad():
            distance = (network.eval()(images) - theirs.eval()(images)).abs().max().item()
        if not distance < 1e-4:
            raise HtfllibError(f"{name}: logits of the two libraries differ by {distance}")
        found[name] = ours_counts
    return found


# Counts the parameters of networks of torchvision as HtFLlib splits them, from expressions.
COUNT_OWN = """
import json, sys
from types import SimpleNamespace
from flcore.trainmodel.models import BaseHeadSplit
order = json.loads(sys.argv[1])
for name, expression in order["expressions"].items():
    args = SimpleNamespace(models=[expression], **order["sizes"])
    network = BaseHeadSplit(args, 0)
    own = [[p.numel() for p in module.parameters(recurse=False)] for module in network.modules()]
    print("counts", json.dumps([name, [sum(counts) for counts in own if counts]]))
"""


def count_own_split(settings: Settings, classes: int, work: Path) -> dict[str, list[int]]:
    """Return the layers' parameter counts of torchvision's networks as HtFLlib itself splits them.

    HtFLlib replaces the whole classifier by a pooling and a linear layer; barter replaces the last
    linear layer only. Networks that torchvision does not build by name are left out.
    """
    options = {"googlenet": ", aux_logits=False, init_weights=True"}
    expressions = {}
    for name in dict.fromkeys(zoo.client_architectures(settings.models, settings.clients)):
        function = re.sub(r"[-.]", "_", name)
        if hasattr(import_module("torchvision.models"), function):
            arguments = f"num_classes=args.num_classes{options.get(name, '')}"
            expressions[name] = f"torchvision.models.{function}({arguments})"
    sizes = {"feature_dim": settings.features, "num_classes": classes}
    order = json.dumps({"expressions": expressions, "sizes": sizes})
    command = [sys.executable, "-c", COUNT_OWN, order]
    counts: dict[str, list[int]] = {}
    for line in stream_lines(command, work / "system", ENVIRONMENT, None):
        if line.startswith("counts "):
            name, layers = json.loads(line[len("counts ") :])
            counts[name] = layers
    return counts


def layer_counts(network: nn.Module) -> list[int]:
    """Return the number of parameters of each layer that has any, in order."""
    counts = []
    for module in network.modules():
        own = [parameter.numel() for parameter in module.parameters(recurse=False)]
        if own:
            counts.append(sum(own))
    return counts


# --- One run of HtFLlib -----------------------------------------------------------------------------


@dataclass
class Log:
    """What HtFLlib printed so far; `read` takes its lines one after the other.

    HtFLlib evaluates at the start of a round: accuracy number t is that after t rounds. Its time of
    a round begins before that evaluation.
    """

    accuracies: list[float] = field(default_factory=list)
    evaluation: list[float] = field(default_factory=list)  # seconds of each evaluation
    whole: list[float] = field(default_factory=list)  # HtFLlib's seconds of each round

    def read(self, line: str) -> None:
        """Take one line of the log."""
        if line.startswith(EVALUATION_LINE):
            self.evaluation.append(float(line[len(EVALUATION_LINE) :]))
        elif found := re.match(r"Averaged Test Accuracy: (\S+)", line):
            self.accuracies.append(float(found[1]))
        elif found := re.match(r"-{25,}(?: time cost -{25,})? (\d\S*)$", line.strip()):
            self.whole.append(float(found[1]))

    def is_complete(self, rounds: int) -> bool:
        """Return whether the last of these rounds is evaluated.

        HtFLlib then trains once more, which is not needed.
        """
        return len(self.accuracies) > rounds and len(self.whole) >= rounds

    def rounds(self) -> list[dict[str, float]]:
        """Return each round's seconds without evaluation, and the evaluation after it."""
        return [
            {
                "round": t,
                "seconds": self.whole[t - 1] - self.evaluation[t - 1],
                "evaluation": self.evaluation[t],
                "accuracy": self.accuracies[t],
            }
            for t in range(1, min(len(self.whole) + 1, len(self.accuracies)))
        ]


def htfllib_command(settings: Settings, method: Method, classes: int, networks: Path) -> list[str]:
    """Return the command that starts HtFLlib's main.py."""
    options: dict[str, object] = {
        "-data": GIVEN,
        "-m": GIVEN,
        "-mfn": networks,
        "-algo": method.htfllib,
        "-ncl": classes,
        "-nc": settings.clients,
        "-gr": settings.rounds,
        "-ls": settings.epochs,
        "-lbs": settings.batch_size,
        "-lr": settings.lr,
        "-fd": settings.features,
        "-dev": settings.device.partition(":")[0],
        "-eg": 1,
        **method.options,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "main.py", *words]


def run_htfllib(
    settings: Settings, method: Method, classes: int, work: Path, limit: float | None
) -> list[dict[str, float]]:
    """Run a method in HtFLlib and return its rounds.

    Raises:
        HtfllibError: The run failed, or took longer than `limit` seconds.
    """
    networks = work / "networks"
    environment = {
        **ENVIRONMENT,
        **LOAD_MODULES,
        SHARED: f"torch.load({str(networks / 'shared.pt')!r})",
        "PYTHONUNBUFFERED": "1",
    }
    log = Log()
    command = htfllib_command(settings, method, classes, networks)
    lines = stream_lines(command, work / "system", environment, limit)
    try:
        for line in lines:
            log.read(line)
            if log.is_complete(settings.rounds):
                break
    finally:
        lines.close()
        shutil.rmtree(work / "system" / "temp", ignore_errors=True)
    if not log.is_complete(settings.rounds):
        raise HtfllibError(f"HtFLlib ended after {len(log.rounds())} rounds")
    return log.rounds()


def stream_lines(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], limit: float | None
) -> Generator[str]:
    """Start a command and yield its lines; closing the iterator ends the process.

    Raises:
        HtfllibError: It ended with an error, or was ended because it took longer than `limit`.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit if limit is not None else threading.TIMEOUT_MAX, stop)
    timer.daemon = True
    timer.start()
    last: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last = [*last[-29:], line]
            yield line
        if process.wait() and not late.is_set():
            raise HtfllibError(f"{' '.join(command)} failed:\n{''.join(last)}")
        if late.is_set():
            raise HtfllibError(f"ended after {limit:.0f} s, the end of --seconds")
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


# --- One run of barter ------------------------------------------------------------------------------


def run_barter(
    settings: Settings, name: str, precision: str, work: Path, limit: float | None
) -> list[dict[str, float]]:
    """Run a method in barter, in a process of its own, and return its rounds.

    Raises:
        HtfllibError: The run failed, or took longer than `limit` seconds.
    """
    order = {
        "settings": settings.__dict__,
        "method": name,
        "precision": precision,
        "work": str(work),
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--barter-run", json.dumps(order)]
    rounds = []
    for line in stream_lines(command, Path.cwd(), ENVIRONMENT, limit):
        if line.startswith("{"):
            rounds.append(json.loads(line))
    return rounds


def barter_rounds(
    settings: Settings, name: str, precision: str, work: Path
) -> Iterator[dict[str, Any]]:
    """Run a method in barter and yield its rounds.

    The seconds are those of the whole step with the checkpoint that it writes, less evaluation.
    """
    method = methods(settings)[name]
    spec = read_common_split(settings, work / "split").spec
    networks = client_networks(settings, spec)
    if settings.in_order:
        fit.index_batches = batches_in_order
    with tempfile.TemporaryDirectory(dir=work) as folder:
        experiment = Experiment(
            ALGORITHMS[name](**method.fields),
            data=split_source(settings, work / "split"),
            partition=Domains(),
            clients=settings.clients,
            models=[networks[name] for name in shortest_family(settings)],
            out=Path(folder) / "run",
            seed=settings.seed,
            rounds=settings.rounds,
            device=settings.device,
            precision=precision,
            evaluate=Evaluation(tests=("local",)),
        )
        for _ in range(settings.rounds):
            start = time.perf_counter()
            record = experiment.step()
            wall = time.perf_counter() - start
            yield round_of_record(record, wall, method.metric)


def shortest_family(settings: Settings) -> list[str]:
    """Return the architectures that clients have in turn, each once if that is possible.

    To barter, every network that it is given is an architecture of its own, with its own graphs.
    """
    architectures = zoo.client_architectures(settings.models, settings.clients)
    once = list(dict.fromkeys(architectures))
    in_turn = [once[k % len(once)] for k in range(settings.clients)]
    return once if in_turn == architectures else architectures


def batches_in_order(n: int, size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield batches of indices as HtFLlib takes them: not shuffled, without a short last one."""
    while True:
        for start in range(0, n - size + 1, size):
            yield torch.arange(start, start + size, device=device)


def round_of_record(record: Round, wall: float, metric: str) -> dict[str, Any]:
    """Return a round of barter in the form of `Log.rounds`.

    Args:
        record: barter's record of the round.
        wall: Seconds of the whole step.
        metric: The accuracy; its mean is weighted by numbers of test images, as HtFLlib's is.
    """
    evaluation = record.seconds.get("evaluate", 0.0)
    correct = 0.0
    images = 0.0
    for values in record.clients.values():
        correct += values[metric] * values["local_images"]
        images += values["local_images"]
    return {
        "round": record.round,
        "seconds": wall - evaluation,
        "evaluation": evaluation,
        "accuracy": correct / images,
        "phases": record.seconds,
    }


# --- Results ----------------------------------------------------------------------------------------


def describe_machine(device: str) -> dict[str, Any]:
    """Return hardware and versions."""
    machine: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: import_module(name).__version__ for name in PACKAGES},
    }
    if device.startswith("cuda"):
        machine["gpu"] = torch.cuda.get_device_name(torch.device(device))
        # PyTorch's defaults, with which HtFLlib runs.
        machine["tf32"] = {
            "convolutions": torch.backends.cudnn.allow_tf32,
            "products": torch.backends.cuda.matmul.allow_tf32,
        }
    return machine


def run_key(run: Mapping[str, Any]) -> str:
    """Return what identifies a run: library, method, precision, settings and commit."""
    names = ("library", "method", "precision", "settings", "commit", "images")
    return json.dumps({name: run.get(name) for name in names}, sort_keys=True)


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file of results; none if there is no file."""
    if not path.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["runs"]
    return runs


def write_runs(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write all runs; the file is replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    patches = [{"file": p.file, "reason": p.reason} for p in PATCHES]
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"patches": patches, "runs": runs}, indent=1) + "\n", "utf-8")
    new.replace(path)


def estimate(planned: Mapping[str, Any], runs: Iterable[Mapping[str, Any]], guess: float) -> float:
    """Return how long a run may take, by the runs of its library with the same networks.

    Their durations are scaled by the number of rounds and by the methods' costs, never down.
    Without any such run, the guess is scaled by the method's cost.
    """
    settings = planned["settings"]
    costs = {name: method.cost for name, method in methods(Settings()).items()}
    known = [
        run["wall"]
        * max(1.0, settings["rounds"] / run["settings"]["rounds"])
        * max(1.0, costs[planned["method"]] / costs[run["method"]])
        for run in runs
        if run["library"] == planned["library"]
        and all(run["settings"][name] == settings[name] for name in ("models", "size", "device"))
    ]
    return max(known, default=guess * costs[planned["method"]])


def later_seconds(run: Mapping[str, Any], name: str = "seconds") -> float:
    """Return the median seconds of the rounds after the first, or of the only one."""
    rounds = run["rounds"][1:] or run["rounds"]
    return float(statistics.median(entry[name] for entry in rounds))


def pair_runs(runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Yield HtFLlib's run beside each of barter's, in any precision.

    Method, settings, commit and images are the same.
    """
    same = ("method", "settings", "commit", "images")
    for ours in runs:
        if ours["library"] != "barter":
            continue
        for theirs in runs:
            if theirs["library"] == "htfllib" and all(theirs[name] == ours[name] for name in same):
                yield theirs, ours
                break


def make_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of runs: HtFLlib's beside each of barter's with the same settings."""
    lines = [
        "| networks | method | precision | HtFLlib, s | barter, s | ratio | first round, s | "
        "evaluation, s | accuracy |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for theirs, ours in pair_runs(runs):
        settings = ours["settings"]
        both = (theirs, ours)
        lines.append(
            f"| {settings['models']}, {settings['size']} px | {ours['method']} "
            f"| {ours['precision']} | {later_seconds(theirs):.2f} | {later_seconds(ours):.2f} "
            f"| {later_seconds(theirs) / later_seconds(ours):.1f} | "
            + " / ".join(f"{run['rounds'][0]['seconds']:.1f}" for run in both)
            + " | "
            + " / ".join(f"{later_seconds(run, 'evaluation'):.2f}" for run in both)
            + " | "
            + " / ".join(f"{100 * run['rounds'][-1]['accuracy']:.1f}" for run in both)
            + " |"
        )
    return "\n".join(lines) + "\n"


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# --- The command ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """Data, networks and code that the runs of one family of networks use."""

    work: Path
    classes: int
    fingerprint: str  # of all clients' images


def prepare(settings: Settings, checkout: Path, work: Path) -> Prepared:
    """Write the split, HtFLlib's data and networks and its patched copy below `work`.

    Data and code are not written again if they are there, of an earlier command or of another
    family of networks.

    Raises:
        HtfllibError: The folder holds something else.
    """
    marker = work / "prepared.json"
    content = describe_content(settings, checkout)
    if not marker.exists():
        if work.exists() and any(work.iterdir()):
            raise HtfllibError(f"--work {work}: give a new or empty folder")
        write_common_split(settings, work / "split")
        copy_checkout(checkout, work)
        task = read_common_split(settings, work / "split")
        write_htfllib_data(task, work / "dataset" / GIVEN)
        marker.write_text(content)
    elif marker.read_text() != content:
        raise HtfllibError(f"--work {work} has data or code of other settings: give a new folder")
    task = read_common_split(settings, work / "split")
    shutil.rmtree(work / "networks", ignore_errors=True)
    write_htfllib_networks(settings, task.spec, work / "networks")
    trained = compare_networks(settings, task.spec, work / "networks")
    own = count_own_split(settings, task.spec.classes, work)
    for name, counts in trained.items():
        line = f"{name}: {len(counts)} layers with {sum(counts):,} parameters, equal in both"
        if name in own and own[name] != counts:
            line += f" ({len(own[name])} with {sum(own[name]):,} as HtFLlib would split it)"
        say(line)
    sets = [images.fingerprint() for images in (*task.train, *task.local_tests)]
    digest = hashlib.sha256(" ".join(sets).encode()).hexdigest()[:16]
    return Prepared(work, task.spec.classes, digest)


def describe_content(settings: Settings, checkout: Path) -> str:
    """Return what a folder's data and code depend on, as JSON."""
    names = ("data", "size", "clients", "alpha", "seed", "test_images", "train_images")
    content: dict[str, object] = {name: getattr(settings, name) for name in names}
    content["bytes"] = Path(settings.data).stat().st_size
    content["code"] = hash_code(checkout)
    content["patches"] = [repr(patch) for patch in PATCHES]
    return json.dumps(content)


def plan(
    settings: Settings, only: Sequence[str], precisions: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return method, library and precision of each run; libraries alternate.

    Raises:
        ValueError: A name of `only` is no METHOD, LIBRARY or LIBRARY/METHOD.
    """
    names = methods(settings)
    possible = {*names, *LIBRARIES, *(f"{lib}/{name}" for lib in LIBRARIES for name in names)}
    for name in only:
        if name not in possible:
            raise ValueError(f"--only {name}: choose from {', '.join(sorted(possible))}")
    runs = []
    for name in names:
        for library in LIBRARIES:
            if only and not {name, library, f"{library}/{name}"} & set(only):
                continue
            # HtFLlib has one precision: PyTorch's default, TF32 in convolutions only.
            chosen = ("default",) if library == "htfllib" else tuple(precisions)
            runs += [(name, library, precision) for precision in chosen]
    return runs


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--htfllib", type=Path, help="a checkout of HtFLlib, which is not changed")
    parser.add_argument("--commit", help="its commit, if the folder has no .git")
    parser.add_argument("--data", help="an npz file: x_train, y_train, x_test, y_test")
    parser.add_argument("--models", nargs="+", default=["htfe-1"], help="families of networks")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--only", nargs="+", default=[], help="METHOD, LIBRARY or LIBRARY/METHOD")
    parser.add_argument("--precision", nargs="+", default=["auto"], help="of barter's runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet split")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1, help="local epochs")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.01, help="of SGD, in clients and servers")
    parser.add_argument("--features", type=int, default=512, help="width of the features")
    parser.add_argument("--shared", default="cnn", help="the shared network of FML and FedKD")
    parser.add_argument("--test-images", type=int, default=200, help="per client, at most")
    parser.add_argument("--train-images", type=int, help="per client, at most; default: all")
    parser.add_argument(
        "--in-order", action="store_true", help="barter takes HtFLlib's batches, to check equality"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="begin no run that would end later")
    parser.add_argument("--guess", type=float, default=120.0, help="seconds of a run, if unknown")
    parser.add_argument(
        "--work", type=Path, help="a folder for data, which a later command uses again"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "htfllib.json")
    parser.add_argument("--table", action="store_true", help="print the file's table, run nothing")
    parser.add_argument("--barter-run", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if not (args.table or args.barter_run) and not (args.htfllib and args.data):
        parser.error("--htfllib and --data are required")
    return args


def measure(args: argparse.Namespace, folder: Path, begin: float) -> bool:
    """Make all runs that the file of results lacks; return whether none was left out."""
    runs = read_runs(args.out)
    commit = find_commit(args.htfllib, args.commit)
    code = hash_code(args.htfllib)
    machine = describe_machine(args.device)
    complete = True
    for models in args.models:
        settings = Settings(
            data=str(Path(args.data).resolve()),
            models=models,
            size=args.size,
            clients=args.clients,
            alpha=args.alpha,
            seed=args.seed,
            rounds=args.rounds,
            epochs=args.epochs,
            batch_size=args.batch_size,
            lr=args.lr,
            features=args.features,
            shared=args.shared,
            test_images=args.test_images,
            train_images=args.train_images,
            device=args.device,
            in_order=args.in_order,
        )
        prepared = prepare(settings, args.htfllib, folder)
        for name, library, precision in plan(settings, args.only, args.precision):
            run: dict[str, Any] = {
                "library": library,
                "method": name,
                "precision": precision,
                # The data are known by their hash, wherever the file is.
                "settings": {**settings.__dict__, "data": Path(settings.data).name},
                "commit": commit,
                "code": code,
                "images": prepared.fingerprint,
                "machine": machine,
            }
            label = f"{models}, {name}, {library}, {precision}"
            if run_key(run) in map(run_key, runs):
                say(f"{label}: in {args.out.name} already")
                continue
            left = None if args.seconds is None else args.seconds - (time.monotonic() - begin)
            if left is not None and estimate(run, runs, args.guess) > left:
                say(f"{label}: left out, {left:.0f} s are left")
                complete = False
                continue
            start = time.monotonic()
            try:
                if library == "barter":
                    rounds = run_barter(settings, name, precision, folder, left)
                else:
                    method = methods(settings)[name]
                    rounds = run_htfllib(settings, method, prepared.classes, folder, left)
            except HtfllibError as error:
                say(f"{label}: {error}")
                complete = False
                continue
            run["rounds"] = rounds
            run["wall"] = time.monotonic() - start
            runs.append(run)
            write_runs(args.out, runs)
            accuracies = ", ".join(f"{100 * entry['accuracy']:.1f}" for entry in rounds)
            say(
                f"{label}: {later_seconds(run):.2f} s a round and "
                f"{later_seconds(run, 'evaluation'):.2f} s of evaluation, first round "
                f"{rounds[0]['seconds']:.1f} s, accuracy {accuracies} ({run['wall']:.0f} s in all)"
            )
    return complete


def main() -> None:
    """Run what the command line asks for."""
    begin = time.monotonic()
    args = parse_arguments()
    if args.barter_run:
        order = json.loads(args.barter_run)
        settings = Settings(**order["settings"])
        work = Path(order["work"])
        for entry in barter_rounds(settings, order["method"], order["precision"], work):
            say(json.dumps(entry))
        return
    complete = True
    if not args.table:
        try:
            with contextlib.ExitStack() as stack:
                folder = args.work
                if folder is None:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                complete = measure(args, folder.resolve(), begin)
        except (HtfllibError, BarterError, OSError, ValueError) as error:
            sys.exit(str(error))
    say(make_table(read_runs(args.out)))
    if not complete:
        sys.exit(1)


if __name__ == "__main__":
    main()
