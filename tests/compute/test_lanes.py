"""Tracks, without a GPU: a stream is whatever it is."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch

from barter.compute.lanes import Track


class Owner:
    """All of a lane that a track knows."""

    device = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority, object()))
    monkeypatch.setattr(Track, "idle", defaultdict(list))


def track(owner: Any, priority: int = 0) -> Track:
    return Track.for_lane(owner, priority)


def test_a_track_is_taken_over_when_its_owner_is_gone() -> None:
    one, two, urgent = Owner(), Owner(), Owner()
    first, second, ahead = track(one), track(two), track(urgent, -1)
    assert len({id(first), id(second), id(ahead)}) == 3
    del one, urgent
    three, four = Owner(), Owner()
    assert track(three) is first, "and not the one of another priority"
    assert track(four) is not second, "whose owner is there yet"
    assert track(Owner(), -1) is ahead


def test_a_track_has_one_thread_for_all_of_its_owners() -> None:
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()
    names = []
    for _ in range(3):
        owner = Owner()
        mine = track(owner)
        mine.submit(lambda: seen.put(threading.get_ident()))
        names.append(seen.get(timeout=60))
        del owner
    assert len(set(names)) == 1
    assert names[0] != threading.get_ident()


def test_what_a_job_holds_is_given_back_when_it_is_done() -> None:
    gone = threading.Event()

    class Held:
        def __call__(self) -> None: ...

        def __del__(self) -> None:
            gone.set()

    owner = Owner()
    track(owner).submit(Held())
    assert gone.wait(timeout=60)
