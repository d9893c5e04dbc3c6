"""DFFKE's losses against derivations by hand, on tensors small enough to check on paper."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from barter import DFFKE, Classifier
from barter.algorithms.dffke import augment_and_resize, review_loss
from barter.core.images import Augment, Spec
from barter.ops.docking import docking_loss
from barter.ops.inversion import CodeBatch, Terms, Viewer, decoded_inversion_loss, discrepancy

Array: TypeAlias = np.ndarray[Any, Any]


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


def softmax(x: Array) -> Array:
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
        return (self.factor * code[:, 0]).view(-1, 1, 1, 2)


# Two clients: what A, z, codes and embeddings each has; of heads and students both have the same.
A, B = [[1.0, 2.0], [0.0, -1.0]], [[1.0, 0.0], [-1.0, 2.0], [0.5, 0.5]]
OTHER = [[0.5, 0.0], [1.0, 1.0]]
SPEC = Spec(1, 1, 2, 3, (0.5,), (0.5,))
BODIES = A, [[0.5, 1.0], [-1.0, 0.0]]
DOCKS = ([[1.0, 1.0], [0.0, 2.0]], [0.0, 0.5]), ([[0.0, -1.0], [1.0, 0.5]], [0.2, -0.1])
CODES = np.array([[0.2, -0.4], [1.0, 0.1]]), np.array([[0.7, 0.3], [-0.5, 0.9], [0.0, -1.1]])
EMBEDDINGS = np.array([[0.3, 0.1], [-0.2, 0.7]]), np.array([[1.0, 0.0], [0.4, -0.6], [-0.3, 0.2]])


def decoder_loss(*clients: int, **terms: Any) -> tuple[Tensor, Tensor, Fixed]:
    viewers = tuple(Viewer(Linear(BODIES[k], B), linear(*DOCKS[k])) for k in clients)
    batch = tuple(
        CodeBatch(*(torch.tensor(part).float()[:, None] for part in (CODES[k], EMBEDDINGS[k])))
        for k in clients
    )
    decoder: Any = Fixed()
    others = tuple(Linear(OTHER, B) for _ in clients)
    loss, bare = decoded_inversion_loss(decoder, SPEC, viewers, others, Terms(**terms), batch)
    return loss, bare, decoder


def fidelity(k: int, factor: float = 3.0) -> float:
    """Eq. 12 for a client."""
    weight, bias = map(np.array, DOCKS[k])
    reencoded = factor * CODES[k] @ np.array(BODIES[k]).T @ weight.T + bias
    return float(((reencoded - CODES[k]) ** 2).mean())


def added(k: int) -> dict[str, float]:
    """What each option adds to it."""
    x = 3 * CODES[k]
    fake = softmax(x @ np.array(BODIES[k]).T @ np.array(B).T)
    real = softmax(EMBEDDINGS[k] @ np.array(B).T)
    other = softmax(x @ np.array(OTHER).T @ np.array(B).T)
    return {
        "logits": (real * np.log(real / fake)).sum(1).mean(),
        "kl": -0.1 * (fake * np.log(fake / other)).sum(1).mean(),
        "mae": -np.abs(fake - other).mean(),
        "mse": -((fake - other) ** 2).mean(),
    }


@pytest.mark.parametrize("clients", [(0,), (1,), (0, 1)])
def test_equation_12_by_hand(clients: tuple[int, ...]) -> None:
    def together(factor: float) -> float:
        rows = sum(len(CODES[k]) for k in clients)
        return sum(len(CODES[k]) * fidelity(k, factor) for k in clients) / rows

    loss, bare, decoder = decoder_loss(*clients)
    assert loss.item() == pytest.approx(together(3.0), rel=1e-5)
    assert bare.item() == loss.item()
    assert not bare.requires_grad
    loss.backward()
    step = 1e-4
    slope = (together(3 + step) - together(3 - step)) / (2 * step)
    assert decoder.factor.grad is not None
    assert decoder.factor.grad.item() == pytest.approx(slope, rel=1e-3)


def test_two_clients_count_by_how_many_codes_they_have() -> None:
    assert abs(fidelity(0) - fidelity(1)) > 1
    loss = decoder_loss(0, 1)[0].item()
    assert loss == pytest.approx((2 * fidelity(0) + 3 * fidelity(1)) / 5, rel=1e-5)
    assert decoder_loss(1, 0)[0].item() == pytest.approx(loss, rel=1e-6)


def test_what_the_options_add_to_equation_12() -> None:
    for k in (0, 1):
        plain = decoder_loss(k)[0].item()
        assert decoder_loss(k, logits=True)[0].item() - plain == pytest.approx(
            added(k)["logits"], abs=1e-5
        )
        for choice in ("kl", "mae", "mse"):
            loss, bare, _ = decoder_loss(k, differ=choice)
            assert loss.item() - plain == pytest.approx(added(k)[choice], abs=1e-5)
            assert bare.item() == plain
    everything, bare, _ = decoder_loss(0, 1, logits=True, differ="mae")
    each = [fidelity(k) + added(k)["logits"] + added(k)["mae"] for k in (0, 1)]
    assert everything.item() == pytest.approx((2 * each[0] + 3 * each[1]) / 5, rel=1e-5)
    assert bare.item() == decoder_loss(0, 1)[0].item()


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
    for direction, expected in (("teacher", forward), ("student", reverse)):
        algorithm: Any = DFFKE(direction=direction)  # type: ignore[arg-type]
        loss = algorithm.exchange_loss(model, model.features(images), logits)
        assert loss.item() == pytest.approx(expected, abs=1e-5)
    # The gradient with respect to the student's logits is (student - teacher) / N for KL(teacher || student).
    DFFKE().exchange_loss(model, model.features(images), logits).backward()
    features = x @ np.array(A).T
    assert model.b.grad is not None
    assert model.b.grad.numpy() == pytest.approx(((student - teacher) / 2).T @ features, abs=1e-5)
    translated = features @ np.array([[1.0], [1.0]]) + 0.5
    embeddings = np.array([[1.0], [-1.0]])
    docking = torch.tensor([[1.0, 1.0]]), torch.tensor([0.5])
    said = logits, torch.tensor(embeddings).float()
    loss = DFFKE(embedding_loss=True).exchange_loss(model, model.features(images), *said, *docking)
    assert loss.item() == pytest.approx(forward + ((translated - embeddings) ** 2).mean(), abs=1e-5)


def test_private_images_are_judged_by_what_is_frequent_at_home() -> None:
    model, x, labels = Linear(A, B), np.array([[0.3, -0.2], [0.8, 0.1]]), [2, 0]
    shares = np.array([0.7, 0.2, 0.1])
    features = torch.tensor(x @ np.array(A).T).float()
    for home in (None, shares):
        said = softmax(x @ np.array(A).T @ np.array(B).T + (0 if home is None else np.log(home)))
        told = () if home is None else (torch.tensor(home).float().log(),)
        loss = review_loss(model, features, torch.tensor(labels), *told)
        assert loss.item() == pytest.approx(-np.log(said[[0, 1], labels]).mean(), abs=1e-5)


def test_a_student_sees_transfer_images_augmented() -> None:
    """A picture of two pixels is mirrored or not: two losses are possible, and about as often."""
    model, target = Linear(A, B), np.array([[4.0, 0.0, -1.0]])
    teacher = softmax(target)
    possible = []
    for x in ([[0.3, -0.2]], [[-0.2, 0.3]]):
        student = softmax(np.array(x) @ np.array(A).T @ np.array(B).T)
        possible.append(float((teacher * np.log(teacher / student)).sum()))
    assert abs(possible[0] - possible[1]) > 0.05
    torch.manual_seed(0)
    images, logits = torch.tensor([[[[0.3, -0.2]]]]), torch.tensor(target).float()
    seen = [model.features(augment_and_resize(SPEC, Augment(flip=True), images)) for _ in range(40)]
    losses = [DFFKE().exchange_loss(model, features, logits).item() for features in seen]
    mirrored = [abs(loss - possible[1]) < 1e-5 for loss in losses]
    assert all(
        abs(loss - possible[is_mirrored]) < 1e-5
        for loss, is_mirrored in zip(losses, mirrored, strict=True)
    )
    assert 8 < sum(mirrored) < 32
