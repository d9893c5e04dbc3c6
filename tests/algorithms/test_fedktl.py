"""FedKTL, with a small generator made for the purpose."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from barter.algorithms.fedktl import (
    Aligner,
    AligningServer,
    FedKTL,
    alignment,
    arcface,
    fedktl_loss,
    local_arcface_loss,
    mmd,
)
from barter.core import seeds
from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier, SplitClassifier
from barter.core.payload import leaves
from barter.data.partition import Classes
from barter.data.sources import load_dataset
from barter.models.framed import FrameHead, add_frame_head
from barter.models.pretrained import generate_pixels, pretrained_generator, sample_latents
from barter.ops.prototypes import ByClass
from tests.conftest import Blots, federation, same, small_federation, state, tiny

CPU = torch.device("cpu")


class Shifted(Blots):
    """Draws otherwise, and knows its own latent vectors."""

    def forward(self, codes: Tensor) -> Tensor:
        return super().forward(codes + 1)

    def latents(self, count: int) -> Tensor:
        return torch.full((count, 5), 2.0)


def nameless() -> nn.Module:
    return nn.Linear(5, 9)


def test_corners_are_equally_far_apart() -> None:
    head = FrameHead(4, 4, 10.0)
    with torch.no_grad():
        head.weight.copy_(torch.eye(4))
        head.bias.zero_()
    corners = F.normalize(torch.eye(4) - 1 / 4)
    assert torch.allclose(head(3 * corners), 10 * (4 / 3 * torch.eye(4) - 1 / 3), atol=1e-5), (
        "1, and -1/3 from each other"
    )
    old = nn.Linear(3, 4)
    network = add_frame_head(SplitClassifier(nn.Flatten(), old), 10.0)
    assert torch.equal(cast(Tensor, network.state_dict()["head.weight"]), old.weight), (
        "its projection is the old head"
    )


def test_the_own_tasks_loss_by_hand() -> None:
    cosines, labels = torch.tensor([[0.6, 0.0]]), torch.tensor([0])
    wider = math.cos(math.acos(0.6) + 0.5)
    value = arcface(cosines, labels, 2.0, 0.5)
    assert float(value) == pytest.approx(math.log(1 + math.exp(-2 * wider)), rel=1e-5)
    plain = F.cross_entropy(2 * cosines, labels)
    assert torch.allclose(arcface(cosines, labels, 2.0, 0.0), plain), (
        "without a margin, cross entropy"
    )
    corner = torch.tensor([[1.0, -1.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(arcface(corner, labels, 64.0, 0.5), corner)
    assert bool(slope.isfinite().all()), "at a corner too"


def test_the_whole_loss_is_the_own_task_and_the_mean_square() -> None:
    spec = Spec(1, 1, 2, 2, (0.0,), (1.0,))
    model = add_frame_head(SplitClassifier(nn.Flatten(), nn.Linear(2, 2)), 8.0)
    projection = nn.Linear(2, 1)
    with torch.no_grad():
        projection.weight.copy_(torch.tensor([[2.0, 0.0]]))
        projection.bias.fill_(1.0)
    white = torch.tensor([255, 0], dtype=torch.uint8).view(
        1, 1, 1, 2
    )  # features (1, 0), projected to 3
    x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    own = local_arcface_loss(model, 8.0, 0.5, x, torch.tensor([1]))
    whole = fedktl_loss(
        model, projection, 7.0, spec, 8.0, 0.5, x, torch.tensor([1]), white, torch.tensor([[1.0]])
    )
    assert whole.item() == pytest.approx(own.item() + 7 * 4, rel=1e-5)


def test_discrepancy_by_hand() -> None:
    x, y = torch.tensor([[0.0]]), torch.tensor([[2.0]])
    apart = sum(math.exp(-4 / (2 * width)) for width in (10, 15, 20, 50))
    assert float(mmd(x, y)) == pytest.approx(4 + 4 - 2 * apart, rel=1e-5)
    assert float(mmd(x, x)) == pytest.approx(0.0, abs=1e-6)


def test_alignment_pulls_to_the_own_centre() -> None:
    aligner = Aligner(2, 1)
    with torch.no_grad():
        aligner.centres.copy_(torch.tensor([[0.0], [5.0]]))
    vectors, classes = torch.eye(2), torch.tensor([1, 0])
    codes = aligner.eval()(vectors)
    with_it, without = (
        alignment(aligner, lam, vectors, classes, codes).item() for lam in (3.0, 0.0)
    )
    squares = (codes.flatten() - torch.tensor([5.0, 0.0])).square().mean()
    assert with_it - without == pytest.approx(3 * squares.item(), rel=1e-4)
    assert without == pytest.approx(0.0, abs=1e-5)


def test_drawn_images_are_the_clients_kind() -> None:
    code = torch.tensor([[-99.0, 99.0, -99.0, 99.0, 0.0]])  # black on the left, white on the right
    grey = generate_pixels(Blots(), code, Spec(1, 3, 3, 10, (0.5,), (0.5,)))
    assert grey.tolist() == [[[[0, 128, 255]] * 3]]
    colour = generate_pixels(Blots(), code.repeat(9, 1), Spec(3, 6, 8, 10, (0.5,) * 3, (0.5,) * 3))
    assert colour.shape == (9, 3, 6, 8)
    assert torch.equal(colour[0, 0], colour[8, 2])
    assert int(colour[0, 0, 0, 0]) == 0


def test_a_generators_own_latent_vectors_are_taken() -> None:
    assert sample_latents(Shifted(), 3, CPU).unique().tolist() == [2.0]
    assert sample_latents(Blots(), 3, CPU).shape == (3, 5)


def test_without_a_generator_it_is_said_what_one_is(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"trained already: a TorchScript file, or .*latent_dim.*between -1 and 1"
    ):
        list(small_federation(FedKTL()).rounds(1))
    with pytest.raises(ConfigError, match="generator='nowhere.pt': there is no such file"):
        pretrained_generator("nowhere.pt", "", CPU)
    with pytest.raises(ConfigError, match="is a Linear without latent_dim"):
        pretrained_generator("tests.algorithms.test_fedktl:nameless", "", CPU)
    with pytest.raises(
        ConfigError, match="the generator 'tests.conftest:nobody' cannot be imported"
    ):
        pretrained_generator("tests.conftest:nobody", "", CPU)
    (tmp_path / "weights.pt").write_bytes(b"weights")
    with pytest.raises(ConfigError, match="weights.pt' is not TorchScript"):
        pretrained_generator(str(tmp_path / "weights.pt"), "", CPU)

    class ByHand(Classifier):
        feature_dim = 48

    with pytest.raises(
        ConfigError, match="ByHand was split by hand, and its head cannot be replaced"
    ):
        add_frame_head(ByHand(), 64.0)


class Painter(nn.Module):
    """Images of 8 x 8 pixels of sixteen numbers, by one layer; nobody has trained it yet."""

    def __init__(self) -> None:
        super().__init__()
        self.latent_dim, self.layer = 16, nn.Linear(16, 64)

    def forward(self, codes: Tensor) -> Tensor:
        painted: Tensor = self.layer(codes).clamp(-1, 1).view(-1, 1, 8, 8)
        return painted


def test_weights_of_a_generator_that_was_trained_come_from_a_safetensors_file(
    tmp_path: Path,
) -> None:
    place, file = "tests.algorithms.test_fedktl:Painter", tmp_path / "painter.safetensors"
    digits = load_dataset("digits").x_train.flatten(1) / 127.5 - 1
    _, lengths, axes = torch.linalg.svd(digits - digits.mean(0), full_matrices=False)
    trained = (
        axes[:16].T * lengths[:16] / len(digits) ** 0.5
    )  # sixteen principal components, as far as digits reach
    save_file({"layer.weight": trained.contiguous(), "layer.bias": digits.mean(0)}, file)

    def strangeness(weights: str) -> float:
        """How far images that clients are sent lie from the nearest digit, per pixel."""
        experiment, _ = finished(1, generator=place, weights=weights)
        (lesson,) = experiment.server.lessons
        sent = lesson["images"].flatten(1) / 127.5 - 1
        return float(torch.cdist(sent, digits).min(1).values.mean() / 8)

    assert strangeness(str(file)) < 0.6 < 0.7 < strangeness("")
    with pytest.raises(ConfigError, match="weights='.*blank' are not those of this generator"):
        pretrained_generator(place, str(tmp_path / "blank"), CPU)
    save_file({"layer.weight": trained.contiguous()}, file)
    with pytest.raises(ConfigError, match="are not those of this generator: .*layer.bias"):
        pretrained_generator(place, str(file), CPU)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_is_as_good_as_a_function(tmp_path: Path) -> None:
    torch.jit.script(Blots()).save(str(tmp_path / "blots.pt"))
    one, other = (
        small_federation(tiny("fedktl", **changes))
        for changes in ({}, {"generator": str(tmp_path / "blots.pt")})
    )
    assert [list(e.rounds(1)) for e in (one, other)]
    assert same(state(one), state(other))


def finished(rounds: int = 2, clients: int = 2, **changes: Any) -> tuple[Any, list[Any]]:
    experiment = small_federation(
        tiny("fedktl", **changes), clients=clients, partition=Classes(per_client=3)
    )
    return experiment, list(experiment.rounds(rounds))


def test_a_round() -> None:
    experiment, (first, second) = finished(clients=3)
    server, clients = cast(AligningServer, experiment.server), experiment.engine.clients.values()
    held = sorted({int(y) for client in clients for y in client.data.labels})
    assert server.known == held, "an image for each class that somebody has"
    (lesson,) = server.lessons
    assert lesson["images"].shape == (len(held), 1, 8, 8)
    assert torch.equal(lesson["images"], generate_pixels(Blots(), lesson["latents"], server.spec))
    sent = 3 * 3 * (8 + 4 * 10)  # three classes of each, and where they lie in ten dimensions
    projection = 4 * (48 * 5 + 5)
    assert first.bytes == {"learn": {"up": sent, "down": 0}}
    assert second.bytes == {
        "learn": {"up": sent, "down": 3 * (len(held) * (64 + 4 * 5) + projection)}
    }
    labels, pictures = experiment.algorithm.creations(server, lambda labels: labels >= 0)
    assert labels.tolist() == held
    assert pictures.shape == (len(held), 1, 8, 8)


def test_what_is_sent_is_of_after_training() -> None:
    algorithm = cast(FedKTL, tiny("fedktl", lr=0.1))
    client = small_federation(algorithm).engine.clients[0]
    sent = algorithm.learn(client, [])
    model = client.model.eval()
    features = model.features(client.data.batch(torch.arange(len(client.data))))
    places = F.normalize(F.linear(features, model.head.weight, model.head.bias)).detach()
    for y, vector in zip(sent["classes"].tolist(), sent["vectors"], strict=True):
        assert torch.allclose(
            vector, F.normalize(places[client.data.labels == y].mean(0), dim=0), atol=1e-5
        )


def test_every_round_begins_with_the_same_projection() -> None:
    experiment, _ = finished(1)
    before = dict(leaves(cast(AligningServer, experiment.server).lessons[0]["projection"]))
    list(experiment.rounds(2))
    assert same(
        before, dict(leaves(cast(AligningServer, experiment.server).lessons[0]["projection"]))
    )


def test_without_its_term_what_the_generator_draws_does_not_matter() -> None:
    ends = []
    for mu, place in (
        (0.0, "tests.conftest:Blots"),
        (0.0, "tests.algorithms.test_fedktl:Shifted"),
        (50.0, "tests.conftest:Blots"),
    ):
        experiment, _ = finished(mu=mu, generator=place)
        ends.append({at: v for at, v in state(experiment).items() if ".clients." in at})
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])


def table() -> ByClass:
    with seeds.scope(0, "table"):
        return {"classes": torch.arange(30) % 10, "vectors": F.normalize(torch.randn(30, 10))}


def test_the_server_brings_prototypes_to_where_the_generator_draws_from() -> None:
    def aligned(**changes: Any) -> tuple[float, float]:
        algorithm = FedKTL(generator="tests.algorithms.test_fedktl:Shifted", **changes)
        server = AligningServer(Spec(1, 8, 8, 10, (0.5,), (0.5,)), {}, None, CPU)
        with seeds.scope(0, "server"):
            centres = algorithm.align(server, table())
        aligner = Aligner(10, 5)
        aligner.load_state_dict(server.aligner)
        codes = aligner.eval()(table()["vectors"]).detach()
        assert torch.allclose(centres[3], codes[table()["classes"] == 3].mean(0), atol=1e-5), (
            "as they are in the end"
        )
        return float((centres.mean(0) - 2.0).abs().max()), float(
            (codes - centres[table()["classes"]]).square().mean()
        )

    far, _ = aligned(server_epochs=1)
    near, together = aligned(server_batch_size=10)
    _, apart = aligned(server_batch_size=10, lam=0.0)
    assert near < 0.5 < far
    assert together < apart


def test_features_and_projection_learn_to_tell_what_images_were_drawn_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    along, train = [], FedKTL.train

    def watching(self: FedKTL, client: Any, loss: Any, pairs: Any = (), trained: Any = ()) -> None:
        train(self, client, loss, pairs, trained)
        along.extend(trained)

    monkeypatch.setattr(FedKTL, "train", watching)
    with seeds.scope(0, "lesson"):
        codes, projection = torch.randn(10, 5), nn.Linear(48, 5)

    def told(mu: float) -> float:
        algorithm = cast(FedKTL, tiny("fedktl", mu=mu))
        client = federation(algorithm).engine.clients[0]
        images, start = (
            generate_pixels(Blots(), codes, client.data.spec),
            dict(projection.state_dict()),
        )
        with seeds.scope(0, "learn"):
            algorithm.learn(client, [{"images": images, "latents": codes, "projection": start}])
        features = client.model.eval().features((images.float() / 255 - 0.5) / 0.5)
        return F.mse_loss(projection(features), codes).item()

    assert told(50.0) < 0.9 * told(0.0), "also by the projection as it began"
    (trained,) = along
    assert not torch.allclose(trained.weight, projection.weight, atol=1e-3)


def test_the_benchmarks_generator_is_one_that_the_method_takes(tmp_path: Path) -> None:
    from benchmarks.generator import grey28, trained

    torch.manual_seed(0)
    square = torch.full((50, 1, 28, 28), -0.5)
    square[:, :, 7:21, 7:21] = 0.5
    painter, weights = trained(square, 20), tmp_path / "weights.safetensors"
    save_file(painter.state_dict(), weights)
    again = pretrained_generator("benchmarks.generator:grey28", str(weights), CPU)
    codes = sample_latents(again, 20, CPU)
    with torch.no_grad():
        assert torch.equal(again(codes), painter(codes))
        first, last = (F.mse_loss(network(codes), square[:20]) for network in (grey28(), painter))
    assert float(last) < 0.9 * float(first), "it has begun to draw what it saw"
