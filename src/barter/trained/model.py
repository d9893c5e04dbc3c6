"""Load and evaluate networks that a run has trained, without its data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from barter.core.errors import CheckpointError, ConfigError, summarise_error
from barter.core.evaluation import accuracy
from barter.core.images import Augment, Images, Spec, prepare_batch
from barter.core.model import Classifier
from barter.core.params import BY_PYTHON
from barter.core.payload import Payload
from barter.data.dataset import Dataset
from barter.models.zoo import Own
from barter.runs.folder import Which, read_finished_round
from barter.setup.participants import cut_networks, initial_network, narrowed_name
from barter.setup.trust import read_run, require_consent, trusting
from barter.trained.pixels import to_pixels

__all__ = ["TrainedModel", "evaluate_networks", "load", "load_all"]


@dataclass(frozen=True)
class TrainedModel:
    """A trained network in evaluation mode, and the input it expects."""

    network: Classifier  # maps images, as `prepare` returns them, to logits
    spec: Spec  # shape of images, number of classes, and normalisation
    classes: tuple[str, ...]  # names of the classes, in the order of the logits
    architecture: str
    owner: str  # such as "client 3", or "server"
    round: int  # the round after which the network was saved

    def prepare(self, images: Tensor | NDArray[Any]) -> Tensor:
        """Resize and normalise images to network inputs, floats (N, C, height, width).

        Args:
            images: A tensor or an array of images of any size: uint8 in 0..255 or floats in 0..1,
                (N, C, H, W) or (N, H, W, C). A single image may lack N, and images with one channel
                may lack C.

        Raises:
            ConfigError: The images are of another type, scale or number of channels, or their
                layout is ambiguous.
        """
        return prepare_batch(to_pixels(images, self.spec), self.spec, Augment())

    @torch.no_grad()
    def __call__(self, images: Tensor | NDArray[Any]) -> Tensor:
        """Return the logits (N, classes) of images; N is 1 for a single image.

        `prepare` says which images are accepted.

        >>> import torch
        >>> from barter.core.images import Spec
        >>> from barter.models.zoo import build_network
        >>> spec = Spec(1, 8, 8, 10, mean=(0.3,), std=(0.4,))
        >>> network = build_network("small-cnn", spec).eval()
        >>> trained = TrainedModel(network, spec, tuple("0123456789"), "small-cnn", "client 0", 1)
        >>> images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
        >>> logits = trained(images)
        >>> torch.allclose(trained(images / 255), logits, atol=1e-4)  # floats in 0..1
        True
        >>> torch.equal(trained(images.permute(0, 2, 3, 1).numpy()), logits)  # channels last
        True
        >>> trained(images[0]).shape
        torch.Size([1, 10])
        """
        x = self.prepare(images)
        device = next(self.network.parameters(), x).device
        logits: Tensor = self.network(x.to(device))
        return logits


def load(
    run: str | Path,
    client: int | None = None,
    *,
    round: Which = "last",
    network: Own | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Load a trained network of a run, which may still be going on.

    Args:
        run: The run's folder.
        client: The client whose network to load; None for the server's model.
        round: A round whose checkpoint is kept, "last", or "best": the one with the highest
            validation accuracy.
        network: The module or factory of the network, if it was given in Python.
        trust: Consent to run the code that the folder names, such as a network's `module:name`. A
            run that this user started in this folder needs none.

    Raises:
        CheckpointError: That round is not kept; the message names those that are.
        ConfigError: There is no such network in the run's folder, or it names code without consent.

    >>> import tempfile, torch
    >>> from barter import Experiment, Local, load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for _ in Experiment(Local(max_epochs=1), clients=2, out=f"{folder}/run").rounds(1):
    ...         trained = load(f"{folder}/run", client=1)
    >>> trained.architecture, trained(torch.zeros(5, 1, 8, 8, dtype=torch.uint8)).shape
    ('small-vgg', torch.Size([5, 10]))
    """
    with trusting(trust):
        return _restore(Path(run), read_finished_round(Path(run), round), client, network)


def load_all(run: Path, round: Which = "last") -> list[TrainedModel]:
    """Load all networks in a run's folder: clients' by id, then the server's, if any.

    Clients of a Flower run have theirs at their sites, not in the folder. A classifier of a server
    without a model is left out with a warning if it cannot be built.

    Raises:
        CheckpointError: That round is not kept, or damaged.
        ConfigError: A network cannot be built, or is code without consent.
    """
    checkpoint = read_finished_round(run, round)
    _, state = checkpoint
    models = [_restore(run, checkpoint, client, None) for client in sorted(state["clients"])]
    if "model" in state["server"]:
        return [*models, _restore(run, checkpoint, None, None)]
    try:
        classifier = _restore_server_classifier(run, checkpoint)
    except ConfigError as error:
        warnings.warn(f"the server's classifier is left out: {error}", stacklevel=2)
        return models
    return models if classifier is None else [*models, classifier]


def _restore(
    run: Path, checkpoint: tuple[int, Payload], client: int | None, own: Own | None
) -> TrainedModel:
    """Restore a client's network, or the server's, from a checkpoint.

    Args:
        run: The run's folder.
        checkpoint: Round and state.
        client: The client's id; None for the server.
        own: The network, if it was given in Python.

    Raises:
        CheckpointError: The checkpoint does not describe its networks.
        ConfigError: The folder does not hold this network, or it cannot be built.
    """
    config = read_run(run)
    round, state = checkpoint
    names, spec, classes = _described(run, state)
    clients = state["clients"]
    if client is None and "model" not in state["server"]:
        classifier = _restore_server_classifier(run, checkpoint)
        if classifier is None:
            raise ConfigError(
                f"{run}: {type(config.algorithm).__name__}'s server has no model of its own: name "
                "a client"
            )
        return classifier
    if client is not None and client not in names:
        raise ConfigError(f"client {client}: {run} has clients 0 to {max(names)}")
    if client is not None and client not in clients:
        raise ConfigError(
            f"{run} ran on Flower: the network of client {client} is at its site, not here"
        )
    k = client or 0
    name = names[k]
    if config.models == BY_PYTHON and own is None and ":" not in name:
        raise ConfigError(
            f"{name} was given in Python: load it there, barter.load(run, client, network=...)"
        )
    if own is None and ":" in name:
        require_consent(run, [name])
    memory = state["server"] if client is None else clients[k]

    def build() -> Classifier:
        parts = cut_networks(
            config, {k: name}, {k: initial_network(name, spec, config.seed, own)}, spec
        )
        network = parts.full if client is None else parts.own[k]
        assert network is not None
        return network

    try:
        if own is None and ":" not in name:
            _require_shapes(build, memory["model"])
        network = build()
        network.load_state_dict(memory["model"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{run} holds the weights of another network than {name}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if client is None:
        owner = "server"
        architecture = config.algorithm.server_model.network or name
    else:
        owner = f"client {client}"
        architecture = narrowed_name(name, config.algorithm.budget(k, config.clients))
    return TrainedModel(network.eval(), spec, classes, architecture, owner, round)


def _restore_server_classifier(run: Path, checkpoint: tuple[int, Payload]) -> TrainedModel | None:
    """Restore the classifier of a server without a model; None if it has none.

    Raises:
        CheckpointError: The checkpoint does not describe it.
        ConfigError: It cannot be built.
    """
    round, state = checkpoint
    _, spec, classes = _described(run, state)
    try:
        found = read_run(run).algorithm.server_classifier(state["server"], spec)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{run} is damaged: its server's classifier: {summarise_error(error)}"
        ) from error
    if found is None:
        return None
    return TrainedModel(found.network, found.spec, classes, found.architecture, "server", round)


def _described(run: Path, state: Payload) -> tuple[dict[int, str], Spec, tuple[str, ...]]:
    """Return a checkpoint's architectures by client, input format and class names.

    Raises:
        CheckpointError: It is not what a run writes.
    """
    if "networks" not in state:
        raise CheckpointError(
            f"{run} was written by an older version, which did not record its networks"
        )
    networks = state["networks"]
    try:
        names = dict(networks["architectures"])
        spec = Spec.of(networks["spec"])
        classes = tuple(networks["classes"])
        if not all(isinstance(name, str) for name in (*names.values(), *classes)):
            raise TypeError("a name is not text")
        if not names or not all(isinstance(k, int) for k in names):
            raise TypeError("a client is not a number")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{run} is damaged: its description of networks: {summarise_error(error)}"
        ) from error
    return names, spec, classes


def _require_shapes(build: Callable[[], Classifier], weights: Mapping[str, Tensor]) -> None:
    """Check that weights have the shapes of a network, before allocating it.

    Raises:
        ValueError: A tensor is missing, unknown, or has another shape.
    """
    try:
        with torch.device("meta"):
            wanted = {name: tensor.shape for name, tensor in build().state_dict().items()}
    except (NotImplementedError, RuntimeError):
        return  # Building it needs values, as where a network is narrowed.
    found = {name: tensor.shape for name, tensor in weights.items()}
    if found != wanted:
        differing = [
            name for name in dict.fromkeys([*wanted, *found]) if wanted.get(name) != found.get(name)
        ]
        raise ValueError(f"shapes differ at {', '.join(map(str, differing[:3]))}")


def evaluate_networks(
    networks: Sequence[TrainedModel], dataset: Dataset, *, new: bool, device: torch.device
) -> tuple[int, list[float]]:
    """Evaluate networks on a data set; return image count and accuracies.

    The test split is used. If the data set came without one and is new to the run, all images are
    used. Classes are matched by name.

    Args:
        networks: Networks of one run, which are moved to the device.
        dataset: The data set.
        new: Whether the run was trained on other data.
        device: Where to compute.

    Returns:
        The number of images, and each network's accuracy, a fraction of 1, in the given order.

    Raises:
        ConfigError: The data set has other channels or classes than the networks.
    """
    first = networks[0]
    if dataset.x_test.shape[1] != first.spec.channels:
        raise ConfigError(
            f"{dataset.name}: images of {dataset.x_test.shape[1]} channels for "
            f"{first.spec.channels}"
        )
    x = dataset.x_test
    y = dataset.y_test
    if new and dataset.held_out:
        x = torch.cat([dataset.x_train, x])
        y = torch.cat([dataset.y_train, y])
    labels = _class_indices(dataset, first.classes)[y]
    # The classifier of a server may have another normalisation than the clients' networks.
    images = {
        spec: Images(x.to(device), labels.to(device), spec)
        for spec in {model.spec for model in networks}
    }
    accuracies = [accuracy(model.network.to(device), images[model.spec]) for model in networks]
    return len(x), accuracies


def _class_indices(dataset: Dataset, classes: Sequence[str]) -> Tensor:
    """Return the run's class index for each class of a data set, by name.

    Classes that only have numbers keep them, if there are no more than the run has.

    Raises:
        ConfigError: The run does not know a class.
    """
    unknown = [name for name in dataset.classes if name not in classes]
    if not unknown:
        return torch.tensor([classes.index(name) for name in dataset.classes])
    if dataset.numbered and len(dataset.classes) <= len(classes):
        return torch.arange(len(dataset.classes))
    raise ConfigError(
        f"{dataset.name} has classes that the run does not know: {', '.join(unknown[:4])}"
        f"{', ...' * (len(unknown) > 4)}; it knows "
        f"{', '.join(classes[:4])}{', ...' * (len(classes) > 4)}"
    )
