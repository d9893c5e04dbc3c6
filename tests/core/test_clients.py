from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from typing_extensions import TypeVar

from barter import Algorithm, Client, Clients, Server
from barter.core.clients import Failure, Replies
from barter.core.errors import BarterError, ClientError, ConfigError
from tests.conftest import federation


@dataclass(frozen=True, kw_only=True)
class Chat(Algorithm):
    """Methods for the tests."""

    crosses = {}

    def greet(self, client: Client, word: str, times: int = 1) -> str:
        return f"{word * times} {client.id}"

    def fail(self, client: Client, who: int) -> int:
        if client.id == who:
            raise RuntimeError("no luck")
        return client.id

    def nonsense(self, client: Client) -> float:
        return float("nan") if client.id == 1 else 1.0

    def add(self, client: Client, number: int) -> int:
        return number + 10**client.id

    def hop(self, client: Client, number: int) -> int:
        if client.id == 1:
            raise RuntimeError("gone")
        return number + 10**client.id

    def named(self, client: Client, a: int, *, b: int = 0) -> int:
        return a + b

    def noise(self, client: Client) -> float:
        return float(torch.rand(()))


CHAT = Chat()


def group(min_clients: int | None = None, clients: int = 4) -> Clients:
    experiment = federation(CHAT, clients=clients, min_clients=min_clients)
    return Clients(experiment.engine, experiment.engine.client_ids)


def test_run_scatter_and_relay() -> None:
    clients = group()
    assert clients.run(CHAT.greet, "hi") == {k: f"hi {k}" for k in range(4)}
    assert clients.run(CHAT.greet, word="a", times=2)[1] == "aa 1"
    assert clients.scatter(CHAT.add, {k: k for k in range(4)}) == {0: 1, 1: 11, 2: 102, 3: 1003}
    assert clients.relay(CHAT.add, 0) == 1111
    assert clients.only([2, 3, 9]).run(CHAT.greet, "x") == {2: "x 2", 3: "x 3"}


def test_replies_know_the_numbers_of_examples() -> None:
    clients = group()
    replies = clients.run(CHAT.greet, "hi")
    engine: Any = clients._engine
    assert replies.num_examples == {k: len(engine.clients[k].data) for k in range(4)}


def test_a_group_is_a_sequence_of_ids() -> None:
    clients = group()
    assert (list(clients), len(clients), clients[1], list(clients[1:3])) == (
        [0, 1, 2, 3],
        4,
        1,
        [1, 2],
    )


def test_samples_are_shares_and_depend_on_the_round_only() -> None:
    clients = group(clients=10)
    engine: Any = clients._engine
    chosen = [clients.sample(0.3)[:] for engine.round in range(20)]
    assert all(len(set(ids)) == 3 for ids in chosen)
    assert len(set(map(tuple, chosen))) > 5
    assert [clients.sample(0.3)[:] for engine.round in range(20)] == chosen
    assert len(clients.sample(0.001)) == 1
    assert len(clients.sample(1.0)) == 10
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(ConfigError, match="a share of the clients"):
            clients.sample(wrong)


def test_by_default_all_must_answer() -> None:
    with pytest.raises(
        ClientError, match=r"3 of 4 clients answered 'fail', 4 must: client 2.*no luck"
    ) as caught:
        group().run(CHAT.fail, 2)
    assert "RuntimeError: no luck" in caught.value.__notes__[0]
    assert "Traceback" in caught.value.__notes__[0]


def test_the_run_goes_on_while_enough_answer() -> None:
    clients = group(min_clients=3)
    replies = clients.run(CHAT.fail, 2)
    assert replies == {0: 0, 1: 1, 3: 3}
    failure = replies.failures[2]
    assert (failure.client, failure.method, failure.round, failure.error) == (
        2,
        "fail",
        0,
        "RuntimeError: no luck",
    )
    with pytest.raises(ClientError, match="1 of 2"):
        clients.only([2, 3]).run(CHAT.fail, 2)


def test_nan_from_a_client_is_a_failure_of_that_client() -> None:
    replies = group(min_clients=1).run(CHAT.nonsense)
    assert replies == {0: 1.0, 2: 1.0, 3: 1.0}
    assert "NaN" in replies.failures[1].error


def test_nan_from_the_server_stops_the_run() -> None:
    with pytest.raises(BarterError, match="NaN"):
        group(min_clients=1).scatter(CHAT.add, {k: float("nan") for k in range(4)})  # type: ignore[arg-type]


def test_every_client_and_method_has_a_stream_of_its_own() -> None:
    clients = group()
    first, second = clients.run(CHAT.noise), clients.run(CHAT.noise)
    assert len(set(first.values()) | set(second.values())) == 8, "asked again, a method draws anew"
    again = group()
    assert again.run(CHAT.noise) == first
    assert again.run(CHAT.noise) == second


def test_a_relay_goes_on_past_who_fails_while_enough_answer() -> None:
    assert group(min_clients=3).relay(CHAT.hop, 0) == 1101
    with pytest.raises(ClientError, match="3 of 4 clients answered 'hop', 4 must: client 1 failed"):
        group().relay(CHAT.hop, 0)


def test_wrong_calls_are_refused_before_anything_is_sent() -> None:
    clients = group()
    with pytest.raises(TypeError):
        clients.run(CHAT.greet)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"keyword-only parameters \['b'\]"):
        clients.run(CHAT.named, 1, b=9)
    with pytest.raises(ConfigError, match="one payload for each"):
        clients.scatter(CHAT.add, {0: 1})


def test_nobody_asked_nobody_answers() -> None:
    assert group().only([]).run(CHAT.greet, "hi") == {}


def test_an_answer_that_the_server_can_make_nothing_of_is_its_clients_failure() -> None:
    clients = group(min_clients=3)
    engine: Any = clients._engine

    def halved(client: int, word: str) -> int:
        return 10 // (client - 1) + len(word)

    found = clients.run(CHAT.greet, "hi").map(halved)
    assert found == {0: -6, 2: 14, 3: 9}
    assert found.num_examples == {k: len(engine.clients[k].data) for k in (0, 2, 3)}
    assert found.failures[1].error == "ZeroDivisionError: integer division or modulo by zero"
    assert "in halved" in found.failures[1].traceback
    assert engine.failures == [found.failures[1]], "and in the round's record"
    with pytest.raises(
        ClientError, match="2 of 4 clients answered 'greet', 3 must: client 1 failed in 'greet'"
    ):
        found.map(lambda client, number: 1 // (number - 14))


def test_who_failed_before_counts_when_answers_are_looked_at() -> None:
    replies = group(min_clients=3).run(CHAT.fail, 2)
    with pytest.raises(ClientError, match="2 of 4 clients answered 'fail', 3 must"):
        replies.map(lambda client, answer: 1 // answer)


def test_answers_of_nobodys_are_looked_at_without_excuse() -> None:
    replies = Replies({0: 1, 1: 0}, {0: 1, 1: 1}, {})
    with pytest.raises(ZeroDivisionError):
        replies.map(lambda client, answer: 1 // answer)
    assert replies.map(lambda client, answer: client + answer) == {0: 1, 1: 1}


def test_former_names_are_refused_with_the_present_ones() -> None:
    replies: Replies[int] = Replies({0: 1}, num_examples={0: 1}, failures={})
    with pytest.raises(AttributeError, match=r"Replies\.each is called Replies\.map now"):
        replies.each(lambda client, answer: answer)
    with pytest.raises(TypeError, match=r"Old\.at_home: this method is called local_offset now"):
        type("Old", (Algorithm,), {"at_home": lambda self, client: None})


def test_replies_are_sorted() -> None:
    replies = Replies({2: "b", 0: "a"}, {0: 1, 1: 1, 2: 1}, {1: Failure(1, "m", 1, "e")})
    some = replies.only([2, 1])
    assert (dict(some), some.num_examples, some.failures) == ({2: "b"}, {2: 1}, replies.failures)
    assert list(replies) == [0, 2]
    assert replies.num_examples == {0: 1, 2: 1}


def test_parties_come_from_the_class() -> None:
    class MyServer(Server):
        pass

    class MyClient(Client):
        pass

    class Mine(Algorithm[MyServer, MyClient]):
        pass

    class Heir(Mine):
        pass

    kind = TypeVar("kind", bound=Server, default=Server)

    class Base(Algorithm[kind, MyClient]):
        pass

    class WithItsServer(Base[MyServer]):
        pass

    assert WithItsServer.parties() == (MyServer, MyClient), "the client is the base's"
    assert Base.parties() == (Server, MyClient)
    assert Mine.parties() == (MyServer, MyClient)
    assert Heir.parties() == (MyServer, MyClient)
    assert Chat.parties() == (Server, Client)


def test_memory_is_what_a_class_annotates() -> None:
    class Keeper(Client):
        log: list[int] = []
        note: str = "none"

    class Forgetful(Client):
        log: list[int]

    template = federation(CHAT).engine.clients[0]
    make = (0, template.model, template.device, template.data, template.tests)
    one, two = Keeper(*make), Keeper(*make)
    one.log.append(1)
    assert (one.log, two.log, Keeper.log) == ([1], [], [])
    two.recall(one.memory())
    assert two.log == [1]
    assert set(one.memory()) == {"log", "note", "model"}
    with pytest.raises(TypeError, match="Forgetful.log needs a default"):
        Forgetful(*make)
