"""The oracle exchange is DFFKE with private images in the place of decoded ones."""

from __future__ import annotations

import torch

from barter.core.images import Augment, prepare_batch
from barter.engines.local import LocalEngine
from benchmarks.oracle import OracleExchange
from tests.conftest import TINY, small_federation, tiny


def test_transfer_images_are_the_private_images() -> None:
    fields = {**TINY["dffke"], "share": 0.5}
    oracle = small_federation(OracleExchange(**fields))
    dffke = small_federation(tiny("dffke", share=0.5))
    for experiment in (oracle, dffke):
        experiment.step()
    assert isinstance(oracle.engine, LocalEngine)
    assert isinstance(dffke.engine, LocalEngine)
    for k, client in oracle.engine.clients.items():
        index, images = oracle.algorithm.transfer_images(client, 1)
        assert torch.equal(index, dffke.engine.clients[k].offered[1]), "the same images are offered"
        private = prepare_batch(client.data.pixels[index], client.data.spec, Augment())
        assert torch.equal(images, private.half().float())
    # Weights and embeddings stay with the clients: the server decodes nothing.
    assert not oracle.server.decoder
    assert not oracle.server.docking
