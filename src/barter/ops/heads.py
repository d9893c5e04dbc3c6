"""Classifier heads: the last linear layer, which maps features to logits."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import torch
from torch import Tensor, nn

from barter.core.contracts import Entries
from barter.core.errors import ConfigError
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.model import Classifier, SplitClassifier
from barter.core.payload import State

__all__ = [
    "Head",
    "head_state",
    "linear_head",
    "load_head",
    "logits_by_heads",
    "remove_ineffective",
]

Head: TypeAlias = Annotated[
    State, Entries({"weight": ("classes", "features"), "bias": ("classes",)})
]


def linear_head(model: Classifier) -> nn.Linear:
    """Return the head of a network, its Linear layer that was defined last.

    Raises:
        ConfigError: If the network does not end in a linear layer with a bias.
    """
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not linears or linears[-1].in_features != model.feature_dim or linears[-1].bias is None:
        raise ConfigError(
            f"{type(model).__name__} does not end in nn.Linear({model.feature_dim}, classes) "
            "with a bias, which the head that clients share must be; use fedproto or feddistill "
            "for other heads"
        )
    return linears[-1]


def head_state(model: Classifier) -> Head:
    """Return weight and bias of a network's head under these names, not copied.

    Raises:
        ConfigError: If the network does not end in a linear layer with a bias.
    """
    return dict(linear_head(model).state_dict())


def load_head(model: Classifier, head: State) -> None:
    """Load a head ("weight", "bias") into a network; an empty state changes nothing.

    Raises:
        ConfigError: If the network does not end in a linear layer with a bias.
        RuntimeError: If names or shapes differ.
    """
    if head:
        linear_head(model).load_state_dict(head)


def logits_by_heads(model: Classifier, head: State, data: Images) -> tuple[Tensor, Tensor]:
    """Return the logits of all images by the network's own head, then by `head`.

    The features, which are nearly all of the work, are computed once. The network is left in
    evaluation mode and with its own head. An empty `head` gives the own logits twice.
    """
    model.eval()
    index = torch.arange(len(data), device=data.device)
    features = predict(model.features, data.batch, index)
    by_own = predict(model.logits, features.__getitem__, index)
    own = {name: tensor.clone() for name, tensor in head_state(model).items()}
    load_head(model, head)
    try:
        by_other = predict(model.logits, features.__getitem__, index)
    finally:
        load_head(model, own)
    return by_own, by_other


def remove_ineffective(change: State, model: Classifier) -> State:
    """Subtract the mean over classes from the change of a head's weights.

    No prediction depends on this part, because a softmax ignores what all logits share. Cross
    entropy has no gradient in its direction. Adam's steps, which have the same size for all
    weights, nevertheless add it up until it is most of the change of a client that lacks most
    classes. The change of a classifier with a hand-written split is returned as it is, since its
    use of the head's weights is not known.

    Args:
        change: Difference of two states of the network, which is not modified.
        model: The network.

    Returns:
        A new state with another "head.weight"; all other tensors are those of `change`.
    """
    if not isinstance(model, SplitClassifier):
        return change
    weight = change["head.weight"]
    return {**change, "head.weight": weight - weight.mean(0)}
