"""What a watched script trains, learnt while it runs: its models by their outermost calls, its batches from its data loaders."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter  # torch 2.6 to 2.13

from bisect_nan.finding import Phase
from bisect_nan.recording.naming import batch_tensors, name_tensors
from bisect_nan.recording.recorder import Recorder


class Names:
    """The models that a script has called, and the batch that it has loaded last.

    The parameters of the first model go by their own names; those of a further one (a discriminator) behind the name of its class.

    Attributes:
        paths: The path of every module of the models.
        held: The buffers that a recorder was told of last.
    """

    def __init__(self) -> None:
        """Start with nothing known."""
        self.paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.held: dict[str, torch.Tensor] = {}
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._batch: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def meet(self, module: nn.Module) -> bool:
        """Return whether a module that the script calls is a model which was not known, and remember it."""
        holds = next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
        if module in self.paths or not holds:
            return False
        parts = set(module.modules())
        models = [model for ref in self._models if (model := ref()) is not None and model not in parts]
        models.append(module)
        self._models = [weakref.ref(model) for model in models]
        for prefix, model in self._prefixed():
            self.paths.update({part: (prefix + path).rstrip(".") for path, part in model.named_modules()})
        return True

    def models(self) -> list[nn.Module]:
        """Return the models that are still there."""
        return [model for ref in self._models if (model := ref()) is not None]

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer."""
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of all models, and then those that only an optimizer knows."""
        found: dict[str, torch.Tensor] = {}
        for prefix, model in self._prefixed():
            found |= {prefix + name: parameter for name, parameter in model.named_parameters()}
        known = {id(parameter) for parameter in found.values()}
        for place, ref in enumerate(self._optimizers):
            optimizer, prefix = ref(), f"optimizer {place}, " if place else ""
            for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
                names = [f"{prefix}param_groups[{number}].params[{at}]" for at in range(len(group["params"]))]
                found |= {n: p for n, p in zip(names, group["params"], strict=True) if id(p) not in known}
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of all models."""
        return {prefix + name: b for prefix, model in self._prefixed() for name, b in model.named_buffers()}

    def tell(self, recorder: Recorder) -> None:
        """Tell a recorder the names of all that is known."""
        self.held = self.buffers()
        name_tensors(recorder, self.parameters(), self.held)
        self.tell_batch(recorder)

    def tell_batch(self, recorder: Recorder) -> None:
        """Tell a recorder the names of the batch's tensors."""
        for name, ref in self._batch:
            tensor = ref()
            if tensor is not None:
                recorder.values.name(tensor, Phase.INPUT, name)

    def load(self, batch: Any) -> None:
        """Remember a batch that a data loader has returned."""
        self._batch = [(name, weakref.ref(tensor)) for name, tensor in batch_tensors(batch)]

    def _prefixed(self) -> Iterator[tuple[str, nn.Module]]:
        used: set[str] = set()
        for place, model in enumerate(self.models()):
            prefix = name = f"{type(model).__name__}." if place else ""
            while prefix in used:
                prefix = f"{name[:-1]}{len(used)}."
            used.add(prefix)
            yield prefix, model


@contextlib.contextmanager
def loading(
    aside: Callable[[], contextlib.AbstractContextManager[None]], loaded: Callable[[Any], None]
) -> Iterator[None]:
    """Notice what data loaders return.

    Args:
        aside: Makes the context in which they work.
        loaded: Told every batch.
    """
    plain: Any = _BaseDataLoaderIter.__next__

    @functools.wraps(plain)
    def fetch(iterator: Any) -> Any:
        with aside():
            batch = plain(iterator)
        loaded(batch)
        return batch

    _BaseDataLoaderIter.__next__ = fetch  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _BaseDataLoaderIter.__next__ = plain  # type: ignore[method-assign]
