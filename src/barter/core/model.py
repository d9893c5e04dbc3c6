"""A classifier in two steps, and how to make one of any module."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from barter.core.errors import ConfigError

__all__ = ["Classifier", "SplitClassifier", "split"]


class Classifier(nn.Module):
    """Images to features, features to logits: the two methods every algorithm counts on.

    >>> from torch import nn
    >>> from barter import Classifier, Experiment, Local
    >>> class Pixels(Classifier):
    ...     feature_dim = 64
    ...     def __init__(self, spec):
    ...         super().__init__()
    ...         self.head = nn.Linear(64, spec.classes)
    ...     def features(self, x):
    ...         return x.flatten(1)
    ...     def logits(self, features):
    ...         return self.head(features)
    >>> Experiment(Local(max_epochs=1), models=[Pixels, "small-cnn"], clients=3).architectures
    ['Pixels-0', 'small-cnn', 'Pixels-0']
    """

    feature_dim: int

    def features(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) to features (N, feature_dim)."""
        raise NotImplementedError

    def logits(self, features: Tensor) -> Tensor:
        """Features (N, feature_dim) to logits (N, classes)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.features(x))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As every module's; a tree that crossed or was kept, which has no versions of layers, is of this network's."""
        if not hasattr(state_dict, "_metadata"):
            state_dict = OrderedDict(state_dict)
            parts = self.named_modules(remove_duplicate=False)
            state_dict._metadata = {at: {"version": part._version} for at, part in parts}  # type: ignore[attr-defined]
        return super().load_state_dict(state_dict, strict, assign)


class SplitClassifier(Classifier):
    """A body that ends in features, and the linear head behind it."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.feature_dim = head.in_features

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features

    def logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


BY_HAND = """write it by hand:

    class Mine(barter.Classifier):
        feature_dim = 128
        def features(self, x): ...      # (N, C, H, W) -> (N, 128)
        def logits(self, features): ... # (N, 128) -> (N, classes)"""


def split(module: nn.Module) -> Classifier:
    """Any network that ends in a Linear layer as a Classifier; the module itself is left as it is.

    >>> from torch import nn
    >>> from barter import split
    >>> split(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))).feature_dim
    32
    """
    if isinstance(module, Classifier):
        return copy.deepcopy(module)
    name = type(module).__name__
    linears = [at for at, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not linears:
        raise ConfigError(f"{name} has no Linear layer to split at; {BY_HAND}")
    if linears[-1] == "":
        raise ConfigError(
            f"{name} is a single Linear layer, nothing is left for the features; {BY_HAND}"
        )
    body = copy.deepcopy(module)
    parent, _, child = linears[-1].rpartition(".")
    head = getattr(body.get_submodule(parent), child)
    setattr(body.get_submodule(parent), child, nn.Identity())
    return SplitClassifier(body, head)


def verify_split(
    original: nn.Module, classifier: Classifier, shape: tuple[int, int, int], classes: int
) -> None:
    """Refuse a split whose parts do not compute what the whole module computes, or not for this task."""
    name = type(original).__name__
    probe = torch.linspace(-1, 1, 2 * shape[0] * shape[1] * shape[2]).reshape(2, *shape)
    was_training = original.training
    original.eval()
    classifier.eval()
    try:
        with torch.no_grad():
            whole, features = original(probe), classifier.features(probe)
            same = (
                features.shape == (2, classifier.feature_dim)
                and isinstance(whole, Tensor)
                and torch.allclose(whole, classifier.logits(features), atol=1e-5)
            )
            in_training = _in_training(classifier, probe)
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        size = "x".join(map(str, shape))
        raise ConfigError(
            f"{name} does not take images of {size}, or cannot be split at its last Linear layer ({error}); {BY_HAND}"
        ) from error
    finally:
        original.train(was_training)
        classifier.train(was_training)
    if isinstance(whole, Tensor) and whole.shape[1:] != (classes,):
        raise ConfigError(
            f"{name} gives {tuple(whole.shape[1:])} outputs per image, the task has {classes} classes"
        )
    if not same:
        raise ConfigError(
            f"{name} cannot be split at its last Linear layer: what follows or bypasses it matters too; {BY_HAND}"
        )
    if not isinstance(in_training, Tensor):
        raise ConfigError(
            f"{name} gives {type(in_training).__name__} instead of logits while it is trained: build it without "
            "auxiliary classifiers (torchvision: aux_logits=False)"
        )


def _in_training(classifier: Classifier, probe: Tensor) -> object:
    """What the body gives while it is trained; the classifier and the random state stay as they are."""
    before = [buffer.clone() for buffer in classifier.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            return classifier.train().features(probe)
    finally:
        for buffer, value in zip(classifier.buffers(), before, strict=True):
            buffer.copy_(value)
