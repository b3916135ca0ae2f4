#!/usr/bin/env python3
"""Make the crash files in fixtures/ anew, each by running the model in fixtures/models that its README names.

    python scripts/make_fixtures.py [--into DIR]

The files are recorded as a user would record them: `Snapshot.capture` for one step, `Guard` in a training loop, and `torch.save`
of a dictionary by hand. Two runs give files with the same findings, not with the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from bisect_nan import NonFiniteStep, Snapshot

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures"

CAPTURED = {
    "all_masked_attention": ("encoder", "build"),
    "forward_log_of_zero": ("tagger", "build"),
    "backward_sqrt_at_zero": ("retrieval", "build"),
    "input_nan": ("forecaster", "build"),
    "fp16_overflow": ("decoder", "build"),
    "harmless_masks": ("encoder", "build_healthy"),
}
"""Snapshots of one step: the module in fixtures/models and its function that returns model, batch and step."""


def main() -> int:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--into", type=Path, default=FIXTURES, metavar="DIR", help="where to write (default: fixtures/)"
    )
    for path in make(parser.parse_args().into):
        print(f"{path}  {path.stat().st_size:,} bytes")
    return 0


def make(folder: Path) -> list[Path]:
    """Write all files into a folder and return their paths."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(ROOT):  # reports name files relative to where the step was recorded
        captured = [capture(folder / f"{name}.safetensors", *source) for name, source in CAPTURED.items()]
        return [*captured, guard(folder / "optimizer_eps.safetensors"), *dictionary(folder)]


def model_file(name: str) -> ModuleType:
    """Execute a file of fixtures/models."""
    spec = importlib.util.spec_from_file_location(name, FIXTURES / "models" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def capture(path: Path, module: str, function: str) -> Path:
    """Capture one step."""
    step = getattr(model_file(module), function)()
    return Snapshot.capture(step["model"], step["batch"], step["step"]).save(path)


def guard(path: Path) -> Path:
    """Train under a guard until it raises, and keep what it saved."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        try:
            model_file("recommender").train(Path(folder))
        except NonFiniteStep as fault:
            if fault.path is None:
                raise
            return fault.path.replace(path)
    raise RuntimeError("the training run came out finite")


def dictionary(folder: Path) -> list[Path]:
    """Save what a training script that knows nothing of bisect_nan leaves behind: the failing step's tensors, the weights."""
    torch.manual_seed(0)
    model = model_file("classifier").build()
    images, labels = torch.rand(4, 1, 16, 16), torch.tensor([0, 1, 2, 0])
    images[2] = 0.0  # the lens cap was on
    step = {"step": 812, "input": images, "output": model(images).detach(), "target": labels}
    crash, weights = folder / "crash_step_812.pt", folder / "last.pt"
    torch.save(step, crash)
    torch.save(model.state_dict(), weights)
    return [crash, weights]


if __name__ == "__main__":
    sys.exit(main())
