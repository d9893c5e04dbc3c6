"""A memory of transfer images, stored as codes and decoded when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from barter.core.contracts import Content, Floats, Places, When
from barter.core.errors import PayloadError
from barter.core.evaluation import predict
from barter.core.images import Images, Spec
from barter.core.nodes import Client
from barter.core.payload import State
from barter.core.seeds import stream_seed
from barter.models.generators import Decoder
from barter.ops import views
from barter.ops.embedding_models import ClassGaussians, sample_embeddings, sample_labels_and_noise
from barter.ops.photographs import photograph_images

__all__ = [
    "Entry",
    "Lesson",
    "Page",
    "Targets",
    "check_lesson",
    "collect_lessons",
    "decode_images",
    "decode_pages",
    "distribute_lessons",
    "entry_images",
    "logits_to_half",
    "newest_entries",
    "photograph_entry",
    "prepare_lesson",
    "public_entry",
    "sample_codes",
    "sample_review",
    "statistics_entry",
    "to_half",
    "to_single",
    "transfer_images",
]


class Entry(TypedDict):
    """The transfer images of one round, or what they are decoded from."""

    round: int
    # By client: images (n, C, H, W), codes of each image's views (n, V, h), or indices: into the
    # public data, of samples of the client's Gaussians, or of the seed's crops of photographs.
    codes: Annotated[dict[int, Tensor], Content("images")]
    decoder: State  # decodes codes to images; empty if the entry holds none
    # By client: models from which embeddings are sampled, and layers that map these to codes.
    gaussians: NotRequired[dict[int, ClassGaussians]]
    docking: NotRequired[dict[int, State]]
    seed: NotRequired[int]  # of the samples or crops


class Targets(TypedDict):
    """A teacher's predictions for its own images of a round, or for some of them."""

    round: int
    index: NotRequired[Annotated[Tensor, Places("n")]]  # the images; all if missing
    logits: Annotated[
        Tensor, Floats("n", "classes", half="describes", compared="large_targets_do_harm")
    ]
    embeddings: NotRequired[Annotated[Tensor, Floats("n", "code_dim"), When("embedding_loss")]]


Lesson: TypeAlias = list[Targets]  # for the last round's images, then for some of earlier rounds
# A round, a client, and the indices of some of its images in that round; None means all.
Page: TypeAlias = tuple[int, int, Tensor | None]
# (entry, owner, codes) -> images
Draw: TypeAlias = Callable[[Entry, int, Tensor], Tensor]
Say: TypeAlias = Callable[[Tensor], Mapping[str, Tensor]]  # images -> predictions by name


def public_entry(
    round_number: int, sizes: Mapping[int, int], public: Images, device: torch.device
) -> Entry:
    """Return a round's entry of public images, sampled per client with repetition.

    Its codes are indices of public images, from torch's default generator of the device. Its
    decoder is empty.

    Args:
        round_number: The round.
        sizes: Number of images by client.
        public: The public data.
        device: Device of the entry.
    """
    codes = {k: torch.randint(len(public), (n,), device=device) for k, n in sizes.items()}
    return {"round": round_number, "codes": codes, "decoder": {}}


def photograph_entry(
    round_number: int, sizes: Mapping[int, int], seed: int, device: torch.device
) -> Entry:
    """Return a round's entry from which clients make the same crops of photographs.

    Its codes number the crops from 0 on, client after client in the order of `sizes`. Its decoder
    is empty.

    Args:
        round_number: The round.
        sizes: Number of images by client.
        seed: The seed of the crops.
        device: Device of the entry.
    """
    index = torch.arange(sum(sizes.values()), device=device)
    codes = dict(zip(sizes, torch.split(index, list(sizes.values())), strict=True))
    return {"round": round_number, "codes": codes, "decoder": {}, "seed": seed}


def statistics_entry(
    round_number: int,
    codes: Mapping[int, Tensor],
    decoder: State,
    gaussians: dict[int, ClassGaussians],
    docking: Mapping[int, nn.Linear],
    seed: int,
) -> Entry:
    """Return a round's entry from which every client repeats all clients' samples.

    The samples are of the clients' Gaussians. In place of codes the entry has the indices of
    samples, from 0 on for each client; `sample_codes` makes codes of them. Weights are in half
    precision.

    Args:
        round_number: The round.
        codes: The codes of the samples by client. Only their number is used.
        decoder: State of the decoder.
        gaussians: The clients' Gaussians.
        docking: Each client's layer that maps samples to codes.
        seed: The seed of the samples.
    """
    return {
        "round": round_number,
        "codes": {k: torch.arange(len(code), device=code.device) for k, code in codes.items()},
        "decoder": to_half(decoder),
        "gaussians": gaussians,
        "docking": {k: to_half(dict(layer.state_dict())) for k, layer in docking.items()},
        "seed": seed,
    }


def transfer_images(client: Client, entry: Entry, owner: int, codes: Tensor) -> Tensor:
    """Return the images of an owner's codes as a client makes them (`entry_images`).

    Args:
        client: The client that makes the images, with its image format and public data.
        entry: The round's entry.
        owner: The client whose codes they are.
        codes: Some of the entry's codes of the owner.
    """
    return entry_images(entry, owner, codes, client.data.spec, client.public)


def entry_images(
    entry: Entry, owner: int, codes: Tensor, spec: Spec, public: Images | None = None
) -> Tensor:
    """Return the normalised transfer images of some of a client's codes, in order.

    Codes of four axes are images already. Codes of one axis are indices: of samples where the entry
    has Gaussians, of crops of photographs where it has a seed alone, otherwise of public images. All
    others are decoded by the entry's decoder. Decoded images and crops have the decoder's size.

    Args:
        entry: The round's entry.
        owner: The client whose codes they are.
        codes: Some of the entry's codes of this client.
        spec: Format of the images.
        public: The public data, for entries that refer to them.
    """
    if codes.ndim == 4:
        return codes.float()
    if "gaussians" in entry and codes.ndim == 1:
        codes = sample_codes(entry, owner, codes)
    if entry["decoder"]:
        return decode_images(entry["decoder"], spec, codes)
    if "seed" in entry:
        total = sum(map(len, entry["codes"].values()))
        return photograph_images(spec, codes, total, entry["seed"])
    assert public is not None
    return public.batch(codes)


def decode_images(decoder: State, spec: Spec, codes: Tensor) -> Tensor:
    """Decode codes (images, views, width) to images, without gradients.

    The images have the decoder's size.

    Args:
        decoder: State of a `Decoder`, in single or half precision.
        spec: Format of the images.
        codes: The codes, at least one.
    """
    parts = views.parts_of_views(codes.shape[1])
    network = Decoder.from_state(to_single(decoder), spec, parts)
    index = torch.arange(len(codes), device=codes.device)
    return predict(network, lambda part: codes[part], index)


def sample_codes(entry: Entry, owner: int, index: Tensor) -> Tensor:
    """Return codes (samples, views, width) of some samples of a client's Gaussians.

    They follow from the entry's seed and the client alone, so that every client gets the same.

    Args:
        entry: The round's entry, made by `statistics_entry`.
        owner: The client whose Gaussians are sampled.
        index: Indices of the samples, from 0 to their number in the entry - 1.
    """
    assert "gaussians" in entry
    assert "docking" in entry
    assert "seed" in entry
    model = entry["gaussians"][owner]
    n = len(entry["codes"][owner])
    labels, noise = sample_labels_and_noise(model, n, stream_seed(entry["seed"], owner))
    embeddings = sample_embeddings(model, labels[index], noise[index])
    return F.linear(embeddings, **to_single(entry["docking"][owner]))


def to_half(state: State) -> State:
    """Return a state whose floats are in half precision; integers stay."""
    return {name: t.half() if t.is_floating_point() else t for name, t in state.items()}


def logits_to_half(logits: Tensor) -> Tensor:
    """Return logits (N, classes) in half precision, with the same softmax.

    Rows with a number that would be infinite are shifted, so that their largest logit is 0.
    """
    largest = torch.finfo(torch.float16).max
    is_large = logits.abs().amax(1, keepdim=True) > largest
    shifted = torch.where(is_large, logits - logits.amax(1, keepdim=True), logits)
    return shifted.clamp_min(-largest).half()


def to_single(state: State) -> State:
    """Return a state whose floats are in single precision; integers stay."""
    return {name: t.float() if t.is_floating_point() else t for name, t in state.items()}


def newest_entries(entries: Sequence[Entry], limit: int | None) -> list[Entry]:
    """Return the last `limit` entries in order, one per round; all for None.

    Of several entries of a round the last counts, in the place of the first.
    """
    by_round = {entry["round"]: entry for entry in entries}
    unique = list(by_round.values())
    return unique if limit is None else unique[max(0, len(unique) - limit) :]


def sample_review(entries: Sequence[Entry], owner: int, size: int) -> list[Page]:
    """Sample a client's synthetic images of past rounds for the exchange to repeat.

    They are sampled without replacement by torch's global random generator.

    Args:
        entries: The rounds to sample from.
        owner: The client that made the images.
        size: Number of images in all; all images if there are fewer.

    Returns:
        Pages (round, owner, sorted indices into the owner's codes), in the order of `entries`: one
        for each entry that has a sampled image.
    """
    own = [entry for entry in entries if owner in entry["codes"]]
    codes = [entry["codes"][owner] for entry in own]
    chosen = torch.randperm(sum(map(len, codes)))[:size].sort().values
    pages: list[Page] = []
    start = 0
    for entry, entry_codes in zip(own, codes, strict=True):
        end = start + len(entry_codes)
        part = chosen[(chosen >= start) & (chosen < end)] - start
        start = end
        if len(part):
            pages.append((entry["round"], owner, part.to(entry_codes.device)))
    return pages


def decode_pages(entries: Sequence[Entry], pages: Sequence[Page], draw: Draw) -> list[Tensor]:
    """Return the images of each page, in the order of `pages`.

    A page is some images of a client in a round.

    Args:
        entries: The entries of several rounds, among them the round of each page.
        pages: (round, owner, indices into the owner's codes); indices of None stand for all.
        draw: Called as draw(entry, owner, codes) once per round, with the codes of all its pages
            concatenated and the owner of the first; returns the images. Indices of samples have
            been replaced by their codes (`sample_codes`).
    """
    images: dict[int, Tensor] = {}
    for entry in entries:
        found: list[tuple[int, int, Tensor]] = []  # position, owner and codes of a page
        for position, (round_number, owner, index) in enumerate(pages):
            if round_number == entry["round"]:
                own_codes = entry["codes"][owner]
                if index is not None:
                    own_codes = own_codes[index]
                if "gaussians" in entry:
                    own_codes = sample_codes(entry, owner, own_codes)
                found.append((position, owner, own_codes))
        if found:
            positions, owners, codes = zip(*found, strict=True)
            decoded = draw(entry, owners[0], torch.cat(codes))
            parts = torch.split(decoded, [len(part) for part in codes])
            images |= zip(positions, parts, strict=True)
    return [images[position] for position in range(len(pages))]


def prepare_lesson(entries: Sequence[Entry], owner: int, draw: Draw, say: Say) -> Lesson:
    """Return a client's predictions for all of its newest images and some older ones.

    `sample_review` samples the older ones; their number is at most that of the new ones.

    Args:
        entries: The entries of several rounds, the newest one last.
        owner: The client, which has images in the newest entry.
        draw: Makes images of codes, see `decode_pages`.
        say: Maps images to predictions by name, such as {"logits": ...}.

    Returns:
        The targets of the newest round, without an index, then those of earlier rounds.
    """
    *past, newest_entry = entries
    new_page: Page = (newest_entry["round"], owner, None)
    pages = [new_page, *sample_review(past, owner, len(newest_entry["codes"][owner]))]
    images = decode_pages(entries, pages, draw)
    sizes = [len(part) for part in images]
    predictions = say(torch.cat(images))
    by_page = {name: torch.split(values, sizes) for name, values in predictions.items()}
    lesson: list[Any] = []
    for position, (round_number, _, index) in enumerate(pages):
        targets: dict[str, Any] = {"round": round_number}
        if index is not None:
            targets["index"] = index
        for name, parts in by_page.items():
            targets[name] = parts[position]
        lesson.append(targets)
    return lesson


def check_lesson(entries: Sequence[Entry], owner: int, lesson: Lesson) -> Lesson:
    """Check that a lesson is about its teacher's images; return it unchanged.

    The teacher is `owner`. The lesson must cover all images of the newest entry, without an index,
    and may cover some of earlier ones. Targets without an index cover all images of their round.

    Raises:
        PayloadError: If it names a round twice, a round or an image that does not exist, or lacks
            images of the newest round.
    """
    n_images = {entry["round"]: len(entry["codes"].get(owner, ())) for entry in entries}
    rounds = [targets["round"] for targets in lesson]
    repeated = len(set(rounds)) < len(rounds)
    if repeated or not {entries[-1]["round"]} <= set(rounds) <= n_images.keys():
        raise PayloadError(
            f"a lesson of rounds {rounds[:9]}, and there are images of rounds {list(n_images)}"
        )
    for targets in lesson:
        round_number = targets["round"]
        available = n_images[round_number]
        index = targets.get("index")
        last = len(targets["logits"]) - 1
        if index is not None and round_number == entries[-1]["round"]:
            raise PayloadError(
                f"a lesson on some images of round {round_number}, the newest: it must be on all "
                f"{available}, in their order"
            )
        if index is not None:
            last = int(index.max()) if len(index) else 0
        if last >= available or (index is None and last + 1 != available):
            raise PayloadError(
                f"a lesson on image {last} of round {round_number}, of which there are {available}"
            )
    return lesson


def distribute_lessons(
    lessons: Mapping[int, Lesson], peers: int | None, teachers: Collection[int]
) -> dict[int, dict[int, Lesson]]:
    """Distribute lessons: each client gets those of all others, or of some at random.

    Args:
        lessons: Each client's lesson.
        peers: Number of others that are sampled for each client, by torch's global generator; None
            means all others.
        teachers: The clients whose lessons count; those of others reach nobody. They are left out
            after sampling, so that a client may get fewer than `peers` lessons.

    Returns:
        Client -> teacher -> lesson. Clients without a lesson are missing.
    """
    others = {k: [i for i in lessons if i != k] for k in lessons}
    if peers is not None:
        others = {
            k: sorted(ids[i] for i in torch.randperm(len(ids))[:peers].tolist())
            for k, ids in others.items()
        }
    heard = {k: {i: lessons[i] for i in ids if i in teachers} for k, ids in others.items()}
    return {k: by_teacher for k, by_teacher in heard.items() if by_teacher}


def collect_lessons(
    entries: Sequence[Entry], lessons: Mapping[int, Lesson], draw: Draw, *, mixed: bool
) -> list[list[Tensor]]:
    """Return the training rows of lessons: images, logits, and embeddings if any.

    Args:
        entries: The entries of several rounds, the newest one last.
        lessons: Each teacher's lesson.
        draw: Makes images of codes, see `decode_pages`.
        mixed: Join all teachers' rows; otherwise each teacher has its own groups.

    Returns:
        Groups of equally long tensors [images, logits(, embeddings)]. New and earlier images are in
        different groups: first the groups of new images, one per teacher in ascending order or one
        in all, then those of earlier rounds, if any.
    """
    newest_round = entries[-1]["round"]
    by_teacher = [(i, targets) for i, lesson in lessons.items() for targets in lesson]
    pages = [(targets["round"], i, targets.get("index")) for i, targets in by_teacher]
    images = decode_pages(entries, pages, draw)

    # Groups are sorted by (is of an earlier round, teacher).
    groups: dict[tuple[bool, int], list[list[Tensor]]] = {}
    for (i, targets), x in zip(by_teacher, images, strict=True):
        row = [x, targets["logits"].float()]
        if "embeddings" in targets:
            row.append(targets["embeddings"])
        key = (targets["round"] != newest_round, 0 if mixed else i)
        groups.setdefault(key, []).append(row)
    # Groups are released as they are concatenated, so that images are not in memory twice.
    del images
    rows = []
    for key in sorted(groups):
        rows.append([torch.cat(column) for column in zip(*groups.pop(key), strict=True)])
    return rows
