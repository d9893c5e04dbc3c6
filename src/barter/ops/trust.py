"""Leave out answers that no other client confirms.

The answers are condensed sets, and teachers of synthetic images. They are not averaged, so robust
aggregation selects whole clients here. Every function returns all answers unless the run has a
defence (`robust`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from barter.core import robust
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.model import Classifier
from barter.core.nodes import Server
from barter.core.payload import State
from barter.ops.condense import Lot

__all__ = [
    "class_summaries",
    "clients_with_consistent_labels",
    "confirmed_teachers",
    "consistent_clients",
    "trusted_sets",
]

CHANCE = 0.5  # The share of the probability of a guess that does not count as support.
LEAST = 0.5  # A client is left out if its score is below this multiple of the median score.


def class_summaries(
    model: Classifier, lots: Sequence[Lot], server: Server
) -> tuple[Tensor, Tensor]:
    """Return each set's mean features by class, and which classes each set has.

    Args:
        model: The network that computes features; it is left in evaluation mode.
        lots: Condensed sets, which may be empty.
        server: The server, for the format of images.

    Returns:
        The means (sets, classes, features), and 1 where a set has images of a class
        (sets, classes, 1).
    """
    spec = server.spec
    means = torch.zeros(len(lots), spec.classes, model.feature_dim, device=server.device)
    held = torch.zeros(len(lots), spec.classes, 1, device=server.device)
    model.eval()
    for i, lot in enumerate(lots):
        labels = lot["classes"].repeat_interleave(lot["sizes"])
        if not len(labels):
            continue
        images = Images(lot["images"], labels, spec)
        index = torch.arange(len(labels), device=server.device)
        features = predict(model.features, images.batch, index)
        for c in lot["classes"].tolist():
            members = labels == c
            if bool(members.any()):
                means[i, c] = features[members].mean(0)
                held[i, c] = 1.0
    return means, held


def trusted_sets(server: Server, lots: Mapping[int, Lot]) -> list[int]:
    """Return the clients whose condensed images resemble others' of the same classes.

    A set is judged by the mean features of its classes in the server's model, by `Defence.keep`.
    Without a defence on sets, all clients are returned and no features are computed.
    """
    clients = list(lots)
    if not robust.active().defends("sets"):
        return clients
    means, held = class_summaries(server.model, list(lots.values()), server)
    mask = robust.select([means], [held])
    return [k for k, keep in zip(clients, mask.tolist(), strict=True) if keep]


def consistent_clients(scores: Mapping[int, float]) -> list[int]:
    """Return the clients whose score is at least half of the median.

    Higher scores are better. Without a defence on sets, and of fewer than three clients, all are
    returned.
    """
    if not robust.active().defends("sets") or len(scores) < 3:
        return list(scores)
    usual = float(robust.median(torch.tensor(list(scores.values()), dtype=torch.double)))
    return [k for k, score in scores.items() if score >= LEAST * usual]


def clients_with_consistent_labels(
    server: Server,
    weights: Mapping[int, State],
    embeddings: Mapping[int, Tensor],
    labels: Mapping[int, Tensor],
) -> list[int]:
    """Return clients whose network classifies their embeddings as they label them.

    The score is the share of full images whose predicted class is the label; `consistent_clients`
    decides. The number of the others is added to the server's report as `left_out`. Without a
    defence on sets, all clients are returned and nothing is reported.

    Args:
        server: The server, which has copies of the clients' networks.
        weights: The weights that each client uploaded.
        embeddings: The embeddings (images, views, features) that each client uploaded, the whole
            image first.
        labels: Each client's labels.
    """
    if not robust.active().defends("sets"):
        return list(labels)
    scores = {}
    for k, y in labels.items():
        model = server.replica(k, weights[k])
        predicted = model.logits(embeddings[k][:, 0]).argmax(1)
        scores[k] = float((predicted == y).double().mean())
    chosen = consistent_clients(scores)
    _report_left_out(server, len(scores) - len(chosen))
    return chosen


def _report_left_out(server: Server, clients: int) -> None:
    server.report["left_out"] = server.report.get("left_out", 0.0) + clients


def confirmed_teachers(
    server: Server,
    weights: Mapping[int, State],
    logits: Mapping[int, Tensor],
    images: Callable[[int], Tensor],
) -> list[int]:
    """Return the teachers whose logits agree with the networks that clients uploaded.

    The number of the others is added to the server's report as `left_out`. Without a defence on
    sets, all teachers are returned and nothing is reported; with one, there must be at least two.

    The score of a teacher on its own images is the product of two agreements: the probability that
    the other clients' networks together give to the classes it predicts, less half of what guessing
    would give (0.5 / classes), and the overlap of its predictions with those of the network it
    uploaded itself, the mean over images of sum_c min(p_c, q_c). `consistent_clients` decides.

    Args:
        server: The server, which has copies of the clients' networks.
        weights: The weights that each teacher uploaded.
        logits: Each teacher's logits on its own images.
        images: Returns a teacher's images, as networks take them.
    """
    if not robust.active().defends("sets"):
        return list(logits)
    replicas = {k: server.replica(k, weights[k]) for k in logits}
    scores: dict[int, float] = {}
    for k, said in logits.items():
        x = images(k)
        index = torch.arange(len(x), device=x.device)
        predictions = {
            j: predict(replica, x.__getitem__, index).softmax(1) for j, replica in replicas.items()
        }
        others = torch.stack([p for j, p in predictions.items() if j != k]).mean(0)
        support = others.gather(1, said.argmax(1, keepdim=True)).mean() - CHANCE / said.shape[1]
        overlap = torch.minimum(said.softmax(1), predictions[k]).sum(1).mean()
        scores[k] = float(support * overlap)
    chosen = consistent_clients(scores)
    _report_left_out(server, len(scores) - len(chosen))
    return chosen
