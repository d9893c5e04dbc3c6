"""One suite of checks that every algorithm of the registry passes."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from barter import ALGORITHMS
from barter.core.params import describe
from barter.core.payload import leaves, pack, unpack
from barter.core.wire import Wire
from barter.engines import local
from barter.engines.local import LocalEngine
from barter.experiment import Experiment
from tests.conftest import TINY, federation, same, state, tiny


def finished(experiment: Experiment, rounds: int = 2) -> tuple[dict[str, Any], list[Any]]:
    records = [(r.round, r.clients, r.server, r.bytes) for r in experiment.rounds(rounds)]
    return state(experiment), records


def test_the_suite_covers_the_registry() -> None:
    assert TINY.keys() == ALGORITHMS.keys()


def test_runs_with_its_defaults(name: str) -> None:
    (record,) = federation(ALGORITHMS[name](), clients=2).rounds(1)
    assert sorted(record.clients) == [0, 1]
    for metrics in record.clients.values():
        assert 0 <= metrics["global"] <= 1
        trained = metrics.get("before_local", metrics["local"])
        assert trained > 0.5, "every method at least trains on the client's own data"
    assert record.seconds["round"] > 0
    assert not record.failures


def test_what_crosses_is_documented(name: str) -> None:
    (record,) = federation(tiny(name)).rounds(1)
    kind = ALGORITHMS[name]
    assert record.bytes.keys() <= kind.crosses.keys()
    for method, count in record.bytes.items():
        assert callable(getattr(kind, method))
        said = kind.crosses[method]
        for direction in ("up", "down"):
            assert (count[direction] > 0) == (f"{direction}:" in said), f"{method} {direction}: {count}, said: {said}"


def test_payloads_survive_the_codec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = finished(federation(tiny(name)))
    carry = Wire.carry

    def over_the_codec(self: Wire, tree: Any, *args: Any) -> Any:
        tensors, header = pack(carry(self, tree, *args))
        return unpack({name: tensor.clone() for name, tensor in tensors.items()}, header)

    monkeypatch.setattr(Wire, "carry", over_the_codec)
    coded = finished(federation(tiny(name)))
    assert same(coded[0], straight[0])
    assert coded[1] == straight[1]


def test_resumed_equals_straight(name: str, tmp_path: Path) -> None:
    straight = finished(federation(tiny(name)), 3)
    first = federation(tiny(name), out=tmp_path / "run")
    begun = finished(first, 1)
    assert first.folder is not None
    first.folder.release()
    resumed = finished(federation(tiny(name), out=tmp_path / "run", resume=True), 3)
    assert same(resumed[0], straight[0])
    assert begun[1] + resumed[1] == straight[1]


def test_the_order_of_clients_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = finished(federation(tiny(name)))
    monkeypatch.setattr(LocalEngine, "order", lambda self, ids: sorted(ids, reverse=True))
    backwards = finished(federation(tiny(name)))
    assert same(backwards[0], forwards[0])
    assert backwards[1] == forwards[1]


def test_who_mutates_what_it_received_changes_nobody_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peaceful = finished(federation(tiny(name)))
    carry = Wire.carry
    spoiled = 0

    def with_a_vandal(self: Wire, tree: Any, method: str, client: int, direction: Any, device: Any = None) -> Any:
        nonlocal spoiled
        arrived = carry(self, tree, method, client, direction, device)
        vandal = Wire(self.may_be_infinite)
        for _, leaf in leaves(carry(vandal, tree, method, client, direction, device)):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
                spoiled += 1
        return arrived

    monkeypatch.setattr(Wire, "carry", with_a_vandal)
    beside_a_vandal = finished(federation(tiny(name)))
    assert same(beside_a_vandal[0], peaceful[0])
    assert beside_a_vandal[1] == peaceful[1]
    assert spoiled > 0 or name == "local"


def test_clients_on_cores_of_their_own_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = finished(federation(tiny(name)), 3)
    monkeypatch.setattr(local, "FORK_SECONDS", 0)
    experiment = federation(tiny(name))
    experiment.engine.cores = 2
    side_by_side = finished(experiment, 3)
    assert same(side_by_side[0], one_by_one[0])
    assert side_by_side[1] == one_by_one[1]


def test_seeds_make_runs(name: str) -> None:
    one, again, other = (finished(federation(tiny(name), seed=seed), 1) for seed in (1, 1, 2))
    assert same(one[0], again[0])
    assert not same(one[0], other[0])


def test_fields_are_documented_and_the_file_opens_with_a_citation(name: str) -> None:
    kind = ALGORITHMS[name]
    for field in describe(kind):
        assert len(field.meaning) > 5, f"{name}.{field.name} has no comment behind it"
        assert field.default is not inspect.Parameter.empty
    assert kind.citation().endswith((".", ")."))
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}("), "the docstring that dataclass makes is none"
    for preset in kind.presets:
        assert isinstance(kind.preset(preset), kind)


def test_the_round_fits_one_screen_and_holds_no_batch_loop(name: str) -> None:
    source = inspect.getsource(ALGORITHMS[name].round)
    assert len(source.splitlines()) <= 25
    loops = [n for n in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(n, ast.For)]
    assert not any("batch" in ast.unparse(loop.target) for loop in loops)
