from __future__ import annotations

import pytest
import torch

from barter import Local
from barter.compute.parking import Parking
from barter.core.errors import ConfigError
from barter.core.nodes import Client
from barter.experiment import Experiment
from barter.setup.hardware import limit_memory
from tests.conftest import federation


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Client], list[tuple[int, str]]]:
    """Four clients with a model of 100 bytes each, and a list of who was moved where."""
    clients = federation(Local(), clients=4).engine.clients
    moves: list[tuple[int, str]] = []
    monkeypatch.setattr(Client, "footprint", lambda self: 100)
    monkeypatch.setattr(Client, "move", lambda self, device: moves.append((self.id, device.type)))
    return dict(clients), moves


def test_who_was_not_asked_for_longest_is_parked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, moves = watched(monkeypatch)
    for client in clients.values():
        client.device = torch.device("meta")  # so that the two places can be told apart
    parking = Parking(clients, limit=400)
    for k in (0, 1, 0, 2):
        with parking.on_device(clients[k]):
            pass
    assert list(parking.sizes) == [0, 2]
    assert moves == [(0, "meta"), (1, "meta"), (2, "meta"), (1, "cpu")]


def test_who_is_at_work_is_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, moves = watched(monkeypatch)
    for client in clients.values():
        client.device = torch.device("meta")
    parking = Parking(clients, limit=300)
    with parking.on_device(clients[0]):
        pass
    with parking.on_device(clients[0]):  # on the device already, and not asked for longest
        with parking.on_device(clients[1]):
            pass
        assert moves == [(0, "meta"), (1, "meta"), (1, "cpu")]
    parking.limit = 100
    with parking.on_device(clients[0]):
        pass
    assert moves[3:] == [(0, "cpu")], "a budget too small for one: it leaves when its turn is over"


def test_a_full_device_leaves_the_clients_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, moves = watched(monkeypatch)
    for k, client in clients.items():
        client.device = torch.device("meta", k % 2)
    parking = Parking(clients, limit=300)
    for k in (1, 0, 2):
        with parking.on_device(clients[k]):
            pass
    assert list(parking.sizes) == [1, 2], "0 made room for 2, and 1 is elsewhere"
    assert moves[-1] == (0, "cpu")


def test_without_a_device_there_is_no_budget() -> None:
    assert limit_memory(torch.device("cpu"), 3.0) == 0


@pytest.mark.parametrize("value", [0, -1, "much"])
def test_nonsense_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="device_memory"):
        Experiment(Local(), device_memory=value)  # type: ignore[arg-type]
