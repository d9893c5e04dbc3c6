"""Rounds of DFFKE: what crosses, who takes part, and what is remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from barter import DFFKE, Experiment
from barter.algorithms.dffke import DFFKEClient, DFFKEServer
from barter.core.errors import ClientError, ConfigError
from barter.core.payload import isolate, nbytes
from barter.data.task import Data
from barter.models.generators import Decoder
from barter.ops.docking import unify
from barter.ops.fit import adam
from barter.ops.transfer import logits_to_half, sample_review, to_half, transfer_images
from barter.setup.config import resolve
from barter.testing.conformance import few_digits
from tests.conftest import TINY, perceptrons, small_federation, tiny


def exchanged(rounds: int = 3, **changes: Any) -> tuple[Experiment, list[Any]]:
    experiment = perceptrons(tiny("dffke", **changes))
    return experiment, list(experiment.rounds(rounds))


def test_a_round_crosses_what_it_says_and_no_more() -> None:
    experiment, (record,) = exchanged(1)
    clients = experiment.engine.clients
    shared = {k: max(2, -(-len(c.data) // 10)) for k, c in clients.items()}
    weights = {k: nbytes(c.model.state_dict()) for k, c in clients.items()}
    learn = sum(
        8 + weights[k] + n * clients[k].model.feature_dim * 4 + n * 8 for k, n in shared.items()
    )
    entry = 8 + sum(shared.values()) * 8 * 8 * 2
    lesson = {k: 8 + n * 10 * 4 for k, n in shared.items()}
    assert record.bytes["learn"] == {"up": learn, "down": 0}
    assert record.bytes["teach"] == {"up": sum(lesson.values()), "down": 3 * entry}
    assert record.bytes["exchange"] == {"up": 0, "down": 2 * sum(lesson.values())}
    assert "train" not in record.bytes


def test_embeddings_of_parts_cross_too_and_clients_may_draw_for_themselves() -> None:
    data = Data(source=few_digits(), size=16)
    ends: dict[str, dict[str, torch.Tensor]] = {}
    for parts, transfer in (
        (2, "decoder"),
        (4, "images"),
    ):  # 16 pixels have no more than two by two parts of 8
        experiment = small_federation(
            tiny("dffke", parts=parts, transfer=transfer), data=data, clients=2
        )
        (record,) = experiment.rounds(1)
        clients, spec = experiment.engine.clients, experiment.task.spec
        shared = {k: -(-len(c.data) // 10) for k, c in clients.items()}
        embeddings = sum(
            n * 5 * clients[k].model.feature_dim * 4 + n * 8 for k, n in shared.items()
        )
        weights = sum(nbytes(c.model.state_dict()) for c in clients.values())
        assert record.bytes["learn"]["up"] == 2 * 8 + weights + embeddings
        each = {"images": 16 * 16 * 2, "decoder": 5 * 16 * 4}[transfer]
        decoder = nbytes(Decoder(16, spec, 2).state_dict()) if transfer == "decoder" else 0
        assert record.bytes["teach"]["down"] == 2 * (8 + each * sum(shared.values()) + decoder)
        ends[transfer] = isolate(dict(clients[0].model.state_dict()))
    for at, w in ends["images"].items():
        assert torch.allclose(w.float(), ends["decoder"][at].float(), atol=5e-3), (
            "but for half precision, the same"
        )
    with pytest.raises(
        ConfigError, match="parts=1: one part is the whole image; 2 cuts an image into four parts"
    ):
        DFFKE(parts=1)


@pytest.mark.parametrize(
    ("limit", "kept", "transfer"),
    [(0, 0, "images"), (1, 1, "decoder"), (2, 2, "images"), (None, 4, "images")],
)
def test_the_buffer_keeps_r_past_rounds_and_reports_its_size(
    limit: int | None, kept: int, transfer: str
) -> None:
    experiment, records = exchanged(4, memory=limit, transfer=transfer)
    for client in experiment.engine.clients.values():
        assert isinstance(client, DFFKEClient)
        assert [entry["round"] for entry in client.buffer] == list(range(5 - kept, 5))
        assert records[-1].clients[client.id]["buffer_bytes"] == nbytes(client.buffer)
    decoder = 0 if transfer == "images" else nbytes(Decoder(16, experiment.task.spec).state_dict())
    each = {"images": 8 * 8 * 2, "decoder": 16 * 4}[transfer]
    codes = sum(max(2, -(-len(c.data) // 10)) * each for c in experiment.engine.clients.values())
    assert nbytes(client.buffer) == kept * (
        decoder + codes + 8
    )  # R (|Dec| + N h b), and the round's number
    assert records[-1].server["buffer_bytes"] == nbytes(client.buffer)


def test_without_memory_only_fresh_data_is_taught() -> None:
    _, with_memory = exchanged(2)
    _, without = exchanged(2, memory=0)
    assert with_memory[0].bytes == without[0].bytes
    assert with_memory[1].bytes["exchange"]["down"] > without[1].bytes["exchange"]["down"]


def test_review_takes_as_much_of_the_past_as_there_is_fresh() -> None:
    lessons: dict[int, Any] = {}

    class Watched(DFFKE):
        def teach(self, client: DFFKEClient, delivery: Any) -> Any:
            lessons[client.id] = super().teach(client, delivery)
            return lessons[client.id]

    experiment = perceptrons(Watched(**TINY["dffke"]))
    for record in experiment.rounds(3):
        for client in experiment.engine.clients.values():
            assert isinstance(client, DFFKEClient)
            sizes = {entry["round"]: len(entry["codes"][client.id]) for entry in client.buffer}
            fresh, *past = lessons[client.id]
            assert fresh["round"] == record.round
            assert "index" not in fresh
            assert len(fresh["logits"]) == sizes[record.round]
            assert sum(len(targets["logits"]) for targets in past) == (
                sizes[record.round] if record.round > 1 else 0
            )
            for targets in past:
                assert targets["round"] < record.round
                assert (
                    len(targets["index"])
                    == len(targets["logits"])
                    == len(set(targets["index"].tolist()))
                )
                assert int(targets["index"].max()) < sizes[targets["round"]]
    assert [targets["round"] for targets in lessons[0]] == [3, 1, 2], "some of every round before"
    everything = sample_review(client.buffer[:-1], client.id, 10**6)
    assert [part.tolist() for _, _, part in everything if part is not None] == 2 * [
        list(range(sizes[1]))
    ]


def test_who_missed_rounds_is_sent_their_entries() -> None:
    experiment = perceptrons(
        tiny("dffke", fraction=0.5, memory=None, transfer="decoder"), clients=4
    )
    buffers: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    decoder = nbytes(Decoder(16, experiment.task.spec).state_dict())
    for r in experiment.rounds(8):
        active = [k for k, m in r.clients.items() if m["bytes_up"]]
        assert len(active) == 2
        for k in active:
            client = experiment.engine.clients[k]
            assert isinstance(client, DFFKEClient)
            buffers[k] = [entry["round"] for entry in client.buffer]
            assert buffers[k] == list(range(1, r.round + 1)), "the buffer is synchronised"
            assert r.clients[k]["bytes_down"] > (r.round - last.get(k, 0)) * decoder, (
                "and that is counted"
            )
            last[k] = r.round
    assert len(buffers) == 4


def test_collaboration_is_a_fixed_group_and_the_rest_train_alone() -> None:
    experiment = perceptrons(tiny("dffke", collaboration=0.5), clients=4)
    for r in experiment.rounds(2):
        assert [k for k, m in r.clients.items() if m["bytes_up"]] == [0, 1]
        assert r.bytes["train"] == {"up": 0, "down": 0}
        assert all(m["epochs"] >= 1 for m in r.clients.values())


def test_noise_in_place_of_embeddings_sends_weights_alone() -> None:
    experiment, records = exchanged(2, reveal="nothing")
    weights = sum(nbytes(c.model.state_dict()) for c in experiment.engine.clients.values())
    assert records[0].bytes["learn"]["up"] == weights + 3 * 8
    assert records[0].mean("global") > 0


def test_mixtures_take_the_place_of_embeddings() -> None:
    _, (of_images,) = exchanged(1)
    mixed, (record,) = exchanged(1, reveal="mixtures", mixture=2)
    assert record.bytes["learn"] == of_images.bytes["learn"], "of the same size"
    assert mixed.algorithm.gallery(mixed.engine.clients[0], 1, lambda index: index) is None, (
        "a synthetic image belongs to no single one"
    )
    with pytest.raises(ConfigError, match="reveal='images'"):
        tiny("dffke", reveal="mixtures", mixture=1)


def test_statistics_take_the_place_of_embeddings_and_images() -> None:
    experiment, records = exchanged(2, reveal="statistics", share=1.0, rank=4)
    clients = experiment.engine.clients
    hub = experiment.server
    assert isinstance(hub, DFFKEServer)
    entry = hub.buffer[-1]
    assert not records[0].failures
    assert records[1].mean("global") > 0
    assert all(codes.dtype == torch.int64 for codes in entry["codes"].values()), "indices alone"
    half = sum(nbytes(to_half(c.model.state_dict())) for c in clients.values())
    gaussians = sum(nbytes(model) for model in entry["gaussians"].values())
    assert records[1].bytes["learn"]["up"] == half + gaussians + 3 * 8
    for teacher in clients:
        images = [
            transfer_images(c, entry, teacher, entry["codes"][teacher]) for c in clients.values()
        ]
        assert all(torch.equal(images[0], other) for other in images), "everybody sees the same"
        some = transfer_images(clients[0], entry, teacher, entry["codes"][teacher][1:3])
        assert torch.allclose(some, images[0][1:3], atol=1e-5), "whatever part is decoded"


def test_fields_of_older_versions_are_understood() -> None:
    def read(**fields: object) -> DFFKE:
        algorithm = resolve({"algorithm": {"name": "dffke", **fields}}).algorithm
        assert isinstance(algorithm, DFFKE)
        return algorithm

    assert read(embeddings="real", transfer="decoder") == DFFKE(transfer="decoder")
    assert read(embeddings="noise", noise=2.0) == DFFKE(reveal="nothing", noise=2.0)
    assert read(transfer="public") == DFFKE(reveal="nothing", substitute="public")
    with pytest.raises(ConfigError, match="substitute='public'"):
        DFFKE(transfer="public")  # type: ignore[arg-type]


def test_noise_in_place_of_embeddings_is_as_strong_as_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []

    def noted(server: DFFKEServer, e: dict[int, Tensor], *arguments: Any, **more: Any) -> Any:
        seen.extend(e.values())
        return unify(server, e, *arguments, **more)

    monkeypatch.setattr("barter.algorithms.dffke.unify", noted)
    exchanged(1, reveal="nothing", noise=7.0)
    drawn = torch.cat([e.flatten() for e in seen])
    assert float(drawn.mean()) == pytest.approx(0, abs=0.5)
    assert float(drawn.std()) == pytest.approx(7, rel=0.05)


def test_public_data_takes_the_place_of_decoder_embeddings_and_weights() -> None:
    experiment = perceptrons(
        tiny("dffke", reveal="nothing", substitute="public"),
        data=Data(source=few_digits(), public="digits"),
    )
    records = list(experiment.rounds(2))
    assert records[0].bytes["learn"]["up"] == 3 * 8, "how many images"
    shared = sum(max(2, -(-len(c.data) // 10)) for c in experiment.engine.clients.values())
    assert records[0].bytes["teach"]["down"] == 3 * (8 + shared * 8)
    with pytest.raises(ConfigError, match=r"data\.public"):
        perceptrons(tiny("dffke", reveal="nothing", substitute="public"), data=Data())
    with pytest.raises(ConfigError, match="embedding_loss"):
        tiny("dffke", reveal="nothing", substitute="public", embedding_loss=True)


def test_crops_of_photographs_take_the_place_of_all_but_logits() -> None:
    experiment, records = exchanged(2, reveal="nothing", substitute="photographs")
    clients = experiment.engine.clients
    shared = {k: max(2, -(-len(c.data) // 10)) for k, c in clients.items()}
    total = sum(shared.values())
    assert not records[1].failures
    assert records[0].bytes["learn"]["up"] == 3 * 8, "how many images"
    assert records[0].bytes["teach"]["down"] == 3 * (8 + 8 + total * 8), "a seed and numbers"
    assert records[0].bytes["teach"]["up"] == 3 * 8 + total * 10 * 4
    entries = clients[0].buffer
    codes = [entry["codes"][1] for entry in entries]
    assert torch.equal(codes[0], torch.arange(shared[0], shared[0] + shared[1]))
    first, second = (
        transfer_images(clients[0], entry, 1, own)
        for entry, own in zip(entries, codes, strict=True)
    )
    assert torch.equal(first, transfer_images(clients[2], entries[0], 1, codes[0])), "for everybody"
    assert not torch.equal(first, second), "new ones in each round"
    with pytest.raises(ConfigError, match="substitute='photographs' does not use"):
        tiny("dffke", reveal="nothing", substitute="photographs", embedding_loss=True)


def test_photographs_do_not_stand_in_for_images_of_two_channels() -> None:
    x, y, x_test, y_test = few_digits()
    two_channels = (x.repeat(1, 2, 1, 1), y, x_test.repeat(1, 2, 1, 1), y_test)
    experiment = perceptrons(
        tiny("dffke", reveal="nothing", substitute="photographs"), data=Data(source=two_channels)
    )
    with pytest.raises(ConfigError, match="2 channels"):
        list(experiment.rounds(1))


@pytest.mark.parametrize("whiten", [0.0, 0.01])
def test_docking_layers_are_kept_over_rounds(whiten: float) -> None:
    experiment, _ = exchanged(1, whiten=whiten)
    hub = experiment.server
    assert isinstance(hub, DFFKEServer)
    assert sorted(hub.docking) == [0, 1, 2]
    embeddings = {k: torch.randn(4, 1, hub.docking[k]["weight"].shape[1]) for k in hub.docking}
    labels = {k: torch.zeros(4, dtype=torch.long) for k in hub.docking}
    *_, states = unify(hub, embeddings, labels, hub.docking, 16, 1, adam(1e-12), whiten)
    for k, layer in hub.docking.items():
        assert torch.allclose(states[k]["weight"], layer["weight"], atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [True, False])
def test_the_decoder_learns_to_be_reencoded(mixed: bool) -> None:
    runs = (exchanged(1, mixed=mixed, decoder_steps=steps)[1][0] for steps in (1, 40))
    short, long = (record.server["decoder_loss"] for record in runs)
    assert long < short / 2


def test_a_client_that_fails_is_left_out_and_comes_back() -> None:
    moods = [True]

    class Moody(DFFKE):
        def learn(self, client: DFFKEClient) -> Any:
            if client.id == 1 and client.buffer and moods:
                moods.pop()
                raise RuntimeError("not today")
            return super().learn(client)

    experiment = perceptrons(Moody(**TINY["dffke"]), min_clients=2)
    records = list(experiment.rounds(3))
    assert "client 1 failed in 'learn', round 2: RuntimeError: not today" in records[1].failures
    assert [bool(r.failures) for r in records] == [False, True, False]
    assert records[2].clients[1]["bytes_up"] > 0


def test_a_lone_survivor_has_nobody_to_learn_from() -> None:
    class Silent(DFFKE):
        def teach(self, client: DFFKEClient, delivery: Any) -> Any:
            if client.id:
                raise RuntimeError("mute")
            return super().teach(client, delivery)

    (record,) = perceptrons(Silent(**TINY["dffke"]), min_clients=1).rounds(1)
    assert "exchange" not in record.bytes
    assert len(record.failures) == 2


class Certain(DFFKE):
    """DFFKE whose client 0 answers with far larger logits than the others."""

    def predict_targets(self, client: DFFKEClient, images: Tensor) -> dict[str, Tensor]:
        targets = super().predict_targets(client, images)
        if client.id == 0:
            targets["logits"] *= 1e4
        return targets


def test_a_teacher_may_be_far_more_certain_than_others_where_that_does_no_harm() -> None:
    experiment = perceptrons(Certain(**TINY["dffke"]))
    (record,) = experiment.rounds(1)
    assert not record.failures
    for client in experiment.engine.clients.values():
        weights = client.model.state_dict().values()
        assert all(bool(w.isfinite().all()) for w in weights)


@pytest.mark.parametrize(("direction", "least", "most"), [("teacher", 0, 2), ("student", 1e5, 1e6)])
def test_large_logits_of_a_teacher_give_large_gradients_in_one_direction(
    direction: Any, least: float, most: float
) -> None:
    class Head:
        def logits(self, features: Tensor) -> Tensor:
            return features

    features = torch.tensor([[0.5, 0.0, -0.5]], requires_grad=True)
    teacher = torch.tensor([[-1e6, 1e6, 0.0]])
    algorithm = DFFKE(direction=direction)
    algorithm.exchange_loss(Head(), features, teacher).backward()  # type: ignore[arg-type]
    assert features.grad is not None
    assert least <= float(features.grad.abs().sum()) <= most
    assert algorithm.large_targets_do_harm == (direction == "student")


def test_large_logits_stay_finite_in_half_precision() -> None:
    experiment = perceptrons(DFFKE(**{**TINY["dffke"], "reveal": "statistics"}))
    client = experiment.engine.clients[0]
    assert isinstance(client, DFFKEClient)
    with torch.no_grad():
        client.model.get_submodule("head").weight.mul_(1e7)
    images = torch.rand(4, *client.data.spec.shape)
    (logits,) = DFFKE(reveal="statistics").predict_targets(client, images).values()
    assert logits.dtype == torch.float16
    assert bool(logits.isfinite().all())
    assert float(logits.min()) < -1000


def test_logits_in_half_precision_have_the_same_softmax() -> None:
    usual = torch.tensor([[3.0, -2.0, 0.5]])
    assert torch.equal(logits_to_half(usual), usual.half())
    large = torch.tensor([[70010.0, 70011.0, -1e6], [-90000.0, -90002.0, -90001.0]])
    half = logits_to_half(large)
    assert half.tolist() == [[-1.0, 0.0, -65504.0], [0.0, -2.0, -1.0]]
    torch.testing.assert_close(half.float().softmax(1), large.softmax(1))


def test_a_far_more_certain_teacher_is_refused_where_students_follow_its_logits() -> None:
    options = {**TINY["dffke"], "direction": "student"}
    with pytest.raises(ClientError, match=r"teach\[\]\.logits: its largest absolute value"):
        list(perceptrons(Certain(**options)).rounds(1))


def test_one_trader_alone_has_nobody_to_learn_from() -> None:
    (record,) = perceptrons(tiny("dffke"), clients=1).rounds(1)
    assert set(record.bytes) == {"learn"}


def test_replies_reach_the_server_in_order() -> None:
    experiment, _ = exchanged(1)
    assert isinstance(experiment.server, DFFKEServer)
    assert list(experiment.server.buffer[0]["codes"]) == [0, 1, 2]
