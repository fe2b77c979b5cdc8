"""The whole compile as one list of named steps, each from one `Compilation` to the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import jax

from autopar import rules as rule_table
from autopar.compiler.compilation import Compilation, batch_of, budget_of, fingerprint_of, plain_options, restriction_of, roles_of
from autopar.compiler.pins import input_pins, pin_of
from autopar.compiler.predict import predict
from autopar.intraop.choose import SolveOptions
from autopar.intraop.meshes import Search, choose
from autopar.intraop.price import collectives, leaves, whole_ops
from autopar.intraop.remat import Variants
from autopar.intraop.shape import Shape, shape_of
from autopar.ir.check import check_graph, check_plan
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Timings
from autopar.ir.serialize import plain
from autopar.report.fold import fold_ops
from autopar.runtime.program import in_microbatches
from autopar.trace.recompute import recomputed_ops


def microbatch(c: Compilation) -> Compilation:
    """The step as a loop over microbatches."""
    found = in_microbatches(c.traced, c.microbatches, c.options.batch_argnums, c.options.accumulate_dtype)
    return replace(c, divided=found)


def look_up_rules(c: Compilation) -> Compilation:
    """A sharding rule for each op."""
    graph = check_graph(c.program.graph)
    return replace(c, rules=tuple(rule_table.rule_for(op, graph.aval) for op in graph.ops))


def fold(c: Compilation) -> Compilation:
    """Ops to clusters, equal clusters to classes; of the program as it is, and of it with values made again where that is asked for."""
    program = c.program.graph
    pinned = {v: pin_of(c, name) for v, name in zip(program.inputs, program.input_names, strict=True)}

    def shape(graph: Graph) -> Shape:
        found = c.rules if graph is program else tuple(rule_table.rule_for(op, graph.aval) for op in graph.ops)
        return shape_of(
            graph, found, c.traced.roles.carried, pinned, donated=c.options.donate, restriction=restriction_of(c), batch=batch_of(c)
        )

    return replace(c, variants=Variants(program, shape, c.options.remat))


def intraop(c: Compilation) -> Compilation:
    """Enumerate, price and solve the integer programme on each logical mesh; the fastest plan that fits is chosen."""
    assert c.variants is not None
    limits = SolveOptions(c.options.solver, c.options.time_limit_s, c.options.gap, bases=c.bases)
    search = Search(
        c.variants,
        c.cluster,
        budget_of(c),
        lambda mesh: input_pins(c, mesh),
        limits,
        c.progress,
        time.perf_counter,
        c.options.reduce_dtype == "as_written",
        c.below,
    )
    chosen, candidates = choose(search, c.meshes, c.least)
    check_plan(chosen.shape.graph, chosen.shape.rules, chosen.plan)
    return replace(c, shape=chosen.shape, rules=chosen.shape.rules, chosen=chosen, candidates=candidates)


def summarise(c: Compilation) -> Compilation:
    """The plan as data, with its predictions."""
    assert c.chosen is not None and c.shape is not None
    graph, chosen = c.shape.graph, c.chosen
    inputs, outputs = leaves(graph, chosen.plan, roles_of(c.program))
    plan = Plan(
        fingerprint_of(c.traced),
        c.target or getattr(c.traced.function, "__name__", ""),
        plain(c.cluster.to_dict()),
        chosen.plan,
        inputs,
        outputs,
        collectives(graph, c.rules, chosen.plan, chosen.pricer),
        whole_ops(graph, c.rules, chosen.plan, chosen.pricer, c.shape.charges, [rule_table.has_rule(op) for op in graph.ops]),
        predict(c),
        chosen.solve,
        Timings(c.trace_s, chosen.enumerate_s + c.seconds.get("fold", 0.0), chosen.solve_s, 0.0, c.trace_s + sum(c.seconds.values())),
        chosen.price.by_kind,
        chosen.live,
        c.candidates,
        plain_options(c.options),
        (*_restricted(c), *c.traced.roles.notes, *(c.tried if c.microbatches > 1 else ()), *_made_again(c)),
        jax.__version__,
        microbatches=c.microbatches,
        remat=c.options.remat if chosen.recomputed else "none",
        recomputed=chosen.recomputed,
    )
    return replace(c, plan=plan)


STEPS: tuple[tuple[str, Callable[[Compilation], Compilation]], ...] = (
    ("microbatch", microbatch),
    ("rules", look_up_rules),
    ("fold", fold),
    ("intraop", intraop),
    ("summarise", summarise),
)


def run(c: Compilation) -> Compilation:
    """Every step in order."""
    for name, step in STEPS:
        begin = time.perf_counter()
        c = step(c)
        c = replace(c, seconds={**c.seconds, name: time.perf_counter() - begin})
    return c


def _restricted(c: Compilation) -> tuple[str, ...]:
    restriction = restriction_of(c)
    return () if restriction is None else (f"planned within limits: {restriction}",)


def _made_again(c: Compilation) -> tuple[str, ...]:
    """What the plan makes again after forward, by place."""
    assert c.chosen is not None and c.shape is not None
    if not c.chosen.recomputed:
        return ()
    return tuple(f"made again after forward: {line}" for line in fold_ops(c.shape.graph, recomputed_ops(c.shape.graph)))
