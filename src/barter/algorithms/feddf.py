"""FedDF: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, Algorithms 1
and 3 (arXiv:2006.07242).

Clients train; the server averages the models of each architecture, and lets each average learn from the mean logits
of all clients' models on unlabelled public images. So networks of one kind learn from those of another.

- Everybody has the fused model of its architecture when a round ends, also clients that did not train in it. An
  architecture that nobody trained in a round stays as it is.
- The paper distils for up to 10,000 steps and ends early by a validation set, which there is not here: the default has
  fewer steps, preset "paper" all of them. The rate falls to zero along a cosine, as in the authors' code; that also
  clips gradients at 5, which the paper does not say and this does not.
- All clients' models count alike among the teachers, and by their images in the average of weights, as in the paper.
- The paper trains clients for 20 and more epochs, with a rate of its own for each network.
- Fused models keep the normalisation statistics of public images, on which they were trained last, as in the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from barter.compute import lanes
from barter.core.algorithm import Algorithm
from barter.core.clients import Clients, Replies
from barter.core.evaluation import note_before, predict
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State
from barter.ops.average import Average, average
from barter.ops.ensemble import consensus, distil, drawn, logit_loss, public_images
from barter.ops.fit import adam, fit, sgd

__all__ = ["FedDF"]


@dataclass(frozen=True, kw_only=True)
class FedDF(Algorithm):
    """Models of one architecture are averaged, and learn from all models on public images."""

    replicas = True
    crosses = {
        "learn": "up: the client's weights",
        "receive": "down: the fused weights of the client's architecture",
    }
    presets = {"paper": {"epochs": 20, "distil_steps": 10_000, "lr": 0.1}}

    fraction: Fraction = 1.0  # C: share of clients per round
    epochs: Count = 5  # local epochs; the paper has 20 and more
    batch_size: Count = 64  # private images per step
    lr: Positive = 0.05  # η: learning rate of the clients' SGD; 0.1 for the paper's ResNets
    samples: Count | None = None  # public images per round, drawn anew in each; none is all
    # N: steps of each fused model on public images; up to 10,000 in the paper
    distil_steps: Count = 200
    distil_batch: Count = 128  # public images per step
    distil_lr: Positive = 1e-3  # Adam's learning rate on public images, falling to zero
    # of what comes back: by numbers of images, or what few clients cannot move
    average: Average = "mean"

    @property
    def needs_public_data(self) -> bool:
        return True

    def round(self, server: Server, clients: Clients, t: int) -> None:
        updates = clients.sample(self.fraction).run(self.learn)
        images, places = public_images(server), drawn(public_images(server), self.samples)
        said = [predict(server.replica(k, w), images.batch, places) for k, w in updates.items()]
        trained = {
            name: [k for k in updates if server.names[k] == name]
            for name in map(server.names.get, updates)
        }
        fused = {
            name: self.fused(server, updates, who, places, consensus(said))
            for name, who in trained.items()
        }
        theirs = {k: fused[server.names[k]] for k in clients if server.names[k] in fused}
        clients.only(theirs).scatter(self.receive, theirs)

    def learn(self, client: Client) -> State:
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
        note_before(client)
        return client.model.state_dict()

    def fused(
        self,
        server: Server,
        updates: Replies[State],
        who: Sequence[int],
        places: Tensor,
        ensemble: Tensor,
    ) -> State:
        """The average of these clients' models, after it has learned from the ensemble of all (Eq. 1)."""
        name, first = server.names[who[0]], who[0]
        student = lanes.kept(
            ("student", name), lambda: server.architectures[first]().to(server.device)
        )
        theirs = Replies({k: updates[k] for k in who}, updates.num_examples, {})
        student.load_state_dict(average(theirs, by=self.average))
        distil(
            student,
            public_images(server),
            places,
            [ensemble],
            logit_loss,
            batch_size=self.distil_batch,
            recipe=adam(self.distil_lr, cosine=True),
            steps=self.distil_steps,
            track=partial(server.track, f"distil {name}"),
        )
        return student.state_dict()

    def receive(self, client: Client, w: State) -> None:
        client.model.load_state_dict(w)
