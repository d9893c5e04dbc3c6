"""From other machines, only what sites need."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.superlink import main as superlink

from barter.flower.gate import Gate


def status(path: str, client: tuple[str, int] | None, kind: str = "http") -> Any:
    """What a request gets: the application's answer, or the gate's."""
    said: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        said.append("let in")

    async def send(message: Any) -> None:
        said.append(message.get("status", message.get("code")))

    asyncio.run(Gate(application)({"type": kind, "path": path, "client": client}, None, send))
    return said[0]


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/pull-task-input", "/docs", "/v1/fleet"])
def test_only_this_machine_may_control(path: str) -> None:
    for stranger in (("10.0.0.7", 1), ("2001:db8::1", 1), ("somewhere", 1), None):
        assert status(path, stranger) == 403
        assert status(path, stranger, "websocket") == 1008
    for home in (("127.0.0.1", 1), ("::1", 1)):
        assert status(path, home) == "let in"


def test_sites_may_come_from_anywhere() -> None:
    assert status("/v1/fleet/pull-messages", ("10.0.0.7", 1)) == "let in"


def test_flower_keeps_its_routes_where_the_gate_looks_for_them() -> None:
    prefixes = {router.prefix for router in (superlink.fleet_router, superlink.control_router)}
    assert prefixes == {"/v1/fleet", "/v1/control"}
    assert callable(superlink._get_middleware)
