"""DFFKE against derivations by hand, on tensors small enough to check on paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from barter import DFFKE, Classifier, Experiment, Local
from barter.algorithms.dffke import Hub, Trader, discrepancy, docking_loss
from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.payload import nbytes
from barter.data.task import Data
from barter.models.generators import Decoder, resized
from tests.conftest import TINY, federation, same, tiny


class Linear(Classifier):
    """features = A x, logits = B features, without a bias."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b))
        self.feature_dim = len(a)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.a.T

    def logits(self, features: Tensor) -> Tensor:
        return features @ self.b.T


def softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def linear(weight: Any, bias: Any) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    return layer


def test_docking_loss_and_its_gradient_by_hand() -> None:
    z_weight, z_bias = np.array([[0.5, -1.0], [2.0, 0.25]]), np.array([0.1, -0.2])
    h_weight, h_bias = np.array([[1.0, -1.0], [0.5, 0.5], [-2.0, 1.0]]), np.array([0.0, 0.3, -0.1])
    e, y = np.array([[1.0, 2.0], [-1.0, 0.5]]), np.array([2, 0])
    z = linear(z_weight.astype(np.float32).tolist(), z_bias.tolist())
    head = linear(h_weight.tolist(), h_bias.tolist())
    loss = docking_loss(head, z, torch.tensor(e).float(), torch.tensor(y))
    loss.backward()
    p = softmax((e @ z_weight.T + z_bias) @ h_weight.T + h_bias)
    assert loss.item() == pytest.approx(-np.log(p[[0, 1], y]).mean(), abs=1e-5)
    # d CE / d logits = (p - onehot) / N; back through the head to z's output, then z's weight is output^T e.
    delta = (p - np.eye(3)[y]) / 2 @ h_weight
    assert z.weight.grad is not None
    assert z.bias.grad is not None
    assert z.weight.grad.numpy() == pytest.approx(delta.T @ e, abs=1e-5)
    assert z.bias.grad.numpy() == pytest.approx(delta.sum(0), abs=1e-5)


class Fixed(nn.Module):
    """A decoder that draws a code as an image of 1 x 2 pixels, times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(3.0))

    def forward(self, code: Tensor) -> Tensor:
        return (self.factor * code).view(-1, 1, 1, 2)


A, B = [[1.0, 2.0], [0.0, -1.0]], [[1.0, 0.0], [-1.0, 2.0], [0.5, 0.5]]
SPEC = Spec(1, 1, 2, 3, (0.5,), (0.5,))
CODE = np.array([[0.2, -0.4], [1.0, 0.1]])


def decoder_loss(**options: Any) -> tuple[Tensor, Fixed]:
    decoder, z = Fixed(), linear([[1.0, 1.0], [0.0, 2.0]], [0.0, 0.5])
    student = Linear([[0.5, 0.0], [1.0, 1.0]], B)
    embedding = torch.tensor([[0.3, 0.1], [-0.2, 0.7]])
    algorithm: Any = DFFKE(**options)
    code = torch.tensor(CODE).float()
    return algorithm.decoder_loss(decoder, SPEC, Linear(A, B), z, student, code, embedding), decoder


def reencoded(factor: float) -> np.ndarray[Any, Any]:
    features = factor * CODE @ np.array(A).T
    return features @ np.array([[1.0, 1.0], [0.0, 2.0]]).T + np.array([0.0, 0.5])


def test_equation_12_by_hand() -> None:
    loss, decoder = decoder_loss()
    assert loss.item() == pytest.approx(((reencoded(3.0) - CODE) ** 2).mean(), rel=1e-5)
    loss.backward()
    step = 1e-4
    slope = (((reencoded(3 + step) - CODE) ** 2).mean() - ((reencoded(3 - step) - CODE) ** 2).mean()) / (2 * step)
    assert decoder.factor.grad is not None
    assert decoder.factor.grad.item() == pytest.approx(slope, rel=1e-3)


def test_what_the_options_add_to_equation_12() -> None:
    plain = decoder_loss()[0].item()
    features = 3 * CODE @ np.array(A).T
    fake = softmax(features @ np.array(B).T)
    real = softmax(np.array([[0.3, 0.1], [-0.2, 0.7]]) @ np.array(B).T)
    other = softmax(3 * CODE @ np.array([[0.5, 0.0], [1.0, 1.0]]).T @ np.array(B).T)
    added = {
        "logit_loss": (real * np.log(real / fake)).sum(1).mean(),
        "kl": -0.1 * (fake * np.log(fake / other)).sum(1).mean(),
        "mae": -np.abs(fake - other).mean(),
        "mse": -((fake - other) ** 2).mean(),
    }
    assert decoder_loss(logit_loss=True)[0].item() - plain == pytest.approx(added["logit_loss"], abs=1e-5)
    for choice in ("kl", "mae", "mse"):
        assert decoder_loss(discrepancy=choice)[0].item() - plain == pytest.approx(added[choice], abs=1e-5)


def test_discrepancies_are_bounded_as_the_paper_says() -> None:
    certain, opposite = torch.tensor([[99.0, 0, 0, 0]]), torch.tensor([[0, 99.0, 0, 0]])
    assert discrepancy("mae", certain, opposite).item() == pytest.approx(2 / 4)
    assert discrepancy("mse", certain, opposite).item() == pytest.approx(2 / 4)
    assert discrepancy("mse", certain, certain).item() == 0


def test_equations_13_and_14_by_hand_and_their_direction() -> None:
    model = Linear(A, B)
    x = np.array([[0.3, -0.2], [0.8, 0.1]])
    target = np.array([[4.0, 0.0, -1.0], [-1.0, 0.5, 3.0]])
    images, logits = torch.tensor(x).float().view(2, 1, 1, 2), torch.tensor(target).float()
    student = softmax(x @ np.array(A).T @ np.array(B).T)
    teacher = softmax(target)
    forward = (teacher * np.log(teacher / student)).sum(1).mean()
    reverse = (student * np.log(student / teacher)).sum(1).mean()
    assert abs(forward - reverse) > 0.05
    assert DFFKE().exchange_loss(model, SPEC, images, logits).item() == pytest.approx(forward, abs=1e-5)
    assert DFFKE(direction="student").exchange_loss(model, SPEC, images, logits).item() == pytest.approx(
        reverse, abs=1e-5
    )
    # The gradient with respect to the student's logits is (student - teacher) / N for KL(teacher || student).
    DFFKE().exchange_loss(model, SPEC, images, logits).backward()
    features = x @ np.array(A).T
    assert model.b.grad is not None
    assert model.b.grad.numpy() == pytest.approx(((student - teacher) / 2).T @ features, abs=1e-5)
    translated = features @ np.array([[1.0], [1.0]]) + 0.5
    embeddings = np.array([[1.0], [-1.0]])
    docking = torch.tensor([[1.0, 1.0]]), torch.tensor([0.5])
    with_embeddings = DFFKE(embedding_loss=True)
    loss = with_embeddings.exchange_loss(model, SPEC, images, logits, torch.tensor(embeddings).float(), *docking)
    assert loss.item() == pytest.approx(forward + ((translated - embeddings) ** 2).mean(), abs=1e-5)


def test_the_decoder_draws_32_pixels_and_is_resized_from_there() -> None:
    for side, drawn in ((8, 8), (28, 28), (32, 32), (64, 32), (128, 32)):
        spec = Spec(3, side, side, 10, (0.5,) * 3, (0.5,) * 3)
        decoder = Decoder(16, spec)
        images = decoder(torch.randn(2, 16))
        assert images.shape == (2, 3, drawn, drawn)
        assert resized(images, spec).shape == (2, 3, side, side)
    parameters = {
        code: sum(p.numel() for p in Decoder(code, Spec(3, 32, 32, 10, (0.5,) * 3, (0.5,) * 3)).parameters())
        for code in (100, 256, 512)
    }
    assert parameters == {100: 1_050_947, 256: 2_328_899, 512: 4_426_051}


def exchanged(rounds: int = 3, **changes: Any) -> tuple[Experiment, list[Any]]:
    experiment = federation(tiny("dffke", **changes))
    return experiment, list(experiment.rounds(rounds))


def test_a_round_crosses_what_it_says_and_no_more() -> None:
    experiment, (record,) = exchanged(1)
    spec = experiment.task.spec
    clients = experiment.engine.clients
    shared = {k: max(2, -(-len(c.data) // 10)) for k, c in clients.items()}
    weights = {k: nbytes(c.model.state_dict()) for k, c in clients.items()}
    learn = sum(8 + weights[k] + n * clients[k].model.feature_dim * 4 + n * 8 for k, n in shared.items())
    entry = 8 + sum(shared.values()) * 16 * 4 + nbytes(Decoder(16, spec).state_dict())
    lesson = {k: 8 + n * 10 * 4 for k, n in shared.items()}
    assert record.bytes["learn"] == {"up": learn, "down": 0}
    assert record.bytes["teach"] == {"up": sum(lesson.values()), "down": 3 * entry}
    assert record.bytes["exchange"] == {"up": 0, "down": 2 * sum(lesson.values())}
    assert "train" not in record.bytes


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (1, 1), (2, 2), (None, 4)])
def test_the_buffer_keeps_r_past_rounds_and_reports_its_size(limit: int | None, kept: int) -> None:
    experiment, records = exchanged(4, memory=limit)
    for client in experiment.engine.clients.values():
        assert isinstance(client, Trader)
        assert [entry["round"] for entry in client.buffer] == list(range(5 - kept, 5))
        assert records[-1].clients[client.id]["buffer_bytes"] == nbytes(client.buffer)
    decoder = nbytes(Decoder(16, experiment.task.spec).state_dict())
    codes = sum(max(2, -(-len(c.data) // 10)) * 16 * 4 for c in experiment.engine.clients.values())
    assert nbytes(client.buffer) == kept * (decoder + codes + 8)  # R (|Dec| + N h b), and the round's number
    assert records[-1].server["buffer_bytes"] == nbytes(client.buffer)


def test_without_memory_only_fresh_data_is_taught() -> None:
    _, with_memory = exchanged(2)
    _, without = exchanged(2, memory=0)
    assert with_memory[0].bytes == without[0].bytes
    assert with_memory[1].bytes["exchange"]["down"] > without[1].bytes["exchange"]["down"]


def test_review_takes_as_much_of_the_past_as_there_is_fresh() -> None:
    experiment, _ = exchanged(3)
    client = experiment.engine.clients[0]
    assert isinstance(client, Trader)
    algorithm: Any = experiment.algorithm
    *past, now = client.buffer
    torch.manual_seed(0)
    parts = list(algorithm.review(client, past, len(now["codes"][0])))
    assert sum(len(index) for _, index in parts) == len(now["codes"][0])
    for entry, index in parts:
        assert len(set(index.tolist())) == len(index)
        assert int(index.max()) < len(entry["codes"][0])
    everything = list(algorithm.review(client, past, 10**6))
    assert [index.tolist() for _, index in everything] == [list(range(len(e["codes"][0]))) for e in past]


def test_who_missed_rounds_is_sent_their_entries() -> None:
    experiment = federation(tiny("dffke", participation=0.5), clients=4)
    buffers: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    decoder = nbytes(Decoder(16, experiment.task.spec).state_dict())
    for r in experiment.rounds(8):
        active = [k for k, m in r.clients.items() if m["bytes_up"]]
        assert len(active) == 2
        for k in active:
            client = experiment.engine.clients[k]
            assert isinstance(client, Trader)
            buffers[k] = [entry["round"] for entry in client.buffer]
            assert buffers[k] == list(range(1, r.round + 1)), "the buffer is synchronised"
            assert r.clients[k]["bytes_down"] > (r.round - last.get(k, 0)) * decoder, "and that is counted"
            last[k] = r.round
    assert len(buffers) == 4


def test_collaboration_is_a_fixed_group_and_the_rest_train_alone() -> None:
    experiment = federation(tiny("dffke", collaboration=0.5), clients=4)
    for r in experiment.rounds(2):
        assert [k for k, m in r.clients.items() if m["bytes_up"]] == [0, 1]
        assert r.bytes["train"] == {"up": 0, "down": 0}
        assert all(m["epochs"] >= 1 for m in r.clients.values())


def test_noise_in_place_of_embeddings_sends_weights_alone() -> None:
    experiment, records = exchanged(2, embeddings="noise")
    weights = sum(nbytes(c.model.state_dict()) for c in experiment.engine.clients.values())
    assert records[0].bytes["learn"]["up"] == weights + 3 * 8
    assert records[0].mean("global") > 0


def test_public_data_takes_the_place_of_decoder_embeddings_and_weights() -> None:
    experiment = federation(tiny("dffke", transfer="public"), data=Data(public="digits"))
    records = list(experiment.rounds(2))
    assert records[0].bytes["learn"]["up"] == 3 * 8
    shared = sum(max(2, -(-len(c.data) // 10)) for c in experiment.engine.clients.values())
    assert records[0].bytes["teach"]["down"] == 3 * (8 + shared * 8)
    with pytest.raises(ConfigError, match=r"data\.public"):
        federation(tiny("dffke", transfer="public"))
    with pytest.raises(ConfigError, match="embedding_loss"):
        tiny("dffke", transfer="public", embedding_loss=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"embedding_loss": True},
        {"logit_loss": True},
        {"local_review": False},
        {"discrepancy": "mae"},
        {"discrepancy": "kl"},
        {"direction": "student"},
        {"embeddings": "noise"},
        {"share": 0.3},
    ],
    ids=str,
)
def test_every_option_changes_the_outcome(changes: dict[str, Any]) -> None:
    plain, optioned = exchanged(1)[0], exchanged(1, **changes)[0]
    one, other = (dict(e.engine.clients[0].model.state_dict()) for e in (plain, optioned))
    assert not same(one, other)


def test_docking_layers_are_kept_over_rounds() -> None:
    experiment, _ = exchanged(1)
    hub = experiment.server
    assert isinstance(hub, Hub)
    assert sorted(hub.docking) == [0, 1, 2]
    embeddings = {k: torch.randn(4, hub.docking[k]["weight"].shape[1]) for k in hub.docking}
    labels = {k: torch.zeros(4, dtype=torch.long) for k in hub.docking}
    algorithm: Any = DFFKE(code_dim=16, docking_epochs=1, lr=1e-12, docking_weight_decay=0)
    before = {k: layer["weight"].clone() for k, layer in hub.docking.items()}
    algorithm.unify(hub, embeddings, labels)
    for k, weight in before.items():
        assert torch.allclose(hub.docking[k]["weight"], weight, atol=1e-9)


def test_unification_separates_classes_of_different_clients() -> None:
    """Two clients whose embeddings are each other's negatives: one space must tell the classes apart for both."""
    hub = federation(tiny("dffke")).server
    assert isinstance(hub, Hub)
    torch.manual_seed(0)
    y = torch.arange(40) % 2
    e = torch.randn(40, 6) * 0.1 + (2.0 * y[:, None] - 1)
    algorithm: Any = DFFKE(code_dim=8, lr=1e-2)
    _, codes = algorithm.unify(hub, {0: e, 1: -e}, {0: y, 1: y})
    means = {(k, c): codes[k][y == c].mean(0) for k in (0, 1) for c in (0, 1)}
    across = (means[0, 0] - means[1, 0]).norm() + (means[0, 1] - means[1, 1]).norm()
    between = (means[0, 0] - means[0, 1]).norm() + (means[1, 0] - means[1, 1]).norm()
    assert between > 3 * across


def test_the_decoder_learns_to_be_reencoded() -> None:
    short, long = (exchanged(1, decoder_steps=steps)[1][0].server["decoder_loss"] for steps in (1, 40))
    assert long < short / 2


def test_a_client_that_fails_is_left_out_and_comes_back() -> None:
    moods = [True]

    class Moody(DFFKE):
        def learn(self, client: Trader) -> Any:
            if client.id == 1 and client.buffer and moods:
                moods.pop()
                raise RuntimeError("not today")
            return super().learn(client)

    experiment = federation(Moody(**TINY["dffke"]), min_clients=2)
    records = list(experiment.rounds(3))
    assert "client 1 failed in 'learn', round 2: RuntimeError: not today" in records[1].failures
    assert [bool(r.failures) for r in records] == [False, True, False]
    assert records[2].clients[1]["bytes_up"] > 0


def test_a_lone_survivor_has_nobody_to_learn_from() -> None:
    class Silent(DFFKE):
        def teach(self, client: Trader, delivery: Any) -> Any:
            if client.id:
                raise RuntimeError("mute")
            return super().teach(client, delivery)

    (record,) = federation(Silent(**TINY["dffke"]), min_clients=1).rounds(1)
    assert "exchange" not in record.bytes
    assert len(record.failures) == 2


def test_every_student_makes_the_passes_of_the_largest_set(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[int, int] = {}
    original = DFFKE.exchange_loss

    def counted(self: DFFKE, model: Classifier, *batch: Any) -> Tensor:
        steps[id(model)] = steps.get(id(model), 0) + 1
        return original(self, model, *batch)

    monkeypatch.setattr(DFFKE, "exchange_loss", counted)
    experiment = federation(tiny("dffke", batch_size=10, exchange_epochs=2))
    list(experiment.rounds(1))
    largest = max(-(-len(client.data) // 10) for client in experiment.engine.clients.values())
    assert list(steps.values()) == 3 * [2 * 2 * -(-largest // 10)]  # T_FKE passes, two peers each


def test_a_restored_decoder_draws_the_same() -> None:
    spec = Spec(1, 8, 8, 10, (0.5,), (0.5,))
    decoder = Decoder(16, spec)
    decoder(torch.randn(20, 16))
    codes = torch.randn(5, 16)
    state = {name: tensor.clone().contiguous() for name, tensor in decoder.state_dict().items()}
    assert torch.equal(Decoder.restored(state, spec)(codes), decoder.eval()(codes))


def test_one_trader_alone_has_nobody_to_learn_from() -> None:
    (record,) = federation(tiny("dffke"), clients=1).rounds(1)
    assert set(record.bytes) == {"learn"}


def test_replies_reach_the_server_in_order() -> None:
    experiment, _ = exchanged(1)
    assert isinstance(experiment.server, Hub)
    assert list(experiment.server.buffer[0]["codes"]) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_exchange_is_worth_twenty_points_on_digits(seed: int) -> None:
    alone = list(Experiment(Local(), seed=seed).rounds(5))[-1]
    exchanged = list(Experiment(DFFKE(), seed=seed).rounds(5))[-1]
    assert exchanged.mean("global") >= alone.mean("global") + 0.20
    assert exchanged.mean("local") > 0.85
