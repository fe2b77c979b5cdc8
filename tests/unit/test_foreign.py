"""Compilers of hardware that is not here: what they are told, what they rewrite, and what a plan holds by their rules."""

import importlib.util
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import rules
from autopar.emit.compare import REWRITES, compare_collectives
from autopar.emit.hlo import CompiledCollective, read_collectives
from autopar.errors import MeshError, UsageError
from autopar.intraop.liverange import live_bytes
from autopar.ir.plan import Collective
from autopar.runtime.foreign import Foreign, check_foreign_memory, compile_for, foreign_mesh, gpu_config
from autopar.trace.trace import trace

B, M, H = 64, 256, 1024
CUDA = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda12")


def step(params, batch):
    def loss(p):
        return jnp.mean(jax.nn.gelu(batch @ p["up"]) @ p["down"])

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def arguments():
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    return {"up": shape(M, H), "down": shape(H, M)}, shape(B, M)


@pytest.fixture(scope="module")
def plan():
    return autopar.manual(step, arguments(), "h100-sxm:8", data=8)


def test_a_gpu_is_described_by_its_preset(plan):
    text = gpu_config("h100-sxm", plan.data.cluster["device"])
    assert "memory_bandwidth: 335" in text and "core_count: 132" in text and "major: 9" in text


def test_a_cluster_that_a_compiler_does_not_know_is_refused_with_those_it_does(plan):
    with pytest.raises(MeshError, match="v5e"):
        foreign_mesh(plan.data, "tpu")


def test_a_compiler_that_does_not_exist_is_refused(plan):
    with pytest.raises(UsageError, match="tpu and cuda"):
        plan.verify(step, arguments(), "rocm")


def test_what_compiles_need_not_fit(plan):
    data = plan.data
    held = data.predicted.temp_bytes
    found = Foreign("tpu", 10, 10, 10, held, held, None, "")
    assert check_foreign_memory(data, found).agree
    small = replace(data, cluster={**data.cluster, "device": {**data.cluster["device"], "memory_bytes": 100, "reserved_bytes": 0}})
    check = check_foreign_memory(small, found)
    assert not check.agree and "does not fit" in check.detail


COMBINED = """
HloModule jit_f, num_partitions=2
ENTRY %main (p: f32[8], q: f32[4]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %r = (f32[8]{0}, f32[4]{0}) all-reduce(%p, %q), replica_groups={{0,1}}, metadata={op_name="jit(f)/autopar.c1/psum"}
  %a = f32[8]{0} get-tuple-element(%r), index=0, metadata={op_name="jit(f)/autopar.c1/psum"}
  %b = f32[4]{0} get-tuple-element(%r), index=1, metadata={op_name="jit(f)/autopar.c2/psum"}
  %other = f32[4]{0} get-tuple-element(%elsewhere), index=1, metadata={op_name="jit(f)/autopar.c3/psum"}
  ROOT %s = f32[8]{0} add(%a, %a)
}
"""


def test_a_combined_collective_stands_for_what_is_taken_from_it():
    (found,) = read_collectives(COMBINED)
    assert found.ids == ("c1", "c2") and found.nbytes == 48


def _planned(kind="all_gather", nbytes=512, dtype="float32"):
    return Collective("c0", kind, ("data",), 2, nbytes, dtype, 1, 0.0, "", "forward", "")


def _compiled(kind="all_gather", nbytes=256, elements=128):
    return CompiledCollective("x", kind, ("c0",), (("bfloat16", (elements,)),), nbytes, ((0, 1),), (), "entry", 1)


def test_what_is_cast_after_a_gather_may_be_cast_before_it():
    check = compare_collectives([_planned()], [_compiled()], "cuda")
    assert check.agree and check.rewrites == ("cast before it moves",)


@pytest.mark.parametrize(
    ("planned", "compiled", "backend"),
    [
        (_planned(), _compiled(nbytes=128), "cuda"),
        (_planned(), _compiled(elements=64), "cuda"),
        (_planned(dtype="bfloat16"), _compiled(), "cuda"),
        (_planned(), _compiled(nbytes=1024), "cuda"),
        (_planned(), _compiled(), "cpu"),
        (_planned("reduce_scatter"), _compiled("reduce_scatter"), "cuda"),
    ],
)
def test_other_bytes_are_a_difference(planned, compiled, backend):
    assert not compare_collectives([planned], [compiled], backend).agree


def test_every_rewrite_has_a_reason_and_a_backend():
    assert all(r.reason and r.backends for r in REWRITES) and len({r.name for r in REWRITES}) == len(REWRITES)


def _held(function, args, backend):
    """Live bytes of a function on one device."""
    made = autopar.manual(function, args, "h100-sxm:1")
    traced = trace(function, args)
    found = tuple(rules.rule_for(op, traced.graph.aval) for op in traced.graph.ops)
    return live_bytes(traced.graph, found, made.data.sharding, traced.roles.carried, backend)


def test_element_wise_chains_hold_nothing_on_their_way():
    def chain(x):
        return jnp.sum(jnp.exp(jnp.sin(x) * 2) + 1)

    assert _held(chain, (jax.ShapeDtypeStruct((1024, 1024), jnp.float32),), "gpu") < 1024 * 1024


def test_what_a_matmul_reads_is_written_on_gpus_and_not_on_tpus():
    def product(x, w):
        return jnp.sum(jnp.exp(x) @ w)

    args = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((512, 8), jnp.float32)
    assert _held(product, args, "gpu") >= 512 * 512 * 4 > _held(product, args, "tpu")


def test_backward_keeps_what_it_cannot_make_again():
    """The pre-activation stays on both; GPUs keep the hyperbolic tangent and the activation beside it."""
    rows = 64 * B
    wide = arguments()[0], jax.ShapeDtypeStruct((rows, M), jnp.float32)
    tpu, gpu = (_held(step, wide, backend) for backend in ("tpu", "gpu"))
    activation = rows * H * 4
    assert tpu >= activation
    assert gpu / 1.02 >= tpu / 1.12 + 0.9 * activation


@pytest.mark.slow
@pytest.mark.skipif(CUDA is None, reason="needs autopar[cuda-aot]")
def test_the_cuda_compiler_makes_the_planned_collectives():
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    made = autopar.manual(step, arguments(), "h100-sxm:8", data=4, tensor=2)
    assert compile_for(made.data, made._traced, "cuda").collectives.agree
