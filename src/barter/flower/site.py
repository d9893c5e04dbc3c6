"""A site: one client that lives where its data lives, answers calls, and keeps its memory on disk."""

from __future__ import annotations

import json
import logging
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from barter.compute.precision import Precision, using
from barter.core.clients import Failure
from barter.core.errors import BarterError, CheckpointError, PrivacyError
from barter.core.files import replace_text, replacing, understood
from barter.core.nodes import Client, Monitor, Silence
from barter.core.payload import Payload
from barter.engines.local import LocalEngine
from barter.flower.consent import Consent
from barter.privacy.side_information import EPSILON
from barter.runs import checkpoint

__all__ = ["Site"]

EVALUATE = "evaluate"
RUN = re.compile(r"[0-9a-f]{16}")
log = logging.getLogger("barter")


class Site:
    """Answers what a server asks. A call is done once: asked again, it is answered again.

    `introduce` says who is here for a run's configuration; `settle` makes the client of a session. A site that is
    `quiet` says nothing in evaluations but what it has spent: accuracies tell of images, and are in no account.
    """

    def __init__(
        self,
        name: str,
        memory: Path,
        introduce: Callable[[str], Payload],
        settle: Callable[[Payload], tuple[LocalEngine, Precision]],
        consent: Consent | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self.consent, self.quiet = consent or Consent(), quiet
        self.name, self.memory, self.introduce, self.settle = name, memory, introduce, settle
        self.monitor: Monitor = Silence()  # who is told how far a call is
        self.session: Payload = None
        self.stamp = 0  # of the memory on disk that this one is
        self.round, self.key, self.reply = 0, [], None  # type: int, list[Payload], Payload
        # report and modes before an evaluation
        self.unseen: tuple[dict[str, float], list[bool]] | None = None

    def answer(self, request: Payload) -> Payload:
        """The answer to a request; what goes wrong here is said there."""
        if request["ask"] == "hello":
            try:
                return {"hello": self.introduce(request["config"])}
            except Exception as error:
                return self._went_wrong(error, f"site {self.name} cannot take part: ")
        try:
            return self._call(request)
        except Exception as error:
            self.session = None  # whatever was begun, the next call starts from the disk
            return self._went_wrong(error)

    def _call(self, request: Payload) -> Payload:
        session, round, method = request["session"], request["round"], request["method"]
        key = [session["attempt"], round, method, request["before"]]
        self._take_up(session)
        if key == self.key:
            return self.reply
        if method not in (*self.engine.algorithm.crosses, EVALUATE):
            raise BarterError(
                f"{method!r} is not answered: it is none of the methods that are said to cross"
            )
        self.consent.require_size(self.name, request["args"])
        if round > self.round and self._now.exists():
            self._keep_start()
        k, client = session["client"], self.client
        if (
            self.unseen is not None and round == self.round
        ):  # the evaluation was not the round's last word
            client.report, modes = self.unseen
            for part, training in zip(client.model.modules(), modes, strict=True):
                part.training = training
        self.unseen = None
        self.engine.round = round
        self.engine.tested = request.get("tested", True)
        self.engine.repeat(method, k, request["before"])
        client.released |= {
            name: max(n, client.released.get(name, 0)) for name, n in self._left().items()
        }
        with using(self.precision):
            replies = self.engine.call(method, {k: request["args"]}, alone=request["alone"])
            if k in replies:
                answer = self._said(replies[k]) if method == EVALUATE else replies[k]
                reply: Payload = {"answer": answer, EPSILON: client.report.get(EPSILON)}
                if request["evaluate"]:
                    self.unseen = (
                        dict(client.report),
                        [part.training for part in client.model.modules()],
                    )
                    found = self.engine.call(EVALUATE, {k: ()})
                    reply["evaluation"] = self._said(found[k]) if k in found else None
            else:
                reply = self._why(replies.failures[k])
        self.round, self.key, self.reply = round, key, reply
        self._note_left(client.released)
        self._save()
        return reply

    def _why(self, failure: Failure) -> Payload:
        """What went wrong; a site that is quiet says its kind, and its budget: messages may quote a label."""
        kind = failure.error.partition(":")[0]
        if not self.quiet:
            return {"error": failure.error, "traceback": failure.traceback}
        if kind == PrivacyError.__name__:
            return {"error": failure.error, "traceback": "", "quiet": True}
        log.warning("%s\n%s", failure.error, failure.traceback)
        return {
            "error": f"{kind}, of which the site says no more: its log does",
            "traceback": "",
            "quiet": True,
        }

    def _went_wrong(self, error: Exception, where: str = "") -> Payload:
        """What went wrong around a call; what barter itself refuses is said by every site, for it quotes no image."""
        if isinstance(error, BarterError):
            return {"error": f"{where}{error}", "traceback": "", "quiet": self.quiet}
        told = self._why(
            Failure(0, "", 0, f"{type(error).__name__}: {error}", traceback.format_exc())
        )
        return {**told, "error": f"{where}{told['error']}"}

    def _said(self, evaluation: dict[str, float]) -> dict[str, float]:
        return {
            name: value for name, value in evaluation.items() if not self.quiet or name == EPSILON
        }

    @property
    def client(self) -> Client:
        (client,) = self.engine.clients.values()
        return client

    def _take_up(self, session: Payload) -> None:
        """Be the client of this session, with the memory it had when the server's last finished round was done."""
        if self.session == session and self.stamp == self._written():
            return
        if not RUN.fullmatch(str(session["run"])):
            raise CheckpointError(f"{session['run']!r} is no name of a run")
        self.engine, self.precision = self.settle(session)
        self.engine.watched = self.monitor
        self.data = self.client.data.fingerprint()
        self.session, self.round, self.key, self.reply, self.unseen = session, 0, [], None, None
        found = self._find(session)
        self.stamp = self._written()
        if found is None:
            return
        state, notes = found
        client, self.round = self.client, int(notes["round"])
        if notes["data"] != self.data:
            raise CheckpointError(
                f"site {self.name} does not have the data that it began this run with"
            )
        client.recall(state["memory"])
        client.report = state["report"]
        for part, training in zip(client.model.modules(), state["modes"], strict=True):
            part.training = training
        for parameter, trained in zip(client.model.parameters(), state["trained"], strict=True):
            parameter.requires_grad_(trained)
        if notes["attempt"] == session["attempt"]:
            self.key, self.reply = state["key"], state["reply"]
            self.unseen = None if state["unseen"] is None else tuple(state["unseen"])

    def _find(self, session: Payload) -> tuple[Payload, dict[str, str]] | None:
        """What is remembered of the run: the newest that the server's checkpoint knows of too.

        What the server took back is forgotten, so that it cannot be mistaken for the start of a round.
        """
        known, rounds = dict(session["history"]), []
        for path in (self._now, self._start):
            if path.exists():
                state, notes = checkpoint.read(path, torch.device("cpu"))
                attempt, round = notes["attempt"], int(notes["round"])
                if attempt == session["attempt"] or 0 < round <= known.get(attempt, 0):
                    if path == self._start:
                        path.rename(self._now)
                    return state, notes
                rounds.append(notes["round"])
        if rounds and any(known.values()):
            raise CheckpointError(
                f"the server goes on behind round {max(known.values())}, and all that this site remembers of the run "
                f"is of rounds {', '.join(sorted(rounds))} that were taken back: start a new run"
            )
        for path in (self._now, self._start):
            path.unlink(missing_ok=True)
        return None

    @property
    def _now(self) -> Path:
        return self.memory / str(self.session["run"]) / "now.safetensors"

    @property
    def _start(self) -> Path:
        return self._now.with_name("start.safetensors")

    @property
    def _account(self) -> Path:
        return self._now.with_name("released.json")

    def _left(self) -> dict[str, int]:
        """How often each protected part has left here. What has left has left: a round that the server takes back
        is done again with new noise, and counts twice."""
        return (
            understood(self._account, lambda text: dict(json.loads(text)))
            if self._account.exists()
            else {}
        )

    def _note_left(self, released: dict[str, int]) -> None:
        if released and released != self._left():
            self._account.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._account, json.dumps(released))

    def _keep_start(self) -> None:
        """What is remembered now is what the round that begins started from."""
        with replacing(self._start) as temporary:
            temporary.unlink(missing_ok=True)
            os.link(self._now, temporary)

    def _save(self) -> None:
        client = self.client
        self._now.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "memory": client.memory(),
            "report": client.report,
            "modes": [part.training for part in client.model.modules()],
            "trained": [parameter.requires_grad for parameter in client.model.parameters()],
            "key": self.key,
            "reply": self.reply,
            "unseen": None if self.unseen is None else list(self.unseen),
        }
        origin = {"round": str(self.round), "attempt": self.session["attempt"], "data": self.data}
        checkpoint.write(self._now, state, origin)
        self.stamp = self._written()

    def _written(self) -> int:
        """When the memory was last written, by this process or, in a simulation, by another."""
        return self._now.stat().st_mtime_ns if self._now.exists() else 0
