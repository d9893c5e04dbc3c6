"""Class moments: who is asked, what is learned, and numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from barter.algorithms.moments import (
    ClassMoments,
    Discriminant,
    blend_with_photographs,
    decoding_loss,
    discriminant_logits,
    guided_loss,
    imitation_loss,
    public_format,
)
from barter.core.errors import ClientError, ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier
from barter.core.nodes import Client
from barter.core.payload import isolate
from barter.data.sources import load_dataset
from barter.data.task import Data
from barter.ops.moments import add_moments, sum_moments, whiten_features
from barter.ops.photographs import photograph_images
from barter.privacy import Privacy
from barter.trained.export import export_model
from barter.trained.model import evaluate_networks, load, load_all
from tests.conftest import digits_file, federation, perceptrons, small_federation, tiny


class Plain(Classifier):
    """Features are four pixels, logits are features."""

    feature_dim = 4

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def logits(self, features: Tensor) -> Tensor:
        return features


class Mirrored(Classifier):
    """An extractor's features of mirrored images."""

    def __init__(self, extractor: Classifier) -> None:
        super().__init__()
        self.extractor = extractor
        self.feature_dim = extractor.feature_dim

    def features(self, x: Tensor) -> Tensor:
        return self.extractor.features(x.flip(3))

    def logits(self, features: Tensor) -> Tensor:
        return self.extractor.logits(features)


def test_students_learn_what_the_discriminant_says_and_not_the_other_way_round() -> None:
    target = torch.tensor([[0.0, math.log(3.0)]])  # probabilities 1/4 and 3/4
    value = float(imitation_loss(Plain(), torch.zeros(1, 2), target))
    assert value == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    other_way = 0.5 * math.log(2.0) + 0.5 * math.log(2 / 3)
    assert abs(value - other_way) > 0.01


def test_students_learn_what_the_discriminant_says_of_the_image_they_see() -> None:
    """By hand: two pixels of 0.75 and 0.5 are normalised to 1 and 0, and their components too."""
    spec = Spec(1, 1, 2, 2, mean=(0.25,), std=(0.5,))
    x = torch.tensor([[[[1.0, 0.5]]]])  # pixels 0.75 and 0.5
    weights = torch.tensor([[0.0, 0.0], [math.log(3.0), 7.0]])
    constants = (torch.zeros(2), torch.eye(2), weights, torch.zeros(2), torch.tensor([True, True]))
    features = torch.zeros(1, 2, requires_grad=True)
    extractor = Plain()
    value = guided_loss(Plain(), extractor, spec, x, features, *constants)
    # The discriminant says 1/4 and 3/4, the student 1/2 and 1/2.
    assert value.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    value.backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert features.grad[0].tolist() == pytest.approx([0.25, -0.25])


def test_blended_images_are_means_of_themselves_and_of_crops() -> None:
    spec = Spec(3, 10, 10, 2, mean=(0.2, 0.3, 0.4), std=(0.5, 0.6, 0.7))
    images = torch.full((40, 3, 12, 12), 9.0)  # whiter than white, so that no crop is like it
    torch.manual_seed(0)
    blend_with_photographs(images, 30, spec)
    assert torch.equal(images[30:], torch.full((10, 3, 12, 12), 9.0))
    torch.manual_seed(0)
    seed = int(torch.randint(2**31, ()))
    crops = photograph_images(public_format(spec), torch.arange(30), 30, seed)
    crops = nn.functional.interpolate(crops, (12, 12), mode="bilinear")
    mean, std = torch.tensor(spec.mean).view(3, 1, 1), torch.tensor(spec.std).view(3, 1, 1)
    crops = (crops * 0.25 + 0.5 - mean) / std
    weights = (images[:30] - crops) / (9.0 - crops)
    assert torch.allclose(weights, weights[:, :1, :1, :1].expand_as(weights), atol=1e-4)
    weights = weights[:, 0, 0, 0]
    assert weights.min() < 0.1
    assert weights.max() > 0.9
    untouched = torch.zeros(2, 3, 12, 12)
    blend_with_photographs(untouched, 0, spec)
    assert not untouched.any()


def test_blended_images_need_targets_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"targets='components' with blended=0\.5: .*blended=0"):
        ClassMoments(targets="components")
    assert ClassMoments(targets="components", blended=0.0).blended == 0.0


def test_logits_of_components_can_be_learned_instead() -> None:
    experiment = perceptrons(tiny("moments", targets="components", blended=0.0))
    other = perceptrons(tiny("moments", blended=0.0))
    for run in (experiment, other):
        record = run.step()
        assert record.server["classes"] == 10
    same = [
        torch.equal(a, b)
        for a, b in zip(
            experiment.engine.clients[0].model.parameters(),
            other.engine.clients[0].model.parameters(),
            strict=True,
        )
    ]
    assert not all(same)


def test_unknown_classes_are_never_predicted() -> None:
    gaussians: Any = {
        "weights": torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]),
        "bias": torch.tensor([0.5, -1.0, 0.0]),
        "known": torch.tensor([True, True, False]),
    }
    logits = discriminant_logits(gaussians, torch.tensor([[3.0, 4.0], [-9.0, -9.0]]))
    assert logits.tolist() == [[3.5, 7.0, -26.5], [-8.5, -19.0, -49.0]]


def test_the_decoder_is_to_give_images_whose_components_are_the_code() -> None:
    class Fixed(nn.Module):
        """Decodes everything to the pixels 3, 4, 0, 0."""

        def forward(self, codes: Tensor) -> Tensor:
            assert torch.allclose(codes[0, 0], torch.tensor([2**0.5, 0.0]), atol=1e-6)
            return torch.tensor([3.0, 4.0, 0.0, 0.0]).view(1, 1, 2, 2)

    whitening = (torch.tensor([0.0, 0, 0, 1]), torch.eye(4)[:, :2])
    spec = Spec(1, 2, 2, 2, (0.5,), (0.5,))
    # Components are (3, 4) / 5, and the code is (1, 0): 0.4² + 0.8².
    loss = decoding_loss(Fixed(), Plain(), spec, torch.tensor([[1.0, 0.0]]), *whitening)  # type: ignore[arg-type]
    assert float(loss) == pytest.approx(0.16 + 0.64)


def test_moments_are_those_of_all_images_and_asked_for_once() -> None:
    experiment = perceptrons(tiny("moments"))
    algorithm: Any = experiment.algorithm
    server: Any = experiment.server
    first = experiment.step()
    uploads = isolate(server.moments)
    second = experiment.step()
    assert first.mean("bytes_up") == 4 * (10 + 10 * 16 + 16 * 16)
    assert second.traffic("up") == 0
    assert second.traffic("down") == 0, "clients have the Gaussians and the decoder"
    clients = list(experiment.engine.clients.values())
    extractor = algorithm.build_extractor(server)
    features = []
    for client in clients:
        pixels = client.data.pixels.float() / 255
        features.append(extractor.features((pixels - 0.5) / 0.25))
    x = whiten_features(torch.cat(features), server.whitening)
    labels = torch.cat([client.data.labels for client in clients])
    pooled = sum_moments(x, labels, 10)
    joint = add_moments(uploads.values())
    for key, value in joint.items():
        assert torch.allclose(value.float(), pooled[key], rtol=1e-3, atol=1e-4), key  # type: ignore[literal-required,attr-defined]


def test_clients_that_come_later_renew_what_all_learn_from() -> None:
    experiment = perceptrons(tiny("moments", fraction=0.4), clients=5)
    server: Any = experiment.server
    asked: set[int] = set()
    for record in experiment.rounds(6):
        new = set(server.moments) - asked
        uploading = {k for k, values in record.clients.items() if values.get("bytes_up")}
        assert uploading == new
        assert ("decoder_loss" in record.server) == bool(new)
        asked = set(server.moments)
        for client in experiment.engine.clients.values():
            held = server.held.get(client.id)
            if held == server.version:
                mine = client.knowledge["gaussians"]
                assert torch.equal(mine["means"], server.knowledge["gaussians"]["means"])
    assert len(asked) > 2, "more than the clients of one round"


@pytest.mark.usefixtures("all_crops")
def test_networks_learn_classes_that_their_clients_lack() -> None:
    algorithm = ClassMoments(
        components=64, max_epochs=10, decoder_steps=150, samples=1200, exchange_epochs=4
    )
    (record,) = federation(algorithm, clients=3).rounds(1)
    assert record.mean("global") > record.mean("before_global") + 0.1
    assert record.server["global"] > 0.9
    assert record.server["classes"] == 10


def test_the_server_is_judged_by_the_discriminant() -> None:
    experiment = perceptrons(tiny("moments"))
    algorithm: Any = experiment.algorithm
    server: Any = experiment.server
    test = experiment.test
    assert test is not None
    assert algorithm.evaluate_server(server, test) == {}
    record = experiment.step()
    extractor = algorithm.build_extractor(server)
    model = Discriminant(extractor, server.whitening, server.knowledge["gaussians"], server.spec)
    predicted = model(test.batch(torch.arange(len(test)))).argmax(1)
    right = float((predicted == test.labels).float().mean())
    assert record.server["global"] == pytest.approx(right)


@pytest.mark.parametrize("size", [None, 40])
def test_the_discriminant_is_loaded_and_exported_as_the_servers_model(
    size: int | None, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    data = Data(source="digits" if size is None else digits_file(tmp_path), size=size)
    experiment = perceptrons(tiny("moments"), data=data, out=tmp_path / "run")
    record = experiment.step()
    test = experiment.test
    assert test is not None
    trained = load(tmp_path / "run")
    assert (trained.owner, trained.architecture) == ("server", "discriminant of filters")
    assert trained.spec.height == (size or 8)
    assert (trained.spec.mean, trained.spec.std) == ((0.5,), (0.25,)), "not those of private pixels"
    logits = trained(test.pixels)
    right = float((logits.argmax(1) == test.labels).float().mean())
    assert record.server["global"] == pytest.approx(right)
    networks = load_all(tmp_path / "run")
    assert networks[-1].owner == "server"
    assert networks[0].spec != networks[-1].spec
    digits = load_dataset("digits")
    if size is None:
        images, accuracies = evaluate_networks(
            networks, digits, new=False, device=torch.device("cpu")
        )
        assert images == len(test)
        assert accuracies[-1] == pytest.approx(right), "with its own normalisation"
        assert accuracies[0] == pytest.approx(record.clients[0]["global"])

    export_model(trained, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    inputs = trained.prepare(test.pixels[:20])
    (exported,) = session.run(None, {"images": inputs.numpy()})
    assert torch.allclose(torch.from_numpy(exported), logits[:20], rtol=1e-3, atol=1e-2)


def test_a_classifier_that_cannot_be_built_does_not_hide_the_clients_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perceptrons(tiny("moments"), out=tmp_path / "run").step()

    def fails(self: ClassMoments, spec: Spec) -> Classifier:
        raise ConfigError("no file public.pth")

    monkeypatch.setattr(ClassMoments, "make_extractor", fails)
    with pytest.warns(UserWarning, match=r"classifier is left out: no file public\.pth"):
        networks = load_all(tmp_path / "run")
    assert [model.owner for model in networks] == ["client 0", "client 1", "client 2"]


def test_a_crafted_classifier_is_refused_in_one_line() -> None:
    experiment = perceptrons(tiny("moments"))
    experiment.step()
    server: Any = experiment.server
    algorithm: Any = experiment.algorithm
    memory = server.memory()
    assert algorithm.server_classifier(memory, server.spec) is not None
    for name in ("factor", "weights", "bias", "known"):
        crafted = isolate(memory)
        crafted["knowledge"]["gaussians"][name] = crafted["knowledge"]["gaussians"][name][:-1]
        with pytest.raises(ValueError, match=f"{name} has the shape"):
            algorithm.server_classifier(crafted, server.spec)
    crafted = isolate(memory)
    crafted["whitening"]["center"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"center has the shape \(3,\), and not"):
        algorithm.server_classifier(crafted, server.spec)
    large = replace(server.spec, height=4096, width=4096)
    with pytest.raises(ValueError, match=r"small-mlp would have 4,294,970,634 parameters"):
        ClassMoments(extractor="small-mlp", components=16).server_classifier(memory, large)


def test_a_run_of_an_earlier_version_says_that_it_cannot_go_on() -> None:
    experiment = perceptrons(tiny("moments"), min_clients=2)
    experiment.step()
    earlier: Any = experiment.engine.clients[1]
    earlier.whitening = {}
    (failure,) = experiment.step().failures
    assert "begun by an earlier version of moments" in failure


def test_a_server_that_knows_no_class_has_no_classifier(tmp_path: Path) -> None:
    noise = Privacy(parts={"describe": "gaussian clip=1 noise=100000"})
    perceptrons(tiny("moments"), privacy=noise, out=tmp_path / "run").step()
    with pytest.raises(ConfigError, match="server has no model of its own: name a client"):
        load(tmp_path / "run")
    assert {model.owner for model in load_all(tmp_path / "run")} >= {"client 0"}


def test_other_features_than_the_servers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = perceptrons(tiny("moments"))
    algorithm: Any = experiment.algorithm
    reference = ClassMoments.make_reference

    def other(self: ClassMoments, server: Any) -> Any:
        true = reference(self, server)
        return {**true, "example": true["example"].flip(1)}

    monkeypatch.setattr(ClassMoments, "make_reference", other)
    with pytest.raises(ClientError, match=r"features here are not the server's; every party"):
        experiment.step()
    assert algorithm.extractor == "filters"


def test_an_unknown_extractor_is_refused_before_the_run() -> None:
    with pytest.raises(
        ConfigError, match=r"extractor='filter' is neither .* did you mean 'filters'"
    ):
        ClassMoments(extractor="filter")


def test_images_with_other_channels_than_photographs_are_refused() -> None:
    x, y = torch.randint(256, (60, 2, 8, 8), dtype=torch.uint8), torch.arange(60) % 3
    experiment = federation(tiny("moments"), (x, y, x[:9], y[:9]))
    with pytest.raises(ConfigError, match="have 2 channels, and the photographs"):
        experiment.step()


def test_noise_that_hides_all_classes_is_said() -> None:
    privacy = Privacy(epsilon=0.01, parts={"describe": "gaussian clip=1"})
    experiment = perceptrons(tiny("moments"), privacy=privacy)
    records = list(experiment.rounds(2))
    assert records[0].server["classes"] == 0
    assert "global" not in records[0].server
    (remark,) = experiment.algorithm.remarks(records)
    assert remark.startswith("no class has enough images to be described")


def test_reports_show_decoded_images_of_every_known_class() -> None:
    experiment = small_federation(tiny("moments"))
    assert experiment.algorithm.creations(experiment.server, lambda y: y) is None
    experiment.step()
    found = experiment.algorithm.creations(experiment.server, lambda y: torch.arange(0, len(y), 10))
    assert found is not None
    labels, images = found
    assert labels.tolist() == list(range(10))
    assert images.shape == (10, 1, 8, 8)


def test_any_network_can_be_the_extractor() -> None:
    experiment = perceptrons(tiny("moments", extractor="small-cnn"))
    record = experiment.step()
    assert record.server["classes"] == 10
    server: Any = experiment.server
    assert server.whitening["projection"].shape == (512, 16)


def test_a_client_that_could_not_upload_learns_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describe = ClassMoments.describe

    @wraps(describe)
    def fails(self: ClassMoments, client: Any, reference: Any) -> Any:
        if client.id == 1:
            raise RuntimeError("no power")
        return describe(self, client, reference)

    monkeypatch.setattr(ClassMoments, "describe", fails)
    experiment = perceptrons(tiny("moments"), min_clients=2)
    record = experiment.step()
    server: Any = experiment.server
    assert sorted(server.moments) == [0, 2]
    (failure,) = record.failures
    assert "client 1 failed in 'describe'" in failure
    late: Any = experiment.engine.clients[1]
    assert "gaussians" in late.knowledge
    assert torch.equal(late.whitening["projection"], server.whitening["projection"])
    assert {"before_global", "global"} <= record.clients[1].keys()


def test_a_client_with_other_features_does_not_learn_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused at both calls: its discriminant would say something else than the server's."""
    build = ClassMoments.build_extractor

    def changed(self: ClassMoments, party: Any) -> Classifier:
        extractor = build(self, party)
        if isinstance(party, Client) and party.id == 1:
            return Mirrored(extractor)
        return extractor

    monkeypatch.setattr(ClassMoments, "build_extractor", changed)
    record = perceptrons(tiny("moments"), min_clients=2).step()
    assert len(record.failures) == 2
    for failure, method in zip(record.failures, ("describe", "exchange"), strict=True):
        assert f"client 1 failed in '{method}'" in failure
        assert "features here are not the server's" in failure
