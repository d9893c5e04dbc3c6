"""What generators of images share: terms of their losses, how they take turns with a student, how they are measured."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from barter.core.images import Spec
from barter.core.nodes import Server
from barter.ops.distill import kl, kl_each, tempered_kl
from barter.ops.fit import sgd
from barter.ops.statistics import compare_statistics
from barter.ops.synthesis import (
    Ensemble,
    Player,
    build_ensemble,
    collapse_remarks,
    diversity,
    fidelity,
    fidelity_by_label,
    label_codes,
    merge_spectra,
    sample_canvases,
    spectrum,
    train_alternately,
    variety,
    within_range,
)
from tests.conftest import federation, tiny

P, Q = (
    torch.tensor([[0.0, math.log(3)], [0.0, 0.0]]),
    torch.tensor([[0.0, 0.0], [math.log(3), 0.0]]),
)


def test_divergences_by_hand() -> None:
    one = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(
        0.75 / 0.5
    )  # KL of (1/4, 3/4) from (1/2, 1/2)
    other = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl_each(P, Q).tolist() == pytest.approx([one, other])
    assert kl(P, Q).item() == pytest.approx((one + other) / 2)
    assert tempered_kl(2.0, 2 * Q, 2 * P).item() == pytest.approx(4 * (one + other) / 2), (
        "the teacher comes last"
    )


def test_each_client_is_asked_by_what_it_knows() -> None:
    said = torch.stack([P, Q])  # probabilities of class 1: 3/4 and 1/2; 1/2 and 1/4
    y, weights = torch.tensor([1, 1]), torch.tensor([[0.25, 0.0], [0.75, 1.0]])
    first = 0.25 * -math.log(0.75) + 0.75 * -math.log(0.5)
    assert fidelity_by_label(said, y, weights).item() == pytest.approx((first - math.log(0.25)) / 2)


def test_variety_by_hand() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0], [9.0, 9.0], [9.0, 9.0]])[:, None, None, :]
    y = torch.tensor([1, 1, 4, 4])
    # Class 1 has its two images one off its mean (1, 0) in one of two pixels; four images, two classes.
    # The classes' means are (1, 0) and (9, 9), each 4 and 4.5 off their mean.
    counts = {"shown_classes": 2, "shown_fewest": 2}
    assert variety(x, y) == pytest.approx(
        {"variety": math.sqrt((0.5 + 0.5) / 2), "contrast": math.sqrt(18.125)} | counts
    )


def test_collapsed_generators_are_seen() -> None:
    real, y = (
        torch.randn(100, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
        torch.arange(100) % 10,
    )
    one_for_each, one_for_all = real[:10][y], real[:1].expand(100, -1, -1, -1)
    assert variety(one_for_each, y)["variety"] == pytest.approx(0, abs=1e-6)
    assert variety(one_for_each, y)["contrast"] > 0.5
    same = variety(one_for_all, y)
    assert (same["variety"], same["contrast"]) == pytest.approx((0, 0), abs=1e-6)
    assert variety(real, y)["variety"] == pytest.approx(1, rel=0.1), (
        "of noise with the data's deviation"
    )
    assert variety(real[:10], y[:10])["variety"] == 0, "of single images nothing follows"


def test_diversity_among_images_of_a_class_by_hand() -> None:
    x, h = torch.tensor([[0.0, 0.0], [2.0, 0.0], [7.0, 1.0]]), torch.tensor([[1.0], [4.0], [0.0]])
    # Of the pairs of one class there is one, twice: mean squares 2 and 9.
    assert diversity(x, h, torch.tensor([3, 3, 1])).item() == pytest.approx(
        math.exp(-2 * 9), rel=1e-3
    )
    assert diversity(x, h, torch.arange(3)).item() == 1, (
        "without such pairs there is nothing to gain"
    )


@pytest.mark.parametrize("within", [False, True])
def test_a_generator_collapses_unless_images_of_a_class_must_differ(within: bool) -> None:
    """One picture for each class satisfies fidelity, and the classes differ: over all pairs little is left to gain."""
    torch.manual_seed(0)
    classes, pixels = 10, 12
    network, generator = nn.Linear(pixels, classes), nn.Linear(classes + 4, pixels)
    nn.init.normal_(network.weight, std=0.3)
    optimizer = torch.optim.Adam(generator.parameters(), lr=0.2)
    y = torch.arange(60) % classes
    for _ in range(300):
        z = torch.randn(60, 4)
        x = 2 * generator(label_codes(z, y, classes)).tanh()
        loss = fidelity(network(x), y) + diversity(x, z, y if within else None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = variety(x.detach()[:, None, None], y)
    assert found["contrast"] > 0.5, "the classes differ in both cases"
    assert found["variety"] > 0.8 if within else found["variety"] < 0.01
    assert bool(collapse_remarks([SimpleNamespace(server=found)], "")) == (not within)  # type: ignore[list-item]


def test_a_spectrum_pooled_is_that_of_all_images() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(30, 2, 4, 6) + 1, 3 * torch.randn(10, 2, 4, 6)
    whole = spectrum(torch.cat([one, other]))
    assert torch.allclose(
        merge_spectra([spectrum(one), spectrum(other)], [30, 10]), whole, atol=1e-5
    )
    flat = spectrum(torch.full((2, 1, 4, 4), 0.5))
    assert flat[0, 0, 0, 0].item() == pytest.approx(0.5 * 4), (
        "the lowest frequency is the mean, times the side"
    )
    assert flat.abs().sum().item() == pytest.approx(2.0, abs=1e-5)


def test_canvases_have_the_frequencies_and_the_variety_of_the_data() -> None:
    experiment = federation(tiny("local"), data="digits", clients=1)
    data = experiment.engine.clients[0].data
    x = data.batch(torch.arange(len(data)))
    torch.manual_seed(0)
    made = sample_canvases(2000, spectrum(x))
    assert torch.allclose(spectrum(made), spectrum(x), atol=0.15)
    assert torch.allclose(made.mean(0), x.mean(0), atol=0.1)
    shown = within_range(made, data.spec)
    assert shown.min().item() == pytest.approx(x.min().item())
    assert shown.max().item() == pytest.approx(x.max().item())
    total = x.var(0).mean().sqrt().item()
    assert variety(made, torch.arange(2000) % 10)["variety"] == pytest.approx(total, rel=0.02)


def test_a_run_whose_generator_collapsed_says_so() -> None:
    def ended(variety: float) -> Any:
        return [SimpleNamespace(server={"variety": variety})]

    (remark,) = collapse_remarks(ended(0.04), "raise beta_div")
    assert "0.040 standard deviations" in remark
    assert remark.endswith("; raise beta_div")
    assert (
        collapse_remarks(ended(0.06), "")
        == collapse_remarks([], "")
        == collapse_remarks([SimpleNamespace(server={})], "")
        == []
    )  # type: ignore[list-item]
    for name in ("dense", "dfrd", "fedftg", "fediod", "fedzge", "fedzkt"):
        assert len(tiny(name).remarks(ended(0.0))) == 1, name


def test_networks_are_compared_with_their_statistics() -> None:
    network = nn.Sequential(
        nn.BatchNorm2d(2), nn.Flatten(), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)
    ).eval()
    for layer, mean, var in (
        (0, [1.0, 0.0], [1.0, 4.0]),
        (2, [0.0, 0.0], [1.0, 1.0]),
        (3, [0.0, 0.0], [1.0, 1.0]),
    ):
        network[layer].running_mean, network[layer].running_var = (
            torch.tensor(mean),
            torch.tensor(var),
        )  # type: ignore[assignment]
    x = torch.tensor([[1.0, 3.0], [1.0, -1.0]])[
        :, :, None, None
    ].requires_grad_()  # means 1 and 1, variances 0 and 4
    with compare_statistics(network) as found:
        network(x)
    assert found[0].item() == pytest.approx(1 + 1), "a mean is 1 off, and a variance is"
    assert len(found) == 3
    torch.autograd.grad(found[0], x, retain_graph=True)
    with compare_statistics(network) as again:
        network(x.detach())
        network(x.detach())
    assert len(again) == 6
    network(x)
    assert len(again) == 6, "nobody looks any more"


def test_images_count_by_their_weights_where_these_are_given() -> None:
    layer = nn.BatchNorm1d(1).eval()  # used to mean 0 and variance 1
    x = torch.tensor([[1.0], [5.0], [100.0]])
    with compare_statistics(layer, torch.tensor([3.0, 1.0, 0.0])) as found:
        layer(x)
    assert found[0].item() == pytest.approx(2 + 2), (
        "1, 1, 1 and 5 have the mean 2 and the variance 3"
    )


def test_to_each_client_images_are_strange_that_it_should_know() -> None:
    first, second = nn.BatchNorm1d(1).eval(), nn.BatchNorm1d(1).eval()
    second.running_mean, second.running_var = torch.tensor([9.0]), torch.tensor([0.0])
    ensemble = Ensemble([first, second])  # type: ignore[list-item]
    x, known = (
        torch.tensor([[3.0], [9.0], [9.0], [9.0]]),
        torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 1.0, 1.0]]),
    )
    opinion, strangeness = ensemble.logits_and_distance(x, known)
    assert torch.allclose(opinion, ensemble(x, known))
    # To the first, which knows a quarter, an image is 3 off and does not vary; to the second all are as they should be.
    assert strangeness.item() == pytest.approx((3 + 1) / 4)
    nobody = ensemble.logits_and_distance(x, torch.zeros(2, 4))
    assert [value.abs().sum().item() for value in nobody] == [0, 0]


def test_networks_that_keep_no_statistics_are_not_compared() -> None:
    with compare_statistics(
        nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))
    ) as found:
        pass
    assert found == []


def test_labels_are_told_apart_from_noise() -> None:
    assert label_codes(torch.tensor([[5.0, 6.0]]), torch.tensor([1]), 3).tolist() == [
        [5, 6, 0, 1, 0]
    ]


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.norm = nn.Parameter(torch.tensor(0.0)), nn.BatchNorm1d(1)


@pytest.mark.parametrize("training", [True, False])
def test_players_take_turns_and_the_student_is_frozen_meanwhile(training: bool) -> None:
    spec = Spec(1, 1, 1, 2, (0.0,), (1.0,))
    server, artist, student = Server(spec, {}, None, torch.device("cpu")), Number(), Number()
    moves: list[str] = []

    def seek(z: Tensor) -> Tensor:
        moves.append("g")
        assert not student.w.requires_grad
        assert not student.norm.training
        return artist.w * z

    def learn(z: Tensor) -> Tensor:
        moves.append("s")
        assert student.w.requires_grad
        assert student.norm.training == training
        return student.w * z

    one, other = [torch.tensor(2.0)], [torch.tensor(3.0)]
    players = (
        Player(artist, sgd(0.1), seek, lambda: one, 2),
        Player(student, sgd(0.1), learn, lambda: other, 1),
    )
    train_alternately(server, *players, 2, training=training)
    assert "".join(moves) == "ggsggs"
    assert artist.w.item() == pytest.approx(-0.1 * 2 * 4)
    assert student.w.item() == pytest.approx(-0.1 * 3 * 2)
    # Losses before each step: 0, -0.4, -0.8, -1.2 and 0, -0.9.
    assert server.report == pytest.approx(
        {"generator_loss": -0.6, "global_loss": -0.45, "generator_steps": 4, "global_steps": 2}
    )


def test_optimizers_may_be_new_in_each_turn() -> None:
    server = Server(Spec(1, 1, 1, 2, (0.0,), (1.0,)), {}, None, torch.device("cpu"))
    ends, one = [], [torch.tensor(1.0)]
    for lasting in (True, False):
        artist, student = Number(), Number()
        first = Player(artist, sgd(0.1, momentum=0.5), lambda z, w=artist.w: w * z, lambda: one, 1)
        second = Player(student, sgd(0.1), lambda z, w=student.w: w * z, lambda: one, 1)
        train_alternately(server, first, second, 2, training=False, lasting=lasting)
        ends.append(artist.w.item())
    assert ends == pytest.approx([-0.25, -0.2])


def test_the_ensemble_is_what_came_back_and_frozen() -> None:
    experiment = federation(tiny("dfrd", base="none"), models="small-mlp,small-cnn")
    clients = experiment.engine.clients
    ensemble = build_ensemble(
        experiment.server, {k: dict(clients[k].model.state_dict()) for k in (1, 2)}
    )
    x = clients[0].data.batch(torch.arange(4))
    said = ensemble.logits_by_model(x)
    assert isinstance(ensemble, Ensemble)
    for row, k in zip(said, (1, 2), strict=True):
        assert torch.equal(row, clients[k].model.eval()(x))
    weights = torch.tensor([[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 0.5, 0.75]])
    expected = torch.stack(
        [said[0, 0], said[1, 1], said[:, 2].mean(0), 0.25 * said[0, 3] + 0.75 * said[1, 3]]
    )
    assert torch.allclose(ensemble(x, weights), expected)
    assert not any(p.requires_grad for p in ensemble.parameters())
