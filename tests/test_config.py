from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from barter import Experiment
from barter.algorithms import DFFKE, FedAvg, Local
from barter.core.errors import ConfigError
from barter.data.partition import Classes, Dirichlet
from barter.setup.config import (
    Config,
    RunSettings,
    first_difference,
    read_toml,
    resolve,
    to_plain,
    to_toml,
    with_settings,
)


def test_defaults_are_the_demo() -> None:
    config = resolve({})
    assert config.algorithm == DFFKE()
    assert config.partition == Dirichlet(alpha=0.1)
    assert (config.data.source, config.clients, config.models, config.rounds) == (
        "digits",
        5,
        "auto",
        5,
    )


def test_settings_reach_into_tables() -> None:
    tree = {"algorithm": {"name": "dffke", "share": 0.3}, "rounds": 9}
    settings = [
        "algorithm.tau=0.9",
        "rounds=2",
        "data.source=npz:a=b.npz",
        "partition.name=classes",
        "partition.per_client=3",
    ]
    config = resolve(with_settings(tree, settings))
    assert config.algorithm == DFFKE(share=0.3, tau=0.9)
    assert (config.rounds, config.data.source, config.partition) == (
        2,
        "npz:a=b.npz",
        Classes(per_client=3),
    )
    assert tree["rounds"] == 9, "the tree itself is left as it was"


def test_another_algorithm_drops_the_fields_of_the_first() -> None:
    tree = with_settings({"algorithm": {"name": "dffke", "share": 0.3}}, ["algorithm.name=fedavg"])
    assert resolve({**tree, "models": "small-mlp"}).algorithm == FedAvg()


def test_fields_that_a_file_gives_to_no_algorithm_in_particular_go_to_the_one_that_is_asked_for() -> (
    None
):
    tree = with_settings({"algorithm": {"lr": 0.5}}, ["algorithm.name=fedavg"])
    assert tree["algorithm"] == {"name": "fedavg", "lr": 0.5}
    with pytest.raises(ConfigError, match=r"algorithm\.share"):
        resolve(with_settings({"algorithm": {"share": 0.3}}, ["algorithm.name=fedavg"]))
    assert with_settings({"partition": {"alpha": 0.1}}, ["partition.name=iid"])["partition"] == {
        "name": "iid"
    }


def test_presets_can_be_overridden() -> None:
    config = resolve({"algorithm": {"name": "dffke", "preset": "code", "share": 0.2}})
    assert config.algorithm == DFFKE.preset("code", {"share": 0.2})
    assert isinstance(config.algorithm, DFFKE)
    assert (
        config.algorithm.embedding_loss,
        config.algorithm.share,
        config.algorithm.decoder_steps,
    ) == (True, 0.2, 0)


def test_values_in_tomls_notation() -> None:
    settings = [
        "algorithm.local_review=true",
        "algorithm.memory=3",
        "algorithm.lr=1e-2",
        "models=resnet18",
        "data.download=True",
    ]
    config = resolve(with_settings({}, settings))
    assert isinstance(config.algorithm, DFFKE)
    assert (config.algorithm.local_review, config.algorithm.memory, config.algorithm.lr) == (
        True,
        3,
        0.01,
    )
    assert config.data.download


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"algorithm": {"name": "fedavg", "lr": 1}, "partition": {"name": "iid"}, "min_clients": 2},
    ],
)
def test_what_is_written_is_what_is_read(tree: dict[str, object], tmp_path: Path) -> None:
    config = resolve(tree)
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert resolve(read_toml(tmp_path / "c.toml")) == config
    assert isinstance(config, Config)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("share=0.5", "did you mean 'algorithm.share'"),
        ("algorithm.shar=0.5", "did you mean 'algorithm.share'"),
        ("partition.alhpa=1", "did you mean 'partition.alpha'"),
        ("round=3", "did you mean 'rounds'"),
        ("rounds", "write key=value"),
        ("=3", "write key=value"),
        ("a.b.c=3", "write key=value"),
    ],
)
def test_unknown_settings_name_their_neighbour(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings({}, [setting])


def test_a_field_of_another_algorithm_is_unknown_here() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.epochs': did you mean"):
        resolve(with_settings({}, ["algorithm.epochs=3"]))


def test_the_order_of_settings_does_not_matter() -> None:
    settings = [
        "algorithm.share=0.5",
        "algorithm.name=dffke",
        "partition.alpha=2",
        'partition.name="dirichlet"',
    ]
    for given in (settings, settings[::-1]):
        config = resolve(with_settings({}, given))
        assert (config.algorithm, config.partition) == (DFFKE(share=0.5), Dirichlet(alpha=2.0))


def test_a_name_that_is_the_same_keeps_what_a_file_says() -> None:
    tree = {"algorithm": {"share": 0.5}, "partition": {"name": "classes", "per_client": 3}}
    config = resolve(with_settings(tree, ["algorithm.name=dffke", "partition.name=classes"]))
    assert (config.algorithm, config.partition) == (DFFKE(share=0.5), Classes(per_client=3))


def test_a_preset_that_is_asked_for_wins_over_the_file() -> None:
    tree = to_plain(resolve({}))
    config = resolve(with_settings(tree, ["algorithm.preset=code", "algorithm.tau=0.5"]))
    assert config.algorithm == DFFKE.preset("code", {"tau": 0.5})


def test_none_can_be_written() -> None:
    config = resolve(
        with_settings(
            {"algorithm": {"memory": 5}}, ["algorithm.memory=none", "algorithm.discrepancy=none"]
        )
    )
    assert isinstance(config.algorithm, DFFKE)
    assert (config.algorithm.memory, config.algorithm.discrepancy) == (None, "none")


def test_own_algorithms_take_settings() -> None:
    settings = ["algorithm.name=tests.test_experiment:Tunable", "algorithm.mine=5"]
    assert getattr(resolve(with_settings({}, settings)).algorithm, "mine", None) == 5
    with pytest.raises(ConfigError, match="unknown key 'algorithm.mien': did you mean 'mine'"):
        resolve(with_settings({}, [settings[0], "algorithm.mien=5"]))


def test_the_first_difference_is_found() -> None:
    one, other = (
        to_plain(resolve({})),
        to_plain(resolve({"seed": 3, "rounds": 9, "algorithm": {"lr": 0.5}})),
    )
    assert first_difference(one, other, but=("rounds",)) == "algorithm.lr"
    assert first_difference(one, one, but=()) is None


def test_an_experiment_takes_every_setting_of_a_configuration() -> None:
    taken = {*RunSettings.__annotations__, *inspect.signature(Experiment).parameters}
    here_only = {"engine", "answer_mb"}  # an experiment in this process reaches no Flower site
    fields = {field.name for field in dataclasses.fields(Config)}
    assert fields - taken == here_only
    assert set(RunSettings.__annotations__) <= fields
    plain_run = Experiment("local", clients=2, privacy=None, evaluate=None, seed=3)
    assert plain_run.config == Config(
        algorithm=Local(), clients=2, seed=3, threads=plain_run.config.threads
    )
    with pytest.raises(TypeError, match="no parameter 'round': .*rounds"):
        Experiment("local", round=2)  # type: ignore[call-arg]
