"""Base class of federated algorithms.

An algorithm is a frozen dataclass of hyperparameters with a method `round`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeAlias, get_args

from torch import Tensor
from typing_extensions import TypeVar

from barter.core.clients import Clients
from barter.core.errors import ConfigError
from barter.core.evaluation import evaluate_client, score
from barter.core.images import Images, Spec
from barter.core.model import Classifier
from barter.core.nodes import Client, Server, as_numbers
from barter.core.params import build_dataclass, check_fields, did_you_mean
from barter.core.payload import Payload, State
from barter.core.record import Primary, Round
from barter.core.robust import Aggregate

__all__ = ["Algorithm", "Crossing", "ServerModel", "Tells"]

# How much of a part of an answer one private image can influence: nothing, its own label, its own
# row, its row as computed by the client's network, which was trained on all images, or its own term
# of a sum. To be a sum, all parts of an answer that are declared so must together change by a
# Euclidean norm of at most 2 if one image is replaced. A part that an algorithm does not declare
# counts as depending on the image in every value.
Tells: TypeAlias = Literal["nothing", "label", "row", "row of the network", "sum"]
S = TypeVar("S", bound=Server, default=Server)
C = TypeVar("C", bound=Client, default=Client)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The payloads of a remote method, in words.

    >>> from barter import Crossing
    >>> print(Crossing(down="the server's weights", up="the client's weights"))
    down: the server's weights; up: the client's weights
    >>> print(Crossing())
    nothing
    """

    down: str = ""  # What the server sends to a client; empty if it sends nothing.
    up: str = ""  # What a client answers; empty if it answers nothing.

    def __str__(self) -> str:
        ways = (("down", self.down), ("up", self.up))
        return "; ".join(f"{way}: {what}" for way, what in ways if what) or "nothing"


@dataclass(frozen=True)
class ServerModel:
    """The model that the server holds; it decides which networks clients may have.

    - "none": no model.
    - "shared": the model of all clients, which must have one architecture.
    - "personal": no model, though clients must have one architecture: the server combines their
      weights into a model for each of them.
    - "copies": the clients' networks, which the server builds to load the weights that they upload.
    - "own": a model of its own. The server may build the clients' networks too.

    >>> from barter.core.algorithm import ServerModel
    >>> ServerModel("own", "small-cnn").exists
    True
    """

    kind: Literal["none", "shared", "personal", "copies", "own"]
    # Architecture of a model of its own, of which clients may receive copies; None is that of the
    # first client.
    network: str | None = None

    @property
    def exists(self) -> bool:
        """Return whether the server has a model that can be evaluated: "shared" or "own"."""
        return self.kind in ("shared", "own")

    @property
    def one_architecture(self) -> bool:
        """Return whether all clients must have the same architecture.

        That is so for "shared" and "personal".
        """
        return self.kind in ("shared", "personal")


# Attribute by which an older version declared the server's model -> how it is declared now.
FORMER = {
    "one_architecture": 'server_model = ServerModel("shared")',
    "personal": 'server_model = ServerModel("personal")',
    "global_model": 'server_model = ServerModel("own")',
    "replicas": 'server_model = ServerModel("copies")',
    "server_network": 'a property server_model that returns ServerModel("own", network)',
}


@dataclass(frozen=True)
class ServerClassifier:
    """A classifier of a server that has no model, see `Algorithm.server_classifier`."""

    architecture: str  # what users read about it
    network: Classifier
    spec: Spec  # format of its inputs


@dataclass(frozen=True, kw_only=True)
class Algorithm(Generic[S, C]):
    """Base class of federated methods.

    A subclass declares its hyperparameters as dataclass fields and implements `round`. Subclass
    `Algorithm[MyServer, MyClient]` if the server or the clients keep state besides their model.

    >>> from dataclasses import dataclass
    >>> from barter import Algorithm, Client, Clients, Crossing, Experiment, Server
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Census(Algorithm):
    ...     crosses = {"count": Crossing(up="the client's number of images")}
    ...     def round(self, server: Server, clients: Clients, t: int) -> None:
    ...         server.report["images"] = sum(clients.run(self.count).values())
    ...     def count(self, client: Client) -> int:
    ...         return len(client.data)
    >>> Experiment(Census(), clients=3).step().server
    {'images': 1433.0}
    """

    # Remote method -> its payloads in both directions. The last one is a round's last call.
    crosses: ClassVar[Mapping[str, Crossing]]
    # What a part of an answer tells about one private image: METHOD.KEY -> how much of the part
    # one private image can influence.
    tells: ClassVar[Mapping[str, Tells]] = {}
    # Remote methods that are asked of each client at most once in a run. Privacy noise is calibrated
    # for one release of theirs, not for one in each round. Over Flower a client that is asked again,
    # after a round was rolled back, sends the same answer again.
    once: ClassVar[frozenset[str]] = frozenset()
    # Preset name -> hyperparameters.
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    # Field of an older version -> the value by which this version runs; see `drop_retired_fields`.
    retired: ClassVar[Mapping[str, object]] = {}
    # Headline accuracy: that of the server's model, or the mean over the clients' models.
    primary: ClassVar[Primary] = "clients"
    # Kinds of aggregates that the server computes of answers; `robust` applies to these.
    aggregates: ClassVar[tuple[Aggregate, ...]] = ()
    # Remote methods whose payloads may contain NaN or infinity.
    may_be_infinite: ClassVar[frozenset[str]] = frozenset()
    # Remote methods that only store what the server sends to all clients, in the client's memory
    # and not in its network. With many clients they run when a client next takes part, see
    # `remaining`.
    deferrable: ClassVar[frozenset[str]] = frozenset()
    # Fields, properties or methods that contracts use as sizes, see `core/contracts.py`.
    sizes: ClassVar[tuple[str, ...]] = ()
    # Former name of a field -> its name; files with the former name stay readable.
    former_names: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        """Refuse declarations of older versions, with today's spelling.

        Raises:
            TypeError: If the class declares something as an older version of barter had it.
        """
        super().__init_subclass__()
        # A method of the former name would never be called, and results would silently differ.
        if "at_home" in vars(cls):
            raise TypeError(f"{cls.__name__}.at_home: this method is called local_offset now")
        fields = inspect.get_annotations(cls)
        for name, new in FORMER.items():
            if name in cls.__dict__ and name not in fields:
                raise TypeError(
                    f"{cls.__name__}.{name}: barter now asks once what model the server holds; "
                    f"write {new}, with ServerModel from barter.core.algorithm"
                )
        for method, crossing in cls.__dict__.get("crosses", {}).items():
            if not isinstance(crossing, Crossing):
                raise TypeError(
                    f"{cls.__name__}.crosses[{method!r}] is a {type(crossing).__name__}: write "
                    'Crossing(down="...", up="..."), from barter, and leave out the way by which '
                    "nothing goes"
                )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def server_model(self) -> ServerModel:
        """Return what model the server holds.

        A subclass may give it as a class attribute.
        """
        return ServerModel("none")

    @property
    def feature_width(self) -> int | None:
        """Return the feature width required of all clients; None allows any width.

        Networks with another feature width are pooled to this one.
        """
        return None

    @classmethod
    def upgrade(cls, fields: Mapping[str, object]) -> dict[str, object]:
        """Rename the fields of an older version's configuration to their present names.

        `former_names` has them. Other fields stay, also unknown ones.

        Raises:
            ConfigError: A field is given under its former and its present name.
        """
        for former, present in cls.former_names.items():
            if former in fields and present in fields:
                raise ConfigError(f"algorithm.{former} is called {present} now: give one of them")
        return {cls.former_names.get(name, name): value for name, value in fields.items()}

    @property
    def needs_public_data(self) -> bool:
        """Return whether server and clients must have a public data set; by default not."""
        return False

    def budget(self, client: int, clients: int) -> float:
        """Return the fraction of its network's width that a client can afford.

        It is 1, the full width, unless a subclass says otherwise.

        Args:
            client: The client's id.
            clients: The number of clients in the run.
        """
        return 1.0

    def network(self, network: Classifier, share: float, spec: Spec) -> Classifier:
        """Return the network that a client with this width budget trains.

        Args:
            network: The full network, which may be modified in place.
            share: The fraction of the full width; the server always has 1.
            spec: The input format and the number of classes.
        """
        return network

    def outgoing(self, network: Classifier) -> State:
        """Return the weights of a client's network that may be uploaded, by name.

        By default all of its state.
        """
        return network.state_dict()

    def setup(self, server: S, clients: Clients) -> None:
        """Prepare the run; called once before the first round, not when it is resumed.

        By default nothing happens.
        """

    def round(self, server: S, clients: Clients, t: int) -> None:
        """Run one communication round.

        Args:
            server: The server.
            clients: All clients of the run.
            t: The round's number, from 1 on.
        """
        raise NotImplementedError

    def remaining(
        self, method: str, earlier: tuple[Any, ...], later: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Return what is left of a `deferrable` method's call that a later call follows.

        Args:
            method: The method.
            earlier: The arguments of the earlier call.
            later: The arguments of the later call.

        Returns:
            Arguments with which the earlier call has the same effect before the later one; None,
            the default, if the later call replaces all that the earlier one stored.
        """
        return None

    def evaluate(self, client: C) -> dict[str, float]:
        """Return a client's metrics for the round's record and clear its report.

        The metrics are those of `evaluate_client`, empty if no test is due, `local_images` (the
        number of local test images) if there is a "local" accuracy, and the values that the
        algorithm put into `client.report`, which replace metrics of the same name.
        """
        report = client.report
        client.report = {}
        metrics = evaluate_client(client, self.local_offset(client))
        if "local" in metrics:
            # Means over clients can be weighted by the number of test images.
            metrics["local_images"] = len(client.tests["local"])
        return {**metrics, **as_numbers(report)}

    def local_offset(self, client: C) -> Tensor | None:
        """Return the per-class offset added to a client's logits on its local test data.

        These are its local test and validation sets. Such an offset adapts the logits to the
        client's class prior.

        Returns:
            One number per class; None if the logits are used as they are.
        """
        return None

    def evaluate_server(self, server: S, test: Images) -> dict[str, float]:
        """Return the server model's metrics on a test set; empty without a model.

        The accuracy is named "global", and other metrics global_METRIC, whatever the test set. The
        model is put into evaluation mode.
        """
        if server.model_or_none is None:
            return {}
        return score(server.model, test, "global", server.evaluation)

    def server_classifier(
        self, memory: Mapping[str, Payload], spec: Spec
    ) -> ServerClassifier | None:
        """Return the classifier that a server's memory describes, if it is not its model.

        It is loaded, evaluated and exported as a server's model is. None, the default, if there is
        no such classifier.

        Args:
            memory: The server's part of a checkpoint.
            spec: Format of the task's images.
        """
        return None

    def remarks(self, rounds: Sequence[Round]) -> list[str]:
        """Return warnings about a run that its accuracies do not show.

        Examples are that no exchange ever took place, or that synthetic images are all alike. The
        base class warns if the algorithm sends to clients, but in no round did any client receive
        more than a single number.

        Args:
            rounds: The records of all rounds.

        Returns:
            Clauses without a full stop, each with a cause or a remedy.
        """
        sends_down = any(crossing.down for crossing in self.crosses.values())
        received = []
        for record in rounds:
            for metrics in record.clients.values():
                if "bytes_down" in metrics:
                    received.append(metrics["bytes_down"])
        if not sends_down or not received or max(received) > 8:  # 8 bytes are one number.
            return []
        return [
            "no client ever received anything from others, so training was local only: "
            "some methods exchange from the second round on, and an exchange takes two clients"
        ]

    def gallery(
        self, client: C, t: int, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return images that round t synthesised from single private images of a client.

        They are for the experimenter, who may see private images.

        Args:
            client: The client.
            t: The round.
            wanted: Given the indices of all available private images, returns the positions among
                them of those to show.

        Returns:
            Indices into the client's images, and the synthetic images as model input; None if the
            round made none or they are no longer stored.
        """
        return None

    def transfer_images(self, client: C, t: int) -> tuple[Tensor, Tensor] | None:
        """Return the images that round t synthesised from a client's private images.

        They are for the experimenter, who tests whether they resemble single private images.

        Args:
            client: The client.
            t: The round.

        Returns:
            Indices of the private images that they were made from, and all synthetic images as
            model input; None if the round made none or they are no longer stored.
        """
        return None

    def creations(
        self, party: S | C, wanted: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return synthetic images that do not depict single private images.

        They are those that the party has after the last round; reports show them.

        Args:
            party: The server or a client.
            wanted: Given the labels of all images available, returns the indices to show.

        Returns:
            Labels, and images as model input; None if the party has none.
        """
        return None

    @classmethod
    def preset(cls, name: str, overrides: Mapping[str, Any] | None = None) -> Self:
        """Build the algorithm from a preset.

        Args:
            name: A key of `presets`.
            overrides: Hyperparameters that replace those of the preset. The others have their
                defaults.

        Raises:
            ConfigError: If there is no such preset or a hyperparameter is invalid.
        """
        if name not in cls.presets:
            raise ConfigError(
                f"unknown preset {name!r} of {cls.__name__}: {did_you_mean(name, cls.presets)}"
            )
        return build_dataclass(cls, {**cls.presets[name], **(overrides or {})}, "algorithm.")

    @classmethod
    def parties(cls) -> tuple[type[Server], type[Client]]:
        """Return the server and client classes that the algorithm was written for.

        They are the arguments of `Algorithm[MyServer, MyClient]`; `Server` and `Client` where there
        are none.
        """
        bases = [base for kind in cls.__mro__ for base in getattr(kind, "__orig_bases__", ())]
        candidates = []
        for base in bases:
            for argument in get_args(base):
                candidate = getattr(argument, "__default__", argument)  # A type variable's default.
                if isinstance(candidate, type):
                    candidates.append(candidate)
        server = next((kind for kind in candidates if issubclass(kind, Server)), Server)
        client = next((kind for kind in candidates if issubclass(kind, Client)), Client)
        return server, client

    @classmethod
    def citation(cls) -> str:
        """Return the first paragraph of the module's docstring, which cites the paper.

        Line breaks become spaces. It is empty for a module without docstring.
        """
        module = inspect.getmodule(cls)
        return (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
