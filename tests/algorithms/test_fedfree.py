from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from barter import ALGORITHMS
from barter.algorithms.fedfree import (
    Bridge,
    FedFree,
    Layer,
    counterpart,
    layer_outputs,
    layers_of,
    output_changes,
    relative_change,
    resize_weight,
    weight_entropy,
)
from barter.core.clients import Replies
from barter.core.errors import ConfigError, PayloadError
from barter.core.evaluation import predict
from barter.core.payload import nbytes
from barter.core.record import Round
from barter.models.small import fedfree_cnn
from tests.conftest import small_federation, tiny


def layer(weight: Any, bias: Any = None, depth: float = 0.0) -> Layer:
    weight = torch.as_tensor(weight, dtype=torch.float32)
    made: Layer = {
        "name": "it",
        "kind": "linear" if weight.ndim == 2 else "conv",
        "depth": depth,
        "weight": weight,
    }
    if bias is not None:
        made["bias"] = torch.as_tensor(bias, dtype=torch.float32)
    return made


def test_equation_2_by_hand() -> None:
    before, after = layer([[3.0, 0.0]], [4.0]), layer([[3.0, 1.0]], [6.0])
    assert relative_change(before, after).item() == pytest.approx((1 + 4) / (9 + 16))
    assert relative_change(layer([[3.0, 4.0]]), layer([[3.0, 9.0]])).item() == pytest.approx(
        25 / 25
    )
    assert torch.isfinite(relative_change(layer([[0.0]]), layer([[1.0]])))


def test_only_plain_convolutions_and_linear_layers_are_shared() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 8, 1, bias=False),
        nn.Flatten(),
        nn.Linear(8, 5),
        nn.Linear(5, 5),
        nn.Linear(5, 2),
    )
    found = [(one["name"], one["kind"], one["depth"], "bias" in one) for one in layers_of(model)]
    assert found == [
        ("0", "conv", 0.0, True),
        ("3", "conv", 1.0, False),
        ("5", "linear", 0.0, True),
        ("6", "linear", 0.5, True),
        ("7", "linear", 1.0, True),
    ]


def test_a_lone_layer_is_as_deep_as_it_stands_in_the_network() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(8, 5))
    assert [one["depth"] for one in layers_of(model)] == [0, 1, 1]


def test_kernels_larger_than_the_noise_and_tsallis_of_order_one() -> None:
    g, teacher = layer(torch.randn(2, 1, 5, 5), torch.randn(2)), layer(torch.randn(2, 1, 24, 24))
    assert FedFree(side=2, transfer="sampled").imitate(g, [teacher])["weight"].isfinite().all()
    with pytest.raises(ConfigError, match="tsallis_order=1"):
        FedFree(tsallis_order=1.0)


def test_the_counterpart_is_of_the_same_kind_at_the_nearest_depth() -> None:
    spec = small_federation(FedFree()).task.spec
    network = fedfree_cnn(spec.__class__(3, 32, 32, 10, (0.5,) * 3, (0.5,) * 3))
    server = {str(i): one for i, one in enumerate(layers_of(network))}
    assert [(one["kind"], tuple(one["weight"].shape)) for one in server.values()] == [
        ("conv", (32, 3, 5, 5)),
        ("conv", (64, 32, 5, 5)),
        ("linear", (1600, 1600)),
        ("linear", (384, 1600)),
        ("linear", (10, 384)),
    ]
    convolution, linear = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1)
    assert [counterpart(layer(convolution, depth=d), server) for d in (0, 0.4, 0.6, 1)] == [*"0011"]
    assert [counterpart(layer(linear, depth=d), server) for d in (0, 0.2, 0.3, 0.7, 1)] == [
        *"22334"
    ]
    assert (
        counterpart(layer(linear), {at: one for at, one in server.items() if one["kind"] == "conv"})
        is None
    )


def test_entropies_by_hand() -> None:
    weight = torch.tensor([0.0, 0.1, 0.2, 0.9])  # two bins between the extremes: three and one
    p = np.array([0.75, 0.25])
    assert weight_entropy(weight, "shannon", 2, 1.5) == pytest.approx(-(p * np.log(p)).sum())
    assert weight_entropy(weight, "collision", 2, 1.5) == pytest.approx(-np.log((p**2).sum()))
    assert weight_entropy(weight, "tsallis", 2, 2.0) == pytest.approx(1 - (p**2).sum())
    assert weight_entropy(weight, "tsallis", 2, 1.5) == pytest.approx((1 - (p**1.5).sum()) / 0.5)
    for kind in ("shannon", "collision", "tsallis"):
        assert weight_entropy(torch.full((9,), 0.3), kind, 8, 1.5) == pytest.approx(0, abs=1e-12)  # type: ignore[arg-type]


def test_the_gain_compares_shapes_whatever_the_scale() -> None:
    even, scaled = torch.linspace(0, 0.1, 64), torch.linspace(0, 1, 64)
    assert FedFree(bins=8).gain(even, scaled) == pytest.approx(0)
    spiked = torch.cat([torch.zeros(63), torch.ones(1)])
    p = np.array([63, 1]) / 64
    assert FedFree(bins=8).gain(spiked, even) == pytest.approx(np.log(8) + (p * np.log(p)).sum())


def test_layers_are_fitted_axis_by_axis_around_the_centre_of_the_kernel() -> None:
    weight = torch.arange(9.0).view(1, 1, 3, 3)
    larger = resize_weight(weight, torch.Size([2, 1, 5, 5]), torch.full((2, 1, 5, 5), -1.0))
    assert torch.equal(larger[0, 0, 1:4, 1:4], weight[0, 0])
    assert (larger == -1).sum() == 50 - 9
    assert resize_weight(weight, torch.Size([1, 1, 1, 1])).item() == 4
    assert resize_weight(torch.tensor([1.0, 2.0, 3.0]), torch.Size([2])).tolist() == [1, 2]


def test_equation_7_fills_with_zeros_or_keeps_what_it_does_not_cover() -> None:
    received = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    place = torch.full((2, 3), 9.0)
    assert FedFree(fill="zero").fit_to_layer(received, place).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert FedFree(fill="retain").fit_to_layer(received, place).tolist() == [[1, 2, 9], [3, 4, 9]]
    assert FedFree(fill="zero").fit_to_layer(received, place[:1, :2]).tolist() == [[1, 2]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_in_expectation_the_transfer_is_its_closed_form(
    a: int, b: int, c: int, d: int, convolution: bool
) -> None:
    """E ‖(W_g - W_i) X‖² = ‖W_g - W_i‖² where X ~ N(0, I): the mean of many samples comes near."""
    torch.manual_seed(0)
    kernels = ((3, 3), (1, 1)) if convolution else ((), ())
    w, g_bias = torch.randn(a, b, *kernels[0]), torch.randn(a)
    teacher = layer(torch.randn(c, d, *kernels[1]), torch.randn(c))
    method = FedFree()
    size = (4000, max(b, d)) if not convolution else (400, max(b, d), 8, 8)
    sampled = method.discrepancy(w, g_bias, teacher, torch.randn(size))
    assert sampled.sum().item() == pytest.approx(
        method.expected_discrepancy(w, g_bias, teacher).sum().item(), rel=0.15
    )


def test_the_analytic_form_is_a_moving_average() -> None:
    g = layer(torch.randn(3, 4), torch.randn(3))
    teachers = [layer(torch.randn(3, 4), torch.randn(3)) for _ in range(5)]
    moved = FedFree(transfer="analytic", server_lr=0.1).imitate(g, teachers)
    mean = torch.stack([t["weight"] for t in teachers]).mean(0)
    assert torch.allclose(moved["weight"], 0.8 * g["weight"] + 0.2 * mean, atol=1e-6)
    mean = torch.stack([t["bias"] for t in teachers]).mean(0)
    assert torch.allclose(moved["bias"], 0.8 * g["bias"] + 0.2 * mean, atol=1e-6)


def test_the_sampled_form_agrees_with_it_in_expectation() -> None:
    torch.manual_seed(1)
    g, teacher = layer(torch.randn(2, 3), torch.randn(2)), layer(torch.randn(2, 3), torch.randn(2))
    sampled = FedFree(server_lr=0.1, transfer="sampled")
    steps = [sampled.imitate(g, [teacher])["weight"] for _ in range(600)]
    expected = FedFree(server_lr=0.1, transfer="analytic").imitate(g, [teacher])["weight"]
    assert torch.allclose(torch.stack(steps).mean(0), expected, atol=0.02)
    assert not torch.equal(steps[0], steps[1])


def test_rows_a_teacher_does_not_have_stay_and_columns_it_does_not_have_shrink() -> None:
    g, teacher = layer(torch.ones(2, 2), torch.ones(2)), layer([[5.0]])
    moved = FedFree(transfer="analytic", server_lr=0.25).imitate(g, [teacher])
    assert moved["weight"].tolist() == [[3.0, 0.5], [1.0, 1.0]]  # 1 + 0.5 (5 - 1), 1 + 0.5 (0 - 1)
    assert moved["bias"].tolist() == [0.5, 1.0]


def test_noise_without_borders() -> None:
    noise = torch.randn(2, 3, 8, 8)
    shifted = torch.roll(noise, (3, 5), (2, 3))
    weight, bias = torch.randn(4, 2, 3, 3), torch.randn(4)
    one, other = (layer_outputs(weight, bias, x) for x in (noise, shifted))
    assert one.shape == (2 * 64, 4)
    assert torch.allclose(one.sort(0).values, other.sort(0).values, atol=1e-5)


def test_a_client_is_given_the_layer_with_the_largest_gain_or_none() -> None:
    experiment = small_federation(FedFree())
    server: Any = experiment.server
    assert isinstance(server, Bridge)
    flat, uneven, even = (
        torch.zeros(8, 1),
        torch.tensor([[0.0]] * 6 + [[1.0]] * 2),
        torch.linspace(0, 1, 8)[:, None],
    )
    server.layers = {str(i): layer(w, torch.zeros(8)) for i, w in enumerate((flat, uneven, even))}
    uploads: Replies[list[Layer]] = Replies(
        {0: [layer(uneven)], 1: [layer(even)], 2: [layer(torch.zeros(1, 1, 1, 1))]},
        dict.fromkeys(range(3), 1),
        {},
    )
    gifts = FedFree(bins=8, match="depth").align(server, uploads)
    assert gifts.keys() == {0}
    assert torch.equal(gifts[0][0]["weight"], even)
    assert gifts[0][0]["name"] == "it", "named as the client calls it"


@pytest.mark.parametrize("k", [1, 2])
def test_only_k_layers_go_up_and_one_comes_down(k: int) -> None:
    experiment = small_federation(tiny("fedfree", layers=k))
    (record,) = experiment.rounds(1)
    server: Any = experiment.server
    words = 60  # bytes of a layer's name, kind and depth; beside them, 4 for each output
    for i, client in experiment.engine.clients.items():
        sizes = sorted(nbytes(one) for one in layers_of(client.model))
        outputs = 4 * sum(sorted(len(one["weight"]) for one in layers_of(client.model))[-k:])
        assert sum(sizes[:k]) <= record.clients[i]["bytes_up"] <= sum(sizes[-k:]) + outputs
        assert record.clients[i]["given"] == k
        assert (
            record.clients[i]["bytes_down"]
            <= max(nbytes(one) for one in server.layers.values()) + words
        )


def test_a_received_layer_arrives_where_it_was_taken_from() -> None:
    experiment = small_federation(tiny("fedfree"))
    client: Any = experiment.engine.clients[0]
    name = layers_of(client.model)[0]["name"]
    place = client.model.get_submodule(name)
    others = {n: p.clone() for n, p in client.model.named_parameters() if not n.startswith(name)}
    gift = {**layer(torch.ones_like(place.weight), torch.ones(len(place.weight))), "name": name}
    FedFree().receive(client, [gift])  # type: ignore[arg-type]
    assert torch.equal(place.weight, torch.ones_like(place.weight))
    assert all(torch.equal(p, others[n]) for n, p in client.model.named_parameters() if n in others)


def test_presets_differ_as_the_docstring_says() -> None:
    kind = ALGORITHMS["fedfree"]
    assert kind.preset("sound") == kind()
    assert kind.preset("tableA2").epochs == 30  # type: ignore[attr-defined]
    for name in ("paper", "tableA2"):
        published: Any = kind.preset(name)
        assert (published.match, published.outputs, published.fill) == ("depth", "all", "zero")
        assert (published.server_lr, published.transfer) == (0.01, "sampled")


def test_an_output_counts_as_much_as_training_changed_it() -> None:
    before, after = layer([[1.0, 1.0], [2.0, 0.0]]), layer([[1.0, 3.0], [2.0, 0.0]])
    assert output_changes(before, after).tolist() == [4.0, 0.0]
    teachers = [{**layer([[8.0], [1.0]], [8.0, 1.0]), "credit": torch.tensor([3.0, 0.0])}]
    teachers += [{**layer([[4.0], [2.0]], [4.0, 2.0]), "credit": torch.tensor([1.0, 0.0])}]
    g = layer([[0.0], [5.0]], [0.0, 5.0])
    moved = FedFree().imitate(g, teachers)  # type: ignore[arg-type]
    assert moved["weight"].tolist() == [[7.0], [5.0]], (
        "(3 * 8 + 1 * 4) / 4; an output that nobody trained stays"
    )
    assert moved["bias"].tolist() == [7.0, 5.0]
    half = FedFree(server_lr=0.25).imitate(g, teachers)  # type: ignore[arg-type]
    assert half["weight"].tolist() == [[3.5], [5.0]]
    assert FedFree(outputs="all").imitate(g, teachers)["weight"].tolist() == [[6.0], [1.5]]  # type: ignore[arg-type]
    narrow = {**layer([[1.0]]), "credit": torch.tensor([1.0])}
    parts = FedFree().teacher_weights([teachers[0], narrow])  # type: ignore[list-item]
    assert [part.tolist() for part in parts] == [[0.75, 0.0], [0.25]]


def test_layers_only_go_to_the_same_place_of_the_same_network() -> None:
    """Of three clients two have one network: they exchange, and the third learns alone."""
    experiment = small_federation(tiny("fedfree", layers=9), models="small-cnn,small-mlp,small-cnn")
    (record,) = experiment.rounds(1)
    server: Any = experiment.server
    shapes = {at: tuple(one["weight"].shape) for at, one in server.layers.items()}
    for i, client in experiment.engine.clients.items():
        for one in layers_of(client.model):
            assert shapes[f"{server.names[i]}/{one['name']}"] == tuple(one["weight"].shape)
    assert record.clients[1]["taken"] == 0
    assert record.server["gifts"] == sum(told["taken"] for told in record.clients.values()) >= 1


def test_the_servers_layer_is_the_mean_and_a_client_gets_it() -> None:
    algorithm: Any = FedFree(outputs="all", bins=4)
    experiment = small_federation(algorithm, models="small-mlp", clients=2)
    server: Any = experiment.server
    one, two = torch.zeros(10, 256), torch.linspace(0, 2, 2560).view(10, 256)
    one[0, 0] = 3.0
    uploads = Replies(
        {0: [{**layer(one), "name": "head"}], 1: [{**layer(two), "name": "head"}]}, {0: 1, 1: 1}, {}
    )
    algorithm.share(server, uploads)
    assert torch.allclose(server.layers["small-mlp/head"]["weight"], (one + two) / 2)
    gifts = algorithm.align(server, uploads)
    assert gifts.keys() == {0}, (
        "the mean fills its range more evenly than a layer with one large weight, and less than one that does"
    )
    algorithm.receive(experiment.engine.clients[0], gifts[0])
    assert torch.allclose(experiment.engine.clients[0].model.head.weight, (one + two) / 2)  # type: ignore[union-attr]


def test_of_a_head_a_client_takes_the_outputs_of_its_classes() -> None:
    experiment = small_federation(tiny("fedfree"), partition="classes", models="small-mlp")
    client: Any = experiment.engine.clients[0]
    held = client.data.class_counts() > 0
    assert 0 < held.sum() < 10
    head = client.model.head
    before = head.weight.detach().clone()
    gift: Any = {**layer(torch.full_like(before, 7.0), torch.full((10,), 7.0)), "name": "head"}
    FedFree(offset="received").receive(client, [gift])
    assert (head.bias[held] == 7).all()
    assert (head.weight[held] == 7).all()
    assert torch.equal(head.weight[~held], before[~held])
    FedFree(outputs="all").receive(client, [gift])
    assert (head.weight == 7).all()


def test_a_received_head_keeps_the_mean_logits_of_the_clients_images() -> None:
    experiment = small_federation(tiny("fedfree"), partition="dominant", models="small-mlp")
    client: Any = experiment.engine.clients[0]
    held = client.data.class_counts() > 0
    every = torch.arange(len(client.data))
    head = client.model.head
    torch.manual_seed(0)
    gift: Any = {**layer(torch.randn_like(head.weight), torch.randn(10)), "name": "head"}
    before = predict(client.model.eval(), client.data.batch, every)
    bias = head.bias.detach().clone()
    FedFree().receive(client, [gift])
    after = predict(client.model.eval(), client.data.batch, every)
    assert torch.equal(head.weight[held], gift["weight"][held])
    assert not torch.allclose(after[:, held], before[:, held], atol=0.1)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-4)
    assert torch.equal(head.bias[~held], bias[~held]), "outputs of other classes stay"


@pytest.mark.slow
def test_clients_with_few_images_gain_from_each_others_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same images, by the same training: with the exchange well above without it, on their own tests too."""

    def last() -> Round:
        algorithm = FedFree(epochs=3)
        return list(
            small_federation(algorithm, clients=6, models="small-cnn", partition="iid").rounds(3)
        )[-1]

    together = last()
    monkeypatch.setattr(FedFree, "align", lambda *_: {})
    alone = last()
    assert alone.mean("taken") == 0 < together.mean("taken")
    assert together.mean("local") > alone.mean("local") + 0.05
    assert together.mean("global") > alone.mean("global") + 0.05


def test_a_run_without_exchange_says_so() -> None:
    alone = small_federation(tiny("fedfree"), models="small-cnn,small-mlp,small-vgg")
    rounds = list(alone.rounds(2))
    (said,) = alone.algorithm.remarks(rounds)
    assert "no layer was exchanged in 2 rounds" in said
    assert "fedproto" in said
    (published,) = FedFree(match="depth").remarks(rounds)
    assert "server_lr" in published
    assert FedFree().remarks([]) == []
    together = small_federation(tiny("fedfree"), models="small-cnn")
    assert together.algorithm.remarks(list(together.rounds(1))) == []


def test_a_run_says_if_received_layers_cost_accuracy() -> None:
    (record,) = small_federation(tiny("fedfree"), models="small-cnn").rounds(1)
    before = {0: 0.75, 1: 0.85, 2: 0.9}
    after = {0: 0.5, 1: 0.7}  # Client 2 was not evaluated after the exchange.
    clients = {
        k: {"before_local": value} | ({"local": after[k]} if k in after else {})
        for k, value in before.items()
    }
    (said,) = FedFree().remarks([replace(record, clients=clients)])
    assert said.endswith("accuracy on local tests from 80.0% to 60.0%")
    clients = {k: {**told, "local": before[k] - 0.04} for k, told in clients.items()}
    assert FedFree().remarks([replace(record, clients=clients)]) == []
    assert FedFree().remarks([replace(record, clients={0: {"global": 0.5}})]) == []


def test_layers_are_those_of_the_clients_network() -> None:
    experiment = small_federation(tiny("fedfree"), clients=2, models="small-cnn")
    algorithm, server = experiment.algorithm, experiment.server
    assert isinstance(algorithm, FedFree)
    assert isinstance(server, Bridge)
    one, two, *_ = layers_of(server.architectures[0]())
    assert algorithm.check_upload(server, 0, [one, two]) == [one, two]
    for bad, said in (
        ({**one, "name": "other"}, "other is not a layer of the client's network"),
        ({**one, "kind": "linear"}, "not a layer of the client's network: linear"),
        ({**one, "weight": one["weight"][:1]}, "not a layer"),
        ({**one, "bias": torch.zeros(len(one["weight"]))}, "not a layer"),
    ):
        with pytest.raises(PayloadError, match=said):
            algorithm.check_upload(server, 0, [bad])  # type: ignore[list-item]
    with pytest.raises(PayloadError, match="2 layers, expected at most 2 different ones"):
        algorithm.check_upload(server, 0, [one, one])
    server.architectures = {}
    huge: Layer = {**one, "weight": torch.zeros(1, 1, 65, 1)}
    with pytest.raises(
        PayloadError, match=r"not a layer of the client's network: conv \(1, 1, 65, 1\)"
    ):
        algorithm.check_upload(server, 0, [huge])
    assert algorithm.check_upload(server, 0, [one]) == [one]
