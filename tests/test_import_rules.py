"""Who may know what. The table is the architecture; an import outside it fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "checkpoints", "pallas_kernels")

# Module prefix -> what of this repository it may import. The longest prefix wins.
TYPES = ("checkpoints.model_config", "jaxserve.config", "jaxserve.errors", "jaxserve.request")
DEVICE = (
    "jaxserve.batch",
    "jaxserve.logit_rules",
    "jaxserve.models",
    "jaxserve.sampling",
    "pallas_kernels",
)
ALLOWED: dict[str, tuple[str, ...]] = {
    "pallas_kernels": ("pallas_kernels",),
    "checkpoints": ("checkpoints",),
    "jaxserve.errors": (),
    "jaxserve.request": (),
    "jaxserve.config": (),
    "jaxserve.config_file": ("jaxserve.errors",),
    "jaxserve.frames": ("jaxserve.request",),
    "jaxserve.batch": ("jaxserve.request",),
    "jaxserve.models": (*TYPES, "jaxserve.batch", "jaxserve.models", "pallas_kernels"),
    "jaxserve.sampling": ("jaxserve.batch",),
    "jaxserve.logit_rules": ("jaxserve.batch",),
    "jaxserve.row_blocks": (),
    "jaxserve.prompt_scores": ("jaxserve.batch", "jaxserve.row_blocks", "jaxserve.sampling"),
    "jaxserve.pooling": ("jaxserve.batch",),
    "jaxserve.step": (
        *DEVICE,
        "jaxserve.pooling",
        "jaxserve.prompt_scores",
        "jaxserve.row_blocks",
    ),
    "jaxserve.pages": ("jaxserve.errors",),
    "jaxserve.sequence": ("jaxserve.request",),
    "jaxserve.swap": ("jaxserve.pages", "jaxserve.sequence"),
    "jaxserve.page_mover": ("jaxserve.batch", "jaxserve.swap", "pallas_kernels"),
    "jaxserve.rule_writer": (
        "jaxserve.batch",
        "jaxserve.packing",
        "jaxserve.sequence",
    ),
    "jaxserve.inspection": ("jaxserve.frames", "jaxserve.sequence"),
    "jaxserve.grammar": ("jaxserve.errors", "jaxserve.request"),
    "jaxserve.constraint_compiler": (
        "jaxserve.errors",
        "jaxserve.grammar",
        "jaxserve.request",
    ),
    "jaxserve.mask_writer": ("jaxserve.batch",),
    "jaxserve.prefix": ("jaxserve.pages", "jaxserve.sequence"),
    # The promise: plain Python, told the time.
    "jaxserve.drain": (),
    "jaxserve.huge_pages": (),
    "jaxserve.priority": (),
    "jaxserve.policy": ("jaxserve.drain", "jaxserve.request", "jaxserve.sequence"),
    "jaxserve.limits": (*TYPES, "jaxserve.policy", "jaxserve.sequence"),
    "jaxserve.shares": ("jaxserve.policy", "jaxserve.sequence"),
    "jaxserve.results": ("jaxserve.request", "jaxserve.sequence"),
    "jaxserve.deadlines": ("jaxserve.sequence",),
    "jaxserve.sla": (),
    "jaxserve.sla.turns": (),
    "jaxserve.sla.ladder": (),
    "jaxserve.sla.retry": ("jaxserve.request",),
    "jaxserve.sla.step_time": ("jaxserve.roofline", "jaxserve.sequence"),
    "jaxserve.sla.pace": ("jaxserve.sla.step_time",),
    "jaxserve.sla.outlook": (
        "jaxserve.sla.pace",
        "jaxserve.policy",
        "jaxserve.sequence",
        "jaxserve.sla.turns",
    ),
    "jaxserve.sla.promised": (
        "jaxserve.drain",
        "jaxserve.sla.ladder",
        "jaxserve.sla.outlook",
        "jaxserve.sla.pace",
        "jaxserve.policy",
        "jaxserve.request",
        "jaxserve.sla.retry",
        "jaxserve.sequence",
        "jaxserve.sla.step_time",
        "jaxserve.sla.turns",
        "jaxserve.workload",
    ),
    "jaxserve.scheduler": (
        *TYPES,
        "jaxserve.deadlines",
        "jaxserve.limits",
        "jaxserve.pages",
        "jaxserve.policy",
        "jaxserve.results",
        "jaxserve.shares",
        "jaxserve.prefix",
        "jaxserve.sequence",
        "jaxserve.swap",
    ),
    "jaxserve.packing": ("jaxserve.batch", "jaxserve.request", "jaxserve.sequence"),
    "jaxserve.executor": (
        *TYPES,
        "jaxserve.batch",
        "jaxserve.mask_writer",
        "jaxserve.page_mover",
        "jaxserve.models",
        "jaxserve.packing",
        "jaxserve.rule_writer",
        "jaxserve.sequence",
        "jaxserve.step",
        "jaxserve.swap",
    ),
    "jaxserve.calibrate": (
        "jaxserve.executor",
        "jaxserve.request",
        "jaxserve.sequence",
        "jaxserve.swap",
    ),
    "jaxserve.engine": (
        "jaxserve.executor",
        "jaxserve.policy",
        "jaxserve.request",
        "jaxserve.scheduler",
    ),
    "jaxserve.tokenizer": (
        *TYPES,
        "jaxserve.chat_template",
        "jaxserve.detokenizer",
    ),
    "jaxserve.detokenizer": TYPES,
    "jaxserve.chat_template": (*TYPES, "jaxserve.template_sandbox"),
    "jaxserve.template_sandbox": TYPES,
    "jaxserve.stop_strings": (),
    "jaxserve.parsers": ("jaxserve.parsers",),
    "jaxserve.terminal": (),
    # The planner: arithmetic on dimensions and rates.
    "jaxserve.cards": TYPES,
    "jaxserve.workload": TYPES,
    "jaxserve.roofline": (*TYPES, "jaxserve.cards"),
    "jaxserve.plan": (
        *TYPES,
        "checkpoints",
        "jaxserve.cards",
        "jaxserve.line_chart",
        "jaxserve.plan",
        "jaxserve.roofline",
        "jaxserve.workload",
    ),
    "jaxserve.simulate": (
        *TYPES,
        "jaxserve.pages",
        "jaxserve.line_chart",
        "jaxserve.plan",
        "jaxserve.policy",
        "jaxserve.roofline",
        "jaxserve.scheduler",
        "jaxserve.sequence",
        "jaxserve.simulate",
        "jaxserve.sla.promised",
        "jaxserve.sla.step_time",
        "jaxserve.workload",
    ),
    # Compiling for a card that is not there.
    "jaxserve.memory": (),
    "jaxserve.aot": (
        *TYPES,
        "checkpoints.families",
        "jaxserve.aot",
        "jaxserve.batch",
        "jaxserve.cards",
        "jaxserve.executor",
        "jaxserve.memory",
        "jaxserve.models",
        "jaxserve.packing",
        "jaxserve.roofline",
        "jaxserve.rule_writer",
        "jaxserve.step",
    ),
    "jaxserve.server": (
        *TYPES,
        "jaxserve.detokenizer",
        "jaxserve.frames",
        "jaxserve.parsers",
        "jaxserve.server",
        "jaxserve.stop_strings",
        "jaxserve.token_stream",
        "jaxserve.tokenizer",
    ),
    # Clients of a server.
    "jaxserve.token_stream": (),
    "jaxserve.client": ("jaxserve.client", "jaxserve.errors", "jaxserve.token_stream"),
    "jaxserve.child": ("jaxserve.errors",),
    "jaxserve.chat": (
        "checkpoints",
        "jaxserve.chat",
        "jaxserve.child",
        "jaxserve.client",
        "jaxserve.errors",
        "jaxserve.flags",
        "jaxserve.token_stream",
    ),
    "jaxserve.line_chart": ("jaxserve.errors",),
    "jaxserve.bench": (
        "jaxserve.bench",
        "jaxserve.chat.flags",
        "jaxserve.client",
        "jaxserve.errors",
        "jaxserve.flags",
        "jaxserve.line_chart",
        "jaxserve.offline",
        "jaxserve.terminal",
        "jaxserve.token_stream",
    ),
    # An engine in this process: what the server asks of it, without the server.
    "jaxserve.offline": (
        *TYPES,
        "checkpoints",
        "jaxserve.engine",
        "jaxserve.fetch",
        "jaxserve.flags",
        "jaxserve.grammar",
        "jaxserve.offline",
        "jaxserve.server.choice",
        "jaxserve.server.generation",
        "jaxserve.server.limits",
        "jaxserve.server.openai",
        "jaxserve.server.prompts",
        "jaxserve.server.replies",
        "jaxserve.server.text",
        "jaxserve.startup",
        "jaxserve.terminal",
        "jaxserve.tokenizer",
    ),
    "jaxserve.fetch": ("checkpoints",),
    # Where everything is wired together.
    "jaxserve.sizing": (
        *TYPES,
        "jaxserve.batch",
        "jaxserve.executor",
        "jaxserve.limits",
        "jaxserve.memory",
        "jaxserve.models",
        "jaxserve.packing",
        "jaxserve.rule_writer",
        "jaxserve.step",
    ),
    "jaxserve.startup": PACKAGES,
    "jaxserve.worker": PACKAGES,
    "jaxserve.cli": PACKAGES,
    "jaxserve.flags": PACKAGES,
    "jaxserve.study_commands": PACKAGES,
    "jaxserve.study_flags": PACKAGES,
    "jaxserve.__main__": PACKAGES,
    "jaxserve": PACKAGES,
}

# Tested in milliseconds, and part of processes that must stay small: no jax, however indirectly.
WITHOUT_JAX = (
    "checkpoints",
    "jaxserve.aot.report",
    "jaxserve.aot.target",
    "jaxserve.bench.command",
    "jaxserve.cli",
    "jaxserve.client.synchronous",
    "jaxserve.config",
    "jaxserve.frames",
    "jaxserve.grammar",
    "jaxserve.pages",
    "jaxserve.plan",
    "jaxserve.scheduler",
    "jaxserve.simulate",
    "jaxserve.sla.promised",
    "jaxserve.server.app",
    "jaxserve.server.run",
    "jaxserve.tokenizer",
)


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append((name, path))
    return found


def imports(path: Path) -> set[str]:
    """Modules of this repository that a file imports anywhere, functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who knows whom"
            names.add(node.module or "")
    return {name for name in names if name.split(".")[0] in PACKAGES}


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda value: str(value).split("/")[-1])
def test_a_module_imports_only_what_its_layer_may_know(name, path):
    rule = max((prefix for prefix in ALLOWED if covers(prefix, name)), key=len)
    assert rule != "jaxserve" or name == "jaxserve", f"{name} needs a line in ALLOWED"
    strangers = {
        imported
        for imported in imports(path)
        if not any(covers(allowed, imported) for allowed in ALLOWED[rule])
    }
    assert not strangers, f"{name} (rule {rule!r}) may not import {sorted(strangers)}"


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_it_does_not_load_jax(name):
    check = f"import sys, {name}; sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'orbax')))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0
