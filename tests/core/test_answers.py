"""What strangers answer is looked at before it is used."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeAlias, TypedDict

import pytest
import torch
from torch import Tensor

from barter.core.answers import Known, largest_answer, require_valid_answer, shapes_of, validate
from barter.core.contracts import (
    Counts,
    DistinctClasses,
    Entries,
    Floats,
    Labels,
    Named,
    Pixels,
    Places,
    Room,
    Weights,
    When,
    Within,
)
from barter.core.errors import PayloadError
from barter.core.images import Spec
from barter.core.payload import State

NETWORK = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}
SERVER = {"v": torch.zeros(4).double()}
SPEC = Spec(channels=1, height=2, width=3, classes=4, mean=(0.5,), std=(0.2,))
KNOWN = Known(SPEC, examples=10, features=5, weights=shapes_of(NETWORK), server=shapes_of(SERVER))
X = torch.zeros(2)


class Offer(TypedDict):
    examples: Annotated[int, Within(0, "examples")]
    weights: NotRequired[State]
    embeddings: NotRequired[Annotated[Tensor, Floats("n", "features"), When("embeds")]]


class Rows(TypedDict):
    classes: Annotated[Tensor, DistinctClasses("n")]
    vectors: Annotated[Tensor, Floats("n", "vector")]


class Lot(TypedDict):
    sizes: Annotated[Tensor, Counts("n", total="images")]
    images: Annotated[Tensor, Pixels("images")]


class Sample(TypedDict):
    examples: Annotated[int, Within(1, "examples", "n")]
    labels: Annotated[Tensor, Labels("n")]


# What is noted of the first is forgotten when it is the second.
Either: TypeAlias = (
    tuple[Annotated[Tensor, Labels("n")], int]
    | tuple[Annotated[Tensor, Counts("n", most=1000)], str]
)


class Methods:
    """What methods say that they return."""

    may_be_infinite: ClassVar[frozenset[str]] = frozenset({"wild"})
    sizes: ClassVar[tuple[str, ...]] = ("depth", "twice", "unknown")
    depth = 6
    embeds = True
    tells = False

    def twice(self, known: Known) -> int:
        return 2 * known.examples

    def unknown(self, known: Known) -> int | None:
        return known.nbytes("server") if known.server else None

    def offer(self, client: Any) -> Offer: ...  # type: ignore[empty-body]
    def pair(self, client: Any) -> tuple[Tensor, float]: ...  # type: ignore[empty-body]
    def many(self, client: Any) -> tuple[int, ...]: ...  # type: ignore[empty-body]
    def maybe(self, client: Any) -> list[int] | None: ...
    def nothing(self, client: Any) -> None: ...
    def word(self, client: Any) -> Literal["a", "b"]: ...  # type: ignore[empty-body]
    def anything(self, client: Any) -> Any: ...
    def wild(self, client: Any) -> Any: ...
    def state(self, client: Any) -> State: ...  # type: ignore[empty-body]
    def shared(self, client: Any) -> Annotated[State, Weights("server")]: ...  # type: ignore[empty-body]
    def head(
        self, client: Any
    ) -> Annotated[State, Entries({"weight": ("classes", "features")})]: ...  # type: ignore[empty-body]
    def rows(self, client: Any) -> Annotated[Rows, Named("vector", "features")]: ...  # type: ignore[empty-body]
    def listed(self, client: Any) -> list[Annotated[Rows, Named("vector", 1)]]: ...  # type: ignore[empty-body]
    def lot(self, client: Any) -> Lot: ...  # type: ignore[empty-body]
    def lots(self, client: Any) -> list[Lot]: ...  # type: ignore[empty-body]
    def sample(self, client: Any) -> Sample: ...  # type: ignore[empty-body]
    def either(self, client: Any) -> Either: ...  # type: ignore[empty-body]
    def labels(self, client: Any) -> Annotated[Tensor, Labels("n")]: ...  # type: ignore[empty-body]
    def counts(self, client: Any) -> Annotated[Tensor, Counts("classes", most="twice")]: ...  # type: ignore[empty-body]
    def told(self, client: Any) -> Annotated[Tensor, Counts("classes"), When("tells")]: ...  # type: ignore[empty-body]
    def said(
        self, client: Any, x: Annotated[Tensor, Places("n")]
    ) -> Annotated[Tensor, Floats("depth", "n", "classes")]: ...  # type: ignore[empty-body]
    def layer(self, client: Any) -> Annotated[Tensor, Floats("outputs", ...)]: ...  # type: ignore[empty-body]
    def square(
        self, client: Any, side: Annotated[int, Within(1, 9, "side")]
    ) -> Annotated[Tensor, Floats("side", "side")]: ...  # type: ignore[empty-body]
    def parts(self, client: Any) -> Annotated[list[Tensor], Room("twice")]: ...  # type: ignore[empty-body]
    def factors(self, client: Any) -> Annotated[list[Tensor], Room("unknown")]: ...  # type: ignore[empty-body]
    def scores(self, client: Any) -> dict[str, float]: ...  # type: ignore[empty-body]
    def hidden(self, client: Any) -> Unseen: ...  # type: ignore[name-defined]  # noqa: F821


def rows(n: int, width: int = 5, **changes: Any) -> dict[str, Tensor]:
    return {"classes": torch.arange(n), "vectors": torch.ones(n, width), **changes}


SENT: dict[str, tuple[Any, ...]] = {"said": (torch.zeros(3, dtype=torch.int64),), "square": (3,)}
FULL = {"examples": 3, "embeddings": torch.zeros(7, 5)}


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("offer", FULL),
        ("offer", {**FULL, "examples": 10, "weights": NETWORK}),
        ("pair", (X, 1.5)),
        ("pair", (X, 1)),
        ("many", ()),
        ("many", (1, 2, 3)),
        ("maybe", None),
        ("maybe", [1]),
        ("nothing", None),
        ("word", "b"),
        ("anything", {"x": [None, 1.0, X, "a"]}),
        ("wild", {"x": torch.tensor([math.nan, 1e30]), "y": math.inf}),
        ("state", NETWORK),
        ("shared", SERVER),
        ("head", {"weight": torch.full((4, 5), 1e6)}),
        ("rows", rows(4)),
        ("rows", rows(0)),
        ("listed", [rows(2, 1), rows(3, 1)]),
        (
            "lot",
            {"sizes": torch.tensor([2, 0]), "images": torch.zeros(2, 1, 2, 3, dtype=torch.uint8)},
        ),
        (
            "lot",
            {"sizes": torch.zeros(0).long(), "images": torch.zeros(0, 1, 2, 3, dtype=torch.uint8)},
        ),
        (
            "lots",
            [
                {"sizes": torch.ones(n).long(), "images": torch.zeros(n, 1, 2, 3).byte()}
                for n in (2, 3)
            ],
        ),
        ("sample", {"examples": 2, "labels": torch.tensor([0, 1])}),
        ("sample", {"labels": torch.tensor([0, 1]), "examples": 2}),
        ("either", (torch.tensor([3]), 7)),
        ("either", (torch.tensor([500]), "a")),
        ("labels", torch.tensor([3, 0, 3])),
        ("counts", torch.tensor([0, 20, 0, 0])),
        ("told", torch.zeros(0).long()),
        ("said", torch.zeros(6, 3, 4)),
        ("layer", torch.zeros(7, 3, 2)),
        ("layer", torch.zeros(7)),
        ("square", torch.zeros(3, 3)),
        ("parts", [X, torch.zeros(3)]),
        ("factors", [X] * 4),
        ("scores", {"global": 0.5, "images": 3}),
        ("hidden", {"x": X}),
    ],
)
def test_what_was_asked_for_passes(method: str, tree: Any) -> None:
    require_valid_answer(tree, Methods(), method, SENT.get(method, ()), KNOWN)


@pytest.mark.parametrize(
    ("method", "tree", "said"),
    [
        ("offer", {"examples": 3}, "offer lacks embeddings"),
        ("offer", {"embeddings": X}, "offer lacks examples"),
        ("offer", {**FULL, "more": 1}, "offer has the unknown more"),
        ("offer", {**FULL, "examples": "3"}, "offer.examples is a str, expected int"),
        ("offer", {**FULL, "examples": True}, "offer.examples is a bool, expected int"),
        ("offer", {**FULL, "examples": 2**39}, r"offer.examples is 5.498e\+11, expected 0 to 10"),
        (
            "offer",
            {**FULL, "examples": 10**400},
            "offer.examples: an integer of more than 64 bits",
        ),
        ("offer", {**FULL, "examples": -1}, "offer.examples is -1, expected 0 to 10"),
        (
            "offer",
            {**FULL, "weights": {"a": 1}},
            "offer.weights is not the client's weights: a, n, w unexpected",
        ),
        ("offer", {**FULL, "weights": {1: X}}, "key is a int, expected str"),
        (
            "offer",
            {**FULL, "weights": {}},
            "offer.weights is not the client's weights: n, w unexpected or missing",
        ),
        (
            "offer",
            {**FULL, "embeddings": torch.zeros(7, 6)},
            r"embeddings is float32 \(7, 6\), .* float32 \(7, 5\)",
        ),
        ("pair", [X, 1.5], "pair is a list"),
        ("pair", (X,), "pair is a tuple"),
        ("pair", (X.double(), 1.5), r"pair\[0\] is float64 \(2,\), expected float32"),
        ("pair", (X.half(), 1.5), r"pair\[0\] is float16"),
        (
            "pair",
            (X + 1e30, 1.5),
            r"pair\[0\]: the minimum of its values is 1e\+30, expected -1000000 to 1000000",
        ),
        ("pair", (X - math.inf, 1.5), r"pair\[0\] holds NaN or infinity"),
        ("pair", (X * math.nan, 1.5), r"pair\[0\] holds NaN or infinity"),
        ("pair", (X, math.nan), r"pair\[1\] holds NaN or infinity"),
        ("pair", (X, 1e300), r"pair\[1\] is 1e\+300"),
        ("many", (1, "2"), r"many\[1\] is a str"),
        ("maybe", 3, "maybe is a int"),
        ("nothing", 0, "nothing is a int, expected None"),
        ("word", "c", "word is a str"),
        ("word", [], "word is a list"),
        ("anything", {"x": [X.double()]}, r"anything.x\[0\] is float64"),
        ("anything", {"x": "a" * 201}, "expected a string"),
        ("anything", {"x": object()}, "anything.x: a builtins.object cannot be sent"),
        (
            "state",
            {**NETWORK, "w": torch.zeros(3, 2)},
            r"state.w is float32 \(3, 2\), the client's is float32 \(2, 3\)",
        ),
        ("state", {**NETWORK, "w": torch.zeros(2, 3).double()}, "state.w is float64"),
        ("state", {**NETWORK, "w": "much"}, "state.w is a str, expected Tensor"),
        (
            "state",
            {**NETWORK, "zz": X},
            "state is not the client's weights: zz unexpected or missing",
        ),
        (
            "state",
            {"w": torch.zeros(2, 3)},
            "state is not the client's weights: n unexpected or missing",
        ),
        (
            "state",
            {**NETWORK, "w": torch.full((2, 3), 2e6)},
            "state.w: the minimum of its values is 2000000",
        ),
        ("shared", NETWORK, "shared is not the server's weights: n, v, w unexpected or missing"),
        (
            "head",
            {"weight": torch.zeros(4, 4)},
            r"head.weight is float32 \(4, 4\), expected float32 \(4, 5\)",
        ),
        ("head", {"bias": torch.zeros(4)}, "bias, weight unexpected or missing"),
        (
            "rows",
            rows(3, classes=torch.arange(4)),
            r"rows.vectors is float32 \(3, 5\), expected float32 \(4, 5\)",
        ),
        (
            "rows",
            rows(2, classes=torch.tensor([3, 4])),
            "rows.classes: the maximum of its values is 4, expected 0 to 3",
        ),
        (
            "rows",
            rows(2, classes=torch.tensor([1, 1])),
            "rows.classes: the smallest step of its values is 0, expected 1",
        ),
        (
            "rows",
            rows(2, classes=torch.zeros(2)),
            r"rows.classes is float32 \(2,\), expected int64",
        ),
        ("listed", [rows(2, 1), rows(3)], r"listed\[1\].vectors is float32 \(3, 5\)"),
        (
            "lot",
            {"sizes": torch.tensor([2**62]), "images": torch.zeros(2, 1, 2, 3, dtype=torch.uint8)},
            r"lot.sizes: the sum of its values is 4.611686e\+18, expected 0 to 10",
        ),
        (
            "lot",
            {"sizes": torch.tensor([2, 1]), "images": torch.zeros(2, 1, 2, 3, dtype=torch.uint8)},
            "lot.sizes: the sum of its values is 3, expected 2 to 2",
        ),
        (
            "lot",
            {"sizes": torch.tensor([3, -1]), "images": torch.zeros(2, 1, 2, 3, dtype=torch.uint8)},
            "lot.sizes: the minimum of its values is -1",
        ),
        (
            "sample",
            {"examples": 3, "labels": torch.tensor([0, 1])},
            r"sample.labels is int64 \(2,\), .* int64 \(3\)",
        ),
        (
            "sample",
            {"labels": torch.tensor([0, 1]), "examples": 3},
            "sample.examples is 3, but n is 2",
        ),
        (
            "either",
            (torch.tensor([500]), 7),
            r"either\[0\]: the minimum of its values is 500, expected 0 to 3",
        ),
        (
            "labels",
            torch.tensor([999999]),
            "labels: the minimum of its values is 999999, expected 0 to 3",
        ),
        (
            "labels",
            torch.tensor([-1, 0]),
            "labels: the minimum of its values is -1, expected 0 to 3",
        ),
        ("labels", torch.tensor(1), r"labels is int64 \(\), expected int64 \(n\)"),
        (
            "counts",
            torch.tensor([10, 11, 0, 0]),
            "counts: the sum of its values is 21, expected 0 to 20",
        ),
        ("told", torch.tensor([1, 2, 3, 4]), r"told is int64 \(4,\), expected int64 empty"),
        (
            "said",
            torch.zeros(6, 4, 4),
            r"said is float32 \(6, 4, 4\), expected float32 \(6, 3, 4\)",
        ),
        (
            "layer",
            torch.zeros(()),
            r"layer is float32 \(\), expected float32 \(outputs, ...\)",
        ),
        (
            "square",
            torch.zeros(2, 2),
            r"square is float32 \(2, 2\), expected float32 \(3, 3\)",
        ),
        ("parts", [X, X, X], "^parts has 24 bytes, expected at most 20$"),
        ("factors", [X] * 5, "^factors has 40 bytes, expected at most 32$"),
        ("scores", {"a\nb": 0.5}, "scores: key is"),
    ],
)
def test_what_was_not_asked_for_is_refused(method: str, tree: Any, said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        require_valid_answer(tree, Methods(), method, SENT.get(method, ()), KNOWN)


@pytest.mark.parametrize(
    ("method", "most"),
    [
        *(
            ("nothing", 0),
            ("told", 0),
            ("word", 200),
            ("state", 4 * 6 + 8),
            ("shared", 8 * 4),
            ("head", 4 * 4 * 5),
        ),
        *(
            ("rows", 8 * 4 + 4 * 4 * 5),
            ("sample", 200 + 8 * 10),
            ("counts", 8 * 4),
            ("said", 4 * 6 * 3 * 4),
        ),
        *(("square", 4 * 3 * 3), ("parts", 20), ("factors", 8 * 4)),
        *(
            (name, None)
            for name in (
                "anything",
                "many",
                "maybe",
                "pair",
                "listed",
                "lots",
                "labels",
                "layer",
                "scores",
            )
        ),
        *((name, None) for name in ("offer", "lot", "hidden", "either")),
    ],
)
def test_how_large_an_answer_can_be(method: str, most: int | None) -> None:
    assert largest_answer(Methods(), method, SENT.get(method, ()), KNOWN) == most
    if method in ("state", "shared", "factors"):
        assert largest_answer(Methods(), method, (), Known(SPEC, 10)) is None, (
            "of a network that nobody knows"
        )


def test_a_key_is_there_when_the_algorithm_says_so() -> None:
    class Quiet(Methods):
        embeds = False

    require_valid_answer({"examples": 3}, Quiet(), "offer", (), KNOWN)
    with pytest.raises(PayloadError, match="offer has the unknown embeddings"):
        require_valid_answer(FULL, Quiet(), "offer", (), KNOWN)


def test_what_the_server_does_not_know_may_be_any_weights() -> None:
    require_valid_answer({"a": X}, Methods(), "state", (), Known(SPEC, 1))
    with pytest.raises(PayloadError, match="all unexpected or missing"):
        require_valid_answer({}, Methods(), "state", (), Known(SPEC, 1))


class Variates:
    """Answers that look like a network's state."""

    def plain(self, client: Any) -> State: ...  # type: ignore[empty-body]

    def trained(self, client: Any) -> Annotated[State, Weights(parameters_only=True)]: ...  # type: ignore[empty-body]


def test_a_state_may_be_of_parameters_alone_and_a_message_says_how() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    whole, parameters = network.state_dict(), dict(network.named_parameters())
    trained = {name: p.detach() for name, p in parameters.items()}
    known = Known(SPEC, 10, weights=shapes_of(whole), parameters=frozenset(parameters))
    require_valid_answer(trained, Variates(), "trained", (), known)
    require_valid_answer(whole, Variates(), "plain", (), known)
    for answer in (whole, {"0.weight": trained["0.weight"]}, {}):
        with pytest.raises(PayloadError, match="is not the client's weights"):
            require_valid_answer(answer, Variates(), "trained", (), known)
    with pytest.raises(PayloadError, match=r"Annotated\[State, Weights\(parameters_only=True\)\]"):
        require_valid_answer(trained, Variates(), "plain", (), known)
    assert largest_answer(Variates(), "trained", (), known) == 4 * (6 + 3 + 3 + 3)


@pytest.mark.parametrize("whose", ["known", "unknown"])
def test_statistics_of_normalisation_have_ranges_of_their_own(whose: str) -> None:
    state = {
        "norm.weight": torch.tensor([-1.0, 1.0]),
        "norm.running_mean": torch.tensor([-1.0, 1.0]),
        "norm.running_var": torch.tensor([0.0, 1.0]),
        "norm.num_batches_tracked": torch.tensor(7),
    }
    parameters = frozenset({"norm.weight"})
    weights = shapes_of(state) if whose == "known" else {}
    known = Known(SPEC, 1, weights=weights, parameters=parameters)
    require_valid_answer(state, Methods(), "state", (), known)
    for name, value, said in (
        ("norm.running_var", torch.tensor([1.0, -1e-3]), "minimum of its values is -0.001"),
        ("norm.num_batches_tracked", torch.tensor(-1), "minimum of its values is -1"),
        ("norm.num_batches_tracked", torch.tensor(2**40), "expected 0 to 1e\\+09"),
    ):
        with pytest.raises(PayloadError, match=f"state.{name}: .*{said}"):
            require_valid_answer({**state, name: value}, Methods(), "state", (), known)
    assert not {
        found.kind for found in validate(state, Methods(), "state", (), known).magnitudes
    } ^ ({"weight", "statistic"} if whose == "known" else {"value"})


def test_an_index_of_a_network_stays_in_its_range() -> None:
    state = {"places": torch.tensor([0, 1, 5]), "counter": torch.tensor([3, 4])}
    known = Known(SPEC, 1, weights=shapes_of(state), tables={"places": (0, 5)})
    require_valid_answer(state, Methods(), "state", (), known)
    with pytest.raises(PayloadError, match="state.places: the maximum of its values is 6"):
        require_valid_answer(
            {**state, "places": torch.tensor([0, 1, 6])}, Methods(), "state", (), known
        )
