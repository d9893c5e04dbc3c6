"""Listings come from the sources; they say what the registries hold."""

from __future__ import annotations

import dataclasses

from barter.algorithms import ALGORITHMS
from barter.core.metrics import Evaluation
from barter.core.wire_settings import WireSettings
from barter.data.partition import PARTITIONS
from barter.data.sources import PATH_SOURCES, SOURCES
from barter.data.task import Data
from barter.engines.adversaries import Adversaries
from barter.engines.network import Network
from barter.models.families import FAMILIES
from barter.models.zoo import ZOO
from barter.privacy import Privacy
from barter.setup.catalogue import LISTINGS, known_keys
from barter.setup.config import Config


def test_listings_are_the_registries() -> None:
    listed = {what: dict(rows()) for what, rows in LISTINGS.items()}
    assert listed["algorithms"] == {
        name: (kind.__doc__ or "").split("\n")[0] for name, kind in ALGORITHMS.items()
    }
    assert listed["partitions"] == {name: kind.summary for name, kind in PARTITIONS.items()}
    assert listed["datasets"] == {
        name: text for name, (_, text) in (SOURCES | PATH_SOURCES).items()
    }
    assert listed["families"] == {name: ", ".join(members) for name, members in FAMILIES.items()}
    assert list(listed["models"]) == list(ZOO)
    for model, families in listed["models"].items():
        assert {*families.removeprefix("in ").split(", ")} - {""} == {
            f for f, m in FAMILIES.items() if model in m
        }


def test_known_keys_are_the_fields() -> None:
    tables = {
        "algorithm": ALGORITHMS.values(),
        "partition": PARTITIONS.values(),
        "data": [Data],
        "privacy": [Privacy],
        "evaluate": [Evaluation],
        "adversaries": [Adversaries],
        "network": [Network],
        "wire": [WireSettings],
    }
    fields = {
        f"{table}.{f.name}"
        for table, kinds in tables.items()
        for kind in kinds
        for f in dataclasses.fields(kind)
    }
    top = {f.name for f in dataclasses.fields(Config)} - tables.keys()
    chosen = {"algorithm.name", "algorithm.preset", "partition.name", "network.preset"}
    assert known_keys() == top | fields | chosen
