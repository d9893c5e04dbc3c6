"""The Flower engine on a grid in this process: who answers, who does not, and what is done about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo

from barter.core.errors import BarterError, CheckpointError, ClientError, ConfigError
from barter.core.payload import isolate, leaves, nbytes
from barter.core.wire_settings import WireSettings
from barter.data.task import Data
from barter.experiment import Experiment
from barter.flower import deploy, engine
from barter.flower.client_app import pack_blobs
from barter.flower.consent import Consent
from barter.flower.deploy import conduct
from barter.flower.frames import Frame
from barter.privacy.side_information import PROGRESS
from barter.runs.journal import Journal
from barter.setup.config import Config, to_plain
from barter.setup.trust import read_run
from tests.conftest import digits_file, federation, same, tiny
from tests.flower.grid import Code, LoopbackGrid, Silent, site

Run = Callable[..., Experiment]


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackGrid:
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    sites = [
        site(tmp_path / f"memory-{k}", name=f"site-{k}", share=k, device="cpu") for k in range(3)
    ]
    return LoopbackGrid(sites, monkeypatch)


@pytest.fixture
def run(grid: LoopbackGrid, tmp_path: Path) -> Run:
    def conducted(rounds: int = 1, **options: Any) -> Experiment:
        fields = {
            "algorithm": tiny("fedavg"),
            "clients": 3,
            "models": "small-mlp",
            "device": "cpu",
            **options,
        }
        return conduct(
            grid, Config(rounds=rounds, **fields), tmp_path / "run", Journal(tmp_path / "journal")
        )

    return conducted


def once(grid: LoopbackGrid, node: int, spoil: Callable[[Callable[[], Any]], Any]) -> list[int]:
    """The first call at a node goes wrong; how often it was called."""
    calls: list[int] = []

    def deliver(at: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if at != node or request["ask"] != "call":
            return answer()
        calls.append(request["round"])
        return spoil(answer) if len(calls) == 1 else answer()

    grid.deliver = deliver
    return calls


def failed(code: int, *, done: bool) -> Callable[[Callable[[], Any]], Any]:
    def spoil(answer: Callable[[], Any]) -> Any:
        if done:
            answer()
        raise Code(code)

    return spoil


@pytest.mark.parametrize("done", [False, True])
def test_who_is_lost_on_the_way_is_asked_again_and_trains_once(
    grid: LoopbackGrid, run: Run, done: bool
) -> None:
    calls = once(grid, 101, failed(8, done=done))
    work: list[str] = []
    settle = grid.sites[101].settle

    def counted(session: Any) -> Any:
        local, precision = settle(session)
        call = local.call
        local.call = lambda *call_, **told: (work.append(call_[0]), call(*call_, **told))[1]  # type: ignore[method-assign]
        return local, precision

    grid.sites[101].settle = counted
    experiment = run()
    assert experiment.folder is not None
    (record,) = experiment.folder.records()
    assert record.failures == []
    assert calls == [1, 1]
    assert work == ["client_update", "evaluate"]


def test_a_site_that_stays_away_is_a_failure_that_names_it(grid: LoopbackGrid, run: Run) -> None:
    def offline(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if node == 102 and request["ask"] == "call" and request["round"] == 2:
            grid.offline.add(102)
            raise Code(5)
        return answer()

    grid.deliver = offline
    experiment = run(3, min_clients=2)
    assert experiment.folder is not None
    one, two, three = experiment.folder.records()
    assert one.failures == []
    assert (
        two.failures[0]
        == "client 2 failed in 'client_update', round 2: site site-2: the site went offline"
    )
    assert "site-2: the site is offline" in three.failures[0]
    assert sorted(k for k, metrics in three.clients.items() if "global" in metrics) == [0, 1]


@pytest.mark.parametrize(
    "bad", [{"error": "ValueError: no coffee", "traceback": ""}, {"answer": 10**400}]
)
def test_an_error_is_no_answer_and_who_is_away_for_a_moment_is_waited_for(
    grid: LoopbackGrid, run: Run, monkeypatch: pytest.MonkeyPatch, bad: dict[str, Any]
) -> None:
    looks, online = [], grid.get_node_ids

    def deliver(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if request["ask"] != "call" or request["round"] != 2:
            return answer()
        if node == 102 and not looks:
            grid.offline.add(102)
            raise Code(5)
        return bad if node == 100 and len(looks) < 6 else answer()

    def nodes() -> Any:
        if 102 in grid.offline:
            looks.append(102)
            if len(looks) == 6:
                grid.offline.clear()
        return online()

    grid.deliver = deliver
    monkeypatch.setattr(grid, "get_node_ids", nodes)
    experiment = run(2, min_clients=2)
    assert experiment.folder is not None
    (failure,) = experiment.folder.records()[1].failures
    assert "site site-0: " in failure


@pytest.mark.parametrize(("silence", "said"), [(Silent(), " (within 2 s)"), (Code(3), "")])
def test_a_site_that_hangs_costs_its_time_once_in_a_round(
    grid: LoopbackGrid, run: Run, silence: Exception, said: str
) -> None:
    asked: list[tuple[int, str]] = []

    def hangs(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if node == 101 and request["ask"] == "call":
            asked.append((request["round"], request["method"]))
            if request["round"] == 1:
                raise silence
        return answer()

    grid.deliver = hangs
    experiment = run(2, algorithm=tiny("fedaf"), min_clients=2, timeout=2.0)
    assert experiment.folder is not None
    one, two = experiment.folder.records()
    methods = list(experiment.config.algorithm.crosses)
    assert asked == [(1, methods[0]), *((2, method) for method in methods)]
    first, *others = one.failures
    assert first.endswith(f"site site-1: no answer in time{said}")
    assert [line.split("'")[1] for line in others] == ["receive", "evaluate"]
    assert all(
        line.endswith("site site-1: it did not answer an earlier call of this round in time")
        for line in others
    )
    assert two.failures == []


def test_how_far_a_site_is_can_be_seen_while_its_call_goes_on(
    grid: LoopbackGrid, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PROGRESS_SECONDS", 0.05)
    said, asked, shown = iter([0.25, 0.75, 0.5, 7.0, float("nan"), "x"]), set(), []

    def deliver(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if request["ask"] == "hello":
            return {**answer(), "tells": node != 100}
        if node == 102:
            return answer()
        raise Silent

    def progress(node: int) -> Any:
        asked.add(node)
        return next(said, 0.75)

    def advance(journal: Journal, amount: float) -> None:
        shown.append(amount)

    grid.deliver, grid.progress = deliver, progress
    monkeypatch.setattr(Journal, "advance", advance)
    experiment = run(1, min_clients=1, timeout=2.0)
    assert asked == {101}, "of those who are waited for, and can tell"
    assert [k for k in range(3) if PROGRESS in experiment.engine.crossed[k]] == [1], "and it counts"
    assert [amount for amount in shown if amount][:5] == [1.0, 0.25, 0.5, 1.0, 0.25]
    assert next(said, "all of it was said") == "all of it was said"


@pytest.mark.parametrize(("sites", "seconds"), [(1, [3, 6, 9]), (4, [9, 18, 27])])
def test_the_more_sites_there_are_the_seldomer_they_are_asked_how_far_they_are(
    sites: int, seconds: list[int], grid: LoopbackGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = SimpleNamespace(monotonic=lambda: second), list[int]()
    monkeypatch.setattr(engine, "time", clock)
    monkeypatch.setattr(engine, "send_requests", lambda *_: asked.append(clock.monotonic()) or {})
    progress = engine.Progress(grid, 0.0)
    for second in range(30):  # noqa: B007  # the clock says it
        assert list(progress.poll(set(range(sites)))) == []
    assert asked[:3] == seconds


def test_who_waits_for_sites_looks_once_in_a_second(
    grid: LoopbackGrid, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pauses = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.01
        pauses.append(seconds)

    monkeypatch.setattr(deploy, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(grid, "get_node_ids", lambda: [100, 101])
    with pytest.raises(ConfigError, match=r"2 of 3 sites came within 120 s \(site-0, site-1\)"):
        run(1, timeout=100.0)
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0
    assert len(pauses) < 250


def test_what_all_are_told_is_encoded_once(
    grid: LoopbackGrid, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, push, made = [], grid.push_messages, []
    monkeypatch.setattr(
        engine, "pack_blobs", lambda blobs: (made.append(blobs), pack_blobs(blobs))[1]
    )

    def pushed(messages: Iterable[Message]) -> Iterable[str]:
        sent.append([message.content.get("bulk") for message in messages])
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", pushed)
    run(1)
    *hellos, call = sent
    assert all(bulk is None for hello in hellos for bulk in hello)
    assert len(call) == 3, "one request for all of them"
    assert call[0] is not None
    assert all(bulk is call[0] for bulk in call)
    assert len(made) == 1
    down = [request["args"] for _, request in grid.asked if request["ask"] == "call"]
    assert all(same(dict(leaves(other)), dict(leaves(down[0]))) for other in down)


def test_how_large_answers_can_be_is_said_before_they_are_asked_for(
    grid: LoopbackGrid, tmp_path: Path
) -> None:
    largest, seen = tmp_path / "largest", list[tuple[str, str]]()

    def deliver(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if request["ask"] == "call":
            seen.append((request["method"], largest.read_text()))
        return answer()

    grid.deliver = deliver
    fields: dict[str, Any] = {
        "algorithm": tiny("fedfree"),
        "clients": 3,
        "models": "small-mlp",
        "device": "cpu",
    }
    conduct(
        grid, Config(rounds=1, **fields), tmp_path / "run", Journal(tmp_path / "journal"), largest
    )
    assert {method for method, _ in seen} == {"learn", "receive"}
    assert all(10**6 < int(most) < 1.2e6 for method, most in seen if method == "learn"), (
        "a few layers"
    )
    assert all(most == str(10**6) for method, most in seen if method == "receive"), "nothing"
    seen.clear()
    fields["algorithm"] = tiny("fedavg", fraction=0.4)
    experiment = conduct(
        grid, Config(rounds=1, **fields), tmp_path / "other", Journal(tmp_path / "journal"), largest
    )
    size = nbytes(dict(experiment.server.model.state_dict()))
    assert set(seen) == {("client_update", str(2 * size + 10**6)), ("evaluate", str(10**6))}


def test_an_answer_that_is_larger_than_it_can_be_is_a_failure(grid: LoopbackGrid, run: Run) -> None:
    def longer(answer: Callable[[], Any]) -> Any:
        reply = answer()
        return {**reply, "answer": 8 * reply["answer"]}

    once(grid, 101, longer)
    experiment = run(2, algorithm=tiny("fedfree"), min_clients=2)
    assert experiment.folder is not None
    one, two = experiment.folder.records()
    (failure,) = one.failures
    named = r"client 1 failed in 'learn', round 1: site site-1: learn has \d+ bytes, expected at most \d+"
    assert re.fullmatch(named, failure)
    assert two.failures == []


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (torch.zeros(2_000_000), r"an answer of 8\.\d MB, expected at most \d\.\d"),
        ([0] * 2_000_000, r"an answer whose structure has 6\.\d MB, expected at most 4; .*"),
    ],
)
def test_an_answer_that_is_much_too_large_is_not_even_decoded(
    grid: LoopbackGrid, run: Run, monkeypatch: pytest.MonkeyPatch, extra: Any, reason: str
) -> None:
    decoded: list[int] = []
    plain_decode = engine.decode

    def decode(frame: Frame) -> Any:
        decoded.append(len(frame.header) + sum(len(blob.data) for blob in frame.blobs.values()))
        return plain_decode(frame)

    monkeypatch.setattr(engine, "decode", decode)
    once(grid, 101, lambda answer: {**answer(), "answer": {"more": extra}})
    experiment = run(2, min_clients=2)
    assert experiment.folder is not None
    one, two = experiment.folder.records()
    (failure,) = one.failures
    named = "client 1 failed in 'client_update', round 1: site site-1: "
    assert re.fullmatch(named + reason, failure)
    assert two.failures == []
    assert decoded
    assert max(decoded) < 2_000_000


def test_a_hello_that_is_much_too_large_is_not_even_decoded(
    grid: LoopbackGrid, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deliver(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        return {"hello": torch.zeros(2_000_000)} if node == 102 else answer()

    grid.deliver = deliver
    with pytest.raises(ConfigError, match=r"an answer of 8\.0 MB, expected at most 1\.0"):
        run()


def test_too_few_answers_end_the_run_and_lose_nothing(grid: LoopbackGrid, run: Run) -> None:
    def silent(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if node == 100 and request["ask"] == "call" and request["round"] == 2:
            raise Silent
        return answer()

    grid.deliver = silent
    with pytest.raises(
        ClientError, match=r"2 of 3 clients answered.*site-0: no answer in time \(within 0.5 s\)"
    ):
        run(2, timeout=0.5)
    grid.deliver = lambda node, request, answer: answer()
    again = run(2, timeout=60.0)
    assert again.folder is not None
    assert [r.round for r in again.folder.records()] == [1, 2]


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (lambda w: {n: v / 0 if v.is_floating_point() else v for n, v in w.items()}, "holds NaN"),
        (lambda w: {n: v[None] for n, v in w.items()}, "the client's is float32 (256, 64)"),
        (lambda w: list(w.values()), "client_update is a list, expected"),
        (lambda w: dict.fromkeys(w, "x"), "is a str, expected Tensor"),
        (lambda w: {n: v * 1000 for n, v in w.items()}, "times the reference"),
    ],
)
def test_bad_answers_are_failures(
    grid: LoopbackGrid, run: Run, spoiled: Callable[[Any], Any], said: str
) -> None:
    once(grid, 101, lambda answer: {**(reply := answer()), "answer": spoiled(reply["answer"])})
    experiment = run(2, min_clients=1)
    assert experiment.folder is not None
    one, two = experiment.folder.records()
    assert said in one.failures[0]
    assert "site site-1" in one.failures[0]
    assert two.failures == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": [torch.zeros(3, dtype=torch.uint8)]}, "is no valid encoding: 3 bytes instead of"),
        ({"scales": torch.full((256,), torch.nan)}, "holds NaN or infinity"),
        ({"scales": torch.full((256,), 1e5)}, "the minimum of its values is"),
        ({"shape": [256, 64_000_000], "deflated": True}, "MB when decoded, expected at most 1."),
        ({"shape": [64, 256], "scales": torch.ones(64)}, "the client's is float32 (256, 64)"),
    ],
)
def test_bad_encodings_are_failures(
    grid: LoopbackGrid, run: Run, change: dict[str, Any], said: str
) -> None:
    def spoil(answer: Callable[[], Any]) -> Any:
        reply = answer()
        name, weight = next(item for item in reply["answer"].items() if isinstance(item[1], dict))
        return {**reply, "answer": {**reply["answer"], name: {**weight, **change}}}

    once(grid, 101, spoil)
    experiment = run(2, min_clients=1, wire=WireSettings(profile="small"))
    assert experiment.folder is not None
    one, two = experiment.folder.records()
    assert said in one.failures[0]
    assert "site site-1" in one.failures[0]
    assert two.failures == []
    assert one.clients[1]["bytes_up"] == 0 < two.clients[1]["bytes_up"]


def test_a_site_limits_what_it_is_sent_by_its_decoded_size(
    grid: LoopbackGrid, run: Run, tmp_path: Path
) -> None:
    grid.sites[101].consent = Consent(megabytes=0.05)
    experiment = run(1, min_clients=1, wire=WireSettings(profile="small"))
    assert experiment.folder is not None
    (record,) = experiment.folder.records()
    assert record.clients[0]["bytes_down"] < 50_000
    assert "accepts 0.05 (consent.megabytes)" in record.failures[0]


def test_what_a_site_raises_comes_with_its_traceback(grid: LoopbackGrid, run: Run) -> None:
    once(
        grid,
        100,
        lambda answer: {"error": "ValueError: no coffee", "traceback": "Traceback of the site"},
    )
    with pytest.raises(ClientError, match=r"site site-0: ValueError: no coffee") as caught:
        run()
    assert caught.value.__notes__ == ["Traceback of the site"]


def test_an_error_of_the_front_is_a_failure(grid: LoopbackGrid, run: Run) -> None:
    def dead(answer: Callable[[], Any]) -> Any:
        raise ConnectionError("the site's worker is not there")

    once(grid, 100, dead)
    with pytest.raises(
        ClientError, match=r"Flower's error 2: ConnectionError: the site's worker is not there"
    ):
        run()


def test_a_site_that_comes_back_under_another_number_is_found_by_name(
    grid: LoopbackGrid, run: Run
) -> None:
    def moved(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if node == 101 and request["ask"] == "call" and request["round"] == 2:
            grid.sites[207] = grid.sites.pop(101)
            raise Code(5)
        return answer()

    grid.deliver = moved
    experiment = run(3)
    assert experiment.folder is not None
    assert [r.failures for r in experiment.folder.records()] == [[], [], []]


def test_a_site_is_who_its_key_says(
    grid: LoopbackGrid, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {100: "site-0", 101: "site-1", 102: "site-2", 300: "site-3"}

    def nodes() -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=keys[node]) for node in grid.get_node_ids()]

    def claimed(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if node == 101 and request["ask"] == "call" and request["round"] == 2:
            grid.sites[300] = grid.sites[
                101
            ]  # somebody who calls himself site-1, with a key of his own
            grid.offline.add(101)
            raise Code(5)
        assert node != 300 or request["ask"] == "hello"
        return answer()

    monkeypatch.setattr(grid, "get_nodes", nodes)
    grid.deliver = claimed
    experiment = run(3, min_clients=2)
    assert experiment.folder is not None
    assert ["site-1" in "".join(r.failures) for r in experiment.folder.records()] == [
        False,
        True,
        True,
    ]
    grid.offline.clear()
    del grid.sites[300]
    keys[101] = "site-7"
    with pytest.raises(
        BarterError, match="the site whose key is registered for site-7 claims to be 'site-1'"
    ):
        run(4, min_clients=3)


def test_a_run_goes_on_without_a_site_that_stays_away(
    grid: LoopbackGrid, run: Run, monkeypatch: Any
) -> None:
    monkeypatch.setattr("barter.flower.deploy.CONNECT_SECONDS", 0.1)
    run(1, min_clients=2)
    grid.offline.add(100)
    experiment = run(2, min_clients=2)
    assert experiment.folder is not None
    _, two = experiment.folder.records()
    assert "site-0: the site is offline" in two.failures[0]
    assert two.clients[1]["bytes_up"] > 0


def test_a_site_that_is_not_what_it_was(grid: LoopbackGrid, run: Run, tmp_path: Path) -> None:
    run(1)
    grid.sites[102] = site(tmp_path / "other", name="somebody", share=2, device="cpu")
    with pytest.raises(
        ConfigError, match="site somebody has changed since the run began, or was not there"
    ):
        run(2)


def nonsense(answer: Callable[[], Any]) -> Any:
    return {"hello": {"name": "site-2", "share": "all"}}


def refusal(answer: Callable[[], Any]) -> Any:
    return {"error": "site site-2 cannot take part: it does not want to any more"}


def larger(answer: Callable[[], Any]) -> Any:
    return {"hello": {**answer()["hello"], "examples": 10**6}}


@pytest.mark.parametrize("hello", [nonsense, refusal, larger])
def test_a_run_goes_on_without_a_site_that_is_not_what_it_was(
    grid: LoopbackGrid, run: Run, hello: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barter.flower.deploy.CONNECT_SECONDS", 0.1)
    run(1, min_clients=2)

    def deliver(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        return hello(answer) if node == 102 and request["ask"] == "hello" else answer()

    grid.deliver = deliver
    experiment = run(2, min_clients=2)
    assert experiment.folder is not None
    _, two = experiment.folder.records()
    assert "site-2: the site is offline" in two.failures[0]
    assert all(two.clients[k]["bytes_up"] > 0 for k in (0, 1))
    with pytest.raises(ConfigError, match="site site-2 |a site's hello"):
        run(3, min_clients=3)


def interrupted(grid: LoopbackGrid, run: Run, round: int, absent: int | None = None) -> None:
    """The server dies when everybody has done its part of a round."""
    done: list[int] = []

    def deliver(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        reply = answer()
        if request["ask"] == "call" and request["round"] == round:
            done.append(node)
            if len(done) == len(grid.sites) - len(grid.offline):
                raise KeyboardInterrupt
        return reply

    grid.deliver = deliver
    with pytest.raises(KeyboardInterrupt):
        run(9, min_clients=2)
    grid.deliver = lambda node, request, answer: answer()


def memories(grid: LoopbackGrid) -> dict[str, Any]:
    return {
        f"{n}": v
        for node, s in grid.sites.items()
        for n, v in leaves(isolate(s.client.memory()), str(node))
    }


def test_interrupted_twice_in_one_round(
    grid: LoopbackGrid, run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    interrupted(grid, run, 2)
    interrupted(grid, run, 2)
    interrupted(grid, run, 3)
    run(3, min_clients=2)
    others = [
        site(tmp_path / f"other-{k}", name=f"site-{k}", share=k, device="cpu") for k in range(3)
    ]
    straight = LoopbackGrid(others, monkeypatch)
    config = Config(
        rounds=3,
        algorithm=tiny("fedavg"),
        clients=3,
        models="small-mlp",
        device="cpu",
        min_clients=2,
    )
    conduct(straight, config, tmp_path / "straight", Journal(tmp_path / "journal"))
    assert same(memories(grid), memories(straight))


def test_a_run_that_began_before_lean_was_the_default_stays_exact(
    grid: LoopbackGrid, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder, its checkpoint and the sites hold what versions without encodings wrote."""
    data = Data(source=digits_file(tmp_path))

    def older_toml(config: Config) -> str:
        return tomli_w.dumps({k: value for k, value in to_plain(config).items() if k != "wire"})

    with monkeypatch.context() as patch:
        patch.setattr(deploy, "to_toml", older_toml)
        patch.setattr("barter.experiment.to_toml", older_toml)
        run(1, data=data, engine="flower", wire=WireSettings(profile="exact"))
    with pytest.raises(CheckpointError, match=r"another configuration: wire\.profile differs"):
        run(2, data=data, engine="flower")
    config = replace(read_run(tmp_path / "run"), rounds=2)
    resumed = conduct(grid, config, tmp_path / "run", Journal(tmp_path / "journal"))
    assert resumed.folder is not None
    assert [record.wire for record in resumed.folder.records()] == ["exact", "exact"]
    local = federation(tiny("fedavg"), data=data, wire=WireSettings(profile="exact"))
    traffic = [record.bytes for record in local.rounds(2)]
    assert [record.bytes for record in resumed.folder.records()] == traffic
    assert same(dict(leaves(resumed.server.memory())), dict(leaves(local.server.memory())))


def test_what_the_server_took_back_does_not_come_again(
    grid: LoopbackGrid, run: Run, monkeypatch: Any
) -> None:
    monkeypatch.setattr("barter.flower.deploy.CONNECT_SECONDS", 0.1)
    run(1, min_clients=2)
    before = isolate(grid.sites[102].client.memory())
    interrupted(grid, run, 2)  # all three have done round 2, and it is taken back
    grid.offline.add(102)
    interrupted(grid, run, 3)  # round 2 is done anew without the third site
    grid.offline.clear()
    seen: list[Any] = []

    def deliver(node: int, request: dict[str, Any], answer: Callable[[], Any]) -> Any:
        if node == 102 and request["ask"] == "call":
            grid.sites[102]._restore(request["session"])
            seen.append(isolate(grid.sites[102].client.memory()))
        return answer()

    grid.deliver = deliver
    run(3, min_clients=2)
    assert same(dict(leaves(seen[0])), dict(leaves(before)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "site-0"}, "two sites are called 'site-0'"),
        ({"share": 0}, "each has another share of the run's data"),
        ({"share": 3}, "site site-2 wants share 3, and the run has the shares 0 to 2"),
        ({"model": "small-cnn"}, "FedAvg has one model for all and needs one architecture"),
        (
            {"model": "nowhere:net"},
            "site site-2 and cannot: code that a site names is not run here unless `models`",
        ),
        ({"model": "resnet99"}, "unknown model 'resnet99'"),
        (
            {"share": None, "data": "npz:/no/such.npz"},
            "site site-2: its data cannot be used in this run; its log says why",
        ),
    ],
)
def test_what_does_not_fit_together_is_said_before_the_first_round(
    grid: LoopbackGrid, run: Run, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    fields = {"name": "site-2", "share": 2, "device": "cpu", **changes}
    grid.sites[102] = site(tmp_path / "other", **fields)
    with pytest.raises((ConfigError, BarterError), match=said):
        run()
    assert not (tmp_path / "run").exists()
