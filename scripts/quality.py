#!/usr/bin/env python3
"""Score bisect_nan on faults with known answers: the project's public accuracy benchmark.

    python scripts/quality.py [--cases DIR] [--only SUBSTRING] [--json FILE] [--markdown]

Each case file holds build() and EXPECT (see fixtures/corpus/README.md). A case is used as a user would use the package: one step
without an optimizer is captured and located; a case with an optimizer trains under a Guard until it raises, and the snapshot that
the Guard saved is located. Every case runs in a process of its own, with a time limit.

    phase     the culprit's phase is the expected one; for "backward" (the loss is finite, a gradient is not) the symptom is
              a gradient
    line      the culprit's source line is the one marked # CULPRIT
    cause     the culprit's cause is the expected one or one of the causes accepted beside it
    op        the culprit is known by one of the expected names: its op, the kernel that made the bad value, or its autograd node
    module    the culprit's module path ends as expected
    all       every independent culprit is named, and nothing else
    samples   the rows of the batch that carry the fault
    clean     a case in which nothing is wrong is reported clean
    verified  the change that is advised was executed, and the step came out finite
    budget    the search executed at most the program's nodes and probed at most 3 ceil(log2(nodes)) + 4 times, for each culprit
              and each harmless place
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # every optimizer does, and here it is done once for all cases

from bisect_nan import Finding, Guard, NonFiniteStep, Snapshot, Verdict, locate
from bisect_nan.causes.evidence import base_name

CASES = Path(__file__).resolve().parents[1] / "fixtures" / "corpus" / "cases"
SCORES = ("phase", "line", "module", "op", "cause", "all", "samples", "clean", "verified", "budget")


def load_case(path: Path) -> ModuleType:
    """Execute a case file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(name=path.stem, path=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def marked_lines(path: Path) -> list[int]:
    """Return the lines that end with # CULPRIT."""
    return [n for n, text in enumerate(path.read_text().splitlines(), 1) if text.rstrip().endswith("# CULPRIT")]


def find(path: Path) -> dict[str, Any]:
    """Run one case through the public interface and return the finding's JSON form."""
    case = load_case(path).build()
    model, batch, step, optimizer = case["model"], case["batch"], case["step"], case.get("optimizer")
    if case.get("autocast") is not None:
        step = _autocast(step, case["autocast"])
    if optimizer is None and case.get("steps", 1) == 1:
        return locate(Snapshot.capture(model, batch, step)).to_dict()
    updates = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.0)
    with tempfile.TemporaryDirectory() as folder:
        guard = Guard(model, updates, directory=folder)
        watched = guard.watch(step)
        try:
            for _ in range(case.get("steps", 1)):
                updates.zero_grad()
                loss = watched(model, batch)
                if loss.requires_grad:
                    loss.backward()
                updates.step()
            guard.check()
        except NonFiniteStep as fault:
            if fault.path is None:
                raise
            return locate(Snapshot.load(fault.path)).to_dict()
    return Finding(Verdict.CLEAN).to_dict()


def score(path: Path, finding: dict[str, Any]) -> dict[str, bool]:
    """Return the scores that apply to a case."""
    expect, marks = load_case(path).EXPECT, marked_lines(path)
    culprit, search = finding["culprit"] or {}, finding["search"]
    if expect["phase"] == "none":
        return {"clean": finding["verdict"] == "clean"}
    row = {"phase": culprit.get("phase") == expect["phase"]}
    if expect["phase"] == "backward":
        row["phase"] = (finding["symptom"] or {}).get("kind") == "gradient"
    row["cause"] = culprit.get("cause") in [expect["cause"], *expect.get("also", [])]
    if marks or "module" in expect:
        autograd = (culprit.get("autograd") or "").split("Backward")[0].lower()
        names = {base_name(culprit.get("op") or "").lower(), base_name(culprit.get("kernel") or "").lower(), autograd}
        row["op"] = bool(names & {base_name(op).lower() for op in expect["ops"]})
    if marks:
        row["line"] = Path(culprit.get("file") or "").name == path.name and culprit.get("line") in marks
    if "module" in expect:
        row["module"] = (culprit.get("module") or "").endswith(expect["module"])
    if expect.get("all"):
        named = {(Path(c["file"] or "").name, c["line"]) for c in finding["culprits"]}
        row["all"] = named == {(path.name, mark) for mark in marks}
    if "samples" in expect:
        row["samples"] = sorted(culprit.get("samples") or []) == sorted(expect["samples"])
    row["verified"] = bool((culprit.get("remedy") or {}).get("verified"))
    if search["nodes"] > 1 and expect["phase"] in ("forward", "backward"):
        rounds = max(1, len(finding["culprits"]) + len(finding["innocents"]))
        probes = 3 * math.ceil(math.log2(search["nodes"])) + 4
        row["budget"] = search["executed"] <= search["nodes"] * rounds and search["probes"] <= probes * rounds
    return row


def evaluate(path: Path, limit: float) -> dict[str, Any]:
    """Run and score one case in a process of its own."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_work, args=(path, theirs))
    start = time.perf_counter()
    process.start()
    result = ours.recv() if ours.poll(limit) else {"row": None, "error": f"no answer in {limit:.0f} s"}
    process.kill()
    process.join()
    return {"case": path.name, "seconds": time.perf_counter() - start, **result}


def quality(cases: Path = CASES, only: str = "", limit: float = 60.0) -> dict[str, Any]:
    """Score all cases of a folder.

    Returns:
        `totals` (score: [good, of]), `results` (one dictionary a case) and `confusion` (expected cause: {told cause: count}; a
        case in which nothing is wrong expects `clean`, and what gave no culprit was told its verdict or `error`).
    """
    paths = [path for path in sorted(cases.glob("*.py")) if only in path.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(functools.partial(evaluate, limit=limit), paths))
    totals: dict[str, list[int]] = {}
    confusion: dict[str, dict[str, int]] = {}
    for path, result in zip(paths, results, strict=True):
        row = result["row"] if result["row"] is not None else dict.fromkeys(_applicable(path), False)
        for name, good in row.items():
            pair = totals.setdefault(name, [0, 0])
            totals[name] = [pair[0] + bool(good), pair[1] + 1]
        told = confusion.setdefault(_expected(path), {})
        told[_told(path, result)] = told.get(_told(path, result), 0) + 1
    return {"totals": totals, "results": results, "confusion": confusion}


def _expected(path: Path) -> str:
    expect = load_case(path).EXPECT
    return "clean" if expect["phase"] == "none" else str(expect["cause"])


def _told(path: Path, result: dict[str, Any]) -> str:
    """What was told of a case; a cause that is accepted beside the expected one counts as that."""
    finding = result.get("finding")
    if finding is None:
        return "error"
    told = str((finding["culprit"] or {}).get("cause", finding["verdict"]))
    return _expected(path) if told in load_case(path).EXPECT.get("also", []) else told


def _matrix(confusion: dict[str, dict[str, int]]) -> list[str]:
    """Lay out the confusion: a row for each expected cause, and in it what was told how often, the right one first."""
    width = max(map(len, confusion), default=0)
    lines = [f"{'expected':{width}}  told"]
    for expected, told in sorted(confusion.items()):
        ordered = sorted(told.items(), key=lambda item: (item[0] != expected, -item[1]))
        wrong = [f"{cause} {count}" for cause, count in ordered if cause != expected]
        lines.append(
            f"{expected:{width}}  {told.get(expected, 0)} of {sum(told.values())}{''.join(', ' + w for w in wrong)}"
        )
    return lines


def _applicable(path: Path) -> list[str]:
    expect, marks = load_case(path).EXPECT, marked_lines(path)
    if expect["phase"] == "none":
        return ["clean"]
    names = [
        "phase",
        "cause",
        "verified",
        *(["line", "op"] if marks else []),
        *(["module"] if "module" in expect else []),
    ]
    return names + [key for key in ("all", "samples") if expect.get(key)]


def _autocast(step: Any, dtype: torch.dtype) -> Any:
    def cast(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return step(model, batch)

    return cast


def _work(path: Path, pipe: Any) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            finding = find(path)
            pipe.send({"row": score(path, finding), "finding": finding})
        except BaseException:  # noqa: BLE001  (whatever goes wrong with a case is its result)
            pipe.send({"row": None, "error": traceback.format_exc(limit=-4)})


def _report(result: dict[str, Any], cases: Path) -> None:
    """Print what was missed, then the scores."""
    for entry in result["results"]:
        missed = ["everything"] if entry["row"] is None else [name for name, good in entry["row"].items() if not good]
        if missed and missed != ["verified"]:
            path = cases / entry["case"]
            expect, culprit = load_case(path).EXPECT, (entry.get("finding") or {}).get("culprit") or {}
            got = {key: culprit.get(key) for key in ("phase", "cause", "op", "line")}
            expected = f"{expect['phase']}/{expect['cause']} {marked_lines(path)}"
            print(f"{entry['case']}: missed {', '.join(missed)}; expected {expected}; got {got}")
            if entry.get("error"):
                print("    " + entry["error"].strip().replace("\n", "\n    "))
    print("\n".join(["", *_matrix(result["confusion"]), ""]))
    for name, good, of in _rows(result):
        print(f"{name:9} {good:4} of {of:4}  {good / of:.1%}")
    slowest = max(result["results"], key=lambda entry: entry["seconds"], default=None)
    if slowest:
        print(f"\n{_occasion(result)}; slowest: {slowest['case']}, {slowest['seconds']:.1f} s")


def _markdown(result: dict[str, Any]) -> str:
    """Return the scores as the README shows them."""
    rows = [f"| {name} | {good} of {of} | {good / of:.1%} |" for name, good, of in _rows(result)]
    return "\n".join([f"{_occasion(result)}:", "", "| score | right | share |", "|---|---|---|", *rows])


def _rows(result: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(name, *result["totals"][name]) for name in SCORES if name in result["totals"]]


def _occasion(result: dict[str, Any]) -> str:
    return f"{len(result['results'])} cases, {dt.datetime.now(dt.UTC):%Y-%m-%d}, torch {torch.__version__}"


def main() -> int:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--only", default="", help="only cases whose file name contains this")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--markdown", action="store_true", help="print the scores alone, as Markdown")
    options = parser.parse_args()
    result = quality(options.cases, options.only)
    if options.markdown:
        print(_markdown(result))
    else:
        _report(result, options.cases)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
