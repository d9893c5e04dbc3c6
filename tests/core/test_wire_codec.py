"""Which encoding each field of a payload has, and payloads as a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn

from barter import ALGORITHMS
from barter.core import wire_codec
from barter.core.encodings import ENCODED
from barter.core.errors import ConfigError, PayloadError
from barter.core.payload import nbytes
from barter.core.wire import Wire
from barter.core.wire_codec import (
    WireCodec,
    decode_payload,
    decoded_nbytes,
    encoded_nbytes,
)
from barter.core.wire_settings import WireSettings, list_fields
from barter.setup.config import (
    first_difference,
    read_run_values,
    resolve,
    to_plain,
    with_defaults,
    with_settings,
)
from tests.conftest import tiny


def codec(name: str, **settings: Any) -> WireCodec:
    return WireCodec(tiny(name), WireSettings(**{"profile": "small", **settings}), 0)


def kinds(name: str) -> dict[str, str]:
    return {row.path: row.kind for row in list_fields(ALGORITHMS[name]())}


def test_kinds_follow_from_types() -> None:
    assert kinds("fedavg") == {"client_update.w": "weights", "client_update": "weights"}
    dffke = kinds("dffke")
    assert dffke["learn.weights"] == "weights"
    assert dffke["learn.embeddings"] == "embeddings"
    assert dffke["learn.labels"] == "exact"
    assert dffke["teach.delivery.entries.codes"] == "images"
    assert dffke["teach.logits"] == "logits"
    assert dffke["exchange.lessons.logits"] == "logits"
    assert kinds("dfrd")["measure.variances"] == "exact"
    assert kinds("fedaf")["condense.images"] == "images"
    assert kinds("fedproto")["learn.vectors"] == "embeddings"
    assert kinds("fedkd")["receive.change"] == "weights"
    zeroth = {path: kind for path, kind in kinds("fedzge").items() if path.startswith("answer")}
    assert set(zeroth.values()) == {"exact"}, "its gradients are small differences of logits"


def test_the_most_specific_name_of_a_field_counts() -> None:
    fields: Any = {"embeddings": "half", "learn.embeddings": "int4", "logits": "exact"}
    settings = WireSettings(profile="small", fields=fields)
    assert settings.encoding_of("learn.embeddings", "embeddings") == "int4"
    assert settings.encoding_of("teach.embeddings", "embeddings") == "half"
    assert settings.encoding_of("teach.logits", "logits") == "exact"
    assert settings.encoding_of("learn.weights", "weights") == "int8"
    assert settings.encoding_of("learn.labels", "exact") == "exact"
    said = "small (embeddings: half, learn.embeddings: int4, logits: exact)"
    assert str(settings) == said
    assert settings.deflates
    assert not WireSettings(profile="lean").deflates
    unpacked = WireSettings(profile="small", deflate=False)
    assert (unpacked.deflates, str(unpacked)) == (False, "small (not deflated)")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"learn.labels": "int8"}, "DFFKE needs this field exactly"),
        ({"learn.embedding": "int8"}, "no such field: did you mean 'learn.embeddings'"),
        ({"learn.embeddings": "webp"}, "this encoding is for images, and the field holds embedd"),
        ({"weights": "uint8"}, "this encoding is for images"),
        ({"weights": "int7"}, "must be"),
    ],
)
def test_fields_that_mean_nothing_are_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve({"algorithm": {"name": "dffke"}, "wire": {"fields": fields}})


def test_the_table_of_a_configuration_is_read_and_written() -> None:
    tree = {"algorithm": {"name": "dffke"}, "wire": {"fields": {"learn.embeddings": "int4"}}}
    config = resolve(with_settings(tree, ["wire.profile=lean"]))
    assert config.wire == WireSettings(profile="lean", fields={"learn.embeddings": "int4"})
    assert resolve(to_plain(config)).wire == config.wire
    now = to_plain(resolve({}))
    older = {key: value for key, value in now.items() if key != "wire"}
    assert first_difference(now, with_defaults(older), ()) is None, "an older run can be resumed"


@pytest.mark.parametrize(
    ("settings", "profile"),
    [
        ([], "exact"),
        (["wire.profile=lean"], "lean"),
        (["engine=flower"], "lean"),
        (["engine=flower", "wire.profile=auto"], "lean"),
        (["engine=flower", "wire.profile=exact"], "exact"),
        (["engine=flower", "wire.profile=small"], "small"),
        (["network.up_mbps=8"], "lean"),
        (["network.up_mbps=8", "wire.profile=exact"], "exact"),
    ],
)
def test_the_default_is_lean_where_payloads_cross_a_network(
    settings: list[str], profile: str
) -> None:
    tree = {"algorithm": {"name": "dffke"}, "wire": {"fields": {"logits": "int4"}}}
    config = resolve(with_settings(tree, settings))
    assert str(config.wire) == f"{profile} (logits: int4)"
    assert to_plain(config)["wire"]["profile"] == profile, "a run's folder never says auto"
    assert replace(config, engine="local").wire == config.wire, "a configuration keeps its encoding"
    images: Any = {"exact": "exact", "lean": "webp-6bit", "small": "webp-75"}
    assert config.wire.encoding_of("teach.delivery.entries.codes", "images") == images[profile]
    assert config.wire.encoding_of("teach.logits", "logits") == "int4", "whatever the profile"


@pytest.mark.parametrize("engine", ["local", "flower"])
def test_saved_configurations_without_a_profile_stay_exact(engine: str, tmp_path: Path) -> None:
    tree = to_plain(resolve({"engine": engine}))
    del tree["wire"]
    for name in ("config.toml", "run.toml"):
        (tmp_path / name).write_text(tomli_w.dumps(tree))
        assert resolve(read_run_values(tmp_path, name)).wire.is_exact
    assert with_defaults(tree)["wire"] == to_plain(resolve({}))["wire"]
    fields = {**tree, "wire": {"fields": {"weights": "int8"}}}
    assert with_defaults(fields)["wire"]["profile"] == "exact"


def test_auto_is_not_used_before_a_configuration_has_settled_it() -> None:
    for use in (
        lambda: WireSettings().is_exact,
        lambda: WireSettings().deflates,
        lambda: WireSettings().encoding_of("learn.weights", "weights"),
    ):
        with pytest.raises(ConfigError, match="'auto' depends on the run"):
            use()


def test_weights_keep_what_is_no_matrix() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4))
    w = dict(network.state_dict())
    w["1.running_var"] = torch.full((8,), 1e-9)
    w["1.num_batches_tracked"] = torch.tensor(123_456_789)
    decoded, size = codec("fedavg", deflate=False).transmit(w, "client_update", "up", 0)
    for name, value in w.items():
        assert torch.equal(decoded[name], value) == (value.ndim < 2), name
    matrices = [value for value in w.values() if value.ndim > 1]
    exact = sum(nbytes(value) for value in w.values() if value.ndim < 2)
    assert size == exact + sum(value.numel() + 4 * len(value) for value in matrices)


def test_a_payload_survives_other_values_and_its_sizes_are_known_before_it_is_decoded() -> None:
    images = torch.arange(2 * 3 * 64).view(2, 3, 8, 8).to(torch.uint8)
    entry = {
        "round": 3,
        "codes": {4: images.half() / 100, 5: torch.arange(7), 6: torch.rand(9, 2, 40)},
        "decoder": {},
    }
    arguments = ({"entries": [entry], "docking": {"weight": torch.rand(40, 40)}},)
    coder = codec("dffke")
    sent = coder.encode(arguments, "teach", "down", 0, 1)
    received, size = coder.transmit(arguments, "teach", "down", 0)
    again = decode_payload(sent, nbytes(arguments))
    assert encoded_nbytes(sent) == size < nbytes(arguments) / 2
    assert decoded_nbytes(sent) == nbytes(arguments)
    with pytest.raises(PayloadError, match="when decoded"):
        decode_payload(sent, nbytes(arguments) - 1)
    codes = received[0]["entries"][0]["codes"]
    assert torch.equal(codes[5], torch.arange(7))
    for key, value in again[0]["entries"][0]["codes"].items():
        assert torch.equal(value, codes[key])
    first = sent[0]["entries"][0]["codes"]
    assert first[6][ENCODED] == "int4", "codes in place of images"
    assert first[4][ENCODED] == "webp-75"
    assert torch.is_tensor(first[5])


def test_a_key_that_would_be_mistaken_for_an_encoding_is_refused() -> None:
    with pytest.raises(PayloadError, match="must not have the key"):
        codec("fedavg").transmit({ENCODED: torch.ones(3)}, "client_update", "up", 0)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_several_clients_are_sent_is_encoded_once(
    rounding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    encode = wire_codec.encode_tensor

    def noted(tensor: Any, encoding: str, **options: Any) -> Any:
        made.append(encoding)
        return encode(tensor, encoding, **options)

    monkeypatch.setattr(wire_codec, "encode_tensor", noted)
    wire = Wire(codec=codec("fedavg", rounding=rounding))
    w = {"weight": torch.randn(20, 50)}
    with wire.during_call(1):
        received = [wire.carry((w,), "client_update", k, "down")[0]["weight"] for k in range(3)]
    assert made == ["int8"]
    received[0].zero_()
    assert torch.equal(received[1], received[2])
    assert received[1].abs().sum() > 0, "each client has its own copy"
    assert set(wire.take_bytes().values()) == {20 * 50 + 20 * 4}
    with wire.during_call(2):
        other = wire.carry((w,), "client_update", 0, "down")[0]["weight"]
    assert len(made) == 2
    assert torch.equal(other, received[1]) == (rounding == "nearest")


def test_answers_of_several_clients_are_rounded_independently() -> None:
    coder = codec("fedavg", rounding="stochastic")
    w = {"weight": torch.randn(20, 50)}
    one, other = (coder.transmit(w, "client_update", "up", k)[0]["weight"] for k in range(2))
    assert not torch.equal(one, other)


def test_infinity_is_found_before_it_is_encoded() -> None:
    wire = Wire(codec=codec("fedavg"))
    bad = {"weight": torch.full((20, 50), float("inf"))}
    for carry in (
        lambda: wire.carry((bad,), "client_update", 0, "down"),
        lambda: wire.encode((bad,), "client_update", 0, 1),
    ):
        with pytest.raises(PayloadError, match=r"client_update\[0\]\.weight holds NaN or infinity"):
            carry()
    assert not wire.take_bytes()
