"""Heads by themselves: the linear layer that makes logits of features."""

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

__all__ = ["Head", "felt", "head_state", "linear_head", "logits_by_heads", "put_on"]

Head: TypeAlias = Annotated[
    State, Entries({"weight": ("classes", "features"), "bias": ("classes",)})
]


def linear_head(model: Classifier) -> nn.Linear:
    """The head of a network; refuses one that is not a linear layer with a bias."""
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not linears or linears[-1].in_features != model.feature_dim or linears[-1].bias is None:
        raise ConfigError(
            f"{type(model).__name__} does not end in nn.Linear({model.feature_dim}, classes) with a bias: "
            "the head that clients share is one; use fedproto or feddistill for other heads"
        )
    return linears[-1]


def head_state(model: Classifier) -> Head:
    """Weight and bias of a network's head, whatever it calls them."""
    return dict(linear_head(model).state_dict())


def put_on(model: Classifier, head: State) -> None:
    """Give a network this head, if there is one already."""
    if head:
        linear_head(model).load_state_dict(head)


def logits_by_heads(model: Classifier, head: State, data: Images) -> tuple[Tensor, Tensor]:
    """Return the logits of all images by the network's own head, and by another one.

    The features, which are nearly all of the work, are computed once. The network is in evaluation
    mode and has its own head on when this returns.
    """
    model.eval()
    index = torch.arange(len(data), device=data.device)
    features = predict(model.features, data.batch, index)
    by_own = predict(model.logits, features.__getitem__, index)
    own = {name: tensor.clone() for name, tensor in head_state(model).items()}
    put_on(model, head)
    try:
        by_other = predict(model.logits, features.__getitem__, index)
    finally:
        put_on(model, own)
    return by_own, by_other


def felt(change: State, model: Classifier) -> State:
    """A change of a network's weights without what no prediction depends on: in the head, what all classes share.

    Cross entropy does not ask for it, but Adam's steps, which are alike for all numbers, add it up until it is most of
    the change of a client that lacks most classes. What a head that was split by hand does with its weights is its own.
    """
    if not isinstance(model, SplitClassifier):
        return change
    weight = change["head.weight"]
    return {**change, "head.weight": weight - weight.mean(0)}
