"""Type hints are compiled once, and every name of a size has one meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

import pytest
from torch import Tensor

from barter import ALGORITHMS, Algorithm, Client, Crossing, Experiment
from barter.core.contracts import Entries, Floats, Labels, Named, Room, Weights, When, Within
from barter.core.payload import State
from barter.core.schema import (
    AnySchema,
    ListSchema,
    NumberSchema,
    RecordSchema,
    StateSchema,
    TensorSchema,
    TupleSchema,
    compile_hint,
    compile_method,
)
from barter.engines.local import LocalEngine
from barter.testing.conformance import Trial, find_problem, is_documented
from tests.conftest import small_federation, tiny


class Rows(TypedDict):
    classes: Annotated[Tensor, Labels("n")]
    vectors: NotRequired[Annotated[Tensor, Floats("n", "width"), When("wide")]]


class Tree(TypedDict):
    branches: list[Tree]


def test_annotations_are_in_the_schema() -> None:
    schema = compile_hint(Annotated[list[Annotated[Rows, Named("width", "classes")]], Room(100)])
    assert isinstance(schema, ListSchema)
    assert schema.room == 100
    rows = schema.item
    assert isinstance(rows, RecordSchema)
    assert [(named.name, named.size) for named in rows.names] == [("width", "classes")]
    classes, vectors = rows.fields.values()
    assert isinstance(vectors, TensorSchema)
    assert isinstance(vectors.values, Floats)
    assert (vectors.values.shape, vectors.when, vectors.optional) == (("n", "width"), "wide", True)
    assert (classes.when, classes.optional) == ("", False)
    assert len(list(schema.walk())) == 4
    state = compile_hint(Annotated[State, Entries({"bias": ("classes",)})])
    assert isinstance(state, StateSchema)
    assert list(state.entries or ()) == ["bias"]
    assert compile_hint(tuple[int, ...]).hint == tuple[int, ...]
    assert isinstance(compile_hint(tuple[int, int]), TupleSchema)


@dataclass(frozen=True, kw_only=True)
class Sizes(Algorithm):
    """Answers with names of sizes."""

    crosses = {"learn": Crossing(down="a number", up="rows")}
    sizes = ("depth", "views")

    depth: int = 3  # rows of an answer
    outputs: str = "all"  # what is uploaded

    @property
    def views(self) -> int:
        return 2

    def learn(
        self, client: Client, side: Annotated[int, Within(1, 9, "side")]
    ) -> Annotated[Tensor, Floats("depth", "views", "side", "features")]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Undeclared(Sizes):
    """A size with the name of a field that is something else."""

    def learn(self, client: Client) -> Annotated[Tensor, Floats("outputs", ...)]:  # type: ignore[override]
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Required(Sizes):
    """A size with the name of a field without default, which is no attribute of the class."""

    images: int  # how many

    def learn(self, client: Client) -> list[Annotated[Tensor, Floats("images")]]:  # type: ignore[override]
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OfTheRun(Sizes):
    """A declared size with the name of a size of the run."""

    sizes = ("features",)
    features: int = 3  # width of features


@dataclass(frozen=True, kw_only=True)
class Defined(Sizes):
    """A declared size that the answer defines, too."""

    def learn(self, client: Client) -> Annotated[int, Within(1, 9, "depth")]:  # type: ignore[override]
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Misspelt(Sizes):
    """A declared size that does not exist."""

    sizes = ("dept",)


@dataclass(frozen=True, kw_only=True)
class NoTuple(Sizes):
    """A name instead of a tuple of names."""

    sizes = "depth"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Misplaced(Sizes):
    """An annotation that would never be checked."""

    def learn(self, client: Client) -> Annotated[Tensor | None, Floats("n")]:  # type: ignore[override]
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Endless(Sizes):
    """A type that contains itself."""

    def learn(self, client: Client) -> Tree:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Undeclared(), "its contract has a size 'outputs', and Undeclared.outputs exists: add"),
        (Required(images=1), "its contract has a size 'images', and Required.images exists"),
        (OfTheRun(), "sizes declares 'features', which is a size of every run"),
        (Defined(), "its contract gives the name 'depth' to another size"),
        (Misspelt(), "sizes declares 'dept', and there is no such field or method"),
        (NoTuple(), "sizes is 'depth', expected names"),
        (Misplaced(), "Floats does not apply to torch.Tensor | None: annotate the tensor"),
        (Endless(), "a type that contains itself has no contract"),
    ],
)
def test_an_ambiguous_contract_is_refused_before_the_first_round(
    algorithm: Algorithm[Any, Any], message: str
) -> None:
    name = f"{type(algorithm).__name__}.learn: {message}"
    with pytest.raises(TypeError) as raised:
        Experiment(algorithm, clients=2, models="small-mlp")
    assert name in str(raised.value)
    assert name in find_problem(is_documented, Trial(algorithm)), "`barter check` reports it"


def test_a_schema_is_compiled_once() -> None:
    schema = compile_method(Sizes(), "learn")
    assert compile_method(Sizes(depth=5), "learn") is schema
    assert schema.own_sizes == {"depth", "views"}
    assert [type(parameter) for parameter in schema.parameters] == [NumberSchema]
    assert isinstance(compile_method(Sizes(), "nowhere").answer, AnySchema)


def test_declared_sizes_are_used() -> None:
    for name, kind in ALGORITHMS.items():
        used = {
            size for method in kind.crosses for size in compile_method(kind(), method).own_sizes
        }
        assert used == set(kind.sizes), name


def test_a_required_feature_width_is_known_without_the_network() -> None:
    experiment = small_federation(tiny("fedproto", features=7))
    assert isinstance(experiment.engine, LocalEngine)
    assert experiment.engine.knowledge_of(experiment.server, 0).features == 7
    experiment.server.architectures = {}
    experiment.engine.set_server(experiment.server)
    assert experiment.engine.knowledge_of(experiment.server, 0).features == 7


def test_weights_are_for_states() -> None:
    with pytest.raises(TypeError, match="Weights does not apply to .*Tensor"):
        compile_hint(Annotated[Tensor, Weights("server")])
    with pytest.raises(TypeError, match="Within does not apply to"):
        compile_hint(list[Annotated[State, Within(0, 1)]])
