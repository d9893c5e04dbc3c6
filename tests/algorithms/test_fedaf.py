from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from barter.algorithms.condensation import perturb_parameters
from barter.algorithms.fedaf import (
    FedAF,
    mean_by_class,
    mix_with_new_weights,
    server_loss,
    symmetric_kl,
)
from barter.algorithms.feddm import FedDM
from barter.core.clients import Replies
from barter.core.images import Augment, Spec, prepare_batch
from barter.core.record import Round
from barter.data.task import Data
from barter.ops.condense import averaging_matrix
from tests.conftest import same, small_federation, tiny
from tests.ops.test_condense import Linear

SPEC = Spec(1, 1, 2, 3, (0.5,), (0.25,))


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_equation_15_is_symmetric_and_by_hand() -> None:
    p, q = np.array([[0.7, 0.2, 0.1]]), np.array([[0.1, 0.3, 0.6]])
    expected = 0.5 * ((p * np.log(p / q)).sum() + (q * np.log(q / p)).sum())
    log_p, log_q = (torch.tensor(x).log() for x in (p, q))
    assert symmetric_kl(log_p, log_q).item() == pytest.approx(expected)
    assert symmetric_kl(log_q, log_p).item() == pytest.approx(expected)
    assert symmetric_kl(log_p, log_p).item() == 0


def test_equation_14_by_hand() -> None:
    a, b = [[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 1.0], [0.5, 0.0]]
    model = Linear(a, b)
    pixels = torch.tensor([[[[255, 0]]], [[[0, 255]]], [[[255, 255]]]], dtype=torch.uint8)
    labels = torch.tensor([0, 2, 2])
    x = np.array([[2.0, -2.0], [-2.0, 2.0], [2.0, 2.0]])
    logits = x @ np.array(a).T @ np.array(b).T
    entropy = -np.log(softmax(logits)[range(3), [0, 2, 2]]).mean()
    r = np.array([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
    t = softmax(
        np.stack([logits[0], (logits[1] + logits[2]) / 2]) / 4.0
    )  # classes 0 and 2, temperature 4
    apart = 0.5 * ((r[[0, 2]] - t) * np.log(r[[0, 2]] / t)).sum(1)
    R = torch.tensor(r).float()
    for known, terms in (([1.0, 1.0, 1.0], apart), ([1.0, 1.0, 0.0], apart[:1])):
        told = server_loss(model, SPEC, 0.5, 4.0, pixels, labels, R, torch.tensor(known))
        expected = [entropy + 0.5 * terms.mean(), entropy, terms.mean()]
        assert [x.item() for x in told] == pytest.approx(expected, abs=1e-5)
    plain = server_loss(model, SPEC, 0.0, 4.0, pixels, labels, R, torch.ones(3))
    assert [x.item() for x in plain] == pytest.approx([entropy] * 2, abs=1e-5)
    nobody = server_loss(model, SPEC, 0.5, 4.0, pixels, labels, R, torch.zeros(3))
    assert [x.item() for x in nobody] == pytest.approx([entropy, entropy, 0], abs=1e-5)


def test_means_are_over_the_clients_that_hold_a_class() -> None:
    parts = {
        0: (torch.tensor([0, 2]), torch.tensor([[1.0, 1.0], [4.0, 0.0]])),
        1: (torch.tensor([2]), torch.tensor([[2.0, 2.0]])),
    }
    mean, known = mean_by_class(4, parts)
    assert mean.tolist() == [[1, 1], [0, 0], [3, 1], [0, 0]]
    assert known.tolist() == [1, 0, 1, 0]


def test_equation_17() -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2)
    w = model.weight.detach().clone()
    mix_with_new_weights(1.0, model)
    assert torch.equal(model.weight, w)
    torch.manual_seed(1)
    mix_with_new_weights(0.75, model)
    torch.manual_seed(1)
    fresh = nn.Linear(3, 2)
    assert torch.allclose(model.weight, 0.75 * w + 0.25 * fresh.weight, atol=1e-6)


def test_feddm_draws_networks_at_a_distance() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    perturb_parameters(5.0, model)
    apart = nn.utils.parameters_to_vector(model.parameters()) - before
    assert apart.norm().item() == pytest.approx(5.0, rel=1e-5)


def test_fedaf_without_its_terms_is_feddm_with_fedafs_momentum() -> None:
    """Networks, logits and weight decay are FedDM's by default; the paper's are an option."""
    settings: Any = {"ipc": 2, "steps": 5, "server_epochs": 4, "clip": 2.0}
    dm = small_federation(FedDM(image_momentum=0.9, **settings))
    af = small_federation(FedAF(lambda_loc=0.0, lambda_glob=0.0, **settings))
    sampled_otherwise = small_federation(
        FedAF(lambda_loc=0.0, lambda_glob=0.0, gamma=0.9, **settings)
    )
    for experiment in (dm, af, sampled_otherwise):
        list(experiment.rounds(2))
    weights = dm.server.model.state_dict()
    assert same(af.server.model.state_dict(), weights)
    assert not same(sampled_otherwise.server.model.state_dict(), weights)


def test_the_mean_logits_of_a_class_and_its_soft_label() -> None:
    experiment = small_federation(tiny("fedaf"))
    client: Any = experiment.engine.clients[0]
    algorithm = FedAF(ipc=1, steps=1, min_samples=20, tau=3.0)
    means = algorithm.summarise(client)
    shared = algorithm.merge(experiment.server, Replies({0: means}, {0: 1}, {}))
    given = algorithm.condense(client, shared)
    held = client.data.class_counts()
    assert means["classes"].tolist() == held.nonzero()[:, 0].tolist()
    assert given["classes"].tolist() == (held >= 20).nonzero()[:, 0].tolist()
    logits = client.model.eval()(client.data.batch(torch.arange(len(client.data))))
    for row, c in zip(given["soft"], given["classes"].tolist(), strict=True):
        mean = logits[client.data.labels == c].mean(0)
        assert torch.allclose(row, F.softmax(mean / 3.0, 0), atol=1e-5)


def test_without_collaboration_the_others_do_not_matter() -> None:
    experiment = small_federation(tiny("fedaf"))
    client: Any = experiment.engine.clients[0]
    images = {}
    for weight in (0.0, 50.0):
        algorithm: Any = tiny("fedaf", lambda_loc=weight)
        for shift in (0.0, 10.0):
            means = algorithm.summarise(client)
            means["logits"] = means["logits"] + shift
            torch.manual_seed(0)
            images[weight, shift] = algorithm.condense(client, means)["images"]
    assert torch.equal(images[0.0, 0.0], images[0.0, 10.0])
    assert not torch.equal(images[50.0, 0.0], images[50.0, 10.0])


@pytest.mark.parametrize("name", ["fedaf", "feddm"])
def test_when_no_class_is_large_enough_the_model_stays(name: str) -> None:
    experiment = small_federation(tiny(name, min_samples=10**6))
    before = {at: v.clone() for at, v in experiment.server.model.state_dict().items()}
    (record,) = experiment.rounds(1)
    assert all(torch.equal(v, before[at]) for at, v in experiment.server.model.state_dict().items())
    assert not record.failures
    (remark,) = experiment.algorithm.remarks([record])
    assert remark.startswith("min_samples=1000000: no class of any client has 1000000 images")


def test_clients_end_a_round_with_the_servers_model_and_send_no_weights() -> None:
    for algorithm in (tiny("fedaf"), tiny("feddm")):
        experiment = small_federation(algorithm)
        (record,) = experiment.rounds(1)
        w = experiment.server.model.state_dict()
        for client in experiment.engine.clients.values():
            assert all(torch.equal(v, w[at]) for at, v in client.model.state_dict().items())
        assert record.bytes["receive"]["up"] == 0
        assert record.mean("bytes_up") < 0.1 * record.mean("bytes_down")


def given_away(client: Any, shared: Any, **changes: Any) -> tuple[Any, Any]:
    """What the client sends, and the mean logits that its model has for it, class by class."""
    torch.manual_seed(0)
    given = FedAF(ipc=2, steps=30, **changes).condense(client, shared)
    labels = given["classes"].repeat_interleave(given["sizes"])
    logits = client.model.eval()(prepare_batch(given["images"], client.data.spec, Augment()))
    return given, (averaging_matrix(labels, given["classes"]) @ logits).detach()


def test_collaboration_draws_what_is_sent_to_what_everybody_has() -> None:
    """The claim of CDC: condensed images stand for a class as all clients have it, not as their own client does."""
    experiment = small_federation(tiny("fedaf"), seed=2)
    list(experiment.rounds(1))
    clients: Any = experiment.engine.clients
    local = {k: FedAF().summarise(client) for k, client in clients.items()}
    shared = FedAF().merge(experiment.server, Replies(local, dict.fromkeys(local, 1), {}))
    client, apart = clients[0], {}
    for weight in (0.0, 10.0):
        given, u = given_away(client, shared, lambda_loc=weight)
        apart[weight] = (
            (u - shared["logits"][torch.isin(shared["classes"], given["classes"])])
            .square()
            .mean()
            .item()
        )
    own = local[0]["logits"][torch.isin(local[0]["classes"], given["classes"])]
    everybodys = shared["logits"][torch.isin(shared["classes"], given["classes"])]
    without, collaborating = apart.values()
    assert collaborating < 0.6 * without
    assert collaborating < 0.6 * (own - everybodys).square().mean().item(), (
        "nearer to all than the client's own images"
    )


def test_knowledge_matching_holds_the_model_to_what_it_knew_of_the_originals() -> None:
    """The claim of LGKM: soft labels of the originals keep what few condensed images would make the model forget."""
    experiment = small_federation(tiny("fedaf"))
    server, client = experiment.server, experiment.engine.clients[0]
    before = {at: value.clone() for at, value in server.model.state_dict().items()}
    held = torch.unique(client.data.labels)[:2]
    soft = torch.zeros(2, 10)
    soft[:, held] = torch.tensor([[0.6, 0.4], [0.4, 0.6]])  # two classes that look alike
    images = torch.cat([client.data.pixels[client.data.labels == c][:2] for c in held])
    lots: Any = {
        0: {"classes": held, "sizes": torch.tensor([2, 2]), "images": images, "soft": soft}
    }
    gap = {}
    for weight in (0.0, 1.0):
        server.model.load_state_dict(before)
        torch.manual_seed(0)
        FedAF(server_epochs=60, lambda_glob=weight, tau=1.0).train(
            server, Replies(lots, {0: 1}, {})
        )
        means = (
            server.model.eval()(prepare_batch(images, server.spec, Augment()))
            .view(2, 2, -1)
            .mean(1)
        )
        said = means.softmax(1)
        assert said.argmax(1).tolist() == held.tolist(), "the classes are learnt either way"
        gap[weight] = (said - soft).abs().sum().item()
    without, held_to_it = gap.values()
    assert held_to_it < 0.6 * without
    assert server.report["knowledge_end"] < 0.5 * server.report["knowledge_start"]


@pytest.mark.parametrize("name", ["fedaf", "feddm"])
def test_the_record_says_what_the_terms_did_and_how_varied_images_are(name: str) -> None:
    (record,) = small_federation(tiny(name)).rounds(1)
    terms = {"matching"} | ({"collaboration"} if name == "fedaf" else set())
    ends = {f"{term}_{when}" for term in terms for when in ("start", "end")}
    for told in record.clients.values():
        assert ends | {"variety", "contrast", "own_variety", "own_contrast"} <= told.keys()
        assert told["matching_end"] < told["matching_start"]
        assert 0.5 < told["variety"] / told["own_variety"] < 2, (
            "real images, hardly changed by three steps"
        )
        assert 0.5 < told["contrast"] / told["own_contrast"] < 2
    server = {"entropy"} | ({"knowledge"} if name == "fedaf" else set())
    assert {
        f"{term}_{when}" for term in server for when in ("start", "end")
    } <= record.server.keys()
    assert record.server["entropy_end"] < record.server["entropy_start"]


def test_images_that_are_all_alike_are_spoken_of() -> None:
    algorithm, experiment = FedDM(), small_federation(tiny("feddm"))
    client: Any = experiment.engine.clients[0]
    label = client.data.labels[0].item()
    own = client.data.batch((client.data.labels == label).nonzero()[:, 0])
    algorithm.report_variety(client, own, torch.full((len(own),), label))
    assert client.report["variety"] == pytest.approx(client.report["own_variety"])
    assert client.report["contrast"] == pytest.approx(0, abs=1e-6), "there is one class"
    rounds = [
        Round(t, {0: dict(client.report), 3: dict(client.report)}, {"condensed": 20.0}, {}, {}, [])
        for t in (1, 2)
    ]
    assert algorithm.remarks(rounds) == []
    algorithm.report_variety(
        client, own.mean(0) + 0.09 * (own - own.mean(0)), torch.full((len(own),), label)
    )
    rounds[1].clients[3].update(client.report)
    (remark,) = algorithm.remarks(rounds)
    assert re.match(
        r"the condensed images of a class are nearly identical at client 3: .*init_images.*image_lr",
        remark,
    )
    assert algorithm.remarks(rounds[:1]) == [], "as they were in the end"
    assert FedDM(ipc=1).remarks(rounds) == [], "of one image nothing follows"


def test_both_start_and_train_alike() -> None:
    """What differs between the results of the two is what differs between the methods."""
    af, dm = FedAF(), FedDM()
    for field in (
        "ipc",
        "min_samples",
        "steps",
        "batch_size",
        "init_images",
        "server_epochs",
        "server_lr",
        "momentum",
    ):
        assert getattr(af, field) == getattr(dm, field)
    assert af.clip is not None
    assert dm.clip is not None
    farthest = [
        dm.image_lr * dm.clip / (1 - dm.image_momentum),
        af.image_lr * af.clip / (1 - af.momentum),
    ]
    assert farthest == pytest.approx([4, 4]), "how far images may go in a step"


def test_presets_are_the_papers() -> None:
    paper = FedAF.preset("paper")
    assert (paper.ipc, paper.min_samples, paper.steps, paper.image_lr, paper.momentum) == (
        50,
        50,
        1000,
        1.0,
        0.9,
    )
    assert (paper.lambda_loc, paper.lambda_glob, paper.gamma, paper.clip, paper.init_images) == (
        1e-4,
        0.01,
        0.9,
        None,
        5,
    )
    assert (paper.match_logits, paper.weight_decay) == (False, 0.0)
    assert (paper.server_epochs, paper.server_lr, paper.batch_size, paper.fraction) == (
        500,
        1e-3,
        256,
        1.0,
    )
    dm = FedDM.preset("paper")
    assert (dm.steps, dm.server_epochs, dm.image_lr, dm.clip, dm.rho, dm.init_images) == (
        1000,
        500,
        1.0,
        2.0,
        5.0,
        1,
    )


@pytest.mark.parametrize("name", ["fedaf", "feddm"])
def test_feature_skew(name: str, tmp_path: Path) -> None:
    """Clients that see one domain each: both classes are condensed by both, and nobody fails."""
    for d, domain in enumerate(("photo", "sketch")):
        for c, kind in enumerate(("a", "b")):
            for i in range(10):
                path = tmp_path / domain / kind / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (8, 8), 120 * d + 60 * c + i).save(path)
    source = Data(source=f"domains:{tmp_path}", size=8)
    experiment = small_federation(tiny(name), data=source, partition="domains", clients=2)
    *_, record = experiment.rounds(2)
    assert record.failures == []
    assert experiment.task.class_table().tolist() == [[8, 8], [8, 8]]
    assert record.clients[0]["bytes_up"] == record.clients[1]["bytes_up"] > 0
