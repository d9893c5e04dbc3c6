"""Two networks of one's own, made into Classifiers by splitting them at their last Linear layer."""

from torch import nn

from barter import DFFKE, Experiment

wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
deep = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip

experiment = Experiment(DFFKE(max_epochs=20, decoder_steps=30), models=[wide, deep], clients=4)
for r in experiment.rounds(1):
    for k, metrics in r.clients.items():
        print(f"client {k} ({experiment.architectures[k]}): {metrics['global']:.1%}")
