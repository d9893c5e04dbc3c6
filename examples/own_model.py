"""Two networks of one's own, made into Classifiers by splitting them at their last Linear layer.

A factory is called with the task's spec, and its weights come from the run's seed: the numbers are the same every time.
"""

from torch import nn

from barter import DFFKE, Experiment
from barter.core.images import Spec


def wide(spec: Spec) -> nn.Module:
    pixels = spec.channels * spec.height * spec.width
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 256), nn.ReLU(), nn.Linear(256, spec.classes)
    )


def deep(spec: Spec) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(spec.channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, spec.classes),
    )  # fmt: skip


if __name__ == "__main__":
    method = DFFKE(max_epochs=20, share=0.1, decoder_steps=10, exchange_steps=10)
    experiment = Experiment(method, models=[wide, deep, "small-cnn"], clients=4)
    for r in experiment.rounds(1):
        for k, metrics in r.clients.items():
            print(f"client {k} ({experiment.architectures[k]}): {metrics['global']:.1%}")
