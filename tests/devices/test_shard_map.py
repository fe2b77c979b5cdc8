"""A user's own `shard_map` under any plan: the numbers of its own mesh, its collectives in the plan."""

from __future__ import annotations

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import manual_steps
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from manual_steps import STEPS

import autopar
from autopar.errors import UsageError
from autopar.ir.mesh import LogicalMesh
from benchmarks import forced
from benchmarks.programs import Program, program


@cache
def made(name: str) -> Program:
    with jax.enable_x64(True):
        step, args = STEPS[name]()
    return program(name, step, args)


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2), (3,)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_a_region_gives_its_numbers_on_its_own_mesh_and_on_others(name, sizes):
    row = forced.row(made(name), sizes, "fast-link", 0, Counter())
    assert row.status == "agree", forced.table([row])


@pytest.mark.parametrize("name", STEPS)
def test_random_plans_run_a_region_as_planned_on_its_own_axes_too(name):
    seen = Counter()
    for seed in range(3):
        row = forced.row(made(name), (2, 4), "random", seed, seen)
        assert row.status == "agree", forced.table([row])
    assert any(primitive == "shard_map" and method == "manual" for primitive, method, _ in seen)


@pytest.mark.parametrize("name", ["around_both", "every_collective"])
def test_the_order_of_the_meshs_axes_does_not_matter(name):
    subject, mesh = made(name), LogicalMesh(("y", "x"), (4, 2))
    with subject.mode:
        plans = [forced.plan_for(subject, mesh, "random", seed) for seed in range(3)]
        assert any(s.axes("x") == ("x",) for plan, _ in plans for s in plan.strategies)
        for plan, pricer in plans:
            (error, worst), found = forced.check(subject, plan, pricer)
            assert error <= subject.bar and found.agree, f"{worst} {found}"


def test_a_region_that_pays_runs_on_its_own_axes_with_its_collectives_in_the_plan():
    def layer(x, w, v):
        body = lambda x, w, v: jax.lax.psum(jnp.tanh(x @ w) @ v, "y")  # noqa: E731
        specs = P("x"), P(None, "y"), P("y")
        return jax.shard_map(body, mesh=manual_steps.mesh(), in_specs=specs, out_specs=P("x"))(x, w, v)

    args = tuple(manual_steps.weights(*shape).astype(np.float32) for shape in ((64, 256), (256, 512), (512, 256)))
    plan = autopar.plan(layer, args, manual_steps.mesh(), options=autopar.Options(time_limit_s=None))
    found = [(c.kind, c.axes, c.nbytes, c.purpose) for c in plan.collectives if "shard_map" in c.purpose]
    assert found == [("all_reduce", ("y",), 32 * 256 * 4, "sum in shard_map")]
    checked = plan.verify(layer, args)
    assert checked.numbers.agree and checked.collectives.agree, str(checked)


def test_a_region_that_prints_runs_once_for_each_of_its_devices(capfd):
    def step(x):
        def body(x):
            jax.debug.print("on {i}", i=jax.lax.axis_index("y"))
            return x * 2

        return jax.shard_map(body, mesh=manual_steps.mesh(), in_specs=P("y"), out_specs=P("y"))(x)

    x = np.arange(8.0, dtype=np.float32)
    np.testing.assert_array_equal(autopar.parallelize(step, manual_steps.mesh())(x), x * 2)
    jax.effects_barrier()
    assert set(capfd.readouterr().out.split()) == {"on", "0", "1", "2", "3"}


def test_what_no_batch_of_devices_runs_is_an_error_with_its_line():
    def step(x):
        body = lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # noqa: E731
        return jax.shard_map(body, mesh=manual_steps.mesh(), in_specs=P("y"), out_specs=P("y"), check_vma=False)(x)

    with pytest.raises(UsageError, match=r"`shard_map` at .*test_shard_map.py:\d+ cannot run .*its own axes \(x=2, y=4\)"):
        autopar.parallelize(step, Mesh(jax.devices()[:3], ("q",)))(np.arange(8.0, dtype=np.float32))
