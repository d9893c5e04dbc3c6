"""What two programs with as many threads each as there are cores cost each other, by how threads wait.

    python benchmarks/threads.py

Prints milliseconds of a training step, of a program by itself and of two at the same time, with threads that spin while
they wait (OpenMP's usual way) and with threads that soon sleep, as barter has them. Writes results/threads.json.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

OUT = Path(__file__).parent / "results" / "threads.json"
STEPS = 100
WAYS = {
    "spin": {"OMP_WAIT_POLICY": "active"},
    "soon sleep": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"},
}
STEP = f"""
import time, torch
from torch import nn
model = nn.Sequential(
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)
optimizer, x = torch.optim.Adam(model.parameters(), fused=True), torch.randn(100, 16, 8, 8)
for step in range({STEPS} + 10):
    if step == 10:
        start = time.perf_counter()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
print(1000 * (time.perf_counter() - start) / {STEPS})
"""


def milliseconds(programs: int, way: dict[str, str]) -> float:
    """The mean over so many programs that run at the same time."""
    environment = {**os.environ, **way}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", STEP], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(programs)
    ]
    return sum(float(program.communicate()[0]) for program in running) / programs


def main() -> None:
    found = {
        "command": "python benchmarks/threads.py",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
        "date": str(date.today()),
        "milliseconds": {
            name: {str(programs): round(milliseconds(programs, way), 1) for programs in (1, 2)}
            for name, way in WAYS.items()
        },
    }
    text = json.dumps(found, indent=1) + "\n"
    OUT.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
