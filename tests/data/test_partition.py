from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barter.core.errors import ConfigError
from barter.data.partition import (
    PARTITIONS,
    Classes,
    Dirichlet,
    Domains,
    Dominant,
    Iid,
    Partition,
    Quantity,
)


def labels(n: int, classes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).permutation(np.arange(n) % classes)


def nowhere(n: int) -> Any:
    return np.zeros(n, dtype=np.int64)


partitions: st.SearchStrategy[Partition] = st.one_of(
    st.just(Iid()),
    st.builds(
        Dirichlet, alpha=st.floats(1e-3, 100), balanced=st.booleans(), min_samples=st.integers(1, 3)
    ),
    st.builds(Classes, per_client=st.integers(1, 10)),
    st.builds(Dominant, ratio=st.sampled_from(["8:1:1", "6:2:2"])),
    st.builds(Quantity, alpha=st.floats(1e-2, 10), min_samples=st.integers(1, 5)),
)


@given(partitions, st.integers(1, 12), st.integers(40, 300), st.integers(3, 10), st.integers(0, 99))
def test_every_sample_goes_to_one_client_at_most(
    rule: Partition, clients: int, n: int, classes: int, seed: int
) -> None:
    y = labels(n, classes)
    try:
        parts = rule(y, nowhere(n), clients, seed)
    except ConfigError:
        return  # it cannot always be met; what it says then has tests of its own
    assert len(parts) == clients
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert min(map(len, parts)) >= rule.min_samples
    if isinstance(rule, Iid | Dirichlet | Quantity):
        assert len(together) == n
    again = rule(y, nowhere(n), clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_another_seed_is_another_split() -> None:
    y = labels(200, 10)
    one, other = (Dirichlet(alpha=0.5)(y, nowhere(200), 4, seed) for seed in (0, 1))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_alpha_is_skew() -> None:
    y = labels(5000, 10)

    def held(alpha: float, balanced: bool) -> float:
        parts = Dirichlet(alpha=alpha, balanced=balanced)(y, nowhere(5000), 5, 3)
        shares = [np.bincount(y[part], minlength=10) / len(part) for part in parts]
        return float(np.mean([share.max() for share in shares]))

    for balanced in (False, True):
        assert held(0.1, balanced) > held(1.0, balanced) > held(100.0, balanced)
        assert held(100.0, balanced) < 0.15


def test_balanced_clients_are_of_one_size() -> None:
    parts = Dirichlet(alpha=0.1, balanced=True)(labels(1003, 10), nowhere(1003), 10, 0)
    assert {len(part) for part in parts} == {100, 101}
    assert sum(map(len, parts)) == 1003


@pytest.mark.parametrize(
    ("rule", "clients", "n"),
    [
        (Dirichlet(alpha=0.1, min_samples=10), 100, 1400),
        (Dirichlet(alpha=0.001), 50, 1000),
        (Dirichlet(alpha=0.1, min_samples=100), 20, 1000),
        (Iid(min_samples=10), 20, 100),
    ],
)
def test_a_split_that_cannot_be_met_ends_after_some_draws(
    rule: Partition, clients: int, n: int
) -> None:
    with pytest.raises(ConfigError, match=r"min_samples") as caught:
        rule(labels(n, 10), nowhere(n), clients, 0)
    assert "fewer clients" in str(caught.value)


def test_classes_per_client() -> None:
    y = labels(1000, 10)
    parts = Classes(per_client=2)(y, nowhere(1000), 5, 0)
    held = [set(y[part].tolist()) for part in parts]
    assert all(len(h) == 2 for h in held)
    assert set.union(*held) == set(range(10))
    with pytest.raises(ConfigError, match="only 10 classes"):
        Classes(per_client=11)(y, nowhere(1000), 5, 0)


@pytest.mark.parametrize("ratio", ["8:1:1", "6:2:2"])
def test_dominant_ratios_are_met(ratio: Any) -> None:
    y = labels(10_000, 10)
    for part in Dominant(ratio=ratio)(y, nowhere(10_000), 10, 0):
        shares = sorted(
            np.bincount(y[part], minlength=10)[np.bincount(y[part], minlength=10) > 0] / len(part)
        )
        assert shares[::-1] == pytest.approx([int(r) / 10 for r in ratio.split(":")], abs=0.01)


def test_quantity_skews_sizes_not_mixes() -> None:
    y = labels(5000, 5)
    parts = Quantity(alpha=0.5)(y, nowhere(5000), 5, 1)
    sizes = sorted(map(len, parts))
    assert sizes[-1] > 3 * sizes[0]
    big = max(parts, key=len)
    assert np.bincount(y[big]) / len(big) == pytest.approx([0.2] * 5, abs=0.04)


def test_domains_are_kept_apart() -> None:
    domains = np.repeat([0, 1, 2], [30, 60, 90])
    parts = Domains()(labels(180, 5), domains, 6, 0)
    assert [set(domains[part].tolist()) for part in parts] == [{0}, {1}, {2}, {0}, {1}, {2}]
    assert [len(part) for part in parts] == [15, 30, 45, 15, 30, 45]
    with pytest.raises(ConfigError, match="at least 3 clients"):
        Domains()(labels(180, 5), domains, 2, 0)


def test_bad_values_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"partition\.alpha=0\.0: must be float > 0 \(α: concentration"
    ):
        Dirichlet(alpha=0.0)
    assert all(kind.summary for kind in PARTITIONS.values())
