"""A memory of transfer images: kept as what they are made from, drawn anew when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

import torch
from torch import Tensor

from barter.core.contracts import Floats, Places, When
from barter.core.errors import PayloadError
from barter.core.evaluation import predict
from barter.core.images import Spec
from barter.core.nodes import Client
from barter.core.payload import State
from barter.models.generators import Decoder
from barter.ops import views

__all__ = [
    "Entry",
    "Lesson",
    "Page",
    "Targets",
    "depicted",
    "draw",
    "drawn",
    "heard",
    "lesson",
    "newest",
    "review",
    "sound",
    "taught",
]


class Entry(TypedDict):
    """The transfer images of one round, or what every client's are made from."""

    round: int
    codes: dict[
        int, Tensor
    ]  # images (n, C, H, W), codes of each image's views (n, V, h), places in the public data
    decoder: State  # that makes images of codes


class Targets(TypedDict):
    """A teacher's word on its own images of a round, or on some of them."""

    round: int
    index: NotRequired[Annotated[Tensor, Places("n")]]
    logits: Annotated[Tensor, Floats("n", "classes")]
    embeddings: NotRequired[Annotated[Tensor, Floats("n", "code_dim"), When("embedding_loss")]]


Lesson: TypeAlias = list[Targets]  # on the last round's images, then on some of earlier rounds'
Page: TypeAlias = tuple[
    int, int, Tensor | None
]  # a round, a client, and which of its images then; none is all
Draw: TypeAlias = Callable[[Entry, Tensor], Tensor]
Say: TypeAlias = Callable[[Tensor], Mapping[str, Tensor]]


def draw(client: Client, entry: Entry, codes: Tensor) -> Tensor:
    """The transfer images that these codes of a round stand for."""
    if codes.ndim == 4:
        return codes.float()
    if entry["decoder"]:
        return depicted(entry["decoder"], client.data.spec, codes)
    assert client.public is not None
    return client.public.batch(codes)


def depicted(decoder: State, spec: Spec, codes: Tensor) -> Tensor:
    """The images that a decoder makes of these codes."""
    restored = Decoder.restored(decoder, spec, views.parts_of(codes.shape[1]))
    return predict(
        restored, lambda part: codes[part], torch.arange(len(codes), device=codes.device)
    )


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
        parts = [
            codes[owner] if index is None else codes[owner][index]
            for _, owner, index in here.values()
        ]
        if parts:
            made = draw(entry, torch.cat(parts))
            images |= zip(here, torch.split(made, [len(part) for part in parts]), strict=True)
    return [images[at] for at in range(len(pages))]


def lesson(entries: Sequence[Entry], owner: int, draw: Draw, say: Say) -> Lesson:
    """What a client says of its images: of all that are new, and of as many of earlier ones."""
    *past, now = entries
    fresh: Page = (now["round"], owner, None)
    pages = [fresh, *review(past, owner, len(now["codes"][owner]))]
    images = drawn(entries, pages, draw)
    said = {
        name: torch.split(x, [len(part) for part in images])
        for name, x in say(torch.cat(images)).items()
    }
    lesson: list[Any] = []
    for at, (t, _, index) in enumerate(pages):
        which = {} if index is None else {"index": index}
        lesson.append({"round": t, **which, **{name: parts[at] for name, parts in said.items()}})
    return lesson


def sound(entries: Sequence[Entry], owner: int, lesson: Lesson) -> Lesson:
    """The lesson, if it is of images that these entries have of its teacher: of all new ones, and of some before."""
    made = {entry["round"]: len(entry["codes"].get(owner, ())) for entry in entries}
    rounds = [targets["round"] for targets in lesson]
    if len(set(rounds)) < len(rounds) or not {entries[-1]["round"]} <= set(rounds) <= made.keys():
        raise PayloadError(
            f"a lesson of rounds {rounds[:9]}, and there are images of rounds {list(made)}"
        )
    for targets in lesson:
        t, index = targets["round"], targets.get("index")
        last = (
            len(targets["logits"]) - 1 if index is None else int(index.max()) if len(index) else 0
        )
        if last >= made[t] or (index is None and last + 1 != made[t]):
            raise PayloadError(
                f"a lesson on image {last} of round {t}, of which there are {made[t]}"
            )
    return lesson


def heard(lessons: Mapping[int, Lesson], peers: int | None) -> dict[int, dict[int, Lesson]]:
    """What each client hears: the lessons of all others, or of so many of them, drawn at random."""
    others = {k: [i for i in lessons if i != k] for k in lessons}
    if peers is not None:
        others = {
            k: sorted(ids[i] for i in torch.randperm(len(ids))[:peers].tolist())
            for k, ids in others.items()
        }
    return {k: {i: lessons[i] for i in ids} for k, ids in others.items()}


def taught(
    entries: Sequence[Entry], lessons: Mapping[int, Lesson], draw: Draw, *, mixed: bool
) -> list[list[Tensor]]:
    """Images and what was said of them, row by row: new ones, then earlier; of all peers, or by peer."""
    said = [(i, targets) for i, lesson in lessons.items() for targets in lesson]
    images = drawn(
        entries, [(targets["round"], i, targets.get("index")) for i, targets in said], draw
    )
    rows: dict[tuple[bool, int], list[list[Tensor]]] = {}
    for (i, targets), x in zip(said, images, strict=True):
        words = [targets["logits"], *([targets["embeddings"]] if "embeddings" in targets else [])]
        rows.setdefault((targets["round"] != entries[-1]["round"], 0 if mixed else i), []).append(
            [x, *words]
        )
    del images  # or everything would be held twice
    return [
        [torch.cat(column) for column in zip(*rows.pop(key), strict=True)] for key in sorted(rows)
    ]
