"""DFFKE's data-free module: one space for all embeddings, and a decoder that draws what they stand for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from barter.algorithms.dffke import DFFKE, DFFKEServer
from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.record import Round
from barter.experiment import Experiment
from barter.models.generators import Decoder, resize_images
from barter.ops.docking import largest_ratio, typical_size, unify
from barter.ops.fit import Trainer, adam
from barter.ops.inversion import Schedule, Terms, Viewer, fit_decoder
from barter.ops.statistics import whitening_transform
from barter.ops.views import count_views
from benchmarks.magnified import magnify
from tests.conftest import TINY, same, small_federation, tiny


def test_the_decoder_draws_32_pixels_and_is_resized_from_there() -> None:
    for side, drawn in ((8, 8), (28, 28), (32, 32), (64, 32), (128, 32)):
        spec = Spec(3, side, side, 10, (0.5,) * 3, (0.5,) * 3)
        decoder = Decoder(16, spec)
        images = decoder(torch.randn(2, 1, 16))
        assert images.shape == (2, 3, drawn, drawn)
        assert resize_images(images, spec).shape == (2, 3, side, side)
    parameters = {
        code: sum(
            p.numel()
            for p in Decoder(code, Spec(3, 32, 32, 10, (0.5,) * 3, (0.5,) * 3)).parameters()
        )
        for code in (100, 256, 512)
    }
    assert parameters == {100: 1_050_947, 256: 2_328_899, 512: 4_426_051}


def test_a_restored_decoder_draws_the_same() -> None:
    spec = Spec(1, 16, 16, 10, (0.5,), (0.5,))
    for parts in (0, 2):
        decoder, views = Decoder(16, spec, parts), count_views(parts)
        decoder(torch.randn(20, views, 16))
        codes = torch.randn(5, views, 16)
        state = {name: tensor.clone().contiguous() for name, tensor in decoder.state_dict().items()}
        assert torch.equal(Decoder.from_state(state, spec, parts)(codes), decoder.eval()(codes))


@pytest.mark.parametrize(("side", "parts"), [(32, 2), (32, 4), (28, 3), (20, 3)])
def test_the_code_of_a_part_tells_the_decoder_of_its_own_place(side: int, parts: int) -> None:
    """Each part's code goes to what the convolutions start from in its cell alone, and to all of the cell."""
    decoder = Decoder(4, Spec(1, side, side, 10, (0.5,), (0.5,)), parts)
    plain, told = decoder.part(torch.zeros(1, parts**2, 4)), side // 4
    empty = decoder.arrange_tiles(plain)
    assert empty.shape == (1, 128, told, told)
    for row in range(parts):
        for column in range(parts):
            tiles = plain.clone()
            tiles[0, row * parts + column] += 1.0
            touched = (decoder.arrange_tiles(tiles) - empty)[0].amax(0) > 1e-6
            low, high = (torch.tensor([row, column]) + torch.tensor([[0], [1]])) * told / parts
            inside = torch.zeros(told, told, dtype=torch.bool)
            inside[
                low[0].floor().int() : high[0].ceil().int(),
                low[1].floor().int() : high[1].ceil().int(),
            ] = True
            assert (
                torch.equal(touched, inside) if told % parts == 0 else not (touched & ~inside).any()
            )
            assert touched.any()


def hub() -> DFFKEServer:
    server = small_federation(tiny("dffke")).server
    assert isinstance(server, DFFKEServer)
    return server


def test_unification_separates_classes_of_different_clients() -> None:
    """Two clients whose embeddings are each other's negatives: one space must tell the classes apart for both."""
    torch.manual_seed(0)
    y = torch.arange(40) % 2
    e = torch.randn(40, 6) * 0.1 + (2.0 * y[:, None] - 1)
    e = e[:, None]
    _, codes, _ = unify(hub(), {0: e, 1: -e}, {0: y, 1: y}, {}, 8, 100, adam(1e-2, 1e-3))
    means = {(k, c): codes[k][y == c].mean(0) for k in (0, 1) for c in (0, 1)}
    across = (means[0, 0] - means[1, 0]).norm() + (means[0, 1] - means[1, 1]).norm()
    between = (means[0, 0] - means[0, 1]).norm() + (means[1, 0] - means[1, 1]).norm()
    assert between > 3 * across


def unified(
    floor: float,
) -> tuple[dict[int, Any], dict[int, Tensor], dict[int, nn.Linear], dict[int, Tensor]]:
    """The same embeddings of two clients in one space: what is kept of the layers, embeddings, layers and codes."""
    torch.manual_seed(0)
    embeddings = {
        0: torch.randn(60, 2, 6) * torch.arange(1.0, 7.0) + 2,
        1: torch.randn(100, 2, 5) - 1,
    }
    labels = {k: torch.arange(len(e)) % 10 for k, e in embeddings.items()}
    torch.manual_seed(1)
    z, codes, states = unify(hub(), embeddings, labels, {}, 4, 5, adam(1e-2), floor)
    return states, embeddings, z, codes


@pytest.mark.parametrize("whiten", [0.0, 1e-6, 0.5])
def test_docking_layers_make_exactly_the_codes_and_are_kept_as_trained(whiten: float) -> None:
    plain, _, _, unwhitened = unified(0.0)
    kept, embeddings, z, codes = unified(whiten)
    for k, e in embeddings.items():
        assert torch.equal(z[k](e), codes[k])
        assert not codes[k].requires_grad
        assert same(kept[k], plain[k])
        assert same(dict(z[k].state_dict()), kept[k]) == (whiten == 0)
    if whiten:
        mean, matrix = whitening_transform(
            torch.cat(list(unwhitened.values())).flatten(0, 1), whiten
        )
        for k in embeddings:
            assert torch.allclose(codes[k], (unwhitened[k] - mean) @ matrix, atol=1e-4)


def test_the_typical_size_of_embeddings_and_the_largest_ratio() -> None:
    # Three embeddings of two features, whose root mean squares are 5, 1 and 60.
    embeddings = torch.tensor([[5.0, -5.0], [1.0, 1.0], [0.0, 60.0 * 2**0.5]])
    assert typical_size(embeddings) == 5
    # A tenth of the root mean square of all: most are near zero, and one is 1000.
    tiny = torch.tensor([[1e-6, 1e-6], [1e-6, -1e-6], [1e-6, 1e-6], [1000.0, 1000.0]])
    assert typical_size(tiny) == pytest.approx(0.1 * 500)
    assert typical_size(torch.zeros(2, 3)) == 0
    assert largest_ratio([3.0, 12.0, 1.0, 0.0, 2.0]) == 12
    assert largest_ratio([0.0]) == 1


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("larger", [64.0, 2.0**-12])
def test_standardised_codes_do_not_depend_on_how_large_features_of_a_network_become(
    floor: float, larger: float
) -> None:
    torch.manual_seed(0)
    embeddings = {k: torch.randn(50, 2, 6) for k in range(3)}
    labels = {k: torch.arange(50) % 10 for k in range(3)}

    def unified_at(factor: float, start: dict[int, Any]) -> Any:
        torch.manual_seed(1)
        scaled = {**embeddings, 1: factor * embeddings[1]}
        scales = {k: typical_size(e[:, 0]) for k, e in scaled.items()}
        return unify(hub(), scaled, labels, start, 4, 20, adam(1e-2), floor, scales=scales)

    start = unified_at(1.0, {})[2]
    one = unified_at(1.0, start)
    other = unified_at(larger, start)
    for k in range(3):
        torch.testing.assert_close(one[1][k], other[1][k], atol=1e-4, rtol=1e-3)
        for name, trained in one[2][k].items():
            torch.testing.assert_close(trained, other[2][k][name], atol=1e-5, rtol=1e-3)
    # The layers take the embeddings as they are.
    layer = other[0][1]
    assert torch.equal(layer(larger * embeddings[1]), other[1][1])


def test_standardised_layers_are_not_for_clients() -> None:
    with pytest.raises(ConfigError, match="with standardised=True, docking layers are of divided"):
        DFFKE(standardised=True, embedding_loss=True)


def test_whitened_codes_of_all_clients_together_vary_alike() -> None:
    for whiten, off in ((0.0, True), (1e-6, False)):
        codes = torch.cat(list(unified(whiten)[3].values())).flatten(0, 1)
        covariance = torch.cov(codes.T, correction=0)
        assert torch.allclose(covariance, torch.eye(4), atol=1e-3) != off
        assert torch.allclose(codes.mean(0), torch.zeros(4), atol=1e-4) != off


def decoder_steps(
    mixed: bool, epochs: int, floor: int
) -> tuple[list[list[tuple[int, Tensor]]], dict[int, Tensor]]:
    """Whose codes each step of the decoder was on, of clients with 10, 20 and 60 of them."""
    steps: list[list[tuple[int, Tensor]]] = []

    class Watched(Trainer):
        def step(self, loss: Any, *batch: Any) -> Any:
            _, _, looking, others, _ = loss.args
            owners = [next(k for k, viewer in viewers.items() if viewer is one) for one in looking]
            assert others == tuple(viewers[k].model for k in owners), "nobody else is asked"
            (parts,) = batch
            steps.append([(k, part.codes) for k, part in zip(owners, parts, strict=True)])
            return super().step(loss, *batch)

    experiment = small_federation(tiny("dffke"))
    models = {
        k: client.model.eval().requires_grad_(False)
        for k, client in experiment.engine.clients.items()
    }
    viewers = {k: Viewer(model, nn.Linear(model.feature_dim, 4)) for k, model in models.items()}
    embeddings = {
        k: torch.randn(n, 1, models[k].feature_dim)
        for k, n in zip(models, (10, 20, 60), strict=True)
    }
    codes = {k: viewers[k].translate(e).detach() for k, e in embeddings.items()}
    schedule = Schedule(epochs, floor, 6, mixed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("barter.ops.inversion.Trainer", Watched)
        fit_decoder(
            experiment.server, {}, viewers, codes, embeddings, adam(1e-3), schedule, Terms()
        )
    return steps, codes


def passes(parts: list[Tensor], codes: Tensor) -> bool:
    """Whether these parts are all the codes, each once."""
    return torch.equal(torch.cat(parts).sort(0).values, codes.sort(0).values)


def test_a_mixed_step_of_the_decoder_holds_every_clients_codes_in_proportion() -> None:
    steps, codes = decoder_steps(mixed=True, epochs=2, floor=0)
    # 6 on average, so 2, 4 and 12; then an epoch is five steps for everybody.
    assert [[(k, len(part)) for k, part in step] for step in steps] == 10 * [
        [(0, 2), (1, 4), (2, 12)]
    ]
    for epoch in (steps[:5], steps[5:]):
        for at, k in enumerate(codes):
            assert passes([step[at][1] for step in epoch], codes[k])


def test_in_the_paper_a_step_of_the_decoder_is_on_one_clients_codes() -> None:
    steps, codes = decoder_steps(mixed=False, epochs=1, floor=0)
    # An epoch of the largest offer is ten steps of 6, and the others make as many.
    assert [[(k, len(part)) for k, part in step] for step in steps] == 10 * [
        [(0, 6)],
        [(1, 6)],
        [(2, 6)],
    ]
    assert passes([step[0][1] for step in steps[2::3]], codes[2])


@pytest.mark.parametrize("mixed", [True, False])
def test_the_decoder_makes_at_least_so_many_steps(mixed: bool) -> None:
    for floor in (3, 13):
        steps, _ = decoder_steps(mixed=mixed, epochs=1, floor=floor)
        assert len(steps) == (max(floor, 5) if mixed else 3 * max(floor, 10))


@pytest.mark.parametrize("standardised", [True, False])
def test_only_standardised_embeddings_ignore_how_large_features_are(standardised: bool) -> None:
    records: list[Round] = []
    remarks = []
    small = Round(2, {}, {"embedding_ratio": 1.0}, {}, {}, [])
    for factor in (1.0, 64.0):
        experiment = Experiment(
            DFFKE(**{**TINY["dffke"], "decoder_steps": 20, "standardised": standardised}),
            data="digits",
            models=[partial(magnify, name="small-mlp", factor=factor), "small-mlp"],
            clients=3,
            seed=0,
        )
        records += experiment.rounds(1, progress=False)
        remarks.append(experiment.algorithm.remarks([*records[-1:], small]))
    before, after = ([record.clients[k]["before_global"] for k in range(3)] for record in records)
    assert before == after, "the networks are the same"
    losses = [record.server["decoder_loss"] for record in records]
    alike = losses[1] == pytest.approx(losses[0], rel=0.01)
    assert alike == standardised, losses
    assert remarks[0] == []
    ratio = records[1].server["embedding_ratio"]
    assert 16 < ratio < 256
    advice = f"one client's embeddings were up to {ratio:.0f} times as large as another's"
    assert [remark.startswith(advice) for remark in remarks[1]] == [True] * (not standardised)
    (plain,) = DFFKE(embedding_loss=True).remarks(records)
    assert plain.endswith("can spoil all synthetic images")
