"""Class means of features (prototypes) or predictions, per client or over many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypedDict

import torch
from torch import Tensor

from barter.compute.precision import full_precision
from barter.core import robust
from barter.core.contracts import DistinctClasses, Floats
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.model import Classifier

__all__ = [
    "ByClass",
    "class_means",
    "concatenate_tables",
    "features_of",
    "lookup",
    "mean_table",
    "nearest_class",
    "prototypes_of",
    "select_trusted_tables",
    "update_table",
]


class ByClass(TypedDict):
    """A table with one vector for each of some classes."""

    classes: Annotated[Tensor, DistinctClasses("n")]  # the classes in the table
    vectors: Annotated[Tensor, Floats("n", "vector")]  # one row for each of them


def class_means(values: Tensor, labels: Tensor) -> ByClass:
    """Return the mean row of every class that occurs, sorted by class."""
    classes = torch.unique(labels)
    members = (labels == classes[:, None]).to(values)
    # A matrix product sums in the same order each time, on a GPU too.
    with full_precision():
        return {"classes": classes, "vectors": members @ values / members.sum(1, keepdim=True)}


def concatenate_tables(tables: Iterable[ByClass]) -> ByClass:
    """Concatenate one or more tables; a class may then occur more than once."""
    tables = list(tables)
    return {
        "classes": torch.cat([table["classes"] for table in tables]),
        "vectors": torch.cat([table["vectors"] for table in tables]),
    }


def mean_table(tables: Iterable[ByClass]) -> ByClass:
    """Return each class's mean vector over the tables that have one, sorted by class.

    All tables have the same weight; there must be at least one. The run's defence on prototypes
    replaces the mean: "cosine" leaves out whole tables (`select_trusted_tables`) and takes the mean
    of the others, other rules aggregate the vectors of each class.
    """
    tables = list(tables)
    if robust.active().rule_for("prototypes") == "cosine":
        return _class_means_of(select_trusted_tables(dict(enumerate(tables)), "prototypes"))
    if robust.active().defends("prototypes"):
        table = concatenate_tables(tables)
        classes = torch.unique(table["classes"])
        members = [table["vectors"][table["classes"] == c] for c in classes]
        vectors = [robust.aggregate(rows, "prototypes") for rows in members]
        return {"classes": classes, "vectors": torch.stack(vectors)}
    return _class_means_of(tables)


def _class_means_of(tables: Sequence[ByClass]) -> ByClass:
    """Return the mean vector of every class, over the tables that have one."""
    table = concatenate_tables(tables)
    return class_means(table["vectors"], table["classes"])


def select_trusted_tables(
    tables: Mapping[int, ByClass], kind: robust.Aggregate = "sets"
) -> list[ByClass]:
    """Return, in order, the clients' tables that the run's defence keeps.

    The defence compares all of a client's vectors with those of other clients for the same classes
    (`Defence.keep`). Without a defence of this kind of aggregate, and of fewer than three tables,
    all are returned.

    Args:
        tables: The table of each client, of which at least one has a class.
        kind: The kind of aggregate whose rule applies: "sets" or "prototypes".
    """
    kept = list(tables.values())
    if not robust.active().defends(kind):
        return kept
    classes = int(max(int(table["classes"].max()) for table in kept if len(table["classes"]))) + 1
    width = kept[0]["vectors"].shape[1]
    vectors = torch.zeros(len(kept), classes, width, device=kept[0]["vectors"].device)
    held = torch.zeros(len(kept), classes, 1, device=vectors.device)
    for i, table in enumerate(kept):
        vectors[i, table["classes"]] = table["vectors"]
        held[i, table["classes"]] = 1.0
    mask = robust.select([vectors], [held], kind)
    return [table for table, keep in zip(kept, mask.tolist(), strict=True) if keep]


def features_of(model: Classifier, data: Images) -> Tensor:
    """Return the features (images, features) of all images, which are not augmented.

    The model is left in evaluation mode.
    """
    return predict(model.eval().features, data.batch, torch.arange(len(data), device=data.device))


def prototypes_of(model: Classifier, data: Images) -> ByClass:
    """Return the mean features of every class that occurs.

    The model is left in evaluation mode.
    """
    return class_means(features_of(model, data), data.labels)


def update_table(old: Sequence[ByClass], new: ByClass) -> ByClass:
    """Update a table: new vectors, and the old ones of classes without a new vector.

    Args:
        old: A list of the old table, or an empty list.
        new: The new table.

    Returns:
        The updated table, sorted by class.
    """
    tables = [new]
    for table in old:
        missing = ~torch.isin(table["classes"], new["classes"])
        tables.append({"classes": table["classes"][missing], "vectors": table["vectors"][missing]})
    merged = concatenate_tables(tables)
    order = merged["classes"].argsort()
    return {"classes": merged["classes"][order], "vectors": merged["vectors"][order]}


def lookup(
    table: Sequence[ByClass], classes: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Convert a table to a row for each class of the task, and a mask of its classes.

    Args:
        table: A list of the table, or an empty list.
        classes: Number of all classes.
        width: Length of the vectors.
        device: Device of the result.

    Returns:
        The rows (classes, width), zero for classes without a vector, and for each class 1 if it has
        one, otherwise 0.
    """
    rows = torch.zeros(classes, width, device=device)
    known = torch.zeros(classes, device=device)
    for vectors in table:
        rows[vectors["classes"]] = vectors["vectors"]
        known[vectors["classes"]] = 1.0
    return rows, known


def nearest_class(features: Tensor, table: ByClass) -> Tensor:
    """Return the class of the closest vector by Euclidean distance, for each row."""
    return table["classes"][torch.cdist(features, table["vectors"]).argmin(1)]
