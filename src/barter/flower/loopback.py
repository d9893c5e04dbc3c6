"""Run a coordinator, Flower sites on this machine, or Flower's simulation."""

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
from barter.data.task import with_absolute_paths
from barter.flower.deploy import Coordinator, create_deployment, create_simulation
from barter.flower.handshake import foreign_networks
from barter.flower.supervise import FLOWER, Child, free_port
from barter.runs.folder import SETUP, RunFolder, read_records
from barter.runs.journal import follow
from barter.runs.progress import Watcher
from barter.setup.config import Config, read_toml, to_plain, to_toml
from barter.setup.trust import DEPLOYMENT, code_names, note_consent

__all__ = ["coordinate", "run_here", "simulate"]

log = logging.getLogger("barter")


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that all processes that were started are stopped."""
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def coordinate(folder: Path, host: str, watcher: Watcher, *, insecure: bool = False) -> list[Round]:
    """Start a deployment's SuperLink, register its sites, and follow the run.

    Args:
        folder: The deployment folder.
        host: The host or address on which to listen for sites.
        watcher: Shows the progress.
        insecure: Whether sites connect without TLS and keys.

    Returns:
        The records of all rounds.
    """
    names = [site_folder.name for site_folder in sorted((folder / "sites").iterdir())]
    coordinator = Coordinator(folder, host, insecure=insecure)
    with _ends_in_order(), coordinator.running():
        coordinator.register()
        watcher.console.print(
            f"SuperLink at port {coordinator.port}; waiting for {', '.join(names)}"
        )
        return _follow(coordinator, folder / "run", watcher, {})


def run_here(config: Config, out: Path, watcher: Watcher, *, resume: bool) -> list[Round]:
    """Run a SuperLink and one site per client here, with certificates and keys.

    Args:
        config: The run's configuration.
        out: The run's folder.
        watcher: Shows the progress.
        resume: Whether to continue the run in `out`.

    Returns:
        The records of all rounds.

    Raises:
        BarterError: If a run to be resumed has no Flower sites, or if a process ends.
    """
    config = replace(config, data=with_absolute_paths(config.data))
    folder = out / SETUP
    if not resume:
        cores = config.threads or torch.get_num_threads()
        # As in one process: with many clients each has one core, with few each uses all.
        threads = 1 if 2 * config.clients >= cores else cores
        address = f"127.0.0.1:{free_port()}"
        sites = [
            {
                "name": f"client-{k}",
                "share": k,
                "device": config.device,
                "threads": threads,
                # The user who starts the run starts the sites too.
                "consent": {"models": foreign_networks(config)},
            }
            for k in range(config.clients)
        ]
        _begin(out, config, lambda: create_deployment(folder, config, sites, address))
    elif not (folder / "sites").is_dir():
        raise BarterError(f"{out} has no Flower sites: it was not started with --engine flower")
    else:
        _set_port(folder, free_port())
    coordinator = Coordinator(folder, "127.0.0.1")
    with _ends_in_order(), coordinator.running(), ExitStack() as sites_up:
        coordinator.register()
        children = {}
        env = {**coordinator.env, **FLOWER}
        for site_folder in sorted((folder / "sites").iterdir()):
            command = [sys.executable, "-m", "barter", "site", str(site_folder / "site.toml")]
            child = Child(site_folder.name, command, env, folder / f"{site_folder.name}.log")
            child.start()
            sites_up.callback(child.stop)
            children[site_folder.name] = child
        return _follow(coordinator, out, watcher, children)


def simulate(config: Config, out: Path, watcher: Watcher, *, resume: bool) -> list[Round]:
    """Run Flower's simulation: a pool of processes on all cores and GPUs.

    Args:
        config: The run's configuration.
        out: The run's folder.
        watcher: Shows the progress.
        resume: Whether to continue the run in `out`.

    Returns:
        The records of all rounds.

    Raises:
        ConfigError: If the configuration names one GPU.
    """
    # Ray shows a process only the GPUs that it may use, numbered from 0.
    if ":" in config.device:
        raise ConfigError(
            f"device={config.device!r}: Flower's simulation spreads clients over all GPUs; use "
            "cuda, and choose among them with CUDA_VISIBLE_DEVICES"
        )
    config = replace(config, data=with_absolute_paths(config.data))
    folder = out / SETUP
    if config.timeout is not None:
        log.warning(
            "timeout=%g: the server continues without a late client, but Flower's simulation does "
            "not end its process: the client finishes its call, and its core is busy until then",
            config.timeout,
        )
    if not resume:
        _begin(out, config, lambda: create_simulation(folder, config))
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    options: dict[str, float] = {
        "num-supernodes": config.clients,
        "client-resources-num-cpus": 1,
    }
    if gpus:
        # At most four clients share a GPU.
        gpu_share = min(1.0, gpus / min(config.clients, 4 * gpus))
        options["client-resources-num-gpus"] = gpu_share
    coordinator = Coordinator(folder, "127.0.0.1", insecure=True, simulation=options)
    with _ends_in_order(), coordinator.running():
        return _follow(coordinator, out, watcher, {})


def _begin(out: Path, config: Config, prepare: Callable[[], None]) -> None:
    """Create the folder of a run on Flower.

    Remains of a creation that was killed are removed. The run counts as begun after `prepare`.
    """

    def prepare_anew() -> None:
        note_consent(out, [*code_names(to_plain(config)), DEPLOYMENT])
        shutil.rmtree(out / SETUP, ignore_errors=True)
        prepare()

    RunFolder.create(out, to_toml(config), prepare_anew).release()


def _follow(
    coordinator: Coordinator, out: Path, watcher: Watcher, sites: Mapping[str, Child]
) -> list[Round]:
    """Submit the run and show its progress; stop the run if interrupted.

    Returns:
        The records of all rounds.
    """

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
    return read_records(out)


def _set_port(folder: Path, port: int) -> None:
    """Write a new coordinator port to all sites, as the old one may be in use."""
    for path in (folder / "sites").glob("*/site.toml"):
        path.write_text(tomli_w.dumps({**read_toml(path), "superlink": f"127.0.0.1:{port}"}))
