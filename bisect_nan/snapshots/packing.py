"""A snapshot's content as a manifest and memories, and back.

`bisect_nan.snapshots.manifest` says what the manifest looks like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bisect_nan.finding import Phase, Symptom
from bisect_nan.recording.memory import view
from bisect_nan.recording.outcome import Observed
from bisect_nan.recording.program import NO_STORAGE, Placeholder, Program
from bisect_nan.recording.targets import Targets
from bisect_nan.snapshots import encoding, relocation, storages
from bisect_nan.snapshots.arguments import device
from bisect_nan.snapshots.checks import check
from bisect_nan.snapshots.environment import Environment
from bisect_nan.snapshots.manifest import FORMAT, Manifest
from bisect_nan.strict_json import checked_text, clean, count, fields, items, plain_number, shown, wrong

_TARGETS, _RAISED = ("gradients", "buffers", "parameters", "optimizer"), "values"
"""Tables of targets, and the one that only the file of a step that raised has."""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What a file holds: the fields of a snapshot, with the placeholders' tensors by value number."""

    program: Program
    tensors: Mapping[int, torch.Tensor]
    observed: Observed | None
    loss: float
    environment: Environment
    history: Sequence[Mapping[str, float]]
    step_number: int | None
    entry: str = ""


# --- writing ----------------------------------------------------------------------------------------------------------------


def pack(content: Content) -> tuple[dict[str, Any], dict[str, torch.UntypedStorage]]:
    """Return the manifest and the memories by the names of their entries.

    Raises:
        SnapshotError: The program holds what no file can carry.
    """
    values = content.program.values
    held = {
        values[number].storage: tensor.untyped_storage()
        for number, tensor in content.tensors.items()
        if _dense(values[number])
    }
    parts = relocation.used_parts(content.program, {number: storage.nbytes() for number, storage in held.items()})
    held |= {number: storages.cut(held[number], start, end) for number, (start, end) in parts.items()}
    program = relocation.rebased(content.program, parts)
    entries = {f"storage.{number}": storage for number, storage in held.items() if storage.device.type != "meta"}
    states: dict[bytes, int] = {}
    generators: list[Any] = []

    def generator(state: torch.Tensor) -> int:
        bits = bytes(state.tolist())
        if bits not in states:
            states[bits] = len(states)
            generators.append(storages.write_tensor(state, f"generator.{states[bits]}", entries))
        return states[bits]

    def memory(tensor: torch.Tensor) -> Any:
        return storages.write_tensor(tensor, f"memory.{len(entries)}", entries)

    calls = encoding.encode(program, generator, memory)
    check(program, {number: storage.nbytes() for number, storage in held.items()})
    observed, symptom = None, None
    if content.observed is not None:
        _check_observed(content.observed, program)
        symptom = asdict(content.observed.symptom)
        symptom |= {"name": clean(symptom["name"]), "nonfinite": list(symptom["nonfinite"])}
        tensor = storages.write_tensor(content.observed.tensor, "observed", entries)
        observed = {"names": [clean(name) for name in content.observed.names], "tensor": tensor}
    kept = (*_TARGETS, _RAISED) if program.targets.values else _TARGETS
    targets = {key: {clean(name): number for name, number in getattr(program.targets, key).items()} for key in kept}
    sparse = {number: tensor for number, tensor in content.tensors.items() if not _dense(values[number])}
    manifest = {
        "format": FORMAT,
        "writer": f"bisect_nan {_release()}",
        "symptom": symptom,
        "loss": plain_number(content.loss),
        "step_number": content.step_number,
        "history": [{clean(key): plain_number(value) for key, value in item.items()} for item in content.history],
        "environment": content.environment.to_dict(),
        "nodes": len(program.nodes),
        "placeholders": [_placeholder(item, program) for item in program.placeholders],
        "targets": {"loss": program.targets.loss, **targets, "hooked": program.targets.hooked},
        "observed": observed,
        "storages": [[number, str(storage.device), storage.nbytes()] for number, storage in held.items()],
        "sparse": [
            [number, storages.write_tensor(tensor, f"sparse.{number}", entries)] for number, tensor in sparse.items()
        ],
        "generators": generators,
        "program": calls,
    }
    if content.entry:
        manifest["entry"] = clean(content.entry)
    return manifest, entries


def _dense(value: Any) -> bool:
    return bool(value.storage != NO_STORAGE)


def _placeholder(placeholder: Placeholder, program: Program) -> dict[str, Any]:
    value = program.values[placeholder.value]
    return {
        "value": placeholder.value,
        "name": clean(placeholder.name),
        "phase": placeholder.phase.value,
        "constant": placeholder.constant,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "device": str(value.device),
    }


def _release() -> str:
    try:
        return version("bisect_nan")
    except PackageNotFoundError:  # used from a checkout that is not installed
        return "unreleased"


# --- reading ----------------------------------------------------------------------------------------------------------------


def unpack(manifest: Manifest, reader: storages.Reader) -> Content:
    """Return the content of a file, all of it checked.

    Raises:
        SnapshotError: Something in it is not as it should be.
    """
    data = manifest.data
    states = [
        _state(reader, record, f"generator {place}")
        for place, record in enumerate(items(data["generators"], "generators"))
    ]

    def generator(index: Any, place: str) -> torch.Tensor:
        return states[count(index, place, len(states))]

    values, nodes, uses = encoding.decode(data["program"], generator, reader.tensor)
    if len(nodes) != manifest.nodes:
        raise wrong("nodes", manifest.nodes, f"{len(nodes)}, as the program has")
    placeholders = tuple(
        Placeholder(item["value"], Phase(item["phase"]), item["name"], item["constant"])
        for item in manifest.placeholders
    )
    program = Program(values, placeholders, nodes, _targets(data["targets"]), uses)
    memories = _memories(data["storages"], reader)
    check(program, {number: storage.nbytes() for number, storage in memories.items()})
    tensors = {}
    for item in manifest.placeholders:
        value = values[item["value"]]
        said = (item["dtype"], item["shape"], item["device"])
        if said != (str(value.dtype).removeprefix("torch."), list(value.shape), str(value.device)):
            raise wrong(f"placeholder {shown(item['name'])}", list(said), f"what its value {item['value']} is")
        if value.storage != NO_STORAGE:
            memory = memories[value.storage]
            if (memory.device.type == "meta") != (value.device.type == "meta"):
                raise wrong(f"storage {value.storage}, device", str(memory.device), str(value.device))
            tensors[item["value"]] = view(memory, value)
    tensors |= _sparse(data["sparse"], reader, program)
    observed = _observed(manifest, reader)
    if observed is not None:
        _check_observed(observed, program)
    return Content(
        program=program,
        tensors=tensors,
        observed=observed,
        loss=float(manifest.loss),
        environment=Environment.from_dict(manifest.environment),
        history=tuple(manifest.history),
        step_number=manifest.step_number,
        entry=manifest.entry,
    )


def _state(reader: storages.Reader, record: Any, place: str) -> torch.Tensor:
    state = reader.tensor(record, place)
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise wrong(place, f"{state.dtype} of shape {list(state.shape)}", "the state of a random generator")
    return state


def _targets(data: Any) -> Targets:
    data = fields({_RAISED: {}, **fields(data, "targets")}, "targets", ("loss", *_TARGETS, _RAISED, "hooked"))
    if not isinstance(data["hooked"], bool):
        raise wrong("targets, hooked", data["hooked"], "true or false")
    tables = {
        key: {
            checked_text(name, f"targets, {key}"): count(number, f"targets, {key}")
            for name, number in fields(data[key], key).items()
        }
        for key in (*_TARGETS, _RAISED)
    }
    return Targets(
        None if data["loss"] is None else count(data["loss"], "targets, loss"), **tables, hooked=data["hooked"]
    )


def _memories(data: Any, reader: storages.Reader) -> dict[int, torch.UntypedStorage]:
    """Return the memories that placeholders show, by storage number."""
    found: dict[int, torch.UntypedStorage] = {}
    for position, record in enumerate(items(data, "storages")):
        place = f"storages, item {position}"
        parts = items(record, place)
        if len(parts) != 3:  # noqa: PLR2004
            raise wrong(place, parts, "number, device and bytes")
        number, size = count(parts[0], place), count(parts[2], place)
        if device(parts[1], place).type == "meta":
            found[number] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        else:
            found[number] = reader.storage(f"storage.{number}", size, place)
    return found


def _sparse(data: Any, reader: storages.Reader, program: Program) -> dict[int, torch.Tensor]:
    """Return the placeholders without memory of their own, by value number."""
    wanted = {item.value for item in program.placeholders if program.values[item.value].storage == NO_STORAGE}
    found: dict[int, torch.Tensor] = {}
    for position, record in enumerate(items(data, "sparse")):
        place = f"sparse, item {position}"
        parts = items(record, place)
        if len(parts) != 2 or parts[0] not in wanted:  # noqa: PLR2004
            raise wrong(place, parts, "a placeholder without memory of its own, and a tensor")
        value, tensor = program.values[parts[0]], reader.tensor(parts[1], place)
        if (tensor.dtype, tuple(tensor.shape)) != (value.dtype, value.shape):
            raise wrong(place, f"{tensor.dtype} of shape {list(tensor.shape)}", f"what value {parts[0]} is")
        found[parts[0]] = tensor
    if found.keys() != wanted:
        raise wrong("sparse", sorted(found), f"the placeholders {sorted(wanted)}")
    return found


def _observed(manifest: Manifest, reader: storages.Reader) -> Observed | None:
    symptom, data = manifest.symptom, manifest.data["observed"]
    if symptom is None and data is None:
        return None
    data = fields(data, "observed", ("names", "tensor"))
    if symptom is None:
        raise wrong("symptom", None, "a symptom, since something was observed")
    names = tuple(checked_text(name, "observed, names") for name in items(data["names"], "observed, names"))
    kinds = tuple(symptom["nonfinite"])
    return Observed(
        Symptom(symptom["kind"], symptom["name"], kinds, symptom["others"]),
        names,
        reader.tensor(data["tensor"], "observed, tensor"),
    )


def _check_observed(observed: Observed, program: Program) -> None:
    """Check that what was observed is something that the program computes."""
    targets = program.targets.of(observed.symptom.kind)
    missing = [name for name in observed.names if name not in targets]
    if missing or not observed.names:
        raise wrong("observed, names", missing, f"names of {observed.symptom.kind} targets")
    value = program.values[targets[observed.names[0]]]
    if (observed.tensor.dtype, tuple(observed.tensor.shape)) != (value.dtype, value.shape):
        got = f"{observed.tensor.dtype} of shape {list(observed.tensor.shape)}"
        raise wrong("observed, tensor", got, f"what {shown(observed.names[0])} is")
