"""Collectives read from compiled programs, and compared with planned ones."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from autopar.emit.compare import REWRITES, compare_collectives
from autopar.emit.hlo import CompiledCollective, read_collectives
from autopar.errors import CheckError
from autopar.ir.dtypes import itemsize
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Collective

CUBE = LogicalMesh(("x", "y", "z"), (2, 2, 2))
LINE = LogicalMesh(("x",), (8,))
RING = [(i, (i + 1) % 8) for i in range(8)]

# Each takes the local part, of shape (8, 16), over axes.
EXCHANGES = {
    "all_gather": lambda v, axes: lax.all_gather(v, axes, axis=0, tiled=True),
    "all_reduce": lambda v, axes: lax.psum(v, axes),
    "reduce_scatter": lambda v, axes: lax.psum_scatter(v, axes, scatter_dimension=0, tiled=True),
    "all_to_all": lambda v, axes: lax.all_to_all(v, axes, split_axis=0, concat_axis=1, tiled=True),
    "permute": lambda v, axes: lax.ppermute(v, axes, RING),
}


def compiled(body, mesh=CUBE, shape=(8, 16), dtype="float32", devices=None):
    """The collectives of `body`, run on every device of `mesh` on a whole array of `shape`."""
    jax_mesh = Mesh(np.array(devices or jax.devices()).reshape(mesh.sizes), mesh.names)
    spec = PartitionSpec()
    program = jax.jit(jax.shard_map(body, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return read_collectives(program.lower(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))).compile().as_text())


def scoped(number, compute, *args):
    with jax.named_scope(f"autopar.c{number}"):
        return compute(*args)


def planned(number, kind, axes, shape=(8, 16), dtype="float32", mesh=CUBE, times=1):
    nbytes = prod(shape) * itemsize(dtype)
    return Collective(f"c{number}", kind, axes, mesh.size(axes), nbytes, dtype, times, 1e-6, "test", "forward", "model.py:1")


def coordinates(device, mesh):
    return np.unravel_index(device, mesh.sizes)


@pytest.mark.parametrize("axes", [("x",), ("z",), ("x", "z"), ("z", "y"), ("x", "y", "z")])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_kind_bytes_and_groups_are_read_from_a_real_program(kind, axes):
    (found,) = compiled(lambda v: scoped(3, EXCHANGES[kind], v, axes))
    assert (found.kind, found.ids, found.computation, found.times) == (kind, ("c3",), "entry", 1)
    assert found.nbytes == 8 * 16 * 4
    assert {dtype for dtype, _ in found.operands} == {"float32"}
    assert found.group_size == 2 ** len(axes)
    assert sorted(d for group in found.groups for d in group) == list(range(8))
    for group in found.groups:
        rest = [tuple(p for p, a in zip(coordinates(d, CUBE), CUBE.names, strict=True) if a not in axes) for d in group]
        assert len(set(rest)) == 1
    assert compare_collectives([planned(3, kind, axes)], [found], "cpu", CUBE).agree


def test_groups_are_positions_in_the_mesh_also_when_its_devices_are_permuted():
    devices = [jax.devices()[i] for i in (3, 1, 2, 0, 7, 5, 6, 4)]
    (found,) = compiled(lambda v: scoped(0, EXCHANGES["all_reduce"], v, ("y",)), LogicalMesh(("x", "y"), (2, 4)), devices=devices)
    assert found.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_permutation_has_its_pairs_and_the_devices_they_connect():
    (found,) = compiled(lambda v: scoped(1, lax.ppermute, v, "y", [(0, 1), (1, 0)]))
    assert found.kind == "permute"
    assert set(found.pairs) == {(d, d ^ 2) for d in range(8)}
    assert found.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    (shift,) = compiled(lambda v: scoped(1, lax.ppermute, v, "x", [(i, i + 1) for i in range(7)]), LINE)
    assert shift.groups == (tuple(range(8)),)


def test_loops_multiply_by_their_trip_counts():
    def body(v):
        def outer(h, _):
            h = scoped(0, lax.psum, jnp.sin(h), "x") * 0.5

            def inner(k, _):
                return jnp.cos(scoped(1, lax.psum, k, "y")), None

            return lax.scan(inner, h, None, length=3)[0], None

        return scoped(2, lax.psum, lax.scan(outer, v, None, length=5)[0], "z")

    found = {c.ids: c for c in compiled(body)}
    assert {ids: c.times for ids, c in found.items()} == {("c0",): 5, ("c1",): 15, ("c2",): 1}
    assert found[("c2",)].computation == "entry" != found[("c1",)].computation


def test_a_loop_of_unknown_length_and_both_branches_count_once():
    def body(v):
        w = lax.while_loop(lambda c: jnp.sum(c) > 0.1, lambda c: scoped(0, lax.psum, c * 0.1, "x"), v)
        return lax.cond(jnp.sum(v) > 0, lambda u: scoped(1, lax.psum, jnp.sin(u), "x"), lambda u: scoped(2, lax.pmax, u, "x"), w)

    assert {c.ids: c.times for c in compiled(body, LINE)} == {("c0",): 1, ("c1",): 1, ("c2",): 1}


def test_combined_collectives_keep_all_their_ids_and_agree_by_their_sum():
    def body(v):
        return scoped(0, lax.psum, v, ("x", "z")), scoped(1, lax.psum, v[0, :4], ("x", "z"))

    (found,) = compiled(body)
    assert found.ids == ("c0", "c1")
    assert found.operands == (("float32", (8, 16)), ("float32", (4,)))
    assert found.nbytes == 8 * 16 * 4 + 16
    plan = [planned(0, "all_reduce", ("x", "z")), planned(1, "all_reduce", ("x", "z"), (4,))]
    check = compare_collectives(plan, [found], "cpu", CUBE)
    assert check.agree and check.rewrites == ("combined",)
    unknown = compare_collectives(plan, [found], "cpu", CUBE, rewrites=())
    assert not unknown.agree and [d.what for d in unknown.differing] == ["combined"]
    assert not compare_collectives(plan[:1], [found], "cpu", CUBE).agree


@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32", "int8", "int32"])
def test_the_rewrites_of_the_cpu_say_in_which_dtype_each_dtype_moves(dtype, kind):
    (found,) = compiled(lambda v: scoped(0, EXCHANGES[kind], v, "x"), LINE, dtype=dtype)
    check = compare_collectives([planned(0, kind, ("x",), dtype=dtype, mesh=LINE)], [found], "cpu", LINE)
    assert check.agree, str(check)
    widened = {r.planned: r for r in REWRITES if r.change == "dtype"}
    expected = {"bfloat16": ("float32", "bfloat16"), "float8_e4m3fn": ("float16", "float8"), "float8_e5m2": ("float16", "float8")}
    moves_as, rewrite = expected.get(dtype, (dtype, ""))
    assert {name for name, _ in found.operands} == {moves_as}
    assert check.rewrites == ((widened[rewrite].name,) if rewrite else ())
    assert check.planned_bytes == check.compiled_bytes == 8 * 16 * itemsize(moves_as)


def test_a_dtype_that_only_the_cpu_widens_differs_elsewhere():
    (found,) = compiled(lambda v: scoped(0, EXCHANGES["all_gather"], v, "x"), LINE, dtype="bfloat16")
    check = compare_collectives([planned(0, "all_gather", ("x",), dtype="bfloat16", mesh=LINE)], [found], "tpu", LINE)
    assert [d.what for d in check.differing] == ["bytes"]


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (planned(0, "all_gather", ("x", "z")), "kind"),
        (planned(0, "all_reduce", ("x",)), "group"),
        (planned(0, "all_reduce", ("x", "y")), "group"),
        (planned(0, "all_reduce", ("x", "z"), (8, 8)), "bytes"),
        (planned(0, "all_reduce", ("x", "z"), times=2), "bytes"),
    ],
)
def test_what_differs_is_named(plan, what):
    found = compiled(lambda v: scoped(0, lax.psum, v, ("x", "z")))
    check = compare_collectives([plan], found, "cpu", CUBE)
    assert not check.agree
    assert [d.what for d in check.differing] == [what]
    assert what in str(check)


def test_what_is_missing_and_what_is_unexpected_is_named():
    found = compiled(lambda v: lax.all_gather(scoped(0, lax.psum, v, "x"), "y", tiled=True))
    plan = [planned(0, "all_reduce", ("x",)), planned(1, "all_gather", ("y",))]
    check = compare_collectives(plan, found, "cpu", CUBE)
    assert not check.agree and not check.differing
    assert [c.id for c in check.missing] == ["c1"]
    assert [(c.kind, c.ids) for c in check.unexpected] == [("all_gather", ())]
    assert check.compiled_bytes == check.planned_bytes == 2 * 8 * 16 * 4


def test_a_collective_that_the_compiler_took_out_of_its_loop_differs():
    def body(v):
        return lax.scan(lambda h, _: (h + scoped(0, lax.psum, v, "x"), None), jnp.zeros_like(v), None, length=7)[0]

    check = compare_collectives([planned(0, "all_reduce", ("x",), times=7)], compiled(body), "cpu", CUBE)
    assert [d.what for d in check.differing] == ["bytes"]


def test_no_collectives_are_found_where_there_are_none():
    assert compiled(jnp.sin) == ()
    assert compare_collectives([], [], "cpu").agree


# What other compilers write, in the forms that XLA prints.

MODULE = """HloModule m, num_partitions=8
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (p: bf16[4,256]) -> bf16[4,256] {{
  %p = bf16[4,256]{{1,0:T(8,128)(2,1)}} parameter(0)
{body}
}}
"""


def read(body) -> CompiledCollective:
    (found,) = read_collectives(MODULE.format(body=body))
    return found


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=2,'y'=2,'z'=2] {'z','x'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'x','y':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh[x=2,y=2], device_ids=(0,2,1,3) {x}", ((0, 1), (2, 3))),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_device_groups_are_read_in_every_form(written, groups):
    assert read(f"  ROOT %r = bf16[4,256]{{1,0}} all-reduce(%p), replica_groups={written}, to_apply=%add").groups == groups


def test_an_asynchronous_pair_is_one_collective():
    found = read(
        '  %s = (bf16[4,256]{1,0}, bf16[32,256]{1,0}) all-gather-start(bf16[4,256]{1,0} %p), replica_groups=[1,8]<=[8], '
        'metadata={op_name="jit(f)/autopar.c4/all_gather"}\n'
        "  ROOT %d = bf16[32,256]{1,0} all-gather-done(%s)"
    )
    assert (found.kind, found.ids, found.nbytes, found.operands) == ("all_gather", ("c4",), 2048, (("bfloat16", (4, 256)),))


def test_a_collective_inside_an_asynchronous_computation_is_counted_once():
    text = MODULE.format(body="  %s = ((bf16[4,256]), bf16[4,256], u32[]) async-start(%p), calls=%wrapped\n  ROOT %d = async-done(%s)")
    wrapped = "%wrapped (q: bf16[4,256]) -> bf16[4,256] {\n  %q = bf16[4,256] parameter(0)\n  ROOT %r = bf16[4,256] all-to-all(%q)\n}\n"
    (found,) = read_collectives(text + wrapped)
    assert (found.kind, found.computation, found.times) == ("all_to_all", "wrapped", 1)
    sugared = text.replace("async-start(%p)", "all-to-all-start(%p)").replace("async-done", "all-to-all-done")
    (found,) = read_collectives(sugared + wrapped)
    assert (found.kind, found.computation) == ("all_to_all", "entry")


def test_a_collective_whose_caller_is_not_recognised_is_not_lost():
    text = MODULE.format(body="  ROOT %s = bf16[4,256] mystery(%p), runs=%inner")
    inner = "%inner (q: bf16[4,256]) -> bf16[4,256] {\n  %q = bf16[4,256] parameter(0)\n  ROOT %r = bf16[4,256] all-to-all(%q)\n}\n"
    assert [(c.kind, c.times) for c in read_collectives(text + inner)] == [("all_to_all", 1)]


def test_a_name_that_mentions_a_collective_is_not_one():
    text = MODULE.format(body='  ROOT %all-reduce.1 = bf16[4,256] negate(%p), metadata={op_name="all-gather(x)/autopar.c1"}')
    assert read_collectives(text) == ()


def test_text_that_is_no_program_and_groups_that_are_not_known_are_refused():
    with pytest.raises(CheckError, match="no ENTRY"):
        read_collectives("module @jit_f { }")
    with pytest.raises(CheckError, match="device groups"):
        read("  ROOT %r = bf16[4,256] all-reduce(%p), replica_groups=<<odd>>, to_apply=%add")
    with pytest.raises(CheckError, match="dtype `q7`"):
        read("  ROOT %r = bf16[4,256] all-reduce(q7[4] %p), replica_groups={}, to_apply=%add")


def test_differences_print_what_is_planned_and_what_is_compiled():
    found = read('  ROOT %r = bf16[4,256] all-reduce(%p), replica_groups={}, metadata={op_name="autopar.c0/psum"}, to_apply=%add')
    check = compare_collectives([planned(0, "all_gather", ("x",), (4, 256), "bfloat16", LINE)], [found], "tpu", LINE)
    assert str(check.differing[0]) == "c0: kind is all_reduce in the compiled program, all_gather in the plan"
    moved = replace(planned(1, "all_gather", ("x",), mesh=LINE), source="model.py:12")
    assert "c1 all_gather over x, test model.py:12" in str(compare_collectives([moved], [], "tpu", LINE))
