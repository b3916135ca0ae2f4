#!/usr/bin/env python3
"""How much slower a training runs under `bisect-nan watch`, before its first recorded step and from it on.

    python scripts/bench_watch.py [--steps 20] [--repeats 5] [--threads 1]

Three models train with Adam on random data of their own. A plain step, a step that is only counted and looked at, and a recorded one
are measured in turn in one process, and printed as the medians of their ratios to the plain steps measured beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from bisect_nan.watching.watch import Fault, Watch

Step = Callable[[], None]


def training(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    """Return one step of a training with Adam."""
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def perceptron() -> Step:
    """A small model, where the calls cost more than what they compute."""
    model, x, y = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
        torch.randn(32, 64),
        torch.arange(32) % 8,
    )
    return training(model, lambda: F.cross_entropy(model(x), y))


def convolutions() -> Step:
    """Convolutions with batch normalisation."""
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    return training(model, lambda: F.cross_entropy(model(x), y))


def transformer() -> Step:
    """Six layers of width 256 over 4 x 128 tokens."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 6), torch.randn(4, 128, 256)
    return training(model, lambda: model(x).square().mean())


def unexpected(fault: Fault) -> None:
    """Refuse to go on."""
    message = f"step {fault.step} is non-finite"
    raise ArithmeticError(message)


def seconds(step: Step, steps: int, from_step: int | None) -> float:
    """Return how long some steps take: without a watch for None, else under one that records from a step on."""
    watch = None if from_step is None else Watch(from_step=from_step, caught=unexpected)
    if watch is not None:
        watch.start()
    try:
        step()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - start
    finally:
        if watch is not None:
            watch.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| | plain step | before `--from-step` | recorded |")
    print("|---|---|---|---|")
    for build in (perceptron, convolutions, transformer):
        step = build()
        seconds(step, 2, None)
        rows = []
        for _ in range(options.repeats):
            plain = seconds(step, options.steps, None)
            rows.append((plain, seconds(step, options.steps, 10**9) / plain, seconds(step, options.steps, 0) / plain))
        plain, before, recorded = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {build.__name__} | {1e3 * plain / options.steps:.1f} ms | {before:.2f} | {recorded:.2f} |")


if __name__ == "__main__":
    main()
