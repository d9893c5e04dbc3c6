"""Means over classes: of features (prototypes) or of predictions, each client's own and those of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, TypedDict

import torch
from torch import Tensor

from barter.compute.precision import exact
from barter.core.contracts import Classes, Floats
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.model import Classifier

__all__ = [
    "ByClass",
    "class_means",
    "features_of",
    "joined",
    "lookup",
    "mean_of",
    "nearest",
    "prototypes_of",
    "renewed",
]


class ByClass(TypedDict):
    """A vector for each of some classes."""

    classes: Annotated[Tensor, Classes("n")]  # which ones
    vectors: Annotated[Tensor, Floats("n", "vector")]  # one row for each


def class_means(values: Tensor, labels: Tensor) -> ByClass:
    """The mean row of every class that there is."""
    classes = torch.unique(labels)
    members = (labels == classes[:, None]).to(values)
    with exact():  # a product adds up in the same order each time, on a GPU too
        return {"classes": classes, "vectors": members @ values / members.sum(1, keepdim=True)}


def joined(tables: Iterable[ByClass]) -> ByClass:
    """All vectors of several tables below one another; a class may come more than once."""
    listed = list(tables)
    return {
        "classes": torch.cat([table["classes"] for table in listed]),
        "vectors": torch.cat([table["vectors"] for table in listed]),
    }


def mean_of(tables: Iterable[ByClass]) -> ByClass:
    """The mean vector of every class, over those that have one for it; each of them counts alike."""
    every = joined(tables)
    return class_means(every["vectors"], every["classes"])


def features_of(model: Classifier, data: Images) -> Tensor:
    """The features of all images, in evaluation mode."""
    return predict(model.eval().features, data.batch, torch.arange(len(data), device=data.device))


def prototypes_of(model: Classifier, data: Images) -> ByClass:
    """The mean features of every class that there is."""
    return class_means(features_of(model, data), data.labels)


def renewed(old: Sequence[ByClass], new: ByClass) -> ByClass:
    """The new vectors, and the old ones of classes that have no new one; of one table or none."""
    stay = [~torch.isin(table["classes"], new["classes"]) for table in old]
    classes = torch.cat(
        [new["classes"], *(table["classes"][kept] for table, kept in zip(old, stay, strict=True))]
    )
    vectors = torch.cat(
        [new["vectors"], *(table["vectors"][kept] for table, kept in zip(old, stay, strict=True))]
    )
    order = classes.argsort()
    return {"classes": classes[order], "vectors": vectors[order]}


def lookup(
    table: Sequence[ByClass], classes: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A row for each of all classes, and whether there is one: 1, or 0 where the row is zero; of one table or none."""
    rows, known = torch.zeros(classes, width, device=device), torch.zeros(classes, device=device)
    for found in table:
        rows[found["classes"]], known[found["classes"]] = found["vectors"], 1.0
    return rows, known


def nearest(features: Tensor, table: ByClass) -> Tensor:
    """The class whose vector is the closest."""
    return table["classes"][torch.cdist(features, table["vectors"]).argmin(1)]
