from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from barter.core.errors import PayloadError
from barter.ops.fit import batches, epoch_length
from barter.ops.transfer import (
    Entry,
    Lesson,
    Page,
    check_lesson,
    decode_pages,
    newest_entries,
    sample_review,
)


def entry(t: int, sizes: dict[int, int]) -> Entry:
    """A round whose codes say of whom they are: round, client, place."""
    return {
        "round": t,
        "codes": {k: named(t, k, torch.arange(n)) for k, n in sizes.items()},
        "decoder": {},
    }


def named(t: int, owner: int, places: Tensor) -> Tensor:
    return torch.stack([torch.full_like(places, t), torch.full_like(places, owner), places], 1)


def test_the_newest_entries_each_round_once() -> None:
    entries = [entry(t, {0: 1}) for t in (1, 2, 4)]
    assert newest_entries(entries, None) == entries
    for limit, rounds in ((0, []), (1, [4]), (2, [2, 4]), (3, [1, 2, 4]), (9, [1, 2, 4])):
        assert [kept["round"] for kept in newest_entries(entries, limit)] == rounds
    again = entry(2, {0: 5})
    kept = newest_entries([*entries, again], None)
    assert [one["round"] for one in kept] == [1, 2, 4]
    assert kept[1] is again, "the later word counts"
    assert newest_entries([], 3) == []


def test_a_lesson_is_of_images_that_there_are() -> None:
    entries = [entry(1, {0: 4, 1: 2}), entry(3, {1: 5})]

    def on(t: int, rows: int, index: list[int] | None = None) -> Lesson:
        chosen = {} if index is None else {"index": torch.tensor(index, dtype=torch.long)}
        return [{"round": t, "logits": torch.zeros(rows, 3), **chosen}]  # type: ignore[typeddict-item]

    for good in (on(3, 5), on(3, 5) + on(1, 2, [1, 0]), on(3, 5) + on(1, 0, [])):
        assert check_lesson(entries, 1, good) is good
    for bad, said in (
        ([], r"of rounds \[\], and there are images of rounds \[1, 3\]"),
        (on(1, 2), r"a lesson of rounds \[1\]"),
        (on(3, 5) + on(2, 1), r"a lesson of rounds \[3, 2\]"),
        (on(3, 5) + on(3, 1, [0]), r"a lesson of rounds \[3, 3\]"),
        (on(3, 6), "on image 5 of round 3, of which there are 5"),
        (on(3, 4), "on image 3 of round 3, of which there are 5"),
        (on(3, 3, [0, 1, 2]), "some images of round 3, the newest: it must be on all 5"),
        (on(3, 5, [4, 3, 2, 1, 0]), "it must be on all 5, in their order"),
        (on(3, 5) + on(1, 1, [2]), "on image 2 of round 1, of which there are 2"),
    ):
        with pytest.raises(PayloadError, match=said):
            check_lesson(entries, 1, bad)
    with pytest.raises(PayloadError, match="on image 4 of round 3, of which there are 0"):
        check_lesson(entries, 0, on(3, 5))


histories = st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 12), max_size=4), max_size=6)


def book(sizes: list[dict[int, int]]) -> list[Entry]:
    return [entry(3 * t + 1, by_client) for t, by_client in enumerate(sizes)]


@given(histories, st.integers(0, 3), st.integers(0, 80), st.integers(0, 9))
def test_a_review_is_so_many_of_ones_own_images(
    sizes: list[dict[int, int]], owner: int, asked: int, seed: int
) -> None:
    torch.manual_seed(seed)
    entries = book(sizes)
    pages = sample_review(entries, owner, asked)
    available = {one["round"]: len(one["codes"][owner]) for one in entries if owner in one["codes"]}
    rounds = [t for t, _, _ in pages]
    assert rounds == [t for t in available if t in rounds], "in order, each round once"
    count = 0
    for t, whose, part in pages:
        assert whose == owner
        assert part is not None
        assert 0 < len(part) == len(set(part.tolist()))
        assert 0 <= int(part.min()) <= int(part.max()) < available[t]
        count += len(part)
    assert count == min(asked, sum(available.values()))


def test_every_image_is_as_likely_to_be_reviewed() -> None:
    torch.manual_seed(0)
    entries = [entry(1, {0: 2}), entry(2, {1: 5}), entry(3, {0: 6})]
    counts = {(t, i): 0 for t, n in ((1, 2), (3, 6)) for i in range(n)}
    for _ in range(800):
        for t, _, part in sample_review(entries, 0, 2):
            assert part is not None
            for i in part.tolist():
                counts[t, i] += 1
    assert sum(counts.values()) == 1600
    assert all(150 < count < 250 for count in counts.values())


def halved(entry: Entry, owner: int, codes: Tensor) -> Tensor:
    return codes / 2


@given(histories.filter(any), st.data(), st.integers(0, 9))
def test_images_come_page_by_page_and_are_drawn_round_by_round(
    sizes: list[dict[int, int]], data: st.DataObject, seed: int
) -> None:
    torch.manual_seed(seed)
    entries = book(sizes)
    there = [
        (one["round"], owner, len(codes))
        for one in entries
        for owner, codes in one["codes"].items()
    ]
    pages: list[Page] = []
    expected: list[Tensor] = []
    for t, owner, n in data.draw(st.lists(st.sampled_from(there), max_size=8)):
        part = data.draw(
            st.none() | st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True)
        )
        pages.append((t, owner, None if part is None else torch.tensor(part)))
        expected.append(
            named(t, owner, torch.arange(n) if part is None else torch.tensor(part)) / 2
        )
    calls: list[int] = []

    def draw(entry: Entry, owner: int, codes: Tensor) -> Tensor:
        calls.append(entry["round"])
        assert codes[:, 0].unique().tolist() == [entry["round"]]
        return halved(entry, owner, codes)

    images = decode_pages(entries, pages, draw)
    assert len(images) == len(pages)
    assert all(torch.equal(one, other) for one, other in zip(images, expected, strict=True))
    assert calls == sorted({t for t, _, _ in pages}), (
        "each round in one go, and no round for nothing"
    )


def test_images_by_hand() -> None:
    entries = [entry(1, {0: 3, 1: 2}), entry(2, {0: 1})]
    pages: list[Page] = [(2, 0, None), (1, 1, None), (1, 0, torch.tensor([2, 0]))]
    images = decode_pages(entries, pages, halved)
    assert [(2 * x).tolist() for x in images] == [
        [[2, 0, 0]],
        [[1, 1, 0], [1, 1, 1]],
        [[1, 0, 2], [1, 0, 0]],
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 9))
def test_batches_keep_rows_together_and_an_epoch_sees_each(
    lengths: list[int], size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    n = sum(lengths)
    columns = (
        torch.arange(n),
        torch.arange(n)[:, None] * torch.tensor([10.0, 100.0]),
        -torch.arange(n),
    )
    rows = list(zip(*(torch.split(column, lengths) for column in columns), strict=True))
    stream = batches(rows, size)
    for _ in range(2):
        epoch = list(islice(stream, epoch_length(n, size)))
        for first, second, third in epoch:
            assert len(first) == max(2, min(size, n))
            assert torch.equal(second, first[:, None] * torch.tensor([10.0, 100.0]))
            assert torch.equal(third, -first)
        seen = torch.cat([first for first, *_ in epoch]).tolist()
        assert sorted(seen[:n]) == list(range(n)), "each once; only a last batch is filled up"


@pytest.mark.parametrize("columns", [1, 3])
def test_batches_have_as_many_columns_as_the_rows(columns: int) -> None:
    assert len(next(batches([[torch.zeros(4)] * columns] * 2, 3))) == columns
