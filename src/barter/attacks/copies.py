"""Test whether synthetic images copy the private images that they come from.

A client's synthetic images are made from some of its images, the offered ones. For every synthetic
image, the nearest of all the client's images is found. If synthetic images resemble a class but no
single image, the nearest one is as often an offered one as any other: the rate equals the share of
offered images. If they are copies, the rate is 1. The PSNR of each private image with the synthetic
image most like it bounds what an attacker gains by taking synthetic images for reconstructions: it
is that of an attacker who picks the right one. Images that were not offered are the reference.
Only the experimenter can run these tests, since no party has both kinds of images.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from scipy.special import ndtri
from torch import Tensor

from barter.attacks.inversion import denormalise
from barter.attacks.measures import psnr_of_best_match
from barter.attacks.overheard import clients_of
from barter.attacks.result import Result, mean_result
from barter.core.evaluation import predict
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.experiment import Experiment
from barter.models.generators import resize_images

__all__ = ["copy_rate", "find_nearest", "measure_copies", "wilson_interval"]

NEAREST_BY_PIXELS = "nearest by pixels"
NEAREST_BY_FEATURES = "nearest by features"
LIMIT = 2000  # synthetic images of each client whose nearest image is found


def measure_copies(experiment: Experiment) -> list[Result]:
    """Run the copy test on the last round, by pixels and by network features.

    Only clients count that made synthetic images from a part of their images. Without such a client
    there is a single result with a note.
    """
    values: dict[str, dict[int, dict[str, float]]] = {
        NEAREST_BY_PIXELS: {},
        NEAREST_BY_FEATURES: {},
    }
    for k, client in clients_of(experiment).items():
        made = experiment.algorithm.transfer_images(client, experiment.round)
        if made is None or len(made[1]) == 0:
            continue
        offered, images = made
        images = images[:LIMIT]
        n_private = len(client.data)
        if len(offered) == n_private:
            continue  # Every image was offered, so any nearest image is an offered one.
        private = _private_images(client.data, images.shape[-2:])
        similarity = _similarity(private, images, offered, client.data.spec)
        values[NEAREST_BY_PIXELS][k] = {
            **copy_rate(find_nearest(images, private), offered, n_private),
            **similarity,
        }
        nearest = _by_features(client.model, client.data, images)
        values[NEAREST_BY_FEATURES][k] = copy_rate(nearest, offered, n_private)
    if not values[NEAREST_BY_PIXELS]:
        why = "no synthetic images were made from a part of a client's images"
        return [Result("copies", NEAREST_BY_PIXELS, note=why)]
    return [_mean_over_clients(name, by_client) for name, by_client in values.items()]


def copy_rate(nearest: Tensor, offered: Tensor, n_private: int) -> dict[str, float]:
    """Return the share of synthetic images whose nearest private image was offered.

    Offered images are those that the client's synthetic images were made from. They are a random
    part of its images, so private images are the independent observations, and synthetic images
    are not: blurred ones often have the same nearest private image. Wilson's 95 % interval is
    therefore that of Kish's effective number of observations, (Σ c)² / Σ c², where c is the number
    of synthetic images to which a private image is the nearest, and sums are over private images.

    Args:
        nearest: For every synthetic image, the index of the nearest private image.
        offered: Indices of the offered images.
        n_private: Number of private images.

    Returns:
        The share "copies", its interval "from" and "to", the share of all private images that were
        offered ("chance"), and the "effective" number.
    """
    rate = float(_offered_mask(offered, n_private)[nearest].double().mean())
    counts = torch.bincount(nearest, minlength=n_private).double()
    effective = float(counts.sum() ** 2 / counts.square().sum())
    low, high = wilson_interval(rate, effective)
    return {
        "copies": rate,
        "from": low,
        "to": high,
        "chance": len(offered) / n_private,
        "effective": effective,
    }


def _mean_over_clients(attack: str, clients: dict[int, dict[str, float]]) -> Result:
    """Return the mean of copy rates over clients, with the interval of this mean.

    Clients have equal weights. If the rates of K clients differ by chance alone, their mean varies
    as that of K² / Σ 1/n observations, where n is the effective number of each client.

    Args:
        attack: The name of the attack in the result.
        clients: What `copy_rate` returned, by client.
    """
    result = mean_result("copies", attack, clients)
    effective = len(clients) ** 2 / sum(1 / values["effective"] for values in clients.values())
    low, high = wilson_interval(result.values["copies"], effective)
    result.values.update({"from": low, "to": high, "effective": effective})
    return result


def _offered_mask(offered: Tensor, n_private: int) -> Tensor:
    """Return for each private image whether its index is in `offered`."""
    mask = torch.zeros(n_private, dtype=torch.bool, device=offered.device)
    mask[offered] = True
    return mask


def wilson_interval(share: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion, as lower and upper limit.

    Args:
        share: The proportion, from 0 to 1.
        trials: The number of trials, which may be an effective one; at least one.
        confidence: The confidence.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}: a proportion is from 0 to 1")
    z = float(ndtri((1 + confidence) / 2))
    scale = 1 + z * z / trials
    center = (share + z * z / (2 * trials)) / scale
    margin = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, center - margin), min(1.0, center + margin)


def find_nearest(queries: Tensor, references: Tensor) -> Tensor:
    """Return for each query the index of the reference with the largest correlation."""

    def standardize(rows: Tensor) -> Tensor:
        rows = rows.flatten(1).float()
        return F.normalize(rows - rows.mean(1, keepdim=True), dim=1)

    references = standardize(references)
    parts = [(standardize(part) @ references.T).argmax(1) for part in torch.split(queries, 500)]
    return torch.cat(parts)


def _private_images(data: Images, side: torch.Size) -> Tensor:
    """Return all private images in the size of the synthetic ones."""
    every = torch.arange(len(data), device=data.device)
    return torch.cat(
        [F.interpolate(data.batch(part), side, mode="area") for part in torch.split(every, 500)]
    )


def _similarity(private: Tensor, images: Tensor, offered: Tensor, spec: Spec) -> dict[str, float]:
    """Return the best matches' mean PSNR, for offered and for other private images."""
    decibels = psnr_of_best_match(denormalise(private, spec), denormalise(images.float(), spec))
    is_offered = _offered_mask(offered, len(private))
    return {
        "psnr": float(decibels[is_offered].mean()),
        "psnr_not_offered": float(decibels[~is_offered].mean()),
    }


def _by_features(model: Classifier, data: Images, images: Tensor) -> Tensor:
    """Find the private images whose features in the client's network are nearest."""
    model = model.eval()
    every = torch.arange(len(data), device=data.device)
    private = predict(model.features, data.batch, every)
    shown = torch.arange(len(images), device=images.device)
    synthetic = predict(
        model.features, lambda part: resize_images(images[part].float(), data.spec), shown
    )
    return find_nearest(synthetic, private)
