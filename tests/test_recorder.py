"""What a recording says of its calls, and the internals of torch that it stands on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from steps import Apply, SafeLog, applied, squared
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.recording.capture import record
from bisect_nan.recording.program import Node, Program
from bisect_nan.recording.recorder import Recorder
from bisect_nan.recording.targets import Targets


def program_of(model: Any, batch: Any, step: Callable[[Any, Any], Any]) -> Program:
    """Return the program of a step."""
    return record(model, batch, step).program


def calls(program: Program, name: str) -> list[Node]:
    """Return the calls of an operator, by its name without overload."""
    return [node for node in program.nodes if node.target._schema.name == f"aten::{name}"]


def text(program: Program, node: Node) -> str:
    """Return the line that a call is reported at."""
    source = program.source(node)
    return "" if source is None else source.text


class Attention(nn.Module):
    """Two nested modules, for paths."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.inner = Apply(torch.tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.inner(x).t()
        return functional.softmax(scores, -1)


def test_the_source_is_the_innermost_line_outside_torch() -> None:
    """A call made by torch's own Python code is reported at the line that called torch."""
    program = program_of(Attention(), torch.randn(5, 6), squared)
    (node,) = calls(program, "_softmax")
    assert node.source is not None
    assert (node.source.file, node.source.function) == ("tests/test_recorder.py", "Attention.forward")
    assert node.source.text == "return functional.softmax(scores, -1)"
    assert node.source.line == inspect.getsourcelines(Attention.forward)[1] + 2


def test_the_module_is_the_path_of_the_innermost_running_module() -> None:
    """Calls know the module whose line made them (a plain layer belongs to the line that calls it); derivatives know the same."""
    program = program_of(nn.Sequential(Attention(), Attention()), torch.randn(6, 6), squared)
    assert [node.module for node in calls(program, "_softmax")] == ["0", "1"]
    assert [node.module for node in calls(program, "tanh")] == ["0.inner", "1.inner"]
    assert [node.module for node in calls(program, "addmm")] == ["0", "0.inner", "1", "1.inner"]
    assert [node.module for node in calls(program, "tanh_backward")] == ["1.inner", "0.inner"]
    assert {node.module for node in calls(program, "mean")} == {""}


def test_the_module_stack_survives_a_module_that_raises() -> None:
    """A module that raises and is caught leaves the path of the one that called it."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risky = Apply(lambda x: x.view(-1, 1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(RuntimeError):
                self.risky(x)
            return x.sin()

    program = program_of(nn.Sequential(Careful()), torch.randn(2, 6, requires_grad=True), squared)
    assert [node.module for node in calls(program, "sin")] == ["0"]


def test_phases_follow_the_step() -> None:
    """Calls of the forward pass come first, also derivatives that the step asks for itself; then the backward pass."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(model(batch).sin().sum(), model.weight, create_graph=True)
        return gradient.square().sum()

    program = program_of(nn.Linear(6, 6), torch.randn(5, 6), step)
    phases = [node.phase for node in program.nodes]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)
    inner = [node for node in program.nodes if node.phase is Phase.FORWARD and node.autograd == "SinBackward0"]
    assert inner
    assert {text(program, node) for node in inner} == {text(program, calls(program, "sin")[0])}


def test_a_derivative_maps_to_the_call_that_it_is_of() -> None:
    """Derivatives have no line of their own and lead to the forward call with the same autograd node."""
    program = program_of(*applied(lambda x: x.exp().sqrt().log()))
    for forward, name in (("exp", "ExpBackward0"), ("sqrt", "SqrtBackward0"), ("log", "LogBackward0")):
        derivatives = [node for node in program.nodes if node.autograd == name]
        assert derivatives
        assert all(node.source is None for node in derivatives)
        assert {program.origin(node).index for node in derivatives} == {calls(program, forward)[0].index}


def test_a_derivative_of_a_call_that_made_nothing_maps_to_what_it_returned() -> None:
    """A view of the same shape is no call of the program; its derivative still leads to a line of the step."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y.view(5, 6)
        mask = torch.ones(5, 6)
        return z * mask

    program = program_of(*applied(function))
    lines = {node.autograd: text(program, node) for node in program.nodes if node.phase is Phase.BACKWARD}
    assert lines["ExpBackward0"] == "y = x.exp()"
    assert "mask = torch.ones(5, 6)" not in lines.values()


def test_double_backward_leads_to_the_forward_line() -> None:
    """The derivative of a derivative that the step takes leads to the line of the forward call."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        norm = model(x).norm(dim=1)
        total = norm.sum()
        (gradient,) = torch.autograd.grad(total, x, create_graph=True)
        return gradient.square().sum()

    program = program_of(nn.Linear(6, 6), torch.randn(5, 6), step)
    second = [
        node for node in program.nodes if node.phase is Phase.BACKWARD and node.autograd and "Norm" in node.autograd
    ]
    assert second
    assert {text(program, node) for node in second} == {"norm = model(x).norm(dim=1)"}
    assert all("torch.autograd.grad" not in text(program, node) for node in program.nodes if node.autograd)


def test_derivatives_are_told_apart_where_two_threads_numbered_them() -> None:
    """Autograd nodes that two threads gave the same number lead to their own calls."""
    recorder, results = Recorder(), {}
    x = torch.ones(3, requires_grad=True)

    def forward(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with recorder:
            return function(x)

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:  # both alive, so that they differ
        results[torch.exp] = first.submit(forward, torch.exp).result()
        results[torch.sin] = second.submit(forward, torch.sin).result()
    with recorder:
        torch.autograd.backward(results[torch.exp] * results[torch.sin], torch.ones(3))
    nodes = recorder.finish(Targets()).nodes
    found = {node.autograd: str(nodes[node.forward].target) for node in nodes if node.forward is not None}
    assert found["ExpBackward0"] == "aten.exp.default"
    assert found["SinBackward0"] == "aten.sin.default"


def test_python_code_in_backward_has_its_own_line() -> None:
    """Hooks and the backward of a custom Function are reported at their own Python lines."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = SafeLog.apply(x)
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return y

    program = program_of(*applied(function))
    (divided,) = calls(program, "div")[-1:]
    assert (divided.autograd, divided.forward) == ("SafeLogBackward", None)
    assert text(program, divided) == "return grads[0] / clamped"
    (clamped,) = (node for node in calls(program, "clamp") if node.phase is Phase.BACKWARD)
    assert text(program, clamped) == "y.register_hook(lambda gradient: gradient.clamp(-1, 1))"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_have_their_own_line(reentrant: bool) -> None:
    """What checkpointing computes again runs in the backward phase at the line of the model, and so do its derivatives."""
    model = nn.Sequential(nn.Linear(6, 6), Apply(torch.exp))
    program = program_of(
        model, torch.randn(5, 6), lambda m, b: checkpoint(m[1], m[0](b), use_reentrant=reentrant).square().mean()
    )
    first, again = calls(program, "exp")
    assert (first.phase, again.phase) == (Phase.FORWARD, Phase.BACKWARD)
    assert text(program, first) == text(program, again) == "return self.function(self.linear(x))"
    assert again.module == "1"
    derivative = next(node for node in program.nodes if node.autograd == "ExpBackward0")
    assert text(program, derivative) == "return self.function(self.linear(x))"


def test_what_the_package_adds_has_no_line() -> None:
    """The first gradient, which no line of the step makes, is reported at none."""
    program = program_of(*applied(torch.tanh))
    (seed,) = (node for node in calls(program, "ones_like") if node.phase is Phase.BACKWARD)
    assert program.source(seed) is None


def test_placeholders_are_named_by_path() -> None:
    """Parameters, buffers and the tensors of the batch are named by where they are found, literals by their line."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    batch = {"x": [torch.randn(5, 6)], "labels": {"depth": torch.randn(5)}}

    def step(m: nn.Module, b: Any) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
        return ((m(b["x"][0]).mean(1) - b["labels"]["depth"]) * scale).square().mean()

    found = {item.name: (item.phase, item.constant) for item in program_of(model, batch, step).placeholders}
    assert found["0.weight"] == (Phase.PARAMETER, False)
    assert found["1.running_var"] == (Phase.BUFFER, False)
    assert found["batch['x'][0]"] == found["batch['labels']['depth']"] == (Phase.INPUT, False)
    (constant,) = (name for name, (_, made) in found.items() if made)
    line = inspect.getsourcelines(step)[1] + 1
    assert constant == f"constant at tests/test_recorder.py:{line}"


def test_a_parameter_outside_of_the_model_is_a_target() -> None:
    """A module that only the step knows has gradients, too: they are recorded under the line of their first use."""
    outside = nn.Linear(6, 3)
    recording = record(nn.Linear(6, 6), torch.randn(5, 6), lambda m, b: outside(m(b)).square().mean())
    names = [name for name in recording.program.targets.gradients if name.startswith("parameter ")]
    assert len(names) == 2
    assert all("tests/test_recorder.py:" in name for name in names)
    assert outside.weight.grad is None


def test_views_of_one_memory_in_the_batch_are_placeholders_each() -> None:
    """Two tensors of the batch that overlap are two inputs with one storage."""
    whole = torch.randn(12, 6)
    program = program_of(
        nn.Linear(6, 6),
        {"a": whole[:8], "b": whole[4:]},
        lambda m, b: (m(b["a"]) + m(b["b"])).square().mean(),
    )
    storages = {item.name: program.values[item.value].storage for item in program.placeholders}
    assert storages["batch['a']"] == storages["batch['b']"]


def test_shapes_and_aliases_leave_no_call() -> None:
    """Reading a shape or a detached alias is no call of the program; reading a number is one without a result."""

    def function(x: torch.Tensor) -> torch.Tensor:
        bound = x.detach().abs().max().item()
        return x / bound if math.isfinite(bound) else x.contiguous()

    targets = {node.target._schema.name for node in program_of(*applied(function)).nodes}
    assert not targets & {"aten::detach", "aten::alias"}
    assert "aten::_local_scalar_dense" in targets


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0).sum(), "nested"),
        (
            lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8).dequantize().sum() + x.sum(),
            "quantised",
        ),
        (lambda x: (x.detach().to_sparse().mul_(2)).sum() + x.sum(), "sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantiz.*", "ignore:.*is deprecated")
def test_what_cannot_be_recorded_is_said(make: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    """Nested and quantised tensors, and sparse ones that are changed in place, end in one clear error."""
    with pytest.raises(RecordingError, match=said):
        record(*applied(make))


def test_parameters_that_wait_for_their_first_input_are_refused() -> None:
    """A lazy module has to see one batch before its step can be recorded."""
    with pytest.raises(RecordingError, match="UninitializedParameter"):
        record(nn.LazyLinear(3), torch.randn(5, 6), squared)


def test_memory_that_grows_is_refused() -> None:
    """`resize_` of memory that holds something would leave views of it behind."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().clone()
        y.resize_(50, 6)
        return x * y[:5]

    with pytest.raises(RecordingError, match="grow"):
        record(*applied(function))


def test_a_tensor_class_that_hides_its_calls_is_refused() -> None:
    """A class that computes in its own `__torch_dispatch__` cannot be seen through."""

    class Hiding(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    with pytest.raises(RecordingError, match="Hiding"):
        record(*applied(lambda x: x + torch.ones(5, 6).as_subclass(Hiding)))


@pytest.mark.parametrize("where", ["parameter", "batch", "loss"])
def test_wrappers_of_tensors_may_not_go_in_or_out(where: str) -> None:
    """Parameters, inputs and losses that wrap other tensors own no memory that could be stored."""
    model, wrapped = nn.Linear(6, 6), TwoTensor(torch.ones(6, 6), torch.ones(6, 6))
    if where == "parameter":
        model.weight = nn.Parameter(wrapped)
    batch = wrapped if where == "batch" else torch.ones(6, 6)

    def step(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        return wrapped.sum() if where == "loss" else m(b).sum()

    with pytest.raises(RecordingError, match="TwoTensor"):
        record(model, batch, step)


# --- internals of torch ------------------------------------------------------------------------------------------------


class Probe(Recorder):
    """A recorder that notes what the internals say while calls run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str | None, int | None, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        facts = (None, None) if node is None else (node.name(), node._sequence_nr())
        self.seen.append((func._schema.name, *facts, torch.autograd._get_sequence_nr()))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_the_engine_says_which_autograd_node_runs() -> None:
    """`_current_autograd_node` is None in forward and the running node in backward; its number is that of its forward call."""
    x = torch.ones(3, requires_grad=True)
    with Probe() as probe:
        y = x.sqrt().sum()
        y.backward()
    forward = next(seen for seen in probe.seen if seen[0] == "aten::sqrt")
    backward = next(seen for seen in probe.seen if seen[1] == "SqrtBackward0")
    assert forward[1] is None
    assert backward[2] == forward[3] - 1


def test_the_recorder_runs_without_the_wrapper_against_compilation() -> None:
    """`_should_skip_dynamo` keeps `__torch_dispatch__` as it is written."""
    assert Recorder.__torch_dispatch__.__code__.co_filename.endswith("recorder.py")


def test_the_second_class_of_dispatch_sees_inner_calls_of_wrappers() -> None:
    """A wrapper of tensors takes itself apart under the recorder, which then sees its inner calls."""
    a, b = torch.ones(3), torch.zeros(3)
    with Recorder() as recorder:
        TwoTensor(a, b).exp()
    assert [str(call.target) for call in recorder.calls] == ["aten.exp.default", "aten.exp.default"]


def test_fake_tensors_are_known_by_their_module() -> None:
    """The tensors that higher-order operators trace with are told by where their classes live (torch 2.6 to 2.13)."""
    assert torch._subclasses.FakeTensor.__module__.startswith("torch._subclasses")
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
    with Recorder() as recorder:
        fake.exp()
    assert recorder.calls == []
