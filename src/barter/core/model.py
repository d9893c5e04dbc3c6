"""Classifiers in two steps, features and logits; conversion of other modules."""

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
    """Base class of networks, which compute features and then logits.

    `features` maps images to features, `logits` maps features to logits, and algorithms use both.
    Subclasses implement them and set `feature_dim`.

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
        """Map images (N, C, H, W) to features (N, feature_dim)."""
        raise NotImplementedError

    def logits(self, features: Tensor) -> Tensor:
        """Map features (N, feature_dim) to logits (N, classes)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.features(x))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights; a state dict without layer versions gets those of this network.

        State dicts that were sent or stored have lost the versions, which torch keeps in
        `_metadata` and compares on loading. The given state dict is not changed.

        Raises:
            RuntimeError: If names (with `strict`) or shapes differ.
        """
        if not hasattr(state_dict, "_metadata"):
            state_dict = OrderedDict(state_dict)
            modules = self.named_modules(remove_duplicate=False)
            versions = {name: {"version": module._version} for name, module in modules}
            state_dict._metadata = versions  # type: ignore[attr-defined]
        return super().load_state_dict(state_dict, strict, assign)


class SplitClassifier(Classifier):
    """A classifier made of a body that computes features and a linear head."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head
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
    """Convert a network with a last Linear layer to a Classifier; copies the module.

    The head is the Linear layer that was defined last; the features are what the rest of the module
    computes without it. Layers that follow or bypass the head make that wrong, which is not checked
    here but by `verify_split`. A Classifier is copied as it is.

    Raises:
        ConfigError: If the module has no Linear layer, or is nothing but one.

    >>> from torch import nn
    >>> from barter import split
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> split(network).feature_dim
    32
    """
    if isinstance(module, Classifier):
        return copy.deepcopy(module)
    name = type(module).__name__
    linears = [path for path, layer in module.named_modules() if isinstance(layer, nn.Linear)]
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
    """Check that a split network equals the original and fits the task.

    Both are run on two fixed images on the CPU. Weights, buffers and random state stay; both end in
    the mode, training or evaluation, that the original had.

    Args:
        original: The module that was split.
        classifier: The result of `split`.
        shape: Channels, height and width of the images.
        classes: The number of classes.

    Raises:
        ConfigError: If the logits differ, the input or output shape does not fit, or the network
            computes something other than a tensor of features in training mode. Logits may
            differ by 1e-5.
    """
    name = type(original).__name__
    probe = torch.linspace(-1, 1, 2 * shape[0] * shape[1] * shape[2]).reshape(2, *shape)
    was_training = original.training
    original.eval()
    classifier.eval()
    try:
        with torch.no_grad():
            output = original(probe)
            features = classifier.features(probe)
            same = (
                features.shape == (2, classifier.feature_dim)
                and isinstance(output, Tensor)
                and torch.allclose(output, classifier.logits(features), atol=1e-5)
            )
            training_output = _features_in_training(classifier, probe)
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        size = "x".join(map(str, shape))
        raise ConfigError(
            f"{name} does not take images of {size}, or cannot be split at its last Linear layer "
            f"({error}); {BY_HAND}"
        ) from error
    finally:
        original.train(was_training)
        classifier.train(was_training)
    if isinstance(output, Tensor) and output.shape[1:] != (classes,):
        outputs = tuple(output.shape[1:])
        raise ConfigError(
            f"{name} gives {outputs} outputs per image, the task has {classes} classes"
        )
    if not same:
        raise ConfigError(
            f"{name} cannot be split at its last Linear layer: layers that follow or bypass it "
            f"change the result; {BY_HAND}"
        )
    if not isinstance(training_output, Tensor):
        raise ConfigError(
            f"{name} gives {type(training_output).__name__} instead of logits while it is trained: "
            "build it without auxiliary classifiers (torchvision: aux_logits=False)"
        )


def _features_in_training(classifier: Classifier, probe: Tensor) -> object:
    """Return the features in training mode; restore buffers and random state.

    The classifier is left in training mode.
    """
    before = [buffer.clone() for buffer in classifier.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            return classifier.train().features(probe)
    finally:
        for buffer, value in zip(classifier.buffers(), before, strict=True):
            buffer.copy_(value)
