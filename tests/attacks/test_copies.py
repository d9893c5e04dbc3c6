"""The copy test on images whose originals are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from barter.attacks.copies import copy_rate, find_nearest, measure_copies, wilson_interval
from barter.core.nodes import Client
from tests.conftest import small_federation, tiny


def test_the_interval_of_a_proportion() -> None:
    # Wilson 1927: for 8 of 10, (0.8 + z²/20 ± z sqrt(0.016 + z²/400)) / (1 + z²/10), z = 1.95996.
    low, high = wilson_interval(0.8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(1, 10)[1] == pytest.approx(1)
    with pytest.raises(ValueError, match="from 0 to 1"):
        wilson_interval(8, 10)


def test_the_nearest_image_ignores_brightness_and_contrast() -> None:
    private = torch.tensor([[[[0.0, 1.0, 2.0]]], [[[2.0, 1.0, 0.0]]]])
    assert find_nearest(5 + 0.1 * private, private).tolist() == [0, 1]


def test_copies_are_told_from_images_of_the_class() -> None:
    nearest, offered = torch.tensor([0, 1, 1, 3]), torch.tensor([0, 1])
    values = copy_rate(nearest, offered, 4)
    assert values["copies"] == 0.75
    assert values["chance"] == 0.5
    # Image 1 is the nearest of two: (1 + 2 + 1)² / (1 + 4 + 1).
    assert values["effective"] == pytest.approx(16 / 6)
    assert (values["from"], values["to"]) == wilson_interval(0.75, values["effective"])


def test_the_interval_holds_where_a_few_images_are_the_nearest_of_many() -> None:
    generator = torch.Generator().manual_seed(0)
    # Twenty private images are the nearest of 50 synthetic ones each, and 1,000 of one each.
    nearest = torch.cat([torch.arange(20).repeat(50), torch.arange(20, 1020)])
    covered, covered_by_images = 0, 0
    for _ in range(1000):
        offered = torch.randperm(2000, generator=generator)[:1000]
        values = copy_rate(nearest, offered, 2000)
        covered += values["from"] <= 0.5 <= values["to"]
        low, high = wilson_interval(values["copies"], len(nearest))
        covered_by_images += low <= 0.5 <= high
    assert 930 <= covered <= 975
    assert covered_by_images < 600, "2,000 synthetic images are not 2,000 observations"


def test_the_interval_of_a_mean_over_clients_is_narrower_than_that_of_one() -> None:
    experiment = small_federation(tiny("dffke", share=0.5))
    experiment.step()
    for result in measure_copies(experiment):
        effective = [values["effective"] for values in result.clients.values()]
        assert result.values["effective"] == pytest.approx(9 / sum(1 / n for n in effective))
        assert (result.values["from"], result.values["to"]) == wilson_interval(
            result.values["copies"], result.values["effective"]
        )


def test_images_are_found_that_the_server_decoded() -> None:
    experiment = small_federation(tiny("dffke", share=0.5))
    experiment.step()
    by_pixels, by_features = measure_copies(experiment)
    assert set(by_pixels.clients) == {0, 1, 2} == set(by_features.clients)
    assert by_pixels.values["chance"] == pytest.approx(0.5, abs=0.1)
    assert by_pixels.values["psnr"] > 0
    assert by_pixels.values["psnr_not_offered"] > 0


def test_copies_are_more_like_offered_images_than_like_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = small_federation(tiny("dffke", share=0.5))
    experiment.step()

    def copy(_: object, client: Client, at: int) -> tuple[Tensor, Tensor]:
        offered = torch.arange(len(client.data) // 2)
        return offered, client.data.batch(offered)

    monkeypatch.setattr(type(experiment.algorithm), "transfer_images", copy)
    by_pixels, by_features = measure_copies(experiment)
    assert by_pixels.values["copies"] == by_features.values["copies"] == 1
    assert by_pixels.values["psnr"] == 100  # the value of equal images
    assert by_pixels.values["psnr_not_offered"] < 40


def test_a_method_without_synthetic_images_says_so() -> None:
    experiment = small_federation(tiny("fedavg"))
    experiment.step()
    (result,) = measure_copies(experiment)
    assert not result.values
    assert "no synthetic images" in result.note
