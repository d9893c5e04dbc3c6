"""How large an answer can be where shapes alone do not say it: never less than an honest one, and not much more."""

from __future__ import annotations

from typing import Any

import pytest

from barter import ALGORITHMS
from barter.core.answers import largest_answer, require_valid_answer
from barter.core.errors import PayloadError
from barter.core.payload import Payload, nbytes
from barter.data.task import Data
from barter.engines.base import BaseEngine
from barter.privacy.settings import Privacy
from tests.conftest import TINY, small_federation, tiny

NOISY = Privacy(
    parts={"learn.embeddings": "means clip=1 noise=1", "teach.logits": "laplace clip=1 noise=50"}
)
# Algorithm, method, what is set otherwise, and how many times as large as the largest answer the limit may be.
VARIANTS: list[tuple[str, str, dict[str, Any], float]] = [
    ("dffke", "teach", {"memory": 0, "reveal": "nothing", "substitute": "public"}, 5),
    ("dffke", "teach", {"memory": 1, "reveal": "nothing"}, 3),
    ("dffke", "teach", {"memory": 1, "reveal": "nothing", "substitute": "photographs"}, 3),
    ("dffke", "teach", {"embedding_loss": True, "fraction": 0.7, "transfer": "decoder"}, 3),
    (
        "dffke",
        "teach",
        {**ALGORITHMS["dffke"].presets["paper"], **TINY["dffke"]},
        10,
    ),  # rounds without end
    ("dffke", "teach", {**ALGORITHMS["dffke"].presets["code"], **TINY["dffke"]}, 3),
    ("fedfree", "learn", {}, 2),
    ("fedfree", "learn", {"layers": 1}, 2),
    ("fedfree", "learn", {"layers": 50}, 2),
    ("fedfree", "learn", {"layers": 50, "outputs": "all"}, 2),
    ("fedfree", "learn", {**ALGORITHMS["fedfree"].presets["paper"]}, 2),
    ("fedkd", "learn", {}, 10),
    ("fedkd", "learn", {"energy_start": 1.0, "energy_end": 1.0}, 1.1),
    (
        "fedkd",
        "learn",
        {"energy_start": 0.01, "energy_end": 0.01, "shared": "small-cnn", "fraction": 0.5},
        100,
    ),
    ("central", "give", {}, 1),
]


def told(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> list[tuple[BaseEngine, Payload, int, tuple[Any, ...]]]:
    """The answers to a method, as they arrive: where, what, whose, and to what."""
    found: list[tuple[BaseEngine, Payload, int, tuple[Any, ...]]] = []
    arrived = BaseEngine.receive_answer

    def noted(
        self: BaseEngine, answer: Payload, method: str, client: int, sent: tuple[Any, ...]
    ) -> Payload:
        if method == wanted and self.server is not None:
            found.append((self, answer, client, sent))
        return arrived(self, answer, method, client, sent)

    monkeypatch.setattr(BaseEngine, "receive_answer", noted)
    return found


def require_room(
    found: list[tuple[BaseEngine, Payload, int, tuple[Any, ...]]], method: str, loose: float
) -> None:
    assert found
    ratios = []
    for engine, answer, client, sent in found:
        assert engine.server is not None
        known = engine.knowledge_of(engine.server, client)
        most = largest_answer(engine.algorithm, method, sent, known)
        assert most is not None
        assert nbytes(answer) <= most
        ratios.append(most / nbytes(answer))
        if isinstance(answer, list):
            more = answer * (most // nbytes(answer) + 1)
            with pytest.raises(
                PayloadError, match=rf"^{method} has \d+ bytes, expected at most {most}$"
            ):
                require_valid_answer(more, engine.algorithm, method, sent, known)
    assert min(ratios) <= loose


@pytest.mark.parametrize(("name", "method", "changes", "loose"), VARIANTS)
def test_honest_answers_have_room(
    name: str, method: str, changes: dict[str, Any], loose: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = told(monkeypatch, method)
    for record in small_federation(tiny(name, **changes)).rounds(3):
        assert not record.failures
    require_room(found, method, loose)


def test_noise_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, "teach")
    list(small_federation(tiny("dffke"), privacy=NOISY).rounds(2))
    require_room(found, "teach", 3)


@pytest.mark.parametrize("size", [4, 16])
def test_images_are_as_large_as_in_their_files(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, "give")
    (record,) = small_federation(tiny("central"), data=Data(source="digits", size=size)).rounds(1)
    assert not record.failures
    require_room(found, "give", 1)
    assert {answer[0].shape[-1] for _, answer, _, _ in found} == {8}
