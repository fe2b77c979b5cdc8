"""Import directions, read from the source: a module imports from its own layer or from one before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    *("errors", "ir", "rules", "schedule", "trace", "costs", "intraop", "interop", "emit", "runtime"),
    *("report", "compiler", "api", "models", "cli", "__main__", "__init__"),
)
WITH_JAX = frozenset({"trace", "emit", "runtime", "compiler", "api", "models"})
JAX_LIBRARIES = frozenset({"jax", "jaxlib", "flax", "optax", "equinox", "haiku", "chex", "orbax"})
COMPAT = "autopar.trace.compat"
PROFILER = "cost_models.profile"  # measures the machine at hand


def faults(root: Path) -> list[str]:
    """Every import under `root` that goes the wrong way, as `file:line: what`."""
    found = []
    for package in ("autopar", "cost_models"):
        for path in sorted((root / package).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            for line, name in imported(ast.parse(path.read_text()), module):
                fault = direction_fault(module, name) or jax_fault(module, name)
                if fault:
                    found.append(f"{path.relative_to(root)}:{line}: {fault}")
    return found


def imported(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module imports, in functions too, and of dotted uses of JAX's modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and dotted(node).startswith("jax."):
            yield node.lineno, dotted(node)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from ((node.lineno, a.value) for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def layer(module: str) -> str:
    """`autopar.ir.mesh` -> `ir`; `autopar` itself -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def direction_fault(module: str, name: str) -> str:
    """Why `module` must not import `name`, as far as layers go."""
    package, target = module.split(".")[0], name.split(".")[0]
    if package == "cost_models":
        forbidden = {"autopar"} if is_within(module, PROFILER) else {"autopar"} | JAX_LIBRARIES
        return f"cost_models must not import {name}" if target in forbidden else ""
    if target != "autopar":
        return ""
    here, there = layer(module), layer(name)
    if here not in LAYERS:
        return f"`{here}` is no layer; give it a place in tests/test_layers.py"
    if there not in LAYERS or name == "autopar":  # a name that autopar/__init__.py passes on
        there = "api"
    if LAYERS.index(there) > LAYERS.index(here):
        return f"`{here}` must not import `{there}` ({name})"
    if there == "models" and here not in ("models", "cli"):
        return f"`models` is imported by `cli` alone, not by `{here}`"
    if here == "emit" and there == "trace" and not is_within(name, COMPAT) and name != "autopar.trace":
        return f"`emit` takes trace.compat alone from `trace`, not {name}"
    return ""


def jax_fault(module: str, name: str) -> str:
    """Why `module` must not use the JAX module `name`."""
    if not module.startswith("autopar") or name.split(".")[0] not in JAX_LIBRARIES:
        return ""
    if layer(module) not in WITH_JAX:
        return f"`{layer(module)}` must not use JAX ({name})"
    hidden = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    if (hidden or is_within(name, "jax.extend") or is_within(name, "jaxlib")) and module != COMPAT:
        return f"private JAX ({name}) belongs in trace/compat.py"
    return ""


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_every_import_goes_from_a_layer_to_one_before_it():
    assert faults(ROOT) == []


@pytest.mark.parametrize(
    ("path", "line", "what"),
    [
        ("autopar/ir/plan.py", "from autopar.rules import registry", "must not import `rules`"),
        ("autopar/ir/plan.py", "from ..report.table import plan_table", "must not import `report`"),
        ("autopar/rules/dot.py", "def f():\n    import jax", "must not use JAX"),
        ("autopar/intraop/ilp.py", "import jax.numpy as jnp", "must not use JAX"),
        ("autopar/report/html.py", "from optax import adamw", "must not use JAX"),
        ("autopar/emit/manual.py", "from jax._src import core", "private JAX"),
        ("autopar/emit/manual.py", "import jax\njax.extend.core.Primitive", "private JAX"),
        ("autopar/runtime/executor.py", "from jax import extend", "private JAX"),
        ("autopar/runtime/executor.py", "import importlib\nimportlib.import_module('jax._src.core')", "private JAX"),
        ("autopar/emit/manual.py", "from autopar.trace.program import Program", "trace.compat alone"),
        ("autopar/compiler.py", "from autopar import models", "must not import `models`"),
        ("autopar/__main__.py", "from autopar import models", "imported by `cli` alone"),
        ("autopar/errors.py", "import autopar", "must not import `api`"),
        ("autopar/oddity/new.py", "from autopar.ir import mesh", "is no layer"),
        ("cost_models/roofline.py", "from autopar.ir.mesh import LogicalMesh", "cost_models must not import"),
        ("cost_models/roofline.py", "import jax", "cost_models must not import"),
        ("cost_models/profile/bench.py", "from autopar.ir import mesh", "cost_models must not import"),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(tmp_path, path, line, what):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(line + "\n")
    assert len(faults(tmp_path)) >= 1
    assert all(what in fault for fault in faults(tmp_path))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("autopar/trace/compat.py", "from jax.extend.core import jaxpr_as_fun\nfrom jax._src import core"),
        ("autopar/emit/manual.py", "import jax\nfrom autopar.trace import compat\nfrom autopar.ir.plan import Plan\njax.lax.psum"),
        ("autopar/cli.py", "from autopar import models, plan"),
        ("autopar/api.py", "import jax\nprint(jax.__version__.split('.'))"),
        ("cost_models/profile/bench.py", "import jax"),
        ("cost_models/roofline.py", "import numpy\nfrom cost_models import presets"),
    ],
)
def test_an_import_that_goes_the_right_way_passes(tmp_path, path, line):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(line + "\n")
    assert faults(tmp_path) == []
