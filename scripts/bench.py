#!/usr/bin/env python3
"""How long an answer takes, in units of one eager training step, beside other ways to find the same operation.

    python scripts/bench.py [--sizes small large] [--faults forward backward masked] [--masks] [--repeats 5] [--threads 1]
    python scripts/bench.py --guard [--repeats 200]

Two transformers (12 layers of width 256; 6 layers of width 1024; batch 4 x 128) carry a fault in the layer three quarters up: a
logarithm of zero in the forward pass, or a square root at zero that only the backward pass notices. With `--masks` every layer
masks the padding of its keys with -inf, which is meant; the fault `masked` is one query that sees no key, in that layer alone or,
as `masked everywhere`, in each. Every row is measured in the same process, the rows in turn, and printed as the median of its ratio
to the eager step (forward and backward) measured beside it.
With `--guard`, healthy training steps with and without a guard take turns instead.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from guarded import measure_guard
from torch import nn
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from bisect_nan import Snapshot, locate
from bisect_nan.recording.capture import record

SIZES = {"small": (12, 256), "large": (6, 1024)}
FAULTS = ("forward", "backward", "masked", "masked everywhere")
BATCH, TOKENS, VOCABULARY, HEADS = 4, 128, 512, 8


class Block(nn.Module):
    """A pre-norm transformer block; the faulty one adds a term that is zero, or minus infinity, at one position."""

    def __init__(self, width: int, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, hole: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Return x after attention and a feed-forward layer.

        Args:
            x: (batch, tokens, width).
            hole: (batch, tokens, 1), 0 where the fault lies, else 1.
            padding: bool (batch, 1, 1, tokens), the keys that are not looked at.
        """
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (width // HEADS) ** 0.5
        if padding is not None:
            hidden = padding | (hole == 0)[:, None] if self.fault == "masked" else padding
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        x = x + self.down(F.gelu(self.up(self.between(x))))
        if self.fault == "forward":
            x = x + 1e-3 * torch.log(x.sigmoid() * hole)
        if self.fault == "backward":
            x = x + torch.sqrt(x.sigmoid() * hole)
        return x


class Transformer(nn.Module):
    """Embedding, blocks and a head."""

    def __init__(self, layers: int, width: int, fault: str) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        everywhere, kind = fault.endswith("everywhere"), fault.removesuffix(" everywhere")
        faults = [kind if everywhere or i == layers * 3 // 4 else "" for i in range(layers)]
        self.blocks = nn.ModuleList(Block(width, own) for own in faults)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor, hole: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of ids (batch, tokens)."""
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, hole, padding)
        return self.head(self.norm(x))


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of next-token prediction."""
    logits = model(batch["ids"], batch["hole"], batch.get("padding"))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def eager(model: nn.Module, batch: Any) -> None:
    """One training step without the optimizer."""
    model.zero_grad()
    step(model, batch).backward()


class _Found(Exception):  # noqa: N818  (no error: the way out of a scan)
    """The scan has its answer."""


class Scan(TorchDispatchMode):
    """Looks at the output of every call; stops at the first that is bad (and, for a birth, has only finite inputs)."""

    def __init__(self, bad: Callable[[torch.Tensor], bool], *, birth: bool = False) -> None:
        super().__init__()
        self.bad, self.birth = bad, birth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        healthy = not self.birth or not any(self._any(item) for item in [*args, *(kwargs or {}).values()])
        result = func(*args, **(kwargs or {}))
        if healthy and self._any(result):
            raise _Found
        return result

    def _any(self, item: Any) -> bool:
        if isinstance(item, list | tuple):
            return any(self._any(part) for part in item)
        return isinstance(item, torch.Tensor) and item.is_floating_point() and item.numel() > 0 and self.bad(item)


def by_isfinite(tensor: torch.Tensor) -> bool:
    """The check that people write."""
    return not bool(torch.isfinite(tensor).all())


def by_aminmax(tensor: torch.Tensor) -> bool:
    """The fastest check of one tensor."""
    low, high = torch.aminmax(tensor)
    return not (float("-inf") < float(low) and float(high) < float("inf"))


def scanned(mode: TorchDispatchMode) -> Callable[[nn.Module, Any], None]:
    """Return the eager step under a scan."""

    def run(model: nn.Module, batch: Any) -> None:
        with contextlib.suppress(_Found), mode:
            eager(model, batch)

    return run


def debug_mode(model: nn.Module, batch: Any) -> None:
    """Torch's DebugMode with a norm of every output, which keeps NaN."""
    with DebugMode() as mode, DebugMode.log_tensor_hashes("norm"):
        eager(model, batch)
    assert mode.operators


def anomaly(model: nn.Module, batch: Any) -> None:
    """Torch's anomaly mode: it raises where a derivative is NaN, and says nothing of the forward pass."""
    with contextlib.suppress(RuntimeError), torch.autograd.set_detect_anomaly(True):
        eager(model, batch)


def rows(model: nn.Module, batch: Any, path: Path) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    return {
        "recording the whole step": lambda: record(model, batch, step),
        "locate from a saved snapshot": lambda: locate(Snapshot.load(path), remedies=False),
        "the same, and a remedy executed": lambda: locate(Snapshot.load(path)),
        "capture + locate": lambda: locate(Snapshot.capture(model, batch, step), remedies=False),
        "scan, isfinite().all()": lambda: scanned(Scan(by_isfinite))(model, batch),
        "scan, aminmax": lambda: scanned(Scan(by_aminmax))(model, batch),
        "birth scan, aminmax": lambda: scanned(Scan(by_aminmax, birth=True))(model, batch),
        "DebugMode, norm hashes": lambda: debug_mode(model, batch),
        "detect_anomaly": lambda: anomaly(model, batch),
    }


def seconds(run: Callable[[], Any]) -> float:
    """Return the wall time of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(size: str, fault: str, repeats: int, *, masks: bool) -> None:
    """Print one table."""
    layers, width = SIZES[size]
    torch.manual_seed(0)
    model = Transformer(layers, width, fault)
    hole = torch.ones(BATCH, TOKENS, 1)
    hole[2, 17] = 0.0
    batch = {"ids": torch.randint(0, VOCABULARY, (BATCH, TOKENS)), "hole": hole}
    if masks or fault.startswith("masked"):
        lengths = torch.linspace(TOKENS // 2, TOKENS, BATCH).long()
        batch["padding"] = (torch.arange(TOKENS) >= lengths[:, None])[:, None, None, :]
    with tempfile.TemporaryDirectory() as folder:
        path = Snapshot.capture(model, batch, step).save(Path(folder) / "crash.safetensors")
        finding = locate(Snapshot.load(path))
        measured = rows(model, batch, path)
        ratios: dict[str, list[float]] = {name: [] for name in measured}
        for run in [lambda: eager(model, batch), *measured.values()]:
            run()
        for _ in range(repeats):
            for name, run in measured.items():
                unit = seconds(lambda: eager(model, batch))
                ratios[name].append(seconds(run) / unit)
    culprit = finding.culprit
    print(
        f"\n{layers} layers of width {width}, {fault} fault: {culprit.cause if culprit else finding.verdict.name}"
        f" at {culprit.source if culprit else '?'}, {finding.search.nodes} nodes, {finding.search.executed} executed by the search,"
        f" {finding.search.replayed} replayed, {finding.search.probes} probes"
    )
    print("eager step (forward, backward) = 1")
    for name, found in ratios.items():
        print(f"  {name:30} {statistics.median(found):5.2f}   ({min(found):.2f} to {max(found):.2f})")


def main() -> int:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["forward", "backward"])
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--guard", action="store_true", help="what a guard costs a healthy training")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {options.threads} thread(s), median of {options.repeats} (min to max)"
    )
    if options.guard:
        measure_guard(options.repeats)
        return 0
    for size in options.sizes:
        for fault in options.faults:
            measure(size, fault, options.repeats, masks=options.masks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
