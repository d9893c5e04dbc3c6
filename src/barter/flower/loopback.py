"""A coordinator with its progress on this terminal, and a whole federation of Flower sites on this machine."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import tomli_w
import torch

from barter.core.errors import BarterError, ConfigError
from barter.core.record import Round
from barter.data.task import anchored
from barter.flower.deploy import Coordinator, init, init_simulation
from barter.flower.supervise import FLOWER, Child, free_port
from barter.runs.folder import SETUP, RunFolder, records
from barter.runs.journal import follow
from barter.runs.progress import Watcher
from barter.setup.config import Config, read, to_toml

__all__ = ["coordinate", "run_here", "simulate"]

log = logging.getLogger("barter")


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """Being told to end is like Ctrl-C inside: what was started is taken down."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def coordinate(folder: Path, host: str, watcher: Watcher, *, insecure: bool = False) -> list[Round]:
    """Start the SuperLink of a deployment folder, let its sites in, and follow the run to its end."""
    homes = sorted((folder / "sites").iterdir())
    coordinator = Coordinator(folder, host, insecure=insecure)
    with _ends_in_order(), coordinator.running():
        coordinator.register()
        watcher.console.print(
            f"SuperLink at port {coordinator.port}; waiting for {', '.join(home.name for home in homes)}"
        )
        return _follow(coordinator, folder / "run", watcher, {})


def run_here(config: Config, out: Path, watcher: Watcher, *, resume: bool) -> list[Round]:
    """A SuperLink and one site for each client on this machine, with certificates and keys as between machines."""
    config, folder = replace(config, data=anchored(config.data)), out / SETUP
    if not resume:
        cores = config.threads or torch.get_num_threads()
        threads = {
            "threads": 1 if 2 * config.clients >= cores else cores
        }  # as clients of one process share the cores
        address = f"127.0.0.1:{free_port()}"
        device = config.device
        sites = [
            {"name": f"client-{k}", "share": k, "device": device, **threads}
            for k in range(config.clients)
        ]
        _begin(out, config, lambda: init(folder, config, sites, address))
    elif not (folder / "sites").is_dir():
        raise BarterError(f"{out} has no Flower sites: it was not begun with --engine flower")
    else:
        _move(folder, free_port())
    coordinator = Coordinator(folder, "127.0.0.1")
    with _ends_in_order(), coordinator.running(), ExitStack() as sites_up:
        coordinator.register()
        children = {}
        for home in sorted((folder / "sites").iterdir()):
            command = [sys.executable, "-m", "barter", "site", str(home / "site.toml")]
            children[home.name] = Child(
                home.name, command, {**coordinator.env, **FLOWER}, folder / f"{home.name}.log"
            )
            children[home.name].start()
            sites_up.callback(children[home.name].stop)
        return _follow(coordinator, out, watcher, children)


def simulate(config: Config, out: Path, watcher: Watcher, *, resume: bool) -> list[Round]:
    """Flower's simulation: clients take turns in a pool of processes, on as many cores and GPUs as there are."""
    if ":" in config.device:  # Ray shows a process only the GPUs it may use, numbered from 0 on
        raise ConfigError(
            f"device={config.device!r}: Flower's simulation spreads clients over all GPUs; use cuda, "
            "and choose among them with CUDA_VISIBLE_DEVICES"
        )
    config, folder = replace(config, data=anchored(config.data)), out / SETUP
    if config.timeout is not None:
        log.warning(
            "timeout=%g: the server goes on without a late client, but Flower's simulation does not end its process: "
            "the client finishes its call, and its core is busy until then",
            config.timeout,
        )
    if not resume:
        _begin(out, config, lambda: init_simulation(folder, config))
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    resources = {"num-supernodes": config.clients, "client-resources-num-cpus": 1}
    share = (
        {"client-resources-num-gpus": min(1.0, gpus / min(config.clients, 4 * gpus))}
        if gpus
        else {}
    )
    coordinator = Coordinator(folder, "127.0.0.1", insecure=True, simulation={**resources, **share})
    with _ends_in_order(), coordinator.running():
        return _follow(coordinator, out, watcher, {})


def _begin(out: Path, config: Config, prepare: Callable[[], None]) -> None:
    """The folder of a run on Flower: it is prepared, whatever a kill has left of it before, and only then has begun."""

    def anew() -> None:
        shutil.rmtree(out / SETUP, ignore_errors=True)
        prepare()

    RunFolder.create(out, to_toml(config), anew).release()


def _follow(
    coordinator: Coordinator, out: Path, watcher: Watcher, sites: Mapping[str, Child]
) -> list[Round]:
    """Submit the run and show it to its end; a run that is left before is stopped."""

    def check() -> None:
        coordinator.check()
        for name, child in sites.items():
            if child.poll() is not None:
                raise BarterError(f"site {name} ended: see {child.log}")

    run = coordinator.submit(out)
    try:
        for _ in follow(coordinator.folder / "journal.jsonl", watcher, check):
            pass
    except BaseException:
        coordinator.stop(run)
        raise
    return records(out)


def _move(folder: Path, port: int) -> None:
    """Another port for the coordinator: the one of the last time may be taken."""
    for path in (folder / "sites").glob("*/site.toml"):
        path.write_text(tomli_w.dumps({**read(path), "superlink": f"127.0.0.1:{port}"}))
