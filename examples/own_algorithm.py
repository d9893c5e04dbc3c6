"""A new method in one file: clients trade what they think of each class, on average.

Run it here, or by the command line from this folder:

    barter run --algorithm own_algorithm:ClassLogits --set rounds=2
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from barter import Algorithm, Client, Clients, Crossing, Experiment, Server
from barter.core.contracts import Counts, Floats
from barter.core.evaluation import predict
from barter.core.params import Count, NonNegative, Positive
from barter.ops.distill import kl
from barter.ops.fit import Trainer, adam, epoch_length, index_batches

# What a client answers, or is refused: a row of logits for each class, and how many images it has of the class.
Means: TypeAlias = tuple[
    Annotated[Tensor, Floats("classes", "classes")], Annotated[Tensor, Counts("classes")]
]


class Board(Server):
    """The server remembers the mean logits of every class; nothing before the first round."""

    logits: list[Tensor] = []


@dataclass(frozen=True, kw_only=True)
class ClassLogits(Algorithm[Board]):
    """Federated distillation by the mean logits of each class."""

    crosses = {
        "learn": Crossing(
            down="the mean logits of every class",
            up="the client's own, and how many images they come from",
        ),
    }

    epochs: Count = 5  # E: local epochs
    weight: NonNegative = 1.0  # λ: weight of the distillation term
    lr: Positive = 1e-3  # η: Adam's learning rate
    batch_size: Count = 50  # B: images per step

    def round(self, server: Board, clients: Clients, t: int) -> None:
        answers = clients.run(self.learn, server.logits)
        sums = sum(means * counts[:, None] for means, counts in answers.values())
        total = sum(counts for _, counts in answers.values())
        server.logits = [torch.as_tensor(sums) / torch.as_tensor(total).clamp_min(1)[:, None]]

    def learn(self, client: Client, targets: list[Tensor]) -> Means:
        data, model = client.data, client.model
        trainer = Trainer.of(model, adam(self.lr))
        batches = index_batches(len(data), self.batch_size, client.device)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            logits = model(x)
            distilled = kl(targets[0][y], logits) if targets else 0.0
            return F.cross_entropy(logits, y) + self.weight * distilled

        model.train()
        for _ in client.track(range(self.epochs * epoch_length(len(data), self.batch_size))):
            index = next(batches)
            trainer.step(loss, data.batch(index, augmented=True), data.labels[index])
        everything = torch.arange(len(data), device=client.device)
        logits, counts = predict(model.eval(), data.batch, everything), data.class_counts()
        sums = logits.new_zeros(len(counts), logits.shape[1]).index_add(0, data.labels, logits)
        return sums / counts.clamp_min(1)[:, None], counts


if __name__ == "__main__":
    for r in Experiment(ClassLogits(), clients=5).rounds(2):
        print(f"round {r.round}: {r.mean('global'):.1%}, {r.traffic('up')} bytes up")
