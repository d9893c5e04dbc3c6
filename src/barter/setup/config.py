"""Read, check and write the configuration of a run."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import tomli_w

from barter.algorithms import ALGORITHMS
from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.metrics import MANY_CLIENTS, Evaluation
from barter.core.params import (
    Count,
    DeviceList,
    Fraction,
    Positive,
    Whole,
    build_dataclass,
    check_fields,
    did_you_mean,
    drop_retired_fields,
    import_object,
    nearest_name,
)
from barter.core.robust import AggregationRule
from barter.core.wire_settings import WireSettings
from barter.data.partition import PARTITIONS, Dirichlet, Partition
from barter.data.sources import SOURCES
from barter.data.splits import clients_in
from barter.data.task import SITES, Data
from barter.engines.adversaries import Adversaries
from barter.engines.network import Network
from barter.privacy import Privacy
from barter.setup.catalogue import CHOICES, known_keys

__all__ = [
    "COMPARISON",
    "RESULT_FREE",
    "Config",
    "RunSettings",
    "as_algorithm",
    "configure",
    "describe_wire",
    "find_algorithm",
    "find_partition",
    "first_difference",
    "parse_toml",
    "read_run_values",
    "read_toml",
    "resolve",
    "to_plain",
    "to_toml",
    "translate_former_fields",
    "with_defaults",
    "with_settings",
]

T = TypeVar("T")

# Keys that may differ when a run is resumed: they do not change its results.
RESULT_FREE = (
    "rounds",
    "device",
    "streams",
    "device_memory",
    "threads",
    "engine",
    "timeout",
    "answer_mb",
    "state_store",
    "keep",
    "keep_rounds",
    "patience",
)

COMPARISON = "compare"  # the table that `barter compare` reads; a single run has none

# Dotted keys of a hundred parts or more: the time to parse a key is quadratic in its parts.
KEY_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
DEEP = re.compile(rf"(?<![\w-])(?:{KEY_PART}[ \t]*+\.[ \t]*+){{100}}")

# The tables of a configuration, and what they hold unless a file or a setting says otherwise.
TABLES: dict[str, dict[str, str]] = {
    "algorithm": {"name": "dffke"},
    "partition": {"name": "dirichlet"},
    "data": {},
    "privacy": {},
    "evaluate": {},
    "adversaries": {},
    "network": {},
    "wire": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a run."""

    algorithm: Algorithm  # the method and its hyperparameters
    data: Data = dataclasses.field(default_factory=Data)  # training, test and public data
    # how the data are divided among the clients
    partition: Partition = dataclasses.field(default_factory=Dirichlet)
    clients: Count = 5  # K: number of clients
    # a family, or one model for all clients; auto is small-5, or small-cnn for methods that need
    # one architecture
    models: str = "auto"
    rounds: Count = 5  # T: communication rounds
    seed: Whole = 0  # seed of all random numbers of the run
    # where the run computes; clients take turns over several devices, and the server has the first
    device: DeviceList = "auto"
    # precision of the computation; auto is bf16 on CUDA, else fp32
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    streams: Count = 10  # number of clients that compute at the same time on a CUDA device
    # limit of a CUDA device's memory in GiB; none means all of it
    device_memory: Positive | None = None
    # number of CPU threads; none means the number of cores that are idle at the start
    threads: Count | None = None
    # where the states of clients that do not take part are: in memory, or in files of the run's
    # folder; auto is memory for up to 100 clients
    state_store: Literal["auto", "memory", "disk"] = "auto"
    # number of clients that must answer a call; none means all that were called
    min_clients: Count | None = None
    # how answers are protected before they leave a client
    privacy: Privacy = dataclasses.field(default_factory=Privacy)
    # which tests are run, how often and on which clients, and what they measure
    evaluate: Evaluation = dataclasses.field(default_factory=Evaluation)
    # robust aggregation against adversarial clients, in every average and ensemble of the method;
    # auto is the recommended rule for what the method aggregates
    robust: AggregationRule = "none"
    robust_share: Fraction = 0.3  # share of adversarial clients that robust aggregation assumes
    # simulated adversarial clients, for research
    adversaries: Adversaries = dataclasses.field(default_factory=Adversaries)
    # simulated bandwidth, latency and speed of clients; the run's record then has simulated time
    network: Network = dataclasses.field(default_factory=Network)
    # how payloads are encoded between server and clients
    wire: WireSettings = dataclasses.field(default_factory=WireSettings)
    # the folder of a run whose trained networks are the initial ones; empty: start from the seed
    start: str = ""
    # checkpoint to keep in addition to those of the last rounds: none, or that of the best one on
    # validation
    keep: Literal["last", "best"] = "last"
    keep_rounds: Count = 2  # number of last rounds whose checkpoints are kept
    # stop when validation accuracy has not improved for this number of rounds; none: never
    patience: Count | None = None

    # where clients run: in this process, or at Flower sites
    engine: Literal["local", "flower"] = "local"
    # time limit of a client's call in seconds; none: an hour at a Flower site, else no limit
    timeout: Positive | None = None
    answer_mb: Positive = 2000.0  # maximum size of a Flower site's answer in megabytes

    def __post_init__(self) -> None:
        if isinstance(self.device, list | tuple):
            object.__setattr__(self, "device", ",".join(map(str, self.device)))
        check_fields(self)
        if "," in self.device and self.engine == "flower":
            raise ConfigError(
                f"device={self.device!r}: on Flower every site has a device of its own; use "
                "engine=local, or one device"
            )
        if self.min_clients is not None and self.min_clients > self.clients:
            raise ConfigError(
                f"min_clients={self.min_clients}: there are only {self.clients} clients"
            )
        if not self.data.validation and (self.keep == "best" or self.patience is not None):
            setting = "keep='best'" if self.keep == "best" else f"patience={self.patience}"
            raise ConfigError(
                f"{setting}: rounds are compared by their accuracy on validation images, and there "
                "are none; set "
                "data.validation to a share of the training images, such as 0.1"
            )
        self._require_defence()
        self.network.require(self.clients, self.min_clients)
        if self.network.enabled and self.engine == "flower":
            raise ConfigError(
                "network: links and times are simulated with engine=local only; on Flower they are "
                "real, and timeout is the deadline"
            )
        object.__setattr__(self, "evaluate", self.evaluate.settle(self.clients))
        over_network = self.engine == "flower" or self.network.enabled
        object.__setattr__(self, "wire", self.wire.settle(over_network=over_network))
        self.wire.require(self.algorithm)
        object.__setattr__(self, "privacy", self.privacy.settle(self.algorithm, self.rounds))
        if self.start and self.privacy.training:
            raise ConfigError(
                f"start={self.start!r}: its networks were trained on images without "
                "privacy.training"
            )
        if self.start and self.engine == "flower":
            raise ConfigError(
                f"start={self.start!r}: sites of a run on Flower start from the seed; use "
                "engine=local"
            )

    @property
    def stores_states(self) -> bool:
        """Return whether the states of clients that do not take part are stored in files.

        "auto" does so from more than 100 clients on. On Flower it is always False.
        """
        if self.engine == "flower":
            return False
        many = self.clients > MANY_CLIENTS
        return self.state_store == "disk" or (self.state_store == "auto" and many)

    def _require_defence(self) -> None:
        """Raise ConfigError if robust aggregation or adversaries do not fit the run.

        A defence needs an algorithm that aggregates answers by a plain mean, and a `robust_share`
        below 0.5 is required also without one. Adversarial clients need the local engine, and an
        attack that changes the algorithm's answers.
        """
        title = type(self.algorithm).__name__
        if self.robust != "none" and not self.algorithm.aggregates:
            raise ConfigError(
                f"robust={self.robust!r}: {title} neither averages nor ensembles its clients' "
                "answers, so there is nothing to make robust; set robust=none"
            )
        average = getattr(self.algorithm, "average", "mean")
        if self.robust != "none" and average != "mean":
            raise ConfigError(
                f"robust={self.robust!r}: algorithm.average={average!r} is a robust rule already; "
                "set one of the two"
            )
        if self.robust_share >= 0.5:
            raise ConfigError(
                f"robust_share={self.robust_share:g}: must be below 0.5, the share at which no "
                "aggregate can be robust"
            )
        if self.adversaries.fraction and self.engine == "flower":
            raise ConfigError(
                f"adversaries.fraction={self.adversaries.fraction:g}: adversarial clients are "
                "simulated; use engine=local"
            )
        self.adversaries.require(self.algorithm)


class RunSettings(TypedDict, total=False):
    """Fields of `Config` that `Experiment` takes unchanged.

    `Config` has their meanings and defaults.
    """

    rounds: int
    seed: int
    device: str | Sequence[str]
    precision: str
    streams: int
    device_memory: float | None
    threads: int | None
    state_store: str
    min_clients: int | None
    privacy: Privacy | None
    evaluate: Evaluation | None
    robust: str
    robust_share: float
    adversaries: Adversaries | None
    network: Network | None
    wire: WireSettings | None
    start: str | Path
    keep: str
    keep_rounds: int
    patience: int | None
    timeout: float | None


def configure(
    settings: RunSettings,
    *,
    algorithm: Algorithm[Any, Any],
    data: Data,
    partition: Partition,
    clients: int,
    models: str,
) -> Config:
    """Build a configuration from values of Python.

    The arguments are fields of `Config`; `settings` has those that are not arguments of their own,
    and may lack any. None for `privacy`, `evaluate`, `adversaries`, `network` or `wire` is the
    default.

    Raises:
        TypeError: If `settings` has a key that `RunSettings` does not have.
        ConfigError: If a value has another type, is out of its range, or contradicts others.
    """
    for name in settings.keys() - RunSettings.__annotations__.keys():
        raise TypeError(
            f"Experiment has no parameter {name!r}: {did_you_mean(name, RunSettings.__annotations__)}"
        )
    # None stands for the default where a table is expected.
    values: dict[str, Any] = {
        name: value
        for name, value in settings.items()
        if value is not None
        or name not in ("privacy", "evaluate", "adversaries", "network", "wire")
    }
    if "start" in values:
        values["start"] = str(values["start"])
    return Config(
        algorithm=algorithm,
        data=data,
        partition=partition,
        clients=clients,
        models=models,
        **values,
    )


def find_algorithm(name: str) -> type[Algorithm[Any, Any]]:
    """Return the algorithm class of a registered name or package.module:Class.

    Raises:
        ConfigError: There is no such class, or it is no Algorithm with its own `round`.
    """
    return _find_class(name, "algorithm", ALGORITHMS, Algorithm, "round")


def as_algorithm(
    given: Algorithm[Any, Any] | type[Algorithm[Any, Any]] | str,
) -> Algorithm[Any, Any]:
    """Return an algorithm as an instance; a class or name gives one with defaults.

    An instance is returned as it is. Names are those of `find_algorithm`.

    Raises:
        ConfigError: There is no algorithm of this name, or it has fields without a default.
    """
    if isinstance(given, str):
        return build_dataclass(find_algorithm(given), {}, "algorithm.")
    if isinstance(given, type) and issubclass(given, Algorithm):
        return build_dataclass(given, {}, "algorithm.")
    return given


def find_partition(name: str) -> type[Partition]:
    """Return the partition class of a registered name or package.module:Class.

    Raises:
        ConfigError: There is no such class, or it is no Partition with its own `split`.
    """
    return _find_class(name, "partition", PARTITIONS, Partition, "split")


def _find_class(
    name: str, what: str, registry: Mapping[str, type[T]], base: type[T], method: str
) -> type[T]:
    """Return a class by its registered name or by module:Class, which is imported.

    Args:
        name: The name.
        what: What the class is, for messages.
        registry: Name -> class.
        base: The class that it must inherit.
        method: The method of `base` that an imported class must override.

    Raises:
        ConfigError: There is no such class, it cannot be imported, or it does not do so.
    """
    if ":" not in name:
        if name not in registry:
            raise ConfigError(f"unknown {what} {name!r}: {did_you_mean(name, registry)}")
        return registry[name]
    known, _, rest = name.partition(":")
    if known in registry and "=" in rest:
        fields = re.split(r":(?=[\w.]+=)", rest)
        settings = " ".join(f"--set {what}.{field}" for field in fields)
        raise ConfigError(f"{name!r}: name the {what} alone, {known}, and its fields by {settings}")
    if known in registry:
        raise ConfigError(
            f"{name!r}: what follows {known}: is a field with its value, such as {known}:{rest}=1"
        )
    kind = import_object(name, what)
    inherits = isinstance(kind, type) and issubclass(kind, base)
    if not inherits or getattr(kind, method) is getattr(base, method):
        raise ConfigError(f"{name} is no {base.__name__} with a {method} of its own")
    found: type[T] = kind
    return found


def resolve(tree: Mapping[str, Any]) -> Config:
    """Build a configuration from plain values, as a TOML file holds them.

    Keys that are missing have their defaults; the default algorithm is dffke, the default partition
    dirichlet. Code that the values name as module:name is imported without asking for consent, see
    `barter.setup.trust.read_run`.

    Raises:
        ConfigError: A key is unknown, or a value has another type or is out of its range; the
            message names it.
    """
    if COMPARISON in tree:
        raise ConfigError(
            f"the table [{COMPARISON}] describes a comparison of several runs: give this file to "
            "`barter compare`"
        )
    values = _as_split(dict(tree))
    for section, default in TABLES.items():
        given = values.get(section, {})
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{section} is a table: write [{section}] and its keys below it, or "
                f"{CHOICES[section]}=..."
            )
        values[section] = {**default, **given}
        if not isinstance(values[section].get("name", ""), str):
            raise ConfigError(f"{section}.name={values[section]['name']!r}: must be a name")
    kind = find_algorithm(values["algorithm"].pop("name"))
    preset = values["algorithm"].pop("preset", None)
    fields = kind.upgrade(values["algorithm"])
    values["algorithm"] = (
        build_dataclass(kind, fields, "algorithm.")
        if preset is None
        else kind.preset(str(preset), fields)
    )
    split = find_partition(values["partition"].pop("name"))
    values["partition"] = build_dataclass(split, values["partition"], "partition.")
    values["data"] = build_dataclass(Data, values["data"], "data.")
    values["privacy"] = build_dataclass(Privacy, values["privacy"], "privacy.")
    values["evaluate"] = build_dataclass(Evaluation, values["evaluate"], "evaluate.")
    values["adversaries"] = build_dataclass(Adversaries, values["adversaries"], "adversaries.")
    link_preset = values["network"].pop("preset", None)
    values["network"] = (
        build_dataclass(Network, values["network"], "network.")
        if link_preset is None
        else Network.preset(str(link_preset), values["network"])
    )
    values["wire"] = build_dataclass(WireSettings, values["wire"], "wire.")
    return build_dataclass(Config, values)


def _as_split(values: dict[str, Any]) -> dict[str, Any]:
    """Set partition and number of clients for data that are already split.

    Such data have the source clients:PATH: the partition is "domains", and the number of clients
    that of the files PATH/train/K.npz.

    Args:
        values: The configuration as plain values. Other data are returned unchanged.

    Raises:
        ConfigError: The values contradict the data's split.
    """
    data = values.get("data", {})
    partition = values.get("partition", {})
    source = str(data.get("source", "")) if isinstance(data, Mapping) else ""
    kind, _, path = source.partition(":")
    if kind != "clients" or not isinstance(partition, Mapping):
        return values
    if partition.get("name", "domains") != "domains" or partition.keys() - {"name", "min_samples"}:
        raise ConfigError(
            "data.source=clients:PATH: these data are split already; leave out partition"
        )
    clients = clients_in(Path(path))
    if values.get("clients", clients) != clients:
        raise ConfigError(
            f"clients={values['clients']}: {path} is split among {clients}; leave it out"
        )
    return {**values, "partition": {**partition, "name": "domains"}, "clients": clients}


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML into plain values.

    Raises:
        ValueError: The text is not TOML, or has a key of more than a hundred parts.
    """
    if DEEP.search(text):
        raise ValueError("a key of more than a hundred parts")
    return tomllib.loads(text)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file into plain values.

    Raises:
        ConfigError: The file is missing, cannot be read, or is not TOML.
    """
    try:
        return parse_toml(path.read_bytes().decode())
    except FileNotFoundError:
        is_method = str(path) in ALGORITHMS
        hint = f"; the method of this name is --algorithm {path}" if is_method else ""
        raise ConfigError(f"{path}: there is no such file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def read_run_values(run: Path, name: str = "config.toml") -> dict[str, Any]:
    """Read the configuration that barter wrote to a folder into plain values.

    The hold-out rule of the test images (`data.hold_out`), which older versions did not write, is
    the one that they used. Other keys may be missing; `resolve` gives them their defaults.

    Args:
        run: The run's folder, or a deployment folder.
        name: The file; "run.toml" in a deployment folder.

    Raises:
        ConfigError: The file is missing, cannot be read, or is not TOML.
    """
    return _with_earlier_rules(read_toml(run / name))


def _with_earlier_rules(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Add the rules by which older versions worked and which they did not record.

    They sent payloads as they are (wire.profile="exact"), on both engines. They held out every
    fifth image of each class (hold_out="class"); sources with a name, whose test images are fixed,
    and data of sites get no such rule. Recorded rules stay.
    """
    rules = dict(tree)
    wire = tree.get("wire", {})
    if isinstance(wire, Mapping):
        rules["wire"] = {"profile": "exact", **wire}
    data = tree.get("data", {})
    if isinstance(data, Mapping) and data.get("source", "digits") not in {*SOURCES, SITES}:
        rules["data"] = {"hold_out": "class", **data}
    return rules


def with_settings(tree: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Return the values changed by `key=value` settings, such as "data.source=x".

    The given values are not modified. Settings of names are applied first, then presets, then
    fields, whatever their order. A new name resets its table, since its fields belong to another
    algorithm or partition; a preset resets the fields of a file.

    Raises:
        ConfigError: A setting is malformed or its key is unknown. Values are not checked here, nor
            keys of a table whose name is module:Class.
    """
    changed = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()
    }
    for path, value in sorted(map(_setting, settings), key=_rank):
        section = changed.get(path[0])
        # The fields of module:Class are known only when it is imported.
        imports = isinstance(section, dict) and ":" in str(section.get("name"))
        if not imports:
            _refuse_unknown(path, changed.get("algorithm"))
        table = changed.setdefault(path[0], {}) if len(path) == 2 else changed
        if not isinstance(table, dict):
            raise ConfigError(f"{'.'.join(path)}={value}: {path[0]} is not a table")
        if path[-1] == "name" and len(path) == 2:
            # Fields that a file gives without naming an algorithm stay. Partitions share no fields,
            # so fields without a name belong to the default one.
            unnamed = value if path[0] == "algorithm" else TABLES[path[0]].get("name")
            if table.get("name", unnamed) != value:
                table.clear()
        if path in (["algorithm", "preset"], ["network", "preset"]):
            # A preset in the settings overrides the fields that a file sets.
            for key in table.keys() - {"name"}:
                del table[key]
        table[path[-1]] = value
    return changed


def _setting(text: str) -> tuple[list[str], Any]:
    """Parse `key=value` into the key's one or two parts and the value, see `_value`.

    Raises:
        ConfigError: There is no "=", or the key has an empty or more than two parts.
    """
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path) or len(path) > 2:
        raise ConfigError(
            f"--set {text!r}: write key=value, such as rounds=10 or algorithm.share=0.5"
        )
    return path, _value(value.strip())


def _rank(setting: tuple[list[str], Any]) -> int:
    """Return the order of a setting: 0 for names, 1 for presets, 2 for single fields."""
    return {"name": 0, "preset": 1}.get(setting[0][-1], 2)


def _refuse_unknown(path: list[str], algorithm: object) -> None:
    """Raise ConfigError for an unknown key and suggest the nearest known one.

    A field of any registered algorithm is known, whatever the configured one. Where no key is near,
    the message lists the keys of the same table, or the tables.
    """
    key = ".".join(path)
    if key in known_keys():
        return
    if key in CHOICES:
        raise ConfigError(f"unknown key {key!r}: did you mean {CHOICES[key]!r}?")
    kind = _registered(algorithm)
    if kind is not None and path[0] == "algorithm" and path[-1] in kind.former_names:
        present = kind.former_names[path[-1]]
        raise ConfigError(f"unknown key {key!r}: it is called 'algorithm.{present}' now")
    keys = _keys_with(algorithm)
    same_table = sorted(known for known in keys if known.startswith(f"{path[0]}."))
    # Compared without the table's name, which would make all of its keys similar.
    short = {known.partition(".")[2]: known for known in same_table}
    near = short.get(nearest_name(path[-1], short) or "") or nearest_name(path[-1], keys)
    if near is not None:
        raise ConfigError(f"unknown key {key!r}: did you mean {near!r}?")
    if len(path) == 2 and same_table:
        raise ConfigError(f"unknown key {key!r}: there are {', '.join(same_table)}")
    top_level = sorted(known for known in keys if "." not in known)
    tables = sorted({known.partition(".")[0] for known in keys if "." in known})
    raise ConfigError(
        f"unknown key {key!r}: there are {', '.join(top_level)}, and keys of the tables "
        f"{', '.join(tables)}, "
        "such as algorithm.name; `barter show config` prints all"
    )


def _registered(algorithm: object) -> type[Algorithm[Any, Any]] | None:
    """Return the registered algorithm that a table names; None for another one.

    Without a table or a name, it is the default algorithm.
    """
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    return ALGORITHMS.get(str(name or TABLES["algorithm"]["name"]))


def _keys_with(algorithm: object) -> frozenset[str]:
    """Return the configuration keys with this algorithm, without other algorithms'.

    For an algorithm that is not registered, they are those of all algorithms.
    """
    table = "algorithm."
    kind = _registered(algorithm)
    if kind is None:
        return known_keys()
    own = {f"{table}{field.name}" for field in dataclasses.fields(kind)}
    others = {key for key in known_keys() if not key.startswith(table)}
    return frozenset(others | own | {f"{table}name", f"{table}preset"})


def _value(text: str) -> Any:
    """Parse a value in TOML's notation, True and False; anything else is a string."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return {"True": True, "False": False}.get(text, text)


def to_plain(config: Config) -> dict[str, Any]:
    """Return all values of a configuration, with defaults, as a TOML file has them.

    Fields of algorithm, partition and other tables are nested dicts. None is "none", and a class
    that is not registered has the name package.module:Class.
    """

    def fields(value: Any) -> dict[str, Any]:
        return {f.name: _as_toml(getattr(value, f.name)) for f in dataclasses.fields(value)}

    tree = fields(config)
    registries: dict[str, Mapping[str, type[Any]]] = {
        "algorithm": ALGORITHMS,
        "partition": PARTITIONS,
    }
    for section, registry in registries.items():
        kind = type(tree[section])
        names = {known: name for name, known in registry.items()}
        name = names.get(kind, f"{kind.__module__}:{kind.__qualname__}")
        tree[section] = {"name": name, **fields(tree[section])}
    for section in ("data", "privacy", "evaluate", "adversaries", "network", "wire"):
        tree[section] = fields(tree[section])
    return tree


def _as_toml(value: Any) -> Any:
    """Return a field's value as a TOML file holds it.

    None, which TOML lacks, becomes "none"; a tuple becomes a list. Everything else stays as it is,
    also inside of a tuple.
    """
    if value is None:
        return "none"
    return list(value) if isinstance(value, tuple) else value


def to_toml(config: Config) -> str:
    """Return the whole configuration as TOML; a run from it is the same run."""
    return tomli_w.dumps(to_plain(config))


def describe_wire(config: Config) -> str:
    """Describe how payloads are encoded, for headers and reports.

    Where profile lean is what "auto" means, the text says so and names the way back.
    """
    text = str(config.wire)
    if config.wire != WireSettings(profile="lean"):
        return text
    if config.engine == "flower":
        return f"{text} (default on Flower; wire.profile=exact sends exact values)"
    if config.network.enabled:
        return f"{text} (default over [network]; wire.profile=exact sends exact values)"
    return text


def translate_former_fields(tree: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the fields of a file's algorithm that have changed, and what to write instead.

    Each is one line with TOML's `field = value`, in alphabetical order and separated by commas. The
    second is empty if the fields have only to be removed. The result is None if nothing has
    changed, and also for algorithms outside the registry and for files that `resolve` refuses.

    >>> translate_former_fields({"algorithm": {"name": "dffke", "embeddings": "noise"}})
    ('embeddings = "noise"', 'reveal = "nothing"')
    >>> translate_former_fields({"algorithm": {"name": "dffke", "reveal": "nothing"}}) is None
    True
    """
    given = tree.get("algorithm", {})
    kind = _registered(given)
    if kind is None or not isinstance(given, Mapping):
        return None
    try:
        upgraded = kind.upgrade(given)
    except ConfigError:
        return None
    present = {key: value for key, value in upgraded.items() if key not in kind.retired}
    former = only_in(given, present)
    if not former:
        return None
    return inline_toml(former), inline_toml(only_in(present, given))


def only_in(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of one mapping that another lacks or has with another value."""
    return {key: value for key, value in one.items() if key not in other or other[key] != value}


def inline_toml(values: Mapping[str, Any]) -> str:
    """Return values as TOML in one line, separated by commas."""
    return ", ".join(tomli_w.dumps(dict(sorted(values.items()))).splitlines())


def with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values as this version writes them.

    Keys that an older version did not write have their defaults. Renamed fields of the algorithm
    have their new names, and its retired fields are left out. Partition and privacy settings stay
    as they are.

    Raises:
        ConfigError: The algorithm is unknown, a retired field has a value that it no longer can, or
            there is a plain value where a table is expected.
    """

    def defaults(kind: type[Any]) -> dict[str, Any]:
        values = {f.name: f.default for f in dataclasses.fields(kind)}
        for f in dataclasses.fields(kind):
            if f.default_factory is dict:
                values[f.name] = {}
        return {
            name: _as_toml(value)
            for name, value in values.items()
            if value is not dataclasses.MISSING
        }

    tree = _with_earlier_rules(tree)
    for name in ("algorithm", "data", "evaluate", "adversaries", "network", "wire"):
        if not isinstance(tree.get(name, {}), Mapping):
            raise ConfigError(f"{name} is {tree[name]!r}, and a table [{name}] is expected")
    filled = {**defaults(Config), **tree}
    algorithm = tree.get("algorithm", {})
    if "name" in algorithm:
        method = find_algorithm(algorithm["name"])
        present = drop_retired_fields(method, method.upgrade(algorithm), "algorithm.")
        filled["algorithm"] = {**defaults(method), **present}
    sections: tuple[tuple[str, type[Any]], ...] = (
        ("data", Data),
        ("evaluate", Evaluation),
        ("adversaries", Adversaries),
        ("network", Network),
        ("wire", WireSettings),
    )
    for section, kind in sections:
        filled[section] = {**defaults(kind), **tree.get(section, {})}
    return filled


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], but: Iterable[str]
) -> str | None:
    """Return the first key whose values differ; None if there is none.

    First means in alphabetical order. A key of a table is TABLE.KEY. A missing key equals None.

    Args:
        one: Values.
        other: Values to compare them with.
        but: Keys to ignore, not inside of tables.
    """
    for key in sorted((one.keys() | other.keys()) - set(but)):
        first = one.get(key)
        second = other.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            inner = first_difference(first, second, ())
            if inner is not None:
                return f"{key}.{inner}"
        elif first != second:
            return key
    return None
