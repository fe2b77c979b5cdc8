"""Random programs under random legal plans give what one device gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from random_steps import MAKERS
from random_values import Pool, array, distance

import cost_models
from autopar import rules
from autopar.costs import Pricer
from autopar.emit.manual import Emission
from autopar.intraop.forced import Shares, random_plan
from autopar.ir.check import check_plan
from autopar.ir.mesh import LogicalMesh
from autopar.runtime.executor import Executable, Owned, make_mesh
from autopar.trace.arguments import split
from autopar.trace.trace import trace
from benchmarks.programs import QUICK, flat

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (2, 4), (1,))
LITERAL = 3.0


@dataclass(frozen=True)
class Subject:
    """A random program: its steps, which leaves are one array given twice, and which values it returns; state comes back at the front."""

    pool: Pool
    tied: tuple[tuple[int, int], ...]
    state: int
    outputs: tuple[int, ...]
    literal: bool
    seed: int

    def function(self, state: list[Any], rest: list[Any]) -> tuple[list[Any], list[Any]]:
        env = self.pool.run([*state, *rest])
        return [env[i] for i in self.returned], [env[i] for i in self.outputs] + [LITERAL] * self.literal

    @property
    def returned(self) -> list[int]:
        """For each state leaf the last value of its shape and dtype that is not another's; itself where there is none."""
        found: list[int] = []
        values = self.pool.values
        for i in self.pool.leaves[: self.state]:
            alike = [j for j, v in enumerate(values) if (v.shape, v.dtype) == (values[i].shape, values[i].dtype) and j not in found]
            found.append(alike[-1] if alike else i)
        return found

    @property
    def arguments(self) -> tuple[list[Any], list[Any]]:
        arrays = [array(self.pool.values[i], self.seed + n) for n, i in enumerate(self.pool.leaves)]
        for a, b in self.tied:
            arrays[b] = arrays[a]
        return arrays[: self.state], arrays[self.state :]

    def __repr__(self) -> str:
        values = self.pool.values
        leaves = [f"{i}: {values[i].dtype}{list(values[i].shape)}" for i in self.pool.leaves]
        steps = [f"{first}.. = {s.label} of {s.operands} -> {s.results}" for first, s in self.pool.steps]
        return "\n".join(["", *leaves, *steps, f"state {self.state}, tied {self.tied}, returned {self.returned} and {self.outputs}"])


@st.composite
def subjects(draw: Any, most: int) -> Subject:
    pool = Pool(draw)
    for _ in range(draw(st.integers(most // 3, most))):
        pool.add(draw(st.sampled_from(MAKERS))(pool))
    if draw(st.booleans()):
        pool.leaf((4,), "float32")  # which nothing reads
    alike = [
        (a, b)
        for b in range(len(pool.leaves))
        for a in range(b)
        if pool.values[pool.leaves[a]] == pool.values[pool.leaves[b]] and pool.values[pool.leaves[a]].shape
    ]
    tied = tuple(pair for pair in alike[:1] if draw(st.booleans()))
    outputs = draw(st.lists(st.sampled_from(range(len(pool.values))), max_size=2)) if pool.values else []
    last = [first + k for first, s in pool.steps[-2:] for k in range(len(s.results))]
    state = draw(st.integers(0, min(2, len(pool.leaves))))
    return Subject(pool, tied, state, (*last, *outputs), draw(st.booleans()), draw(st.integers(0, 99)))


@cache
def pricer(sizes: tuple[int, ...]) -> Pricer:
    mesh = LogicalMesh(("x", "y")[: len(sizes)], sizes)
    return Pricer(cost_models.load_cluster(f"fast-link:{mesh.num_devices}"), mesh)


SHARES = (Shares(), Shares(whole=0.02, stay=0.8), Shares(whole=0.02, stay=0.1))


def assert_same_on_devices(subject: Subject, sizes: tuple[int, ...], seed: int) -> None:
    arguments = subject.arguments
    traced = trace(subject.function, arguments)
    leaves, _ = split(arguments, {})
    one = jax.jit(flat(traced)).lower(*leaves).compile(compiler_options=QUICK)(*leaves)
    found = tuple(rules.rule_for(op, traced.graph.aval) for op in traced.graph.ops)
    prices = pricer(sizes)
    plan = random_plan(traced.graph, found, prices.mesh, traced.roles.carried, prices.move, seed, SHARES[seed % 3])
    check_plan(traced.graph, found, plan)
    emission = Emission(traced.graph, traced.program, found, plan)
    run = Executable(traced, emission, make_mesh(prices.mesh), True, compiler_options=QUICK)
    outputs = run(leaves, Owned())
    values = [subject.pool.values[i] for i in (*subject.returned, *subject.outputs)]
    for name, a, e, v in zip(traced.graph.output_names, outputs, one, values, strict=False):
        assert distance(a, e, v) <= 1, f"{name} differs: {a} where one device has {e}; {v}\n{plan}"


def fuzz(examples: int, most: int) -> Callable:
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    chosen = settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=quiet, phases=phases)
    return lambda test: chosen(given(subjects(most), st.sampled_from(MESHES), st.integers(0, 2**20))(test))


@fuzz(150, 9)
def test_a_small_random_program_under_a_random_plan_gives_what_one_device_gives(subject, sizes, seed):
    assert_same_on_devices(subject, sizes, seed)


@pytest.mark.slow
@fuzz(1000, 9)
def test_random_programs_under_random_plans_give_what_one_device_gives(subject, sizes, seed):
    assert_same_on_devices(subject, sizes, seed)
