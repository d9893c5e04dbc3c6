"""What is to be compared: variants and seeds, from a file and the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from barter.core.errors import ConfigError
from barter.core.params import did_you_mean
from barter.setup.config import COMPARISON, Config, resolve, with_settings

__all__ = ["TABLE", "Request", "seeds_of", "variants_of", "varied"]

TABLE = COMPARISON  # of a configuration: what is compared


def seeds_of(text: str) -> list[int]:
    """The seeds of a text such as 0-4 or 0,3,7-9."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        if found is None or not 0 <= int(found[2] or found[1]) - int(found[1]) < 1000:
            raise ConfigError(
                f"seeds {text!r}: write numbers and ranges of at most 1,000, such as 0-4 or 0,3,7-9"
            )
        seeds += range(int(found[1]), int(found[2] or found[1]) + 1)
    return list(dict.fromkeys(seeds))


def variants_of(text: str) -> dict[str, list[str]]:
    """Variants from a text such as local,dffke:preset=paper:share=0.3; a field without a table is the method's."""
    variants: dict[str, list[str]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        # A colon begins a field if a key and = follow; others belong to a name such as my.module:Method, or to a value.
        name, *fields = re.split(r":(?=[\w.]+=)", part)
        settings = [
            field if "." in field.partition("=")[0] else f"algorithm.{field}" for field in fields
        ]
        label = ", ".join([name, *fields])
        if label in variants:
            raise ConfigError(f"{label!r} is asked for twice")
        variants[label] = [f"algorithm.name={name}", *settings]
    return variants


def varied(variants: Mapping[str, Sequence[str]], sweeps: Sequence[str]) -> dict[str, list[str]]:
    """Every variant with every value of each sweep, such as algorithm.tau=0.8,0.9."""
    choices = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not all(part.strip() for part in [key, *values.split(",")]):
            raise ConfigError(
                f"--vary {sweep!r}: write key=value,value such as algorithm.tau=0.8,0.9"
            )
        choices.append([f"{key.strip()}={choice.strip()}" for choice in values.split(",")])
    return {
        ", ".join([name, *(choice.removeprefix("algorithm.") for choice in chosen)]): [
            *settings,
            *chosen,
        ]
        for name, settings in variants.items()
        for chosen in product(*choices)
    }


@dataclass(frozen=True)
class Request:
    """What is to be compared: variants by name with their settings, on top of one configuration."""

    variants: dict[str, list[str]]
    seeds: list[int]
    base: dict[str, Any]  # a configuration's plain values
    settings: list[str]  # for all variants
    question: dict[str, Any]  # metric, baseline and target, where they are given

    @classmethod
    def of(
        cls,
        tree: Mapping[str, Any],
        methods: str,
        seeds: str | None,
        settings: Sequence[str],
        sweeps: Sequence[str],
        asked: Mapping[str, Any],
        only: Sequence[str] = (),
    ) -> Request:
        """From a file's values and what the command line adds to them or puts in their place."""
        table, base = (
            tree.get(TABLE, {}),
            {key: item for key, item in tree.items() if key not in (TABLE, "seed")},
        )
        kinds = {
            dict: "a table",
            str: "a text",
            list: "a list of texts",
            float: "a number such as 0.8",
        }
        known = {
            "variants": dict,
            "seeds": str,
            "vary": list,
            "baseline": str,
            "metric": str,
            "target": float,
        }
        if not isinstance(table, Mapping):
            raise ConfigError(f"{TABLE} is a table: write [{TABLE}] and its keys below it")
        for key, item in table.items():
            if key not in known:
                raise ConfigError(f"[{TABLE}] has the unknown {key}: there are {', '.join(known)}")
            if not isinstance(item, known[key]):
                raise ConfigError(f"{TABLE}.{key}={item!r}: must be {kinds[known[key]]}")
        named = table.get("variants", {})
        if not all(
            isinstance(own, list) and all(isinstance(s, str) for s in own) for own in named.values()
        ):
            raise ConfigError(
                f'[{TABLE}.variants] names lists of settings, such as small = ["algorithm.share=0.1"]'
            )
        every = varied(
            {**named, **variants_of(methods)}, [*map(str, table.get("vary", [])), *sweeps]
        )
        for name in only:
            if name not in every:
                raise ConfigError(f"there is no variant {name!r}: {did_you_mean(name, every)}")
        every = {name: own for name, own in every.items() if name in only or not only}
        for setting in [*settings, *(setting for own in every.values() for setting in own)]:
            key = setting.partition("=")[0].strip()
            if key == "seed" or (key == "rounds" and setting not in settings):
                raise ConfigError(
                    f"{setting}: all methods have the same rounds (--set rounds=...) and seeds (--seeds)"
                )
        chosen = seeds or table.get("seeds") or (str(tree["seed"]) if "seed" in tree else "0-2")
        question = {key: table[key] for key in ("baseline", "metric", "target") if key in table}
        if only and question.get("baseline") not in every:
            question.pop("baseline", None)  # the file's, which was left out
        question |= {key: item for key, item in asked.items() if item is not None}
        return cls(every, seeds_of(chosen), base, list(settings), question)

    def configurations(self) -> dict[str, Config]:
        """What each variant runs with; an error says which one it is of."""
        found = {}
        for name, own in self.variants.items():
            try:
                found[name] = resolve(with_settings(self.base, [*self.settings, *own]))
            except ConfigError as error:
                raise ConfigError(f"variant {name!r}: {error}") from None
        return found
