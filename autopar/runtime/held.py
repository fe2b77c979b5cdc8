"""What a plan's program holds on a device of some kind, by the rules of that device's compiler."""

from __future__ import annotations

from autopar import rules
from autopar.intraop.liverange import live_bytes
from autopar.ir.plan import Plan
from autopar.runtime.program import planned
from autopar.trace.trace import Traced

BACKENDS = {"tpu": "tpu", "cuda": "gpu"}
MAKERS = {"NVIDIA": "gpu", "AMD": "gpu", "Google": "tpu"}


def backend_of(device: str) -> str | None:
    """The backend of a device, by its maker; None for simulated devices."""
    return MAKERS.get(device.partition(" ")[0])


def temporaries(plan: Plan, traced: Traced, backend: str) -> int:
    """Bytes of temporaries at the peak on one device.

    The lesser of two counts: the programme's, which keeps budgets, counts what need not be written; live ranges take loops as they stand.
    """
    program = planned(traced, plan)
    found = tuple(rules.rule_for(op, program.graph.aval) for op in program.graph.ops)
    carried = program.roles.carried if plan.options.get("donate", True) else ()
    as_written = plan.options.get("reduce_dtype") == "as_written"
    return min(plan.predicted.temp_bytes, live_bytes(program.graph, found, plan.sharding, carried, backend, as_written))
