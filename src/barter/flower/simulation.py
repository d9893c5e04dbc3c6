"""The ClientApp of Flower's simulation, whose process serves several sites."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from barter.flower.client_app import from_records, to_records
from barter.flower.codec import decode, encode
from barter.flower.consent import Consent
from barter.flower.handshake import Setup, foreign_networks, make_site
from barter.flower.site import Site
from barter.setup.config import read_run_values, resolve

__all__ = ["app"]

app = ClientApp()


@cache
def _site(folder: Path, k: int) -> Site:
    """Return site k of a run, cached in this process.

    If another process has served the site since, its memory is restored from disk.
    """
    config = resolve(read_run_values(folder, "run.toml"))
    # The user who starts the simulation starts its sites too.
    consent = Consent(models=tuple(foreign_networks(config)))
    setup = Setup(name=f"client-{k}", share=k, device=config.device, consent=consent)
    return make_site(setup, folder / "memory" / str(k))


@app.query("hello")
@app.train("call")
def answer_in_simulation(message: Message, context: Context) -> Message:
    """Answer a server's message as the site of the node's partition.

    The node of partition k (`partition-id`, from 0) is site k of the run in the folder that
    `run_config["folder"]` names. Torch computes with one thread in this process. `Site.answer`
    reports errors of a call in its reply.
    """
    torch.set_num_threads(1)
    site = _site(Path(str(context.run_config["folder"])), int(context.node_config["partition-id"]))
    request = decode(from_records(message.content))
    reply = encode(site.answer(request))
    return Message(to_records(reply), reply_to=message)
