"""Simulated adversarial clients: who they are, what they upload, and that only honest ones are evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from barter.algorithms import ALGORITHMS, DFFKE, FedAvg, FedMD, FedProto, LGFedAvg
from barter.core.algorithm import Algorithm
from barter.core.errors import ConfigError
from barter.core.nodes import Client
from barter.core.payload import State, leaves
from barter.engines.adversaries import Adversaries, AttackName, choose, poison, uploads
from barter.experiment import Experiment
from barter.ops.prototypes import ByClass
from barter.setup.config import Config, resolve, to_plain, to_toml, with_defaults
from tests.conftest import perceptrons, small_federation, tiny


def poisoned(
    algorithm: Algorithm[Any, Any], method: str, answer: Any, attack: AttackName, *references: Any
) -> Any:
    stream = torch.Generator().manual_seed(0)
    adversaries = Adversaries(fraction=0.2, attack=attack)
    return poison(answer, adversaries, algorithm, method, list(references), stream)


def test_weights_are_scaled_from_where_the_client_started() -> None:
    answer = {"w": torch.tensor([1.5]), "b.running_var": torch.tensor([2.0]), "n": torch.tensor(3)}
    start = {"w": torch.tensor([1.0]), "b.running_var": torch.tensor([1.0])}
    sent = poisoned(FedAvg(), "client_update", answer, "scaled-weights", start)
    # 1 - 10 * (1.5 - 1); statistics stay, for a negative variance would be refused.
    assert sent["w"].tolist() == [-4.0]
    assert sent["b.running_var"].tolist() == [2.0]
    assert sent["n"].item() == 3
    alone = poisoned(FedAvg(), "client_update", {"w": torch.tensor([1.5])}, "scaled-weights")
    assert alone["w"].tolist() == [-15.0]


def test_a_head_is_scaled_from_that_of_the_network() -> None:
    head = {"weight": torch.full((2, 3), 2.0), "bias": torch.zeros(2)}
    network = {
        "body.weight": torch.ones(5, 3),
        "head.weight": torch.ones(2, 3),
        "head.bias": head["bias"],
    }
    sent = poisoned(LGFedAvg(), "learn", head, "scaled-weights", network)
    assert sent["weight"].tolist() == [[-9.0] * 3] * 2


def test_logits_become_random_and_probabilities_stay_probabilities() -> None:
    torch.manual_seed(1)
    logits = torch.randn(50, 10)
    sent = poisoned(FedMD(), "answer", {"said": logits}, "random-logits")["said"]
    assert 8 < sent.std() < 12
    assert abs(float(torch.corrcoef(torch.stack([sent.flatten(), logits.flatten()]))[0, 1])) < 0.15
    answer = {"said": logits.softmax(1)}
    sent = poisoned(FedMD(), "answer", answer, "random-logits")["said"]
    assert torch.allclose(sent.sum(1), torch.ones(50))
    assert bool((sent >= 0).all())


def test_prototypes_become_extreme_and_other_parts_stay() -> None:
    answer = {"classes": torch.tensor([0, 2]), "vectors": torch.ones(2, 4)}
    sent = poisoned(FedProto(), "learn", answer, "extreme-prototypes")
    assert sent["classes"].tolist() == [0, 2]
    assert sent["vectors"].tolist() == [[-10.0] * 4] * 2
    assert poisoned(FedProto(), "learn", answer, "random-logits") == answer


def test_parts_of_answers_are_read_from_return_types() -> None:
    expected = {
        "fedavg": {"weights"},
        "heterofl": {"weights"},
        "fedmd": {"logits"},
        "fedproto": {"features"},
        "fedaf": {"logits", "images"},
        "feddm": {"images"},
        "dffke": {"weights", "features", "logits"},
        "lgfedavg": {"weights"},
        "dfrd": {"weights"},
        "local": set(),
    }
    assert {name: uploads(ALGORITHMS[name]()) for name in expected} == expected


class Undecided(FedAvg):
    """Clients upload weights, or prototypes, or nothing."""

    def client_update(  # type: ignore[override]
        self, client: Client, w: State
    ) -> list[int] | ByClass | State | None:
        return None


@pytest.mark.parametrize(
    ("answer", "attack", "changed"),
    [
        ({"w": torch.ones(2)}, "scaled-weights", {"w": [-10.0] * 2}),
        (
            {"classes": torch.tensor([1]), "vectors": torch.ones(1, 2)},
            "extreme-prototypes",
            {"classes": [1], "vectors": [[-10.0] * 2]},
        ),
        (None, "scaled-weights", None),
        ([3], "scaled-weights", [3]),
    ],
)
def test_of_a_union_the_member_that_was_sent_is_changed(
    answer: Any, attack: AttackName, changed: Any
) -> None:
    assert uploads(Undecided()) == {"weights", "features"}
    sent = poisoned(Undecided(), "client_update", answer, attack)
    if isinstance(sent, dict):
        sent = {name: value.tolist() for name, value in sent.items()}
    assert sent == changed


def test_adversaries_are_chosen_by_the_seed() -> None:
    three = Adversaries(fraction=0.3)
    assert choose(three, 10, 0) == choose(three, 10, 0)
    assert len(set(choose(three, 10, 0))) == 3
    assert len({choose(three, 10, seed) for seed in range(5)}) > 1
    assert choose(Adversaries(), 10, 0) == ()


def test_honest_clients_alone_are_evaluated_and_the_record_names_the_others() -> None:
    adversaries = Adversaries(fraction=0.34, attack="flipped-labels")
    experiment = perceptrons(tiny("fedavg"), clients=3, adversaries=adversaries)
    (bad,) = experiment.engine.adversarial
    honest_data = perceptrons(tiny("fedavg"), clients=3).engine.clients[bad].data
    flipped = experiment.engine.clients[bad].data
    assert torch.equal(flipped.labels, 9 - honest_data.labels)
    record = experiment.step()
    assert record.clients[bad]["adversarial"] == 1.0
    assert "global" not in record.clients[bad]
    assert record.clients[bad]["bytes_up"] > 0
    assert set(record.values("global")) == {0, 1, 2} - {bad}
    assert not any("adversarial" in record.clients[k] for k in {0, 1, 2} - {bad})


def test_absent_clients_take_no_part_and_honest_ones_are_the_same() -> None:
    adversaries = Adversaries(fraction=0.34, attack="absent")
    (missing,) = choose(adversaries, 3, 0)
    experiment = perceptrons(tiny("fedavg"), clients=3, adversaries=adversaries, seed=0)
    everyone = perceptrons(tiny("fedavg"), clients=3, seed=0)
    present = sorted({0, 1, 2} - {missing})
    assert list(experiment.engine.client_ids) == present
    for k in present:
        assert torch.equal(
            experiment.engine.clients[k].data.pixels, everyone.engine.clients[k].data.pixels
        )
    record = experiment.step()
    assert record.participants == present
    assert sorted(record.clients) == present
    assert set(record.values("global")) == set(present)
    assert not any("adversarial" in metrics for metrics in record.clients.values())
    Adversaries(fraction=0.2, attack="absent").require(FedMD())  # applies to every method


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("fedavg", "scaled-weights"),
        ("dffke", "random-logits"),
        ("fedproto", "extreme-prototypes"),
        ("fedaf", "extreme-prototypes"),
    ],
)
def test_an_attack_changes_a_run_and_passes_the_contracts(name: str, attack: AttackName) -> None:
    adversaries = Adversaries(fraction=0.34, attack=attack)
    attacked = perceptrons(tiny(name), clients=3, adversaries=adversaries, min_clients=3)
    honest = perceptrons(tiny(name), clients=3)
    assert not attacked.step().failures
    honest.step()
    keep = set(range(3)) - set(attacked.engine.adversarial)

    def learned(experiment: Experiment) -> list[Any]:
        memories = [experiment.engine.memory()[k] for k in keep]
        return [leaf for _, leaf in leaves([experiment.server.memory(), *memories])]

    pairs = zip(learned(attacked), learned(honest), strict=True)
    assert any(
        isinstance(one, torch.Tensor) and not torch.equal(one, other) for one, other in pairs
    )


def test_what_means_nothing_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="robust='median': Local neither averages nor ensembles"):
        resolve({"algorithm": {"name": "local"}, "robust": "median"})
    with pytest.raises(ConfigError, match="set one of the two"):
        resolve({"algorithm": {"name": "fedavg", "average": "median"}, "robust": "krum"})
    with pytest.raises(
        ConfigError, match="FedAvg upload no logits; choose scaled-weights or flipped"
    ):
        resolve(
            {
                "algorithm": {"name": "fedavg"},
                "adversaries": {"fraction": 0.2, "attack": "random-logits"},
            }
        )
    with pytest.raises(ConfigError, match="use engine=local"):
        resolve(
            {"algorithm": {"name": "fedavg"}, "adversaries": {"fraction": 0.2}, "engine": "flower"}
        )
    for tree in ({"robust_share": 0.5}, {"adversaries": {"fraction": 0.5}}):
        with pytest.raises(ConfigError, match=r"must be below 0\.5"):
            resolve(tree)
    assert DFFKE(reveal="nothing", substitute="public").aggregates == ()


def test_the_settings_are_written_and_older_files_do_not_need_them(tmp_path: Path) -> None:
    adversaries = Adversaries(fraction=0.2, attack="flipped-labels")
    config = Config(algorithm=FedAvg(), robust="krum", robust_share=0.2, adversaries=adversaries)
    tree = to_plain(config)
    assert (tree["robust"], tree["adversaries"]["attack"]) == ("krum", "flipped-labels")
    assert 'attack = "flipped-labels"' in to_toml(config)
    assert resolve(tree) == config
    older = {k: v for k, v in to_plain(Config(algorithm=FedAvg())).items() if "robust" not in k}
    del older["adversaries"]
    assert with_defaults(older) == to_plain(Config(algorithm=FedAvg()))


def kinds_consulted(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Run two rounds (some methods exchange from the second on); return the kinds defended."""
    from barter.core.robust import Defence

    asked: set[str] = set()
    original = Defence.rule_for

    def rule_for(self: Defence, kind: Any) -> Any:
        if self.rule != "none":
            asked.add(kind)
        return original(self, kind)

    monkeypatch.setattr(Defence, "rule_for", rule_for)
    experiment.step()
    experiment.step()
    return asked


QUICK = ("fedavg", "heterofl", "feddf", "fedproto", "fedgh", "fedaf", "dffke", "lgfedavg")
DEFENDED = [name for name, kind in ALGORITHMS.items() if name not in ("local", "central")]


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in DEFENDED]
)
def test_methods_ask_for_a_defence_of_what_they_declare(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = tiny(name)
    if not algorithm.aggregates:
        pytest.skip("aggregates nothing")
    asked = kinds_consulted(small_federation(algorithm, robust="auto"), monkeypatch)
    assert asked == set(algorithm.aggregates)
