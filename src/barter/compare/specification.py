"""Specify a comparison: variants, seeds and question, by file or options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from barter.core.errors import ConfigError
from barter.core.params import did_you_mean
from barter.setup.config import COMPARISON, Config, resolve, with_settings

__all__ = ["TABLE", "ComparisonSpec", "combine_sweeps", "parse_seeds", "parse_variants"]

TABLE = COMPARISON  # the table of a configuration file that specifies a comparison


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as 0-4 or 0,3,7-9; a seed that occurs twice counts once.

    Raises:
        ConfigError: The text is malformed, or a range is empty or has more than 1,000 seeds.
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        if found is None or not 0 <= int(found[2] or found[1]) - int(found[1]) < 1000:
            raise ConfigError(
                f"seeds {text!r}: write numbers and ranges of at most 1,000, such as 0-4 or 0,3,7-9"
            )
        seeds += range(int(found[1]), int(found[2] or found[1]) + 1)
    return list(dict.fromkeys(seeds))


def parse_variants(text: str) -> dict[str, list[str]]:
    """Parse variants such as local,dffke:preset=paper into names with settings.

    A key without a dot is a field of the method: preset=paper becomes algorithm.preset=paper.

    Returns:
        Name of the variant, such as "dffke, preset=paper" -> settings `key=value`, of which the
        first is algorithm.name. Empty for an empty text.

    Raises:
        ConfigError: A variant occurs twice.
    """
    variants: dict[str, list[str]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        # A colon begins a field if a key and = follow. Other colons belong to a name such as
        # my.module:Method, or to a value.
        name, *fields = re.split(r":(?=[\w.]+=)", part)
        settings = [
            field if "." in field.partition("=")[0] else f"algorithm.{field}" for field in fields
        ]
        label = ", ".join([name, *fields])
        if label in variants:
            raise ConfigError(f"{label!r} is asked for twice")
        variants[label] = [f"algorithm.name={name}", *settings]
    return variants


def combine_sweeps(
    variants: Mapping[str, Sequence[str]], sweeps: Sequence[str]
) -> dict[str, list[str]]:
    """Combine every variant with every value of each sweep.

    Args:
        variants: Name -> settings.
        sweeps: Texts such as algorithm.tau=0.8,0.9.

    Returns:
        Name with the chosen values, such as "dffke, tau=0.8" -> settings, the chosen ones last.
        Without sweeps, the variants.

    Raises:
        ConfigError: A sweep is malformed.
    """
    choices = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not all(part.strip() for part in [key, *values.split(",")]):
            raise ConfigError(
                f"--vary {sweep!r}: write key=value,value such as algorithm.tau=0.8,0.9"
            )
        choices.append([f"{key.strip()}={choice.strip()}" for choice in values.split(",")])
    combined = {}
    for name, settings in variants.items():
        for chosen in product(*choices):
            labels = [choice.removeprefix("algorithm.") for choice in chosen]
            combined[", ".join([name, *labels])] = [*settings, *chosen]
    return combined


@dataclass(frozen=True)
class ComparisonSpec:
    """The specification of a comparison."""

    variants: dict[str, list[str]]  # name -> settings
    seeds: list[int]
    base: dict[str, Any]  # plain values of the configuration that all variants share
    settings: list[str]  # settings of all variants
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
    ) -> ComparisonSpec:
        """Combine a file's values with those of the command line, which take precedence.

        Only a variant's own settings and its values of sweeps win over --set.

        Args:
            tree: The plain values of a configuration file.
            methods: The value of --algorithms.
            seeds: The value of --seeds; None for the seeds or the seed of the file, or else 0-2.
            settings: The values of --set.
            sweeps: The values of --vary.
            asked: Baseline, metric and target of the command line, or None for each.
            only: The variants to run; empty for all.

        Raises:
            ConfigError: A value is malformed or unknown.
        """
        table = tree.get(TABLE, {})
        base = {key: item for key, item in tree.items() if key not in (TABLE, "seed")}
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
        all_sweeps = [*map(str, table.get("vary", [])), *sweeps]
        variants = combine_sweeps({**named, **parse_variants(methods)}, all_sweeps)
        for name in only:
            if name not in variants:
                raise ConfigError(f"there is no variant {name!r}: {did_you_mean(name, variants)}")
        variants = {name: own for name, own in variants.items() if name in only or not only}
        for setting in [*settings, *(setting for own in variants.values() for setting in own)]:
            key = setting.partition("=")[0].strip()
            if key == "seed" or (key == "rounds" and setting not in settings):
                raise ConfigError(
                    f"{setting}: all methods have the same rounds (--set rounds=...) and seeds "
                    "(--seeds)"
                )
        chosen = seeds or table.get("seeds") or (str(tree["seed"]) if "seed" in tree else "0-2")
        question = {key: table[key] for key in ("baseline", "metric", "target") if key in table}
        if only and question.get("baseline") not in variants:
            question.pop("baseline", None)  # The file's baseline is not among the chosen variants.
        question |= {key: item for key, item in asked.items() if item is not None}
        return cls(variants, parse_seeds(chosen), base, list(settings), question)

    def configurations(self) -> dict[str, Config]:
        """Return the configuration of each variant; `seeds` are not in it.

        Raises:
            ConfigError: A setting is malformed, its key unknown or its value out of range; the
                message names the variant.
        """
        configurations = {}
        for name, own in self.variants.items():
            try:
                configurations[name] = resolve(with_settings(self.base, [*self.settings, *own]))
            except ConfigError as error:
                raise ConfigError(f"variant {name!r}: {error}") from None
        return configurations
