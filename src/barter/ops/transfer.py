"""A memory of transfer images: kept as what they are made from, drawn anew when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypedDict

import torch
from torch import Tensor

from barter.core.payload import State
from barter.ops.fit import index_batches

__all__ = ["Entry", "Page", "batches", "drawn", "newest", "review"]


class Entry(TypedDict):
    """The transfer images of one round: what every client's are made from, and the decoder that makes them."""

    round: int
    codes: dict[int, Tensor]  # embeddings for the decoder or, without one, places in the public data set
    decoder: State


Page: TypeAlias = tuple[int, int, Tensor | None]  # a round, a client, and which of its images then; none is all
Draw: TypeAlias = Callable[[Entry, Tensor], Tensor]


def newest(entries: Sequence[Entry], limit: int | None) -> list[Entry]:
    """The last entries, each round once, at most `limit` of them."""
    kept = list({entry["round"]: entry for entry in entries}.values())
    return kept if limit is None else kept[max(0, len(kept) - limit) :]


def review(entries: Sequence[Entry], owner: int, size: int) -> list[Page]:
    """So many of a client's images at random, all if there are no more."""
    own = [entry for entry in entries if owner in entry["codes"]]
    codes = [entry["codes"][owner] for entry in own]
    chosen = torch.randperm(sum(map(len, codes)))[:size].sort().values
    pages: list[Page] = []
    start = 0
    for entry, made_from in zip(own, codes, strict=True):
        part = chosen[(chosen >= start) & (chosen < start + len(made_from))] - start
        start += len(made_from)
        if len(part):
            pages.append((entry["round"], owner, part.to(made_from.device)))
    return pages


def drawn(entries: Sequence[Entry], pages: Sequence[Page], draw: Draw) -> list[Tensor]:
    """The images of each page; those of one round are drawn in one go."""
    images: dict[int, Tensor] = {}
    for entry in entries:
        here = {at: page for at, page in enumerate(pages) if page[0] == entry["round"]}
        codes = entry["codes"]
        parts = [codes[owner] if index is None else codes[owner][index] for _, owner, index in here.values()]
        if parts:
            made = draw(entry, torch.cat(parts))
            images |= zip(here, torch.split(made, [len(part) for part in parts]), strict=True)
    return [images[at] for at in range(len(pages))]


def batches(rows: Sequence[Sequence[Tensor]], size: int) -> Iterator[list[Tensor]]:
    """Shuffled batches, for ever, of these rows of equally long tensors, one below the other."""
    tensors = [torch.cat(column) for column in zip(*rows, strict=True)]
    for index in index_batches(len(tensors[0]), size, tensors[0].device):
        yield [tensor[index] for tensor in tensors]
