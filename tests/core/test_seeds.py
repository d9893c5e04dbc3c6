from __future__ import annotations

import torch

from barter.core import seeds


def draw(*path: object, seed: int = 0) -> list[float]:
    with seeds.scope(seed, *path):
        return torch.rand(3).tolist()


def test_equal_paths_give_equal_streams_and_others_do_not() -> None:
    paths = [(1, "learn", 0), (1, "learn", 1), (2, "learn", 0), (1, "teach", 0)]
    drawn = {path: draw(*path) for path in paths}
    assert {path: draw(*path) for path in reversed(paths)} == drawn
    assert len({tuple(values) for values in drawn.values()}) == len(paths)
    assert draw(1, "learn", 0, seed=1) != drawn[1, "learn", 0]


def test_the_state_outside_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    first = torch.rand(1)
    draw("anything")
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_the_stream_is_the_same_on_every_machine() -> None:
    assert seeds.stream_seed(0, 1, "learn", 2) == 8750833248890617680
