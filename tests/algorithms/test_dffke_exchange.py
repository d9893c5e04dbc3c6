"""The exchange of DFFKE, and what each of its options does."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from barter import DFFKE, Classifier, Experiment, Local
from barter.algorithms import dffke
from barter.algorithms.dffke import DFFKEClient, DFFKEServer, augment_and_resize
from barter.core.images import Augment, Images, Spec
from barter.core.payload import isolate, nbytes
from barter.ops.distill import kl
from barter.ops.fit import Trainer
from barter.ops.inversion import decoded_inversion_loss
from barter.ops.transfer import Lesson, distribute_lessons
from barter.testing.conformance import few_digits
from tests.conftest import TINY, federation, least, perceptrons, same, state, tiny


def watched(
    monkeypatch: pytest.MonkeyPatch, clients: int = 3, **changes: Any
) -> tuple[Experiment, dict[int, list[Tensor]], Any, set[Augment]]:
    """A run that notes the targets of every peers' batch of every client's exchange, its lessons, and augmentations."""
    steps: dict[int, list[Tensor]] = defaultdict(list)
    lessons: dict[int, dict[int, Any]] = {}
    owner: dict[int, int] = {}
    augments: set[Augment] = set()

    class Watched(DFFKE):
        def exchange(self, client: DFFKEClient, taught: Any) -> None:
            lessons[client.id], owner[id(client.model)] = taught, client.id
            super().exchange(client, taught)

        def exchange_loss(
            self, model: Classifier, features: Tensor, target: Tensor, *docked: Tensor
        ) -> Tensor:
            steps[owner[id(model)]].append(target)
            return super().exchange_loss(model, features, target, *docked)

    def noted(spec: Spec, augment: Augment, images: Tensor) -> Tensor:
        augments.add(augment)
        return augment_and_resize(spec, augment, images)

    monkeypatch.setattr(dffke, "augment_and_resize", noted)
    experiment = federation(
        Watched(**{**TINY["dffke"], **changes}), clients=clients, models="small-mlp"
    )
    return experiment, steps, lessons, augments


def rows(tensor: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in tensor.tolist()}


@pytest.mark.parametrize("review", [True, False])
@pytest.mark.parametrize("floor", [0, 11])
def test_a_mixed_step_of_the_exchange_is_on_images_of_all_peers(
    floor: int, review: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "exchange_epochs": 2,
        "batch_size": 40,
        "exchange_steps": floor,
        "local_review": review,
    }
    experiment, steps, lessons, _ = watched(monkeypatch, **options)
    list(experiment.rounds(1))
    kinds = 1 + review  # a batch holds as many private images, if there are any
    for k, lesson in lessons.items():
        said = {i: rows(targets["logits"]) for i, (targets,) in lesson.items()}
        assert k not in said
        images = sum(len(targets["logits"]) for (targets,) in lesson.values())
        assert len(steps[k]) == kinds * max(floor, 2 * -(-images // 40))
        for target in steps[k]:
            assert len(target) == 40 // kinds
            assert all(bool(rows(target) & said[i]) for i in said), (
                "every peer has a say in every step"
            )
        epoch = -(-images // (40 // kinds))
        for start in (0, epoch):
            seen = set.union(*(rows(target) for target in steps[k][start : start + epoch]))
            assert bool(seen == set.union(*said.values())), "an epoch sees everything"


@pytest.mark.parametrize("floor", [0, 9])
def test_every_student_makes_the_passes_of_the_largest_set(
    floor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"mixed": False, "batch_size": 10, "exchange_epochs": 2, "exchange_steps": floor}
    experiment, steps, lessons, _ = watched(monkeypatch, **options)
    list(experiment.rounds(1))
    largest = max(-(-len(client.data) // 10) for client in experiment.engine.clients.values())
    passes = max(floor, 2 * -(-largest // 10))
    assert [len(steps[k]) for k in range(3)] == 3 * [2 * passes]  # T_FKE passes, two peers each
    for k, lesson in lessons.items():
        for at, (targets,) in enumerate(lesson.values()):
            assert all(rows(target) <= rows(targets["logits"]) for target in steps[k][at::2]), (
                "one peer in a step"
            )


@pytest.mark.parametrize("mixed", [True, False])
def test_memories_are_reviewed_beside_what_is_new(
    mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, steps, lessons, _ = watched(monkeypatch, mixed=mixed, exchange_steps=3)
    list(experiment.rounds(1))
    assert [len(steps[k]) for k in range(3)] == 3 * [
        3 * 2
    ]  # private and new in a step; or a step for each peer
    steps.clear()
    list(experiment.rounds(2))
    assert [len(steps[k]) for k in range(3)] == 3 * [3 * 3 * 2 if mixed else 3 * 4]
    for k, lesson in lessons.items():
        fresh = set.union(*(rows(targets["logits"]) for targets, *_ in lesson.values()))
        kinds = [bool(rows(target) & fresh) for target in steps[k]]
        assert kinds == (9 * [True, False] if mixed else 3 * [True, True, False, False])


@pytest.mark.parametrize("on", [True, False])
def test_students_see_transfer_images_as_they_see_their_own(
    on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, _, _, augments = watched(monkeypatch, augmented=on)
    list(experiment.rounds(1))
    assert augments == {Augment(crop=1) if on else Augment()}


@pytest.mark.slow
def test_one_peer_is_one_lesson_and_another_over_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, _, lessons, _ = watched(monkeypatch, clients=4, peers=1, memory=0)
    shared = {k: max(2, -(-len(c.data) // 10)) for k, c in experiment.engine.clients.items()}
    assert len(set(shared.values())) == 4, "so that bytes tell peers apart"
    taught: dict[int, list[int]] = defaultdict(list)
    for record in experiment.rounds(5):
        for k, lesson in lessons.items():
            (peer,) = lesson
            assert peer != k
            assert nbytes(lesson) == 8 + shared[peer] * 10 * 4
            taught[k].append(peer)
        chosen = [peers[-1] for peers in taught.values()]
        assert record.bytes["exchange"]["down"] == sum(8 + shared[peer] * 10 * 4 for peer in chosen)
    assert all(len(set(peers)) > 1 for peers in taught.values())


@given(
    st.lists(st.integers(0, 99), unique=True, max_size=9),
    st.none() | st.integers(1, 12),
    st.integers(0, 9),
)
def test_each_hears_so_many_others_in_order(ids: list[int], peers: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    lessons: dict[int, Lesson] = {i: [] for i in sorted(ids)}
    received = distribute_lessons(lessons, peers, teachers=ids)
    for k, others in received.items():
        assert list(others) == sorted(set(others) - {k})
        assert all(others[i] is lessons[i] for i in others)
        assert len(others) == (len(ids) - 1 if peers is None else min(peers, len(ids) - 1))
    assert received.keys() == (lessons.keys() if len(ids) > 1 else set())
    torch.manual_seed(seed)
    some = distribute_lessons(lessons, peers, teachers=ids[:1])
    heard = [k for k, others in received.items() if set(others) & set(ids[:1])]
    assert some == {k: {ids[0]: lessons[ids[0]]} for k in heard}, "the same peers are sampled"


@pytest.mark.parametrize("warm", [True, False])
def test_a_warm_decoder_starts_where_the_last_rounds_ended(
    warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Any] = []

    def noted(decoder: Any, *arguments: Any) -> Any:
        if len(starts) < experiment.round + 1:
            starts.append(isolate(dict(decoder.state_dict())))
        return decoded_inversion_loss(decoder, *arguments)

    monkeypatch.setattr("barter.ops.inversion.decoded_inversion_loss", noted)
    experiment = perceptrons(tiny("dffke", warm_decoder=warm, transfer="decoder"))
    list(experiment.rounds(3))
    assert isinstance(experiment.server, DFFKEServer)
    ends = [entry["decoder"] for entry in experiment.server.buffer]
    assert [same(start, end) for start, end in zip(starts[1:], ends[:-1], strict=True)] == [
        warm,
        warm,
    ]
    assert not any(same(start, end) for start, end in zip(starts, ends, strict=True))
    assert same(experiment.server.decoder, ends[-1] if warm else {}), "kept only where it is needed"


@pytest.mark.parametrize("cosine", [True, False])
def test_learning_rates_fall_to_zero_within_each_phase(
    cosine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: dict[Trainer, list[float]] = defaultdict(list)
    original = Trainer.anneal

    def noted(self: Trainer, done: float) -> None:
        original(self, done)
        rates[self].append(self.optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(Trainer, "anneal", noted)
    list(
        perceptrons(
            tiny("dffke", cosine=cosine, tau=1.0, decoder_steps=5, exchange_steps=4)
        ).rounds(1)
    )
    # Two epochs for each of three clients; the decoder; the exchange on two kinds of images.
    assert sorted(map(len, rates.values())) == [2, 2, 2, 5, 8, 8, 8]
    for fallen in rates.values():
        share = [
            0.5 * (1 + math.cos(math.pi * (i + 1) / len(fallen))) if cosine else 1
            for i in range(len(fallen))
        ]
        assert fallen == pytest.approx([1e-3 * part for part in share])
        assert (fallen[-1] == 0) == cosine


@pytest.mark.parametrize(("later", "memory"), [(0, None), (1, 1), (None, 0), (1, 0)])
def test_after_the_first_exchange_local_training_has_a_length_of_its_own(
    later: int | None, memory: int | None
) -> None:
    experiment = perceptrons(
        least("dffke", tau=1.0, max_epochs=3, later_epochs=later, memory=memory), clients=2
    )
    epochs = [[record.clients[k]["epochs"] for k in range(2)] for record in experiment.rounds(3)]
    expected = 3 if later is None else later
    assert epochs == [[3, 3], [expected, expected], [expected, expected]]


def test_without_local_training_clients_offer_what_the_last_exchange_left() -> None:
    offered: dict[int, Any] = {}

    class Watched(DFFKE):
        def learn(self, client: DFFKEClient) -> Any:
            offer = super().learn(client)
            offered[client.id] = isolate(dict(offer["weights"]))
            return offer

    experiment = perceptrons(Watched(**{**TINY["dffke"], "later_epochs": 0}))
    left: dict[int, Any] = {}
    for record in experiment.rounds(3):
        for k, client in experiment.engine.clients.items():
            assert same(offered[k], left.get(k, {})) == (record.round > 1)
            assert ("before_global" in record.clients[k]) == (record.round == 1), (
                "who did not train has nothing to say"
            )
            left[k] = isolate(dict(client.model.state_dict()))


CHANGES: list[dict[str, Any]] = [
    {"fraction": 0.5},
    {"collaboration": 0.5},
    {"tau": 0.05},
    {"max_epochs": 1},
    {"later_epochs": 2},
    {"share": 0.3},
    {"transfer": "decoder"},
    {"code_dim": 8},
    {"docking_epochs": 2},
    {"whiten": 0.0},
    {"whiten": 1.0},
    {"standardised": True},
    {"decoder_epochs": 3},
    {"decoder_steps": 3},
    {"decoder_batch": 5},
    {"warm_decoder": False},
    {"exchange_epochs": 3},
    {"exchange_steps": 3},
    {"mixed": False},
    {"augmented": False},
    {"cosine": False},
    {"balanced": False},
    {"peers": 1},
    {"memory": 0},
    {"lr": 2e-3},
    {"batch_size": 50},
    {"weight_decay": 1e-2},
    {"reveal": "nothing"},
    {"direction": "student"},
    {"temperature": 2.0},
    {"discrepancy": "mae"},
    {"discrepancy": "kl"},
    {"discrepancy": "mse"},
    {"local_review": False},
    {"embedding_loss": True},
    {"logit_loss": True},
]
LATER = {"later_epochs", "warm_decoder", "memory"}  # options of the second round


def outcome(rounds: int, **changes: Any) -> dict[str, Tensor]:
    experiment = federation(tiny("dffke", **changes), few_digits(240), models="small-mlp")
    list(experiment.rounds(rounds))
    return isolate(dict(experiment.engine.clients[0].model.state_dict()))


plain = cache(outcome)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_every_option_changes_the_outcome(changes: dict[str, Any]) -> None:
    rounds = 2 if changes.keys() & LATER else 1
    assert not same(plain(rounds), outcome(rounds, **changes))


@pytest.mark.parametrize("rounds", [1, 2])
def test_and_the_same_options_do_not(rounds: int) -> None:
    assert same(plain(rounds), outcome(rounds))


def test_no_option_was_forgotten() -> None:
    # Images of 8 pixels are not cut; the others belong to levels of `reveal`.
    elsewhere = {"parts", "noise", "mixture", "rank", "compression", "substitute"}
    assert {name for changes in CHANGES for name in changes} == {
        f.name for f in fields(DFFKE)
    } - elsewhere


def test_the_papers_preset_is_the_paper() -> None:
    paper, code = DFFKE.preset("paper"), DFFKE.preset("code")
    off = "parts mixed whiten cosine balanced augmented warm_decoder local_review"
    assert {name: bool(getattr(paper, name)) for name in off.split()} == dict.fromkeys(
        off.split(), False
    )
    assert (paper.share, paper.decoder_epochs, paper.exchange_epochs) == (0.15, 6, 4)
    assert (paper.decoder_steps, paper.exchange_steps) == (0, 0), "no floors"
    assert (paper.batch_size, paper.decoder_batch) == (100, None)
    assert (paper.max_epochs, paper.later_epochs) == (100, None), "as good as no limit"
    assert (paper.tau, paper.lr, paper.code_dim, paper.docking_epochs, paper.noise) == (
        0.98,
        1e-3,
        512,
        100,
        1,
    )
    assert (paper.peers, paper.memory, paper.direction, paper.transfer) == (
        None,
        None,
        "teacher",
        "decoder",
    )
    assert (paper.embedding_loss, paper.logit_loss) == (False, False)
    assert code == DFFKE.preset(
        "paper", {"share": 1.0, "local_review": True, "embedding_loss": True, "logit_loss": True}
    )


def test_logits_are_divided_by_a_temperature_that_photographs_raise() -> None:
    student, teacher = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])

    class Head:
        logits = staticmethod(lambda features: features)

    def loss(**changes: Any) -> float:
        return float(DFFKE(**changes).exchange_loss(Head(), student, teacher))  # type: ignore[arg-type]

    def divergence(p: Tensor, q: Tensor, t: float) -> float:
        return float(t**2 * kl(p / t, q / t))

    photographs: dict[str, Any] = {"reveal": "nothing", "substitute": "photographs"}
    assert loss() == divergence(teacher, student, 1.0)
    assert loss(temperature=2.0, direction="student") == divergence(student, teacher, 2.0)
    assert loss(**photographs) == divergence(teacher, student, 3.0)
    assert loss(substitute="photographs") == loss(), "which nobody uses with reveal='images'"
    assert loss(**photographs, temperature=1.0) == loss()


def test_without_sizes_of_their_own_all_phases_have_that_of_local_training() -> None:
    same_size = {"later_epochs": None, "decoder_batch": None, "batch_size": 20}
    spelled = {"later_epochs": 2, "decoder_batch": 20, "batch_size": 20}
    one, other = (perceptrons(tiny("dffke", **sizes)) for sizes in (same_size, spelled))
    for experiment in (one, other):
        list(experiment.rounds(2))
    assert same(state(one), state(other))


def test_what_is_drawn_does_not_depend_on_how_students_see_it() -> None:
    drawn, learned = [], []
    for on in (True, False):
        experiment = perceptrons(tiny("dffke", augmented=on, memory=1), clients=2)
        for client in experiment.engine.clients.values():
            client.data.augment = Augment(crop=3, flip=True)
        list(experiment.rounds(1))
        drawn.append(experiment.server.buffer[0]["codes"])
        learned.append(experiment.engine.clients[0].model.state_dict())
    assert same(*drawn)
    assert not same(*learned)


def test_transfer_images_are_shifted_by_as_much_as_private_ones() -> None:
    pixels, labels = torch.zeros(2, 3, 64, 64, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    data = Images(
        pixels, labels, Spec(3, 128, 128, 10, (0.5,) * 3, (0.5,) * 3), Augment(8, flip=True)
    )
    assert DFFKE().augment(data) == Augment(4, flip=True), (
        "an eighth of 32 pixels, which the decoder draws"
    )
    assert DFFKE(reveal="nothing", substitute="public").augment(data) == Augment(16, flip=True), (
        "and of the 128 of public images"
    )
    photographs = DFFKE(reveal="nothing", substitute="photographs")
    assert photographs.augment(data) == Augment(4, flip=True), "which crops have, too"
    assert DFFKE(augmented=False).augment(data) == Augment()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_exchange_is_worth_thirty_five_points_on_digits(seed: int) -> None:
    alone = list(Experiment(Local(), seed=seed).rounds(5))[-1]
    exchanged = list(Experiment(DFFKE(), seed=seed).rounds(5))[-1]
    assert exchanged.mean("global") >= alone.mean("global") + 0.35
    assert exchanged.mean("local") > 0.94
