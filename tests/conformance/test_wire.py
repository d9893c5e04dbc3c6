"""Every algorithm runs with encoded payloads, and keeps exactly what it needs exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from barter.cli.describing import print_wire
from barter.core.payload import leaves, nbytes
from barter.core.wire import Direction, Wire
from barter.core.wire_codec import WireCodec
from barter.core.wire_settings import WireSettings
from barter.privacy import Privacy
from tests.conftest import least, perceptrons, same, state, tiny


class Measured(Wire):
    """A wire that compares what is sent with what is decoded."""

    exact = 0
    encoded = 0

    def transmit(
        self, tree: Any, method: str, client: int, direction: Direction
    ) -> tuple[Any, int | None]:
        decoded, size = super().transmit(tree, method, client, direction)
        assert size is not None
        self.exact += nbytes(tree)
        self.encoded += size
        sent = dict(leaves(tree))
        assert list(sent) == [path for path, _ in leaves(decoded)]
        for path, value in leaves(decoded):
            compare(sent[path], value, path)
        return decoded, size


def compare(sent: Any, decoded: Any, path: str) -> None:
    if not isinstance(sent, Tensor) or sent.ndim < 2 or sent.dtype in (torch.int64, torch.bool):
        assert torch.equal(sent, decoded) if isinstance(sent, Tensor) else sent == decoded, path
        return
    assert (sent.shape, sent.dtype) == (decoded.shape, decoded.dtype), path
    if sent.numel():
        one, other = sent.float(), decoded.float()
        error = (one - other).square().mean().sqrt()
        # int4 has seven levels on either side of 0, the last two 1 - (6/7)^2 apart.
        assert error <= 0.14 * one.abs().max(), path
        assert not (one.min() >= 0 and other.min() < 0), path


def test_both_profiles_run(name: str) -> None:
    """One run, whose first round is `small` and whose second one is `lean`."""
    experiment = perceptrons(least(name))
    algorithm = experiment.algorithm
    for profile in ("small", "lean"):
        codec = WireCodec(algorithm, WireSettings(profile=profile), 0)
        wire = Measured(algorithm.may_be_infinite, codec)
        experiment.engine.wire = wire
        record = experiment.step()
        assert record.failures == []
        assert record.traffic("up") + record.traffic("down") <= wire.encoded
        if record.traffic("up") + record.traffic("down"):
            assert wire.encoded < wire.exact
        else:  # Of numbers: evaluations.
            assert wire.encoded == wire.exact


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_resumed_run_is_the_same_run(rounding: Any, tmp_path: Path) -> None:
    wire = WireSettings(profile="small", rounding=rounding)
    straight = perceptrons(tiny("fedavg"), wire=wire)
    list(straight.rounds(3, progress=False))
    out = tmp_path / "run"
    list(perceptrons(tiny("fedavg"), wire=wire, out=out).rounds(1, progress=False))
    again = perceptrons(tiny("fedavg"), wire=wire, out=out, resume=True)
    records = list(again.rounds(3, progress=False))
    assert same(state(straight), state(again))
    assert [record.wire for record in records] == [str(wire)] * 2
    exact = perceptrons(tiny("fedavg"))
    list(exact.rounds(3, progress=False))
    assert not same(state(straight), state(exact))


def test_noise_is_added_before_values_are_encoded() -> None:
    """With noise after it, values would not be levels any more, and the noise would not be sent."""
    heard: list[Tensor] = []

    class Ear(Wire):
        def deliver(self, received: Any, method: str, client: int, direction: Direction) -> Any:
            if method == "client_update" and direction == "up":
                heard.append(max(received.values(), key=Tensor.numel))
            return received

    runs = []
    answers: list[Any] = [{}, {"client_update": "int8"}]
    for fields in answers:
        experiment = perceptrons(
            tiny("fedavg"),
            wire=WireSettings(fields=fields),
            privacy=Privacy(
                epsilon=100, parts={"client_update": "gaussian clip=1 noise=1 of=change"}
            ),
        )
        engine = experiment.engine
        engine.wire = Ear(frozenset(), engine.wire.codec)
        experiment.step()
        runs.append((heard.copy(), experiment.engine.reported_epsilon))
        heard.clear()
    (exact, spent), (encoded, spent_too) = runs
    assert spent == spent_too
    for one, other in zip(exact, encoded, strict=True):
        assert len(one[0].unique()) > 60
        step = other.abs().amax(1, keepdim=True) / 127
        assert ((other / step).round() - other / step).abs().max() < 1e-3, "they are levels"
        assert ((one - other).abs() <= step).all(), "of the same noise"


def test_a_command_shows_the_encoding_of_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    print_wire(None, "fedproto", ["wire.profile=small"])
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "FedProto, profile small" in shown
    assert any(line.startswith("up learn.vectors embeddings int4 ") for line in shown)
    assert any(line.startswith("up learn.classes exact exact ") for line in shown)
    assert "down receive.prototypes.vectors embeddings int4" in shown
    assert not any("auto" in line for line in shown)
    for settings, profile, encoding in ([], "exact", "exact"), (["engine=flower"], "lean", "int8"):
        print_wire(None, "fedproto", settings)
        said = " ".join(capsys.readouterr().out.split())
        assert said.startswith(
            f"FedProto, profile {profile} It is chosen by the default, auto: lean"
        )
        assert f"down receive.prototypes.vectors embeddings {encoding}" in said
