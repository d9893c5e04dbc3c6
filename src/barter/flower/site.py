"""A site: one client with its data, which answers calls and saves its memory."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from barter.compute.precision import Precision, use_precision
from barter.core.clients import Failure
from barter.core.errors import BarterError, CheckpointError, PrivacyError
from barter.core.files import replace_file
from barter.core.nodes import Client, Monitor, Silence
from barter.core.params import build_dataclass
from barter.core.payload import Payload, pack
from barter.core.wire_codec import WireCodec, decode_payload
from barter.core.wire_settings import WireSettings
from barter.engines.local import LocalEngine
from barter.flower.consent import Consent
from barter.privacy.guard import Guard, TotalBudget
from barter.privacy.ledger import LEDGER, Ledger, RunAccount
from barter.privacy.prices import NOTHING, Description, describe_part, merge_accounts, total_epsilon
from barter.privacy.side_information import EPSILON, ERRORS, PIXELS, RESULTS, holds_metrics
from barter.runs import checkpoint
from barter.setup.config import RESULT_FREE, first_difference, parse_toml, with_defaults

__all__ = ["Site"]

EVALUATE = "evaluate"
# What the server learns of a failure, whatever the reason: the reason may depend on a label.
FAILED = "the call failed; the reason is in the site's log (logs/worker.log)"
RUN = re.compile(r"[0-9a-f]{16}")
log = logging.getLogger("barter")


class Site:
    """A server of requests for one client, whose memory is on disk.

    A call is computed once: if it is asked again, the saved reply is sent again. The answer to a
    method that is asked once in a run (`Algorithm.once`) outlasts rounds that the server rolls
    back: it is sent again, too, and not released anew.

    Args:
        name: The site's name.
        memory: The folder for the client's memory of each run.
        introduce: Returns the site's hello for a run's configuration (TOML).
        settle: Builds the engine of one client, and its precision, for a session.
        consent: The site's limits; none: no limits beyond the defaults.
        ledger: The file of what all runs released; none: in the folder `memory`.
        budget: The total ε of all runs in the ledger, and its δ; none: no limit.
        quiet: Send nothing but the spent privacy budget in evaluations. Accuracies reveal
            something about the images, and the privacy account does not include them.
    """

    def __init__(
        self,
        name: str,
        memory: Path,
        introduce: Callable[[str], Payload],
        settle: Callable[[Payload], tuple[LocalEngine, Precision]],
        consent: Consent | None = None,
        *,
        ledger: Path | None = None,
        budget: TotalBudget | None = None,
        quiet: bool = False,
    ) -> None:
        self.name = name
        self.memory = memory
        self.ledger = Ledger(ledger or memory / LEDGER, memory)
        self.budget = budget
        self.introduce = introduce
        self.settle = settle
        self.consent = consent or Consent()
        self.quiet = quiet
        self.monitor: Monitor = Silence()  # receives the progress of calls
        self.session: Payload = None
        self.codec: WireCodec | None = None  # encodes answers; none: they are sent as they are
        # Modification time of the file on disk that the state in this process equals.
        self.stamp = 0
        self.round = 0
        self.key: list[Payload] = []  # identifies the last call: attempt, round, method, index
        self.reply: Payload = None  # the reply to that call
        # Method of `Algorithm.once` that was answered -> a hash of its arguments and of the data.
        self.sent_for: dict[str, str] = {}
        # Report and training modes before an evaluation that was sent with the last reply.
        self.unseen: tuple[dict[str, float], list[bool]] | None = None

    def answer(self, request: Payload) -> Payload:
        """Return the reply to a request, "hello" or a call, as a payload tree.

        An error becomes a reply with the key "error". After a failed call, the next one restores the
        client from disk.
        """
        if request.get("ask") == "hello":
            try:
                self._require_budget()
                hello = self.introduce(request["config"])
                self._note_hello(hello)
                return {"hello": hello}
            except Exception as error:
                return self._error_reply(error, f"site {self.name} cannot take part: ")
        try:
            return self._call(request)
        except Exception as error:
            # The state in this process may be incomplete: the next call restores it from disk.
            self.session = None
            return self._error_reply(error)

    def _call(self, request: Payload) -> Payload:
        """Run a method of the algorithm, save the client's memory, return the reply.

        A call that was answered before is not run again: its reply is repeated. The requested
        evaluation is run at once, and sent along. What the call releases is in the ledger before it
        returns.

        Raises:
            BarterError: If the algorithm does not declare the method, the request is too large
                for the consent, or the session does not fit. Errors of the client's own computation
                become part of the reply.
        """
        session = request["session"]
        round = request["round"]
        method = request["method"]
        key = [session["attempt"], round, method, request["before"]]
        self._restore(session)
        if key == self.key:
            return self.reply
        if method not in (*self.engine.algorithm.crosses, EVALUATE):
            raise BarterError(
                f"{method!r} is not answered: the algorithm's `crosses` does not name it"
            )
        self.consent.require_size(self.name, request["args"])
        args = decode_payload(request["args"], path=method)
        if round > self.round and self._now.exists():
            self._keep_start()
        k = session["client"]
        client = self.client
        if self.unseen is not None and round == self.round:
            # The evaluation sent with the last reply was not the end of the round: undo it.
            client.report, modes = self.unseen
            self._set_modes(modes)
        self.unseen = None
        self.engine.round = round
        self.engine.tested = request.get("tested", True)
        self.engine.repeat(method, k, request["before"])
        before = self._load_account(client)
        guard = self._guard
        request_hash = hash_payload([self.data, request["args"]])
        if self.sent_for.get(method, request_hash) != request_hash:
            raise PrivacyError(
                f"site {self.name} does not answer {method!r} again: it answers this call once in a "
                "run, and was sent other arguments or had other data then; start a new run"
            )
        with use_precision(self.precision):
            replies = self.engine.call(method, {k: args}, local_only=request["alone"])
            if k in replies:
                answer = replies[k]
                if method == EVALUATE:
                    answer = self._without_results(answer)
                elif self.codec is not None:
                    # The privacy guard has protected it before: noise is added to exact values.
                    answer = self.codec.encode(answer, method, "up", k, round)
                reply: Payload = {"answer": answer, EPSILON: client.report.get(EPSILON)}
                if request["evaluate"]:
                    self.unseen = (dict(client.report), self._modes())
                    evaluations = self.engine.call(EVALUATE, {k: ()})
                    reply["evaluation"] = (
                        self._without_results(evaluations[k]) if k in evaluations else None
                    )
            else:
                reply = self._failure_reply(replies.failures[k])
        self.round = round
        self.key = key
        self.reply = reply
        self._write_account(before, method)
        if method in guard.sent_once and method not in self.sent_for:
            # After the ledger, so that every answer that can be repeated has been counted.
            self.sent_for[method] = request_hash
            self._sent.parent.mkdir(parents=True, exist_ok=True)
            state = {"answers": guard.sent_once, "requests": self.sent_for}
            checkpoint.write_checkpoint(self._sent, state, {})
        self._save()
        return reply

    def _failure_reply(self, failure: Failure) -> Payload:
        """Return the reply for a failed computation, and log the reason here.

        The server learns that the call failed and nothing else: the type of an error, its message
        and its place may all depend on an image. Errors about the privacy budget depend only on the
        account, and are sent in full.
        """
        log.warning("%s\n%s", failure, failure.traceback)
        kind = failure.error.partition(":")[0]
        error = failure.error if kind == PrivacyError.__name__ else FAILED
        return {"error": error, "traceback": "", "quiet": True}

    def _error_reply(self, error: Exception, where: str = "") -> Payload:
        """Return the reply for an error outside the client's own computation.

        Barter's own errors here are sent in full: they are about the run, the site's settings and
        its disk, and quote no image.
        """
        if isinstance(error, BarterError):
            log.warning("%s%s", where, error)
            return {"error": f"{where}{error}", "traceback": "", "quiet": True}
        failure = Failure(0, "", 0, f"{type(error).__name__}: {error}", traceback.format_exc())
        reply = self._failure_reply(failure)
        return {**reply, "error": f"{where}{reply['error']}"}

    def _without_results(self, evaluation: dict[str, float]) -> dict[str, float]:
        """Return an evaluation; that of a quiet site has only the ε spent."""
        return {
            name: value for name, value in evaluation.items() if not self.quiet or name == EPSILON
        }

    @property
    def client(self) -> Client:
        """Return the one client of the engine."""
        (client,) = self.engine.clients.values()
        return client

    @property
    def _guard(self) -> Guard:
        """Return the guard of this run's answers, which every site has."""
        assert self.engine.guard is not None
        return self.engine.guard

    def _modes(self) -> list[bool]:
        """Return for each module of the client's model whether it is in training mode."""
        return [part.training for part in self.client.model.modules()]

    def _set_modes(self, modes: Iterable[bool]) -> None:
        """Set each module of the client's model to training or evaluation mode."""
        for part, training in zip(self.client.model.modules(), modes, strict=True):
            part.training = training

    def _restore(self, session: Payload) -> None:
        """Build the client of this session, and restore its memory from disk.

        The memory is the newest that the server's checkpoint knows of, see `_find`.

        Raises:
            CheckpointError: If the memory does not match the session or the site's data.
        """
        if self.session == session and self.stamp == self._modified_at():
            return
        if not RUN.fullmatch(str(session["run"])):
            raise CheckpointError(f"{session['run']!r} is not the id of a run")
        self.engine, self.precision = self.settle(session)
        self._require_same_settings(session)
        self.codec = self._make_codec(session)
        self.engine.watched = self.monitor
        self.data = self.client.data.fingerprint()
        self.session = session
        self.round = 0
        self.key = []
        self.reply = None
        self.unseen = None
        self._load_sent()
        found = self._find(session)
        self.stamp = self._modified_at()
        if found is None:
            return
        state, notes = found
        client = self.client
        self.round = checkpoint.round_of(self._now, notes)
        if notes["data"] != self.data:
            raise CheckpointError(
                f"site {self.name} does not have the data that it began this run with"
            )
        client.recall(state["memory"])
        client.report = state["report"]
        self._set_modes(state["modes"])
        for parameter, trained in zip(client.model.parameters(), state["trained"], strict=True):
            parameter.requires_grad_(trained)
        if notes["attempt"] == session["attempt"]:
            self.key = state["key"]
            self.reply = state["reply"]
            self.unseen = None if state["unseen"] is None else tuple(state["unseen"])

    def _load_sent(self) -> None:
        """Read this site's earlier answers to methods of `Algorithm.once`, if there are any.

        The guard gets the answers, and `sent_for` the hashes of their requests. Both outlast rounds
        that the server rolls back.
        """
        guard = self._guard
        self.sent_for = {}
        if self._sent.exists():
            state, _ = checkpoint.read_checkpoint(self._sent, torch.device("cpu"))
            guard.sent_once = state["answers"]
            self.sent_for = state["requests"]

    def _make_codec(self, session: Payload) -> WireCodec | None:
        """Return what encodes this site's answers, as the session's configuration says."""
        config = with_defaults(parse_toml(session["config"]))
        settings = build_dataclass(WireSettings, config["wire"], "wire.")
        if settings.is_exact:
            return None
        return WireCodec(self.engine.algorithm, settings, self.engine.seed)

    def _find(self, session: Payload) -> tuple[Payload, dict[str, str]] | None:
        """Return the newest saved state that the server knows of, and its notes.

        The server's checkpoint must include its round. A state of rounds that the server has rolled
        back is deleted, so that it cannot be mistaken for the start of a round.

        Returns:
            State and notes; None if there is none and the run begins.

        Raises:
            CheckpointError: If the server has finished rounds and no saved state matches them.
        """
        last_rounds = dict(session["history"])  # earlier attempt -> its last round that counts
        rolled_back = []
        for path in (self._now, self._start):
            if path.exists():
                state, notes = checkpoint.read_checkpoint(path, torch.device("cpu"))
                attempt = notes["attempt"]
                round = checkpoint.round_of(path, notes)
                if attempt == session["attempt"] or 0 < round <= last_rounds.get(attempt, 0):
                    if path == self._start:
                        path.rename(self._now)
                    return state, notes
                rolled_back.append(notes["round"])
        if rolled_back and any(last_rounds.values()):
            raise CheckpointError(
                f"the server resumes after round {max(last_rounds.values())}, and this site only "
                f"has its memory of rounds {', '.join(sorted(rolled_back))}, which were rolled "
                "back: start a new run"
            )
        for path in (self._now, self._start):
            path.unlink(missing_ok=True)
        return None

    @property
    def _now(self) -> Path:
        """Return the file of the current state."""
        return self.memory / str(self.session["run"]) / "now.safetensors"

    @property
    def _start(self) -> Path:
        """Return the file of the state at the start of the current round."""
        return self._now.with_name("start.safetensors")

    @property
    def _sent(self) -> Path:
        """Return the file of answers that are sent once in a run."""
        return self._now.with_name("sent-once.safetensors")

    def _require_budget(self) -> None:
        """Raise PrivacyError if the budget over all runs is spent; no budget is no limit."""
        if self.budget is None:
            return
        spent = total_epsilon(self.ledger.account(), self.budget.delta)
        if spent < self.budget.epsilon:
            return
        message = (
            f"it has spent epsilon = {spent:.4g} of its total budget of {self.budget.epsilon:g}"
        )
        former = ", ".join(map(str, self.ledger.former_accounts()))
        if former:
            message += (
                f"; {former} counts releases without their noise, so that their cost is unknown"
            )
        raise PrivacyError(message)

    def _note_hello(self, hello: Payload) -> None:
        """Note in the ledger, once, that a hello reveals the mean of pixels.

        It does so if the site has data of its own and does not withhold the mean (`careful`). The
        note is not about a run: its id is empty.
        """
        release = describe_part(PIXELS, None)
        is_known = release in self.ledger.runs().get("", RunAccount()).released
        if hello["careful"] or hello["share"] is not None or is_known:
            return
        about = {"method": "hello", "images": hello["examples"], "data": "", "delta": 1.0}
        self.ledger.add("", {release: 1}, about)

    def _require_same_settings(self, session: Payload) -> None:
        """Refuse a session whose configuration is not the one that the run began with.

        The first session of a run binds it to its configuration, in the ledger. Each release would
        have its right price all the same. But a run whose settings change is not the run that this
        site agreed to.

        Raises:
            PrivacyError: If a setting differs that a run cannot change when it is resumed.
        """
        config = parse_toml(session["config"])
        kept = {key: value for key, value in config.items() if key not in RESULT_FREE}
        began_with = self.ledger.bind(session["run"], kept)
        key = first_difference(with_defaults(config), with_defaults(began_with), but=RESULT_FREE)
        if key is not None:
            raise PrivacyError(
                f"site {self.name} does not answer: the server changed {key} of run "
                f"{session['run']} from {_value(began_with, key)} to {_value(config, key)}, and "
                "settings are fixed when a run begins; start a new run"
            )

    def _load_account(self, client: Client) -> dict[str, int]:
        """Raise a client's numbers of releases to the ledger's; return a copy of them.

        A release cannot be undone: a round that the server rolls back is repeated with new noise,
        and counts twice. Unprotected parts are left out. The guard forgets the unprotected parts of
        the last call, and gets the site's budget with what other runs have released.
        """
        runs = dict(self.ledger.runs())
        account = runs.pop(str(self.session["run"]), RunAccount())
        for text, count in account.released.items():
            if Description.read(text).mechanism != NOTHING:
                client.released[text] = max(count, client.released.get(text, 0))
        guard = self._guard
        guard.open_releases = {}
        if self.budget is not None:
            elsewhere = merge_accounts(*(other.released for other in runs.values()))
            guard.total = replace(self.budget, elsewhere=elsewhere)
        return dict(client.released)

    def _write_account(self, before: dict[str, int], method: str) -> None:
        """Append what this call released to the ledger; the reply leaves after that.

        Args:
            before: The client's releases before the call.
            method: The method that was called.
        """
        guard = self._guard
        more = dict(guard.open_releases)
        for text, count in self.client.released.items():
            if count > before.get(text, 0):
                more[text] = count - before.get(text, 0)
        results = [self.reply.get("evaluation")]
        if method == EVALUATE:
            results.append(self.reply.get("answer"))
        if any(result is not None and holds_metrics(result) for result in results):
            more[describe_part(RESULTS, None)] = 1
        if self.reply.get("traceback"):
            more[describe_part(ERRORS, None)] = 1
        if more:
            about = {
                "round": self.round,
                "method": method,
                "images": len(self.client.data),
                "data": self.data,
                "delta": guard.plan.privacy.delta,
            }
            budget = None if self.budget is None else (self.budget.epsilon, self.budget.delta)
            self.ledger.add(str(self.session["run"]), more, about, budget)

    def _keep_start(self) -> None:
        """Keep the current state as the one that the new round started from."""
        with replace_file(self._start) as temporary:
            temporary.unlink(missing_ok=True)
            os.link(self._now, temporary)

    def _save(self) -> None:
        """Write the client's memory, the last call and its reply to disk, atomically."""
        client = self.client
        self._now.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "memory": client.memory(),
            "report": client.report,
            "modes": self._modes(),
            "trained": [parameter.requires_grad for parameter in client.model.parameters()],
            "key": self.key,
            "reply": self.reply,
            "unseen": None if self.unseen is None else list(self.unseen),
        }
        origin = {"round": str(self.round), "attempt": self.session["attempt"], "data": self.data}
        checkpoint.write_checkpoint(self._now, state, origin)
        self.stamp = self._modified_at()

    def _modified_at(self) -> int:
        """Return when the memory was last written, in ns; 0 if never.

        In a simulation, another process may write it.
        """
        return self._now.stat().st_mtime_ns if self._now.exists() else 0


def hash_payload(tree: Payload) -> str:
    """Return a hash of a payload's structure and values, 32 hexadecimal digits."""
    tensors, header = pack(tree)
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for tensor in tensors.values():
        digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _value(tree: Mapping[str, Any], key: str) -> str:
    """Return a value of a configuration as text; dots in its key lead into tables.

    It is "no value" if there is no such key.
    """
    if key in tree:
        return repr(tree[key])
    for name, table in tree.items():
        if isinstance(table, Mapping) and key.startswith(f"{name}."):
            return _value(table, key.removeprefix(f"{name}."))
    return "no value"
