"""The modules of the package from the bottom to the top: each imports only what stands before it."""

from __future__ import annotations

LAYERS = {
    "What can go wrong, and what is found": "errors finite norms finding strict_json",
    "Search": "search",
    "A recorded step": "program traits generators binding lines calls values frontiers uninitialized",
    "Recording": "applications recorder state setting capture live",
    "The crash file": "manifest environment operators arguments encoding checks storages relocation packing snapshot",
    "Running a step again": (
        "dependence stretch bounds replay tracking differentiable stability neutral influence intent blame reproduce runner"
    ),
    "Who is to blame": "trace hidden confirm samples inquest trend scaling",
    "Why": (
        "causes.evidence causes.entry causes.extent causes.operands causes.healing causes.normalisation causes.fused"
        " causes.state causes.applied causes.optimizer causes.domain causes.inverse causes.special causes.division"
        " causes.quotients causes.infinities causes.reductions causes.exponentials causes.ranges causes.masking"
        " causes.derivatives causes.degenerate causes.unclassified causes"
    ),
    "What makes it finite": (
        "remedies.proposal remedies.domain remedies.masking remedies.precision remedies.reductions remedies.stable"
        " remedies.data remedies.updates remedies.alone remedies.wording remedies"
    ),
    "The answer": "witness story explain trial driver",
    "The training loop": "modes training incident guard",
    "Reports": "reports.words reports.terminal reports",
    "The command line": "child user_code tensors targets worker crash inspection meter cli __main__",
}
"""Layer: its modules, in order."""

ORDER = [module for modules in LAYERS.values() for module in modules.split()]
