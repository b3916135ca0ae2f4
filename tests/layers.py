"""The modules of the package from the bottom to the top: each imports only what stands before it."""

from __future__ import annotations

_FOLDERS = (
    (
        "What can go wrong, and what is found",
        "",
        "errors whole_file strict_json finite norms shows culprit finding pictures",
    ),
    ("Search", "", "search"),
    (
        "A recorded step",
        "recording",
        (
            "targets program memory traits unmoved generators binding lines calls values frontiers uninitialized applications"
            " recorder naming holdings shown state outcome raised setting capture live"
        ),
    ),
    (
        "The crash file",
        "snapshots",
        "manifest environment operators arguments encoding checks storages relocation packing snapshot",
    ),
    (
        "Running a step again",
        "replaying",
        "dependence stretch bounds replay tracking differentiable stability neutral contraction influence intent blame reproduce runner",
    ),
    ("Who is to blame", "blaming", "trace hidden confirm samples inquest trend scaling"),
    (
        "Why",
        "causes",
        (
            "evidence entry extent operands healing normalisation fused state applied optimizer domain inverse special division"
            " quotients infinities reductions exponentials ranges masking derivatives degenerate unclassified *"
        ),
    ),
    (
        "What makes it finite",
        "remedies",
        "proposal domain masking precision reductions stable data updates alone wording *",
    ),
    ("The answer", "answer", "witness story explain decisions trial driver picture"),
    (
        "A short script that fails in the same way",
        "reproduction",
        "literals draft spelling surroundings drafting recapture oracle reduction shrink script check minimal",
    ),
    (
        "Reports",
        "reports",
        (
            "words terminal markdown annotations sarif schema * html.context html.scale html.rendering html.way html.strip html.heat"
            " html.probes html.trends html"
            " html.notebook"
        ),
    ),
    (
        "Before it fails",
        "prevention",
        "printed nested meant check model tensor batch saving smoke layers headroom",
    ),
    ("A folder of checkpoints", "checkpoints", "order reading answer first"),
    ("Inputs that losses stumble over", "", "strategies"),
    ("Stress", "stressing", "deriving trial casefile search"),
    (
        "The training loop",
        "loop",
        (
            "modes frames training healthy incident sight mistakes recovery shelf harmless copies attributes journal scaler growth"
            " assurance alarm vigil late guard"
        ),
    ),
    ("A training script under watch", "watching", "graphs stream names suspects looks tape watch"),
    ("Other packages' loops", "integrations", "replaced closures ranks distributed accelerate lightning transformers"),
    (
        "The command line",
        "command",
        (
            "child user_code reading roles weights checkpoint stored tensors cases targets again answers page reproducing"
            " worker crash inspection meter printing repro checkpoints schema watching mcp_server mcp"
        ),
    ),
    ("In tests", "", "integrations.pytest_plugin"),
    ("What a user calls", "", "cli __main__"),
)
"""Title, folder, and the modules in it in order. `*` is the folder itself, where it holds code; elsewhere it comes first."""


def _names(folder: str, modules: str) -> str:
    if not folder:
        return modules
    names = [folder if module == "*" else f"{folder}.{module}" for module in modules.split()]
    return " ".join(names if folder in names else [folder, *names])


LAYERS = {title: _names(folder, modules) for title, folder, modules in _FOLDERS}
"""Layer: its modules, in order."""

ORDER = [module for modules in LAYERS.values() for module in modules.split()]
