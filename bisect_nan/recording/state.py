"""What running a step changes besides the elements of tensors, and how to put it back.

That is attributes, gradients, the batch, optimizer state, and where tensors lie; random generators are in `generators.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves

from bisect_nan import finite
from bisect_nan.errors import BisectNanError
from bisect_nan.recording.generators import ProcessGenerators, state_of
from bisect_nan.recording.holdings import Holdings, copied, nested, own_tensors, plain_tensors, refill
from bisect_nan.recording.shown import Shown


class Surroundings:
    """The Python side of a step, as it was when this object was made; `restore` puts it back, any number of times.

    Covered are the attributes of every module (one level deep: a list that the step appends to, a counter, a reassigned buffer),
    the batch's containers, of every tensor among them its gradient, hooks, `requires_grad` and `.data`, the state, groups and
    attributes of the optimizer, and the generators of torch, Python and NumPy. The elements of tensors are copied only where
    asked for; else somebody else restores those.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        batch: Any = None,
        others: Iterable[torch.Tensor] = (),
        contents: Iterable[torch.Tensor] = (),
        holdings: Holdings | None = None,
    ) -> None:
        """Remember the present state.

        Args:
            model: The module to be trained; anything else has no covered attributes.
            optimizer: Its optimizer, or None.
            batch: Any pytree of tensors and plain values.
            others: Further tensors to cover.
            contents: Tensors whose elements are copied, too.
            holdings: What model and optimizer hold, where it is kept (see `Standing`); read anew without.
        """
        self._held = (Holdings(model, optimizer) if holdings is None else holdings).present()
        more = [*others, *(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))]
        known = self._held.tensors
        self._shown = Shown([*known.values(), *(tensor for tensor in more if id(tensor) not in known)])
        containers = [*self._held.loose, *nested(batch), *self._shown.hooks()]
        self._items = [(container, copied(container)) for container in containers]
        self._undo = [undo for item in self._held.generators if (undo := state_of(item)) is not None]
        self._contents: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.copy(contents)
        self._generators = ProcessGenerators()

    def restore(self) -> None:
        """Put everything back."""
        self._shown.restore()
        self._held.restore()
        for container, items in self._items:
            refill(container, items)
        for undo in self._undo:
            undo()
        with torch.no_grad():
            for tensor, saved in self._contents.values():
                # One that overlaps itself cannot be written to, not even by the step.
                if not finite.same(tensor, saved.to(tensor.device)):
                    tensor.copy_(saved)
        self._generators.restore()

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember the present elements of some tensors, too."""
        self.keep((tensor, tensor.detach().clone()) for tensor in tensors)

    def keep(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Remember the elements of some tensors by copies that were made before; these may lie on another device."""
        self._contents |= {id(tensor): (tensor, copy) for tensor, copy in copies}

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the elements that a tensor had; None when it was not among the `contents`."""
        return self._contents.get(id(tensor), (None, None))[1]


class Standing:
    """Remembers the surroundings of one training step after the other, and reads only what has changed since the last time.

    It keeps what model and optimizer held then, but neither gradients nor batches.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Choose what to remember, as for `Surroundings`.

        Args:
            model: The module to be trained; anything else has no covered attributes.
            optimizer: Its optimizer, or None.
        """
        self._model, self._optimizer = model, optimizer
        self._holdings = Holdings(model, optimizer)

    def now(
        self, *, batch: Any = None, others: Iterable[torch.Tensor] = (), contents: Iterable[torch.Tensor] = ()
    ) -> Surroundings:
        """Return what `Surroundings(model, optimizer, batch=batch, others=others, contents=contents)` would be now."""
        model, optimizer, holdings = self._model, self._optimizer, self._holdings
        return Surroundings(model, optimizer, batch=batch, others=others, contents=contents, holdings=holdings)

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers as they are, of those modules that had some at the latest `now`; one under two names twice."""
        return self._holdings.buffers()

    def plain(self) -> Sequence[torch.Tensor]:
        """Return the tensors that were attributes at the latest `now`, but neither parameters nor buffers."""
        return self._holdings.plain()


def buffers(model: Any) -> list[torch.Tensor]:
    """Return the buffers of a model, in a third of the time that `model.buffers()` takes; one under two names twice."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [buffer for module in modules for buffer in own_tensors(module, "_buffers")]


def require(model: object, optimizer: object) -> None:
    """Refuse what is no model, or no optimizer.

    Raises:
        BisectNanError: One of them is something else.
    """
    if not isinstance(model, nn.Module):
        raise BisectNanError(f"got {type(model).__name__} as the model", "a torch.nn.Module", "pass the model first")
    if not isinstance(optimizer, torch.optim.Optimizer):
        do = "pass the optimizer of this model"
        raise BisectNanError(f"got {type(optimizer).__name__} as the optimizer", "a torch.optim.Optimizer", do)


def remembered(model: Any) -> list[torch.Tensor]:
    """Return what a model keeps from one step to the next besides its parameters: buffers, and tensors that are plain attributes."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [tensor for module in modules for tensor in [*own_tensors(module, "_buffers"), *plain_tensors(module)]]


def named_parameters(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name, then those that only its optimizer knows (`param_groups[1].params[0]`)."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    known = {id(parameter) for parameter in found.values()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                found[f"param_groups[{number}].params[{place}]"] = parameter
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors that an optimizer keeps, with a readable path: its state per parameter, its groups, its attributes.

    The parameters, which it refers to as well, are none of them.
    """
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for path, tensor in _kept(optimizer):
        if id(tensor) not in parameters:
            yield path, tensor


def _kept(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    for number, state in enumerate(optimizer.state.values()):
        if isinstance(state, MutableMapping):
            yield from _named(f"state[{number}]", state.items())
    for number, group in enumerate(optimizer.param_groups):
        yield from _named(f"param_groups[{number}]", [item for item in group.items() if item[0] != "params"])
    known = {"state", "param_groups", "defaults"}
    yield from _named("optimizer", [(key, value) for key, value in optimizer.__dict__.items() if key not in known])


def _named(path: str, items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[str, torch.Tensor]]:
    for key, value in items:
        if isinstance(value, torch.Tensor):
            yield f"{path}.{key}", value
        elif isinstance(value, list | tuple):
            yield from ((f"{path}.{key}[{i}]", item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))
