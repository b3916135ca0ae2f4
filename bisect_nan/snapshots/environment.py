"""What a replay depends on besides the snapshot: the torch build, the machine and torch's settings.

A replay is bit-exact only where all of it agrees; `Environment.differences` says what does not. Settings that this process can
change are taken over by `Environment.applied`.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from bisect_nan.strict_json import checked_text, clean, count, items, wrong
from bisect_nan.strict_json import fields as json_fields

_PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True, slots=True)
class Environment:
    """What results depend on.

    Attributes:
        torch_version: Release of torch (`2.13.0+cpu`).
        machine: Processor architecture (`x86_64`).
        capability: Vector instructions that torch's kernels use (`AVX512`).
        threads: Threads that a kernel may use; sums are split among them.
        devices: Devices of the program with their model (`cuda:0 NVIDIA H100`); the CPU is not listed.
        deterministic: Whether only deterministic algorithms are allowed.
        matmul_precision: What float32 matrix products may be computed in (`highest`, `high`, `medium`).
        default_dtype: What floating-point tensors are made as (`float32`).
        flush_denormal: Whether the calling thread flushes denormal numbers to zero.
        mkldnn: Whether oneDNN kernels are used.
        compiled: Whether the model runs under `torch.compile`; it was recorded eagerly.
    """

    torch_version: str
    machine: str
    capability: str
    threads: int
    devices: tuple[str, ...]
    deterministic: bool
    matmul_precision: str
    default_dtype: str
    flush_denormal: bool
    mkldnn: bool
    compiled: bool = False

    @classmethod
    def here(cls, devices: Iterable[torch.device] = (), *, compiled: bool = False) -> Self:
        """Describe this process.

        Args:
            devices: Those that the program uses.
            compiled: Whether the model runs under `torch.compile`.
        """
        smallest = torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64)
        return cls(
            torch_version=torch.__version__,
            machine=platform.machine(),
            capability=torch.backends.cpu.get_cpu_capability(),
            threads=torch.get_num_threads(),
            devices=tuple(sorted({_describe(device) for device in devices if device.type not in ("cpu", "meta")})),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
            flush_denormal=bool(smallest / 2 == 0),
            mkldnn=bool(torch.backends.mkldnn.enabled),
            compiled=compiled,
        )

    def differences(self, other: Environment) -> tuple[str, ...]:
        """Return what differs between this environment, where a step was recorded, and another one, each as a sentence."""
        found = []
        for field in fields(self):
            if field.name not in _SENTENCES:
                continue
            there, here = getattr(self, field.name), getattr(other, field.name)
            if there != here:
                found.append(_SENTENCES[field.name].format(there=_words(there), here=_words(here)))
        return tuple(found)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give this process the recorded settings for a while.

        These are the default dtype, the precision of matrix products, deterministic algorithms, the flushing of denormals and,
        where the machine has as many processors, the number of threads.
        """
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        here = type(self).here()
        with contextlib.ExitStack() as undo:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            undo.callback(torch.set_float32_matmul_precision, here.matmul_precision)
            undo.callback(torch.set_flush_denormal, here.flush_denormal)
            undo.callback(torch.set_num_threads, here.threads)
            if self.deterministic != here.deterministic:  # the call imports Inductor, which takes a second
                undo.callback(torch.use_deterministic_algorithms, here.deterministic, warn_only=warn_only)
                torch.use_deterministic_algorithms(self.deterministic, warn_only=warn_only)
            torch.set_default_dtype(getattr(torch, self.default_dtype))
            torch.set_float32_matmul_precision(self.matmul_precision)
            torch.set_flush_denormal(self.flush_denormal)
            if 0 < self.threads <= (os.cpu_count() or 1):
                torch.set_num_threads(self.threads)
            yield

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the JSON form.

        Raises:
            SnapshotError: A field is missing, unknown or of the wrong type.
        """
        data = json_fields(data, "environment", [field.name for field in fields(cls)])
        for key in ("deterministic", "flush_denormal", "mkldnn", "compiled"):
            if not isinstance(data[key], bool):
                raise wrong(f"environment, {key}", data[key], "true or false")
        for key in ("torch_version", "machine", "capability"):
            checked_text(data[key], f"environment, {key}")
        if data["matmul_precision"] not in _PRECISIONS:
            raise wrong("environment, matmul_precision", data["matmul_precision"], f"one of {', '.join(_PRECISIONS)}")
        if data["default_dtype"] not in _DEFAULT_DTYPES:
            raise wrong("environment, default_dtype", data["default_dtype"], f"one of {', '.join(_DEFAULT_DTYPES)}")
        count(data["threads"], "environment, threads", 2**31)
        devices = tuple(
            checked_text(item, "environment, devices") for item in items(data["devices"], "environment, devices")
        )
        return cls(**{**data, "devices": devices})


_DEFAULT_DTYPES = ("float32", "float64", "float16", "bfloat16")
"""What `torch.set_default_dtype` takes."""

_SENTENCES = {
    "torch_version": "Recorded with torch {there}, this is torch {here}.",
    "machine": "Recorded on a {there} processor, this is {here}.",
    "capability": "Recorded with {there} kernels, this processor has {here}.",
    "threads": "Recorded with {there} threads, this process has {here}.",
    "devices": "Recorded on {there}, this is {here}.",
    "deterministic": "Deterministic algorithms were {there}, and are {here} in this process.",
    "matmul_precision": "The precision of float32 matrix products was {there}, and is {here} in this process.",
    "default_dtype": "The default dtype was {there}, and is {here} in this process.",
    "flush_denormal": "Flushing of denormal numbers was {there}, and is {here} in this process.",
    "mkldnn": "oneDNN kernels were {there}, and are {here} in this process.",
}


def _describe(device: torch.device) -> str:
    """Return a device with its model, where torch knows it."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " and ".join(value) or "the CPU"
    return str(value)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [clean(item) for item in value]
    return clean(value) if isinstance(value, str) else value
