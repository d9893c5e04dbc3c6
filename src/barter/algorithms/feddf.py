"""FedDF: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, Algorithms 1
and 3 (arXiv:2006.07242).

One round:

1. Sampled clients train on their own data and upload their weights.
2. The server computes the mean logits of all uploaded models on unlabelled public images.
3. For each architecture, the server averages the weights of its models, and the average learns
   from the mean logits. So networks of one architecture learn from those of the others.
4. All clients receive the fused weights of their architecture, including clients that did not
   train in this round. An architecture that no client trained stays as it is.

Differences from the paper:

- `distil_steps`: the paper distils for up to 10,000 steps and stops early by a validation set,
  which is not available here. The default has fewer steps; preset "paper" has all of them.
- Gradients are not clipped. The authors' code clips them at 5, which the paper does not mention.
- `epochs`, `lr`: the paper trains clients for 20 and more epochs, with a learning rate for each
  network.

As in the paper, all models have the same weight in the ensemble, and the average of weights is
weighted by numbers of images. As in the authors' code, the learning rate of distillation falls to
zero along a cosine, and fused models keep the normalisation statistics of public images, on which
they were trained last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from barter.compute import lanes
from barter.core.algorithm import Algorithm, Crossing, ServerModel
from barter.core.clients import Clients, Replies
from barter.core.evaluation import predict, record_before_exchange
from barter.core.model import Classifier
from barter.core.nodes import Client, Server
from barter.core.params import Count, Fraction, Positive
from barter.core.payload import State
from barter.ops.average import Average, average
from barter.ops.ensemble import (
    distil,
    logit_loss,
    mean_predictions,
    public_images,
    sample_index,
    select_teachers,
)
from barter.ops.fit import adam, fit, sgd

__all__ = ["FedDF"]


@dataclass(frozen=True, kw_only=True)
class FedDF(Algorithm):
    """Average models per architecture; distil the ensemble of all on public images."""

    server_model = ServerModel("copies")
    aggregates = ("states", "logits")
    crosses = {
        "learn": Crossing(up="the client's weights"),
        "receive": Crossing(down="the fused weights of the client's architecture"),
    }
    presets = {"paper": {"epochs": 20, "distil_steps": 10_000, "lr": 0.1}}

    fraction: Fraction = 1.0  # C: fraction of clients sampled per round
    epochs: Count = 5  # local epochs; the paper has 20 and more
    batch_size: Count = 64  # private images per step
    lr: Positive = 0.05  # η: learning rate of the clients' SGD; 0.1 for the paper's ResNets
    samples: Count | None = None  # public images per round, sampled anew each time; none: all
    # N: steps of each fused model on public images; up to 10,000 in the paper
    distil_steps: Count = 200
    distil_batch: Count = 128  # public images per step
    distil_lr: Positive = 1e-3  # Adam's learning rate on public images, falling to zero
    # aggregation of updates: mean weighted by image counts, or robust (median, trimmed mean)
    average: Average = "mean"

    @property
    def needs_public_data(self) -> bool:
        return True

    def round(self, server: Server, clients: Clients, t: int) -> None:
        updates = clients.sample(self.fraction).run(self.learn)
        public = public_images(server)
        index = sample_index(public, self.samples)
        predictions = {
            k: predict(server.replica(k, w), public.batch, index) for k, w in updates.items()
        }
        ensemble = mean_predictions(list(predictions.values()))
        teachers = set(select_teachers(predictions))
        fused: dict[str, State] = {}
        for architecture, group in _group_by_architecture(server, updates).items():
            # The weights of a few models of one architecture do not show which of them to trust;
            # the predictions of all models do. A group of none of these still learns from them.
            members = [k for k in group if k in teachers] or group
            fused[architecture] = self.fuse_models(server, updates, members, index, ensemble)
        receivers = {k: fused[server.names[k]] for k in clients if server.names[k] in fused}
        clients.only(receivers).scatter(self.receive, receivers)

    def learn(self, client: Client) -> State:
        """Train the client's network on its own data and return its weights.

        The metrics before the exchange are reported.
        """
        fit(client, epochs=self.epochs, batch_size=self.batch_size, recipe=sgd(self.lr))
        record_before_exchange(client)
        return client.model.state_dict()

    def fuse_models(
        self,
        server: Server,
        updates: Replies[State],
        members: Sequence[int],
        index: Tensor,
        ensemble: Tensor,
    ) -> State:
        """Average an architecture's models; distil the ensemble into the average (Eq. 1).

        Args:
            server: The server, with the public images.
            updates: The weights of all clients that trained.
            members: The clients of this architecture whose models are averaged, weighted by their
                numbers of images.
            index: The public images of this round.
            ensemble: Mean logits of all models on these images.

        Returns:
            The weights of the fused model.
        """
        first = members[0]
        architecture = server.names[first]

        def build() -> Classifier:
            return server.architectures[first]().to(server.device)

        student = lanes.lane_module(("student", architecture), build)
        student.load_state_dict(average(updates.only(members), by=self.average))
        distil(
            student,
            public_images(server),
            index,
            [ensemble],
            logit_loss,
            batch_size=self.distil_batch,
            recipe=adam(self.distil_lr, cosine=True),
            steps=self.distil_steps,
            track=partial(server.track, f"distil {architecture}"),
        )
        return student.state_dict()

    def receive(self, client: Client, w: State) -> None:
        """Load the fused weights of the client's architecture."""
        client.model.load_state_dict(w)


def _group_by_architecture(server: Server, clients: Iterable[int]) -> dict[str, list[int]]:
    """Return the clients of each architecture, in the given order."""
    groups: dict[str, list[int]] = {}
    for k in clients:
        groups.setdefault(server.names[k], []).append(k)
    return groups
