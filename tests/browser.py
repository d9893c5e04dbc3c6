"""A real browser for tests: Chromium without a window, spoken to over two pipes in its own DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page at a time; all that its console said is in `said`."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        )

        def three_and_four() -> (
            None
        ):  # where Chromium expects the pipes; out of each other's way first
            spare = [os.dup2(end, place) for end, place in ((theirs_in, 30), (theirs_out, 31))]
            for end, place in zip(spare, (3, 4), strict=True):
                os.dup2(end, place)

        self._process = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=three_and_four,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._buffer, self._session, self.said = 0, b"", "", list[str]()
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(found["targetId"] for found in targets if found["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._session = ""
        self.call("Browser.close")
        self._process.wait(timeout=20)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser for something, and note what happens until it answers."""
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._count, "method": method, "params": params, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 20)
            assert part, "the browser is gone"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.said.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.said.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.said.append(str(params["entry"]))
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(
                ("file:", "data:", "blob:")
            ):
                self.said.append(f"asked for {params['request']['url']}")
        return message

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Load a page from disk in a window of this size, until all of it is there."""
        phone = {"deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **phone)
        self.said.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript comes to."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = 20) -> None:
        """Wait for something to be so; a page that is just being left cannot be asked."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(AssertionError):
                if self.value(condition):
                    return
            time.sleep(0.05)
        raise AssertionError(f"after {seconds} s still not: {condition}")

    def hover(self, element: str) -> None:
        """Move the mouse to the middle of an element, which is scrolled into view first."""
        self.value(f"{element}.scrollIntoView({{block: 'center'}})")
        at = self.value(
            f"(e => [e.x + e.width / 2, e.y + e.height / 2])({element}.getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def screenshot(self, path: Path) -> None:
        """The whole page as a picture."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
