"""Attacks on runs, through the same door as everything that leaves a client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from barter import Experiment
from barter.attacks import attack as attacking
from barter.attacks import inversion as inverting
from barter.attacks.attack import replay_first_rounds, run_attacks
from barter.attacks.extraction import extract_model, find_predictions
from barter.attacks.labels import estimate_prior
from barter.attacks.labels import label_attacks as read_labels
from barter.attacks.measures import share_error
from barter.attacks.overheard import clients_of, collect_uploads, split_test
from barter.attacks.result import Result
from barter.cli.app import main
from barter.compute.threads import limit_threads
from barter.core import seeds
from barter.core.errors import ConfigError
from barter.core.evaluation import predict
from barter.core.images import Images
from barter.core.nodes import Silence
from barter.data.task import Data
from barter.privacy import Privacy
from barter.setup.trust import read_run
from tests.conftest import tiny

MEANS = {"learn.embeddings": "means clip=4 noise=1"}


def made(
    folder: Path, name: str = "dffke", privacy: dict[str, str] | None = None, **changes: Any
) -> Path:
    algorithm, models = (
        tiny(name, **changes),
        "small-mlp,small-cnn" if name == "dffke" else "small-mlp",
    )
    options: dict[str, Any] = {
        "clients": 2,
        "models": models,
        "privacy": Privacy(parts=privacy or {}),
    }
    for _ in Experiment(algorithm, out=folder, threads=1, device="cpu", **options).rounds(1):
        pass
    return folder


def by_name(results: list[Result], question: str) -> dict[str, dict[str, float]]:
    return {result.attack: result.values for result in results if result.question == question}


@pytest.fixture(autouse=True, scope="module")
def _little_work() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "N_RECONSTRUCTED": 6,
            "PUBLIC": 60,
            "COPIES": 60,
            "EPOCHS": 8,
            "DESCENT": 60,
        }.items():
            patch.setattr(inverting, name, value)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("attack") / "run")


@pytest.fixture(scope="module")
def attacked(run: Path) -> list[Result]:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    results, paths = run_attacks(run, 2, Silence())
    assert paths == [run / "attack.json", run / "attack.png"]
    assert all(
        path.read_bytes() == before[path]
        for path in run.rglob("*")
        if path.is_file() and path not in paths
    )
    return results


def test_what_left_unprotected_gives_images_members_and_labels_away(
    run: Path, attacked: list[Result]
) -> None:
    results = attacked
    pictures, members, labels = (
        by_name(results, question) for question in ("inversion", "membership", "labels")
    )
    assert (
        pictures["descent from there"]["psnr"] > pictures["nearest image of the class"]["psnr"] + 3
    )
    assert pictures["descent from there"]["found"] > 0.8
    assert pictures["mean of the class"]["found"] < 0.3
    assert set(members) == {
        "loss threshold, weights",
        "RMIA with 2 shadow runs, weights",
        "nearest row, embeddings and weights",
    }
    assert members["nearest row, embeddings and weights"]["auc"] > 0.5
    assert labels["learn.labels"]["right"] == 1.0
    assert labels["learn.labels"]["distance"] < labels["all classes alike"]["distance"]
    tree = json.loads((run / "attack.json").read_text())
    assert (tree["algorithm"], tree["round"], tree["shadows"]) == ("DFFKE", 2, 2)
    assert [row["attack"] for row in tree["results"]] == [result.attack for result in results]
    assert (run / "attack.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_heard_is_what_left(tmp_path: Path, run: Path) -> None:
    bare, hidden = (
        collect_uploads(Experiment.restore(folder, unlimited=True))[0]
        for folder in (
            run,
            made(tmp_path / "run", privacy={"learn.embeddings": "withhold"}, parts=0),
        )
    )
    assert bare.answers.keys() == {"learn", "teach", "exchange"}
    assert bare.answers["exchange"] is None, "what comes down is not what was told"
    assert bare.rows is not None
    assert hidden.rows is not None
    assert bool((bare.rows[1] != 0).any())
    assert not bool(hidden.rows[1].any())


def test_heard_networks_are_the_clients_and_rows_belong_to_their_images(run: Path) -> None:
    experiment = Experiment.restore(run)
    told = collect_uploads(experiment)
    for k, client in clients_of(experiment).items():
        network, rows, labels, places = (
            told[k].network,
            told[k].rows,
            told[k].labels,
            told[k].places,
        )
        assert network is not None
        assert rows is not None
        assert labels is not None
        assert places is not None
        with torch.no_grad():
            again = network.features(client.data.batch(places))
        assert torch.allclose(again, rows[1][:, 0], atol=1e-4)
        assert labels[1].equal(client.data.labels[places])


def test_means_of_classes_are_attacked_as_such(tmp_path: Path) -> None:
    results, _ = run_attacks(made(tmp_path / "run", privacy=MEANS, parts=0), 0, Silence())
    pictures, labels = by_name(results, "inversion"), by_name(results, "labels")
    assert "descent from there" not in pictures
    assert pictures["network from embeddings"]["found"] < 0.3
    assert "right" not in labels["learn.labels"]


def test_a_spent_budget_does_not_stop_the_attack(tmp_path: Path) -> None:
    parts = {"learn.embeddings": "gaussian clip=4", "learn.labels": "withhold"}
    privacy = Privacy(epsilon=1, parts=parts)
    list(
        Experiment(
            tiny("dffke", parts=0), clients=2, out=tmp_path / "run", privacy=privacy, rounds=1
        ).rounds(1)
    )
    results, _ = run_attacks(tmp_path / "run", 0, Silence())
    assert by_name(results, "labels")["learn.labels"]["right"] < 0.5


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        (
            "local",
            {
                "inversion": "nothing that left the clients belongs to a single image",
                "membership": "no client uploaded weights",
                "labels": "nothing that left the clients is about classes",
            },
        ),
        ("fedproto", {"membership": "no client uploaded weights"}),
    ],
)
def test_what_a_method_does_not_tell_is_said(
    tmp_path: Path, name: str, notes: dict[str, str]
) -> None:
    results, paths = run_attacks(made(tmp_path / "run", name), 2, Silence())
    for question, words in notes.items():
        assert any(words in result.note for result in results if result.question == question)
    assert [path.name for path in paths] == ["attack.json"]


def test_no_attack_takes_more_threads_than_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()

    def noting(*given: Any) -> Any:
        used.add(torch.get_num_threads())
        return inverting.inversion_attacks(*given)

    monkeypatch.setattr(attacking, "inversion_attacks", noting)
    run = made(tmp_path / "run", "fedavg")
    with limit_threads(2):
        run_attacks(run, 0, Silence())
        assert torch.get_num_threads() == 2
    assert used == {1}


def test_class_counts_are_found_inside_statistics(tmp_path: Path) -> None:
    run = made(tmp_path / "statistics", reveal="statistics", share=1.0)
    found = by_name(run_attacks(run, 0, Silence())[0], "labels")
    # All images are offered, but classes with one image have no Gaussian.
    assert found["learn.gaussians"]["distance"] < 0.1


def test_counts_tell_all_and_prototypes_which_classes_there_are(tmp_path: Path) -> None:
    run = made(tmp_path / "counts", "fedftg")
    assert by_name(run_attacks(run, 0, Silence())[0], "labels")["learn.counts"]["distance"] == 0
    told = run_attacks(made(tmp_path / "means", "fedproto"), 0, Silence())[0]
    held = [
        client.data.class_counts()
        for client in clients_of(Experiment.restore(tmp_path / "means")).values()
    ]
    exact = [share_error((counts > 0).long(), counts) for counts in held]
    assert by_name(told, "labels")["learn.classes"]["distance"] == pytest.approx(sum(exact) / 2)


def test_an_attacker_needs_images_of_its_own() -> None:
    experiment = Experiment(tiny("fedavg"), clients=2, models="small-mlp")
    few = experiment.task.global_test
    few.pixels, few.labels = few.pixels[:19], few.labels[:19]
    with pytest.raises(ConfigError, match="there are 19 test images: an attacker needs 20"):
        split_test(experiment)


def test_a_network_that_sees_one_class_everywhere_takes_it_for_frequent() -> None:
    experiment = Experiment(tiny("fedavg"), clients=2, models="small-mlp")
    public, others = split_test(experiment)
    assert len(public) + len(others) == len(experiment.task.global_test)
    network = clients_of(experiment)[0].model
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.head.bias[3] = 20.0  # type: ignore[union-attr, index]
    even = Images(public.pixels[:10], torch.arange(10), public.spec)
    shares = estimate_prior(network, even)
    assert float(shares[3] / shares.sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attack", "RUN", "--shadows", "3"], "give an even number"),
        (["attack", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_mistakes(
    run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run) if argument == "RUN" else argument for argument in arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_runs_on_flower_keep_their_images_elsewhere(run: Path, tmp_path: Path) -> None:
    text = (run / "config.toml").read_text().replace('engine = "local"', 'engine = "flower"')
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match="ran on Flower: its clients' images are at their sites"):
        run_attacks(tmp_path, 0, Silence())


def test_the_command_finds_the_same_again_and_shows_it(
    run: Path, attacked: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attack", str(run), "--shadows", "0"]) == 0
    after = json.loads((run / "attack.json").read_text())["results"]
    before = [
        json.loads(json.dumps(asdict(result))) for result in attacked if "RMIA" not in result.attack
    ]
    assert after == before
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "round 2, overheard",
        "descent from there",
        "loss threshold, weights",
        "learn.labels",
        "attack.png",
    ):
        assert words in text


def test_predictions_are_found_beside_the_images_that_were_asked_about() -> None:
    told = {"ask": {"said": torch.eye(3)[torch.tensor([0, 2, 1, 2])], "counts": torch.zeros(3)}}
    assert find_predictions(told, {"ask": (torch.tensor([4, 5, 6]),)}, 3) is None, (
        "three images, four predictions"
    )
    assert find_predictions(told, {"other": (torch.tensor([4, 5, 6, 7]),)}, 3) is None
    found = find_predictions(told, {"ask": (torch.tensor([4, 5, 6, 7]),)}, 3)
    assert found is not None
    assert found[0].tolist() == [4, 5, 6, 7]
    assert found[1].argmax(1).tolist() == [0, 2, 1, 2]


def test_a_network_learnt_from_predictions_predicts_alike_elsewhere(run: Path) -> None:
    experiment = Experiment.restore(run)
    public, others = split_test(experiment)
    client = clients_of(experiment)[0]
    truth = [
        predict(client.model.eval(), images.batch, torch.arange(len(images)))
        for images in (public, others)
    ]
    with seeds.scope(0, "extraction"):
        network = extract_model(client.model, public, torch.arange(len(public)), truth[0])
    again = predict(network, others.batch, torch.arange(len(others)))
    assert float((again.argmax(1) == truth[1].argmax(1)).double().mean()) > 0.7
    assert not all(map(torch.equal, network.parameters(), client.model.parameters()))


def test_who_sends_predictions_alone_is_attacked_by_a_network_learnt_from_them(
    tmp_path: Path,
) -> None:
    data = Data(source="digits", public="digits")
    options: dict[str, Any] = {
        "clients": 2,
        "models": "small-mlp",
        "threads": 1,
        "device": "cpu",
        "data": data,
    }
    for _ in Experiment(tiny("fedmd"), out=tmp_path / "run", **options).rounds(1):
        pass
    results, _ = run_attacks(tmp_path / "run", 2, Silence())
    assert by_name(results, "membership").keys() == {
        "loss threshold, network learnt from predictions",
        "RMIA with 2 shadow runs, network learnt from predictions",
    }
    assert "network learnt from predictions" in by_name(results, "labels")


def test_what_clients_upload_only_once_is_attacked(tmp_path: Path) -> None:
    folder = made(tmp_path / "dense", "dense")
    experiment = Experiment.restore(folder, unlimited=True)
    teachers = experiment.server.teachers
    assert collect_uploads(experiment).keys() == set(), "nothing is uploaded after the first round"
    with limit_threads(1):
        told = collect_uploads(experiment, replay_first_rounds(read_run(folder), 1))
    assert told.keys() == teachers.keys() == {0, 1}
    for k, teacher in teachers.items():
        network = told[k].network
        assert network is not None
        assert all(v.equal(network.state_dict()[at]) for at, v in teacher["weights"].items())
    results = run_attacks(folder, 2, Silence())[0]
    assert by_name(results, "membership").keys() == {
        "loss threshold, weights",
        "RMIA with 2 shadow runs, weights",
    }
    assert by_name(results, "labels")["learn.counts"]["distance"] == 0


def test_clients_that_are_sampled_later_are_attacked_too(tmp_path: Path) -> None:
    config = replace(
        read_run(made(tmp_path / "run", "moments")), algorithm=tiny("moments", fraction=0.5)
    )
    assert config.clients == 2
    one = replay_first_rounds(config, 1)
    assert len(one.answers) == 1
    every = replay_first_rounds(config, 20)
    assert {k for k, answers in every.answers.items() if "describe" in answers} == {0, 1}
    assert every.answers.keys() == {0, 1}


def test_counts_with_noise_are_read_as_classes(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "moments", {"describe": "gaussian clip=1 noise=200"})
    told = collect_uploads(
        Experiment.restore(folder, unlimited=True), replay_first_rounds(read_run(folder), 1)
    )
    noisy = [upload.answers["describe"]["counts"] for upload in told.values()]
    assert any(bool((counts < 0).any()) for counts in noisy)
    labels = by_name(run_attacks(folder, 0, Silence())[0], "labels")
    assert labels["describe.counts"]["distance"] > 0
    exact = made(tmp_path / "exact", "moments")
    labels = by_name(run_attacks(exact, 0, Silence())[0], "labels")
    assert labels["describe.counts"]["distance"] < 1e-6


def test_images_that_are_given_away_are_held_beside_private_ones(tmp_path: Path) -> None:
    """In steps of no length they stay the originals that they started from."""
    folder = made(tmp_path / "run", "feddm", steps=1, image_lr=1e-9, init_images=1)
    experiment = Experiment.restore(folder, unlimited=True)
    told = collect_uploads(experiment)[0]
    assert told.network is None
    assert told.given is not None
    data = clients_of(experiment)[0].data
    own = data.batch(torch.arange(len(data))).flatten(1)
    assert float(torch.cdist(told.given.flatten(1), own).min(1).values.max()) < 0.1, (
        "bytes of originals"
    )
    results = run_attacks(folder, 0, Silence())[0]
    assert by_name(results, "membership")["nearest of the images given away"]["tpr_1.0%"] > 0.02


def test_numbers_that_tell_nothing_are_not_read_as_classes(run: Path) -> None:
    experiment = Experiment.restore(run)
    told = collect_uploads(experiment)
    told[0].answers["teach"][0]["index"] = torch.arange(10)  # as many places as there are classes
    public, _ = split_test(experiment)
    assert not any(
        "teach.index" in result.attack for result in read_labels(experiment, told, public)
    )
