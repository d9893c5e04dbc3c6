"""The folder of a deployment, and what the commands say to nonsense."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import subprocess
import threading
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr")

from cryptography import x509
from flwr.app import Context, RecordDict
from rich.console import Console

from barter.cli.app import main
from barter.core.files import create_folder
from barter.flower import deploy, loopback
from barter.flower.supervise import FLOWER, load_setup
from barter.runs.progress import Watcher
from barter.setup.config import describe_wire, read_toml, resolve
from tests.flower.grid import LoopbackGrid
from tests.forked import forked, status

INIT = ["flower", "init"]
SITES = ["--sites", "north, south", "--address", "fl.example.org:8443"]


def test_init_writes_all_that_a_deployment_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "d"
    assert main([*INIT, str(folder), *SITES, "--algorithm", "fedzge", "--set", "rounds=7"]) == 0
    assert "README.md describes the next steps" in capsys.readouterr().out
    run = resolve(read_toml(folder / "run.toml"))
    assert (type(run.algorithm).__name__, run.rounds, run.clients, run.engine) == (
        "FedZGE",
        7,
        2,
        "flower",
    )
    assert run.data.source == "sites"
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"]["folder"] == str(folder)
    for name in ("north", "south"):
        home = folder / "sites" / name
        setup = load_setup(home / "site.toml")
        assert (setup.name, setup.superlink, setup.insecure) == (name, "fl.example.org:8443", False)
        assert (home / "ca.crt").read_bytes() == (folder / "certificates" / "ca.crt").read_bytes()
        assert stat.S_IMODE((home / "key").stat().st_mode) == 0o600
        assert (home / "key.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    assert (folder / "sites/north/key").read_bytes() != (folder / "sites/south/key").read_bytes()
    assert stat.S_IMODE((folder / "certificates" / "ca.key").stat().st_mode) == 0o600
    server = x509.load_pem_x509_certificate((folder / "certificates" / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fl.example.org" in names.get_values_for_type(x509.DNSName)
    assert "127.0.0.1" in map(str, names.get_values_for_type(x509.IPAddress))
    authority = x509.load_pem_x509_certificate((folder / "certificates" / "ca.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    readme = (folder / "README.md").read_text()
    assert "$" not in readme
    assert f"barter flower start {folder}" in readme


@pytest.mark.parametrize(
    ("older", "said"),
    [
        (False, "wire lean (default on Flower; wire.profile=exact sends exact values)"),
        (True, "wire exact"),
    ],
)
def test_a_deployment_of_an_older_version_keeps_sending_exact_values(
    older: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "d"
    with create_folder(folder, 0o700) as new:
        deploy._write_app(new, folder, resolve({"clients": 2, "engine": "flower"}), "app")
        (new / "sites").mkdir()
    if older:
        tree = read_toml(folder / "run.toml")
        del tree["wire"]  # Versions without encodings did not write it.
        (folder / "run.toml").write_text(tomli_w.dumps(tree))
    monkeypatch.setattr(loopback, "Coordinator", Reached)
    with pytest.raises(Reached):
        main(["flower", "start", str(folder)])
    header = " ".join(capsys.readouterr().out.split())
    assert header == f"DFFKE at 2 sites, 5 rounds, {said}"
    started = []
    monkeypatch.setattr(deploy, "conduct", lambda grid, config, *_: started.append(config))
    monkeypatch.setattr(deploy, "_end_with", lambda parent: None)
    context = Context(1, 1, {}, RecordDict(), {"folder": str(folder), "out": str(tmp_path / "run")})
    deploy.main(LoopbackGrid([], monkeypatch), context)
    assert [describe_wire(config) for config in started] == [said.removeprefix("wire ")]


@pytest.mark.parametrize("profile", ["auto", "exact"])
def test_a_run_on_flower_says_how_it_encodes(
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loopback, "create_deployment", lambda folder, *_: folder.mkdir())
    monkeypatch.setattr(loopback, "Coordinator", Reached)
    out = tmp_path / "run"
    command = ["run", "--engine", "flower", "--device", "cpu", "--set", f"wire.profile={profile}"]
    with pytest.raises(Reached):
        main([*command, "--algorithm", "fedavg", "--set", "clients=2", "--out", str(out)])
    chosen = read_toml(out / "config.toml")["wire"]["profile"]
    assert chosen == ("lean" if profile == "auto" else "exact")
    said = f", wire {chosen} (default on Flower; " if profile == "auto" else ", wire exact; folder"
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_coordinator_may_have_an_address_of_version_6(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    assert main([*INIT, str(folder), "--sites", "north", "--address", "[2001:db8::7]:8443"]) == 0
    assert load_setup(folder / "sites" / "north" / "site.toml").superlink == "[2001:db8::7]:8443"
    server = x509.load_pem_x509_certificate((folder / "certificates" / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "2001:db8::7" in map(str, names.get_values_for_type(x509.IPAddress))
    coordinator = deploy.Coordinator(folder, "::")
    at = coordinator.superlink.command.index("--sites")
    assert coordinator.superlink.command[at + 1] == "[::]:8443"
    assert coordinator.control != coordinator.port == 8443


def test_what_flower_bundles_holds_nothing_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    assert main([*INIT, str(folder), *SITES]) == 0
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("secret")
    command, env = ["flwr", "build", "--app", str(folder)], {**os.environ, **FLOWER}
    built = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    (bundle,) = tmp_path.glob("*.fab")
    names = {name for name in zipfile.ZipFile(bundle).namelist() if not name.startswith(".info")}
    assert names == {"pyproject.toml"}, built.stdout


def test_sites_may_share_the_data_of_the_run(tmp_path: Path) -> None:
    assert main([*INIT, str(tmp_path / "d"), *SITES, "--set", "data.source=digits"]) == 0
    assert [
        load_setup(tmp_path / "d" / "sites" / name / "site.toml").share
        for name in ("north", "south")
    ] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*INIT, "d", "--sites", "a,b", "--address", "example.org"], "write HOST:PORT"),
        (
            [*INIT, "d", "--sites", "a", "--address", "::1:8443"],
            "put an IPv6 address in brackets",
        ),
        ([*INIT, "d", "--sites", "a,a", "--address", "h:1"], "names must be unique"),
        ([*INIT, "d", "--sites", "a,b/c", "--address", "h:1"], "site name 'b/c': use letters"),
        ([*INIT, ".", "--sites", "a", "--address", "h:1"], "exists and is not empty"),
        ([*INIT, "d", "--sites", "a", "--address", "h:1", "--set", "rounds=0"], "rounds"),
        (["flower", "start", "."], "run.toml: there is no such file"),
        (["site", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["site", "unknown.toml"], "unknown key 'colour'"),
        (["site", "keyless.toml"], "ca.crt is missing: copy the site's whole folder"),
        (["site", "misled.toml"], "address 'here': write HOST:PORT"),
        (["site", "nameless.toml"], "site name 'a b': use letters"),
        (
            ["run", "--set", "data.source=sites"],
            "every site brings its own data, which needs --engine flower",
        ),
        (
            ["run", "--engine", "flower", "--set", "data.source=sites"],
            "every site brings its own data",
        ),
    ],
)
def test_nonsense(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unknown.toml").write_text('name = "a"\nshare = 0\ncolour = "red"\n')
    Path("keyless.toml").write_text('name = "a"\nshare = 0\n')
    Path("misled.toml").write_text('name = "a"\nshare = 0\nsuperlink = "here"\n')
    Path("nameless.toml").write_text('name = "a b"\nshare = 0\n')
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_without_openssl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "mkdir", "rm"):
        (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main([*INIT, str(tmp_path / "d"), *SITES]) == 2
    assert "is openssl installed?" in capsys.readouterr().err


def test_a_simulation_says_that_a_timeout_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loopback, "Coordinator", Reached)
    config = resolve({"clients": 2, "data": {"source": "digits"}, "timeout": 2})
    with pytest.raises(Reached):
        loopback.simulate(config, tmp_path / "run", Watcher(Console(), 1), resume=False)
    (said,) = caplog.messages
    assert "timeout=2" in said
    assert "does not end its process" in said


@pytest.mark.parametrize("moment", ["certificates.sh", "site.toml", "key.pub", ".config.toml.tmp"])
def test_who_is_killed_while_a_run_is_set_up_can_begin_it_again(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the very last file, a run has not begun; when it has, all that it needs is there."""
    out, config = (
        tmp_path / "run",
        resolve({"clients": 2, "data": {"source": "digits"}, "engine": "flower"}),
    )
    monkeypatch.setattr(loopback, "Coordinator", Reached)

    def killed() -> int:
        write = Path.write_bytes if moment == "key.pub" else Path.write_text

        def torn(path: Path, what: Any, *rest: Any) -> int:
            if path.name == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(path, what, *rest)

        setattr(Path, write.__name__, torn)
        loopback.run_here(config, out, Watcher(Console(), 1), resume=False)
        return 0

    assert status(forked(killed, tmp_path / "said")) == -signal.SIGKILL, (
        tmp_path / "said"
    ).read_text()
    assert not (out / "config.toml").exists()
    with pytest.raises(Reached):
        loopback.run_here(config, out, Watcher(Console(), 1), resume=False)
    assert sorted(home.name for home in (out / "flower" / "sites").iterdir()) == [
        "client-0",
        "client-1",
    ]
    assert all((home / "key.pub").is_file() for home in (out / "flower" / "sites").iterdir())
    assert (out / "config.toml").is_file()
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "flower",
    ]


class Reached(Exception):
    """The set-up is over."""

    def __init__(self, folder: Path, host: str, **options: Any) -> None:
        super().__init__(folder)
        raise self


def test_a_deployment_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        deploy, "_template", lambda name: "exit 1" if name.endswith(".sh") else name
    )
    assert main([*INIT, str(tmp_path / "d"), *SITES]) == 2
    assert "certificates.sh failed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("room", [True, False])
def test_what_stops_the_server_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    folder = tmp_path / "d"
    deploy.create_deployment(
        folder, resolve({"clients": 1}), [{"name": "a", "share": 0}], "127.0.0.1:1"
    )

    def conduct(*_: Any) -> None:
        raise ValueError("rows of two kinds:\n3 and 4")

    monkeypatch.setattr(deploy, "conduct", conduct)
    monkeypatch.setattr(deploy, "_end_with", lambda parent: None)
    if not room:
        monkeypatch.setattr(
            deploy,
            "write_obstacle",
            lambda folder: f"{folder} cannot be written: No space left on device",
        )
    context = Context(1, 1, {}, RecordDict(), {"folder": str(folder), "out": str(tmp_path / "run")})
    with pytest.raises(ValueError):
        deploy.main(LoopbackGrid([], monkeypatch), context)
    place = rf"ValueError: rows of two kinds: 3 and 4 \({__file__}:\d+\)"
    why = place if room else f"{folder} cannot be written: No space left on device"
    kind, said = json.loads((folder / "journal.jsonl").read_text().splitlines()[-1])
    assert kind == "error"
    assert re.fullmatch(
        f"the server stopped: {why}; finished rounds are kept, start again to continue", said
    )


def test_a_server_whose_superlink_is_gone_ends_whatever_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deploy, "ORPHAN", 0.0)
    here, there = os.pipe()
    if (superlink := os.fork()) == 0:
        if os.fork() == 0:
            deploy._end_with(os.getppid())
            os.write(there, b"1")
            threading.Event().wait()
        os.read(here, 1)  # the server has begun
        os._exit(0)
    os.close(there)
    os.waitpid(superlink, 0)
    assert select.select([here], [], [], 20)[0]
    assert os.read(here, 1) == b"", "nobody holds the other end"
    os.close(here)
