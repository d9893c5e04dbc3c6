"""Means over classes, by hand."""

from __future__ import annotations

import torch

from barter.ops.prototypes import (
    ByClass,
    class_means,
    lookup,
    mean_table,
    nearest_class,
    update_table,
)


def table(classes: list[int], *rows: list[float]) -> ByClass:
    return {"classes": torch.tensor(classes), "vectors": torch.tensor(rows)}


def test_the_mean_of_each_class_that_is_there() -> None:
    found = class_means(torch.tensor([[1.0, 0.0], [5.0, 5.0], [3.0, 2.0]]), torch.tensor([7, 2, 7]))
    assert found["classes"].tolist() == [2, 7]
    assert found["vectors"].tolist() == [[5.0, 5.0], [2.0, 1.0]]


def test_every_client_counts_alike_where_it_has_the_class() -> None:
    both = mean_table([table([0, 1], [2.0], [10.0]), table([1, 3], [20.0], [7.0])])
    assert both["classes"].tolist() == [0, 1, 3]
    assert both["vectors"].tolist() == [[2.0], [15.0], [7.0]]


def test_rows_of_classes_that_nobody_has_are_zero_and_marked() -> None:
    rows, known = lookup([table([1], [4.0, 6.0])], 3, 2, torch.device("cpu"))
    assert rows.tolist() == [[0.0, 0.0], [4.0, 6.0], [0.0, 0.0]]
    assert known.tolist() == [0.0, 1.0, 0.0]
    assert lookup([], 2, 1, torch.device("cpu"))[1].tolist() == [0.0, 0.0]


def test_the_nearest_is_a_class_and_not_a_row() -> None:
    found = nearest_class(
        torch.tensor([[0.0, 0.0], [9.0, 9.0]]), table([4, 6], [1.0, 1.0], [8.0, 8.0])
    )
    assert found.tolist() == [4, 6]


def test_classes_without_a_new_vector_keep_the_old_one() -> None:
    old, new = table([1, 4], [1.0], [4.0]), table([0, 4], [10.0], [40.0])
    assert update_table([], new)["classes"].tolist() == [0, 4]
    both = update_table([old], new)
    assert both["classes"].tolist() == [0, 1, 4]
    assert both["vectors"].tolist() == [[10.0], [1.0], [40.0]]
