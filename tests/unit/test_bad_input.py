"""Arguments that make no sense: each is an error of autopar's own that says what to do, and nothing is lost."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import autopar
from autopar import ClusterError, InfeasibleError, Options, PlanError, RuleError, TraceError, UsageError
from autopar.api import cluster_of_devices
from autopar.api.clusters import preset_of_devices
from autopar.errors import AutoparError
from cost_models.profile import host

W, X = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)


def step(w, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grads, jnp.sum(grads)


def plan(cluster="fast-link:8", function=step, args=(W, X), **options):
    return autopar.plan(function, args, cluster, options=Options(**options))


# --- functions and meshes -------------------------------------------------------------------------------------------------------------


def test_what_is_no_function():
    with pytest.raises(UsageError, match="float is not callable: pass the training step itself, not its result"):
        autopar.parallelize(3.0, "fast-link:8")
    with pytest.raises(UsageError, match=r"str is not callable: write `parallelize\(mesh=...\)`"):
        autopar.parallelize("fast-link:8")
    with pytest.raises(UsageError, match="not callable"):
        autopar.plan({}, (W, X), "fast-link:8")
    with pytest.raises(UsageError, match=r"Mesh is not callable: write `parallelize\(mesh=...\)`"):
        autopar.parallelize(jax.make_mesh((8,), ("x",)))


def test_functions_whose_call_does_not_run_their_body():
    def generator(w, x):
        yield w

    async def coroutine(w, x):
        return w

    for function in (generator, coroutine, partial(generator, W)):
        with pytest.raises(UsageError, match="is a generator or a coroutine"):
            autopar.parallelize(function, "fast-link:8")


def test_a_misspelt_cluster_names_the_one_that_was_meant():
    for run in (plan, lambda c: autopar.parallelize(step, c).plan(W, X)):
        with pytest.raises(ClusterError, match="unknown cluster 'h100-sxn'. Did you mean h100-sxm"):
            run("h100-sxn:8")


@pytest.mark.parametrize("text", ["h100-sxm:0x8", "h100-sxm:eight", "h100-sxm:8x", "v5e:3x4x5x6", "h100-sxm:16", "absent.toml"])
def test_shapes_that_do_not_fit(text):
    with pytest.raises(ClusterError):
        plan(text)


@pytest.mark.parametrize(
    "text, lacks",
    [
        ("", "lacks device, topology, title"),
        ('title = "t"', "lacks device, topology."),
        ('title = "t"\n[device]\n[topology]', "lacks a kind or a shape"),
        ('title = "t"\ndevice = 3\n[topology]', "lacks device"),
        ('title = "t"\n[device]\n[topology]\nkind = "two-level"\nshape = [1, 8]', "incomplete"),
        ('title = "t"\n[device]\n[topology]\nkind = "ring"\nshape = [1, 8]', "incomplete"),
        ("\x80", "not valid TOML"),
    ],
)
def test_profiles_that_lack_something(tmp_path, text, lacks):
    (tmp_path / "c.toml").write_text(text, encoding="latin-1")
    with pytest.raises(ClusterError, match=lacks):
        plan(str(tmp_path / "c.toml"))


@pytest.mark.parametrize("mesh", [8, ("data", 8), AbstractMesh((8,), ("x",))])
def test_what_is_no_mesh(mesh):
    with pytest.raises(UsageError, match="a mesh is a jax.sharding.Mesh, an autopar.Cluster, a string such as 'h100-sxm:8x8' or None"):
        plan(mesh)


def test_more_devices_than_there_are():
    parallel = autopar.parallelize(step, "fast-link:16")
    w, x = jnp.ones(W.shape), jnp.ones(X.shape)
    with pytest.raises(autopar.MeshError, match="needs 16 devices"):
        parallel(w, x)
    assert parallel.plan(w, x).mesh.num_devices == 16 and not w.is_deleted()


def test_more_devices_than_there_are_are_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(host, "figures", lambda *_: pytest.fail("measured"))
    parallel = autopar.parallelize(step, "host:16")
    for run in (parallel, parallel.lower, lambda w, x: parallel.init(lambda: w, batch=x)):
        with pytest.raises(autopar.MeshError, match="needs 16 devices, but 8 are here"):
            run(jnp.ones(W.shape), jnp.ones(X.shape))


# --- arguments ------------------------------------------------------------------------------------------------------------------------


def test_the_users_error_is_chained_and_the_step_stays_usable():
    parallel = autopar.parallelize(step, "fast-link:8")
    with pytest.raises(TraceError, match="(?s)`step` raised TypeError.*try `jax.make_jaxpr`") as error:
        parallel(jnp.ones((5, 5)), jnp.ones(X.shape))
    assert isinstance(error.value.__cause__, TypeError)
    assert parallel.plan(W, X).collectives is not None


def test_unhashable_leaves():
    class Table:
        __hash__ = None

    class Closed:
        def __hash__(self):
            raise NotImplementedError

    for leaf in (Table(), Closed()):
        with pytest.raises(UsageError, match=r"\['table'\] is a (Table|Closed): neither an array nor hashable"):
            plan(args=({"table": leaf}, X))


def test_shapes_where_arrays_are_needed():
    with pytest.raises(UsageError, match="`w` is a shape, and running a step takes arrays"):
        autopar.parallelize(step, "fast-link:8")(W, jnp.ones(X.shape))


@pytest.mark.parametrize("transform", [jax.jit, jax.eval_shape, jax.vmap])
def test_a_parallel_step_inside_a_transformation(transform):
    parallel, args = autopar.parallelize(step, "fast-link:8"), (jnp.ones((1, *W.shape)), jnp.ones((1, *X.shape)))
    with pytest.raises(UsageError, match="cannot be called inside jit, grad or vmap"):
        transform(parallel, *args) if transform is jax.eval_shape else transform(parallel)(*args)


def test_outputs_that_do_not_match_the_state_are_legal_and_noted():
    found = plan(function=lambda s, x: ({"w": s["w"].astype("bfloat16"), "b": s["b"]}, x.sum()), args=({"w": W, "b": X}, X))
    assert [leaf.role for leaf in found.inputs] == ["state", "batch", "batch"]
    assert any("1 of the 2 leaves of argument 0 come back" in note for note in found.notes)


@pytest.mark.parametrize("args", [{"x": X}, X, jnp.ones(3), "w", 3])
def test_arguments_come_as_a_tuple(args):
    with pytest.raises(UsageError, match=r"the tuple of the step's arguments, not an? \w+: write plan\(function, \(state, batch\)"):
        plan(args=args)
    with pytest.raises(UsageError, match="`args` is the tuple"):
        plan().verify(step, args)
    with pytest.raises(UsageError, match="`kwargs` maps names of arguments to their values, not a list"):
        autopar.plan(step, (W, X), "fast-link:8", kwargs=[1])
    assert plan(args=[W, X]).inputs


@pytest.mark.parametrize(
    "leaf, message",
    [
        (np.array(["a"]), r"args\[0\]\['w'\] is an array of dtype <U1, which JAX cannot hold"),
        (np.array(["2020-01-01"], "datetime64[D]"), "dtype datetime64"),
        (np.array([object()]), "dtype object"),
        (2**40, "is 1099511627776, which int32 cannot hold. Pass a float .*jax_enable_x64"),
        (-(2**31) - 1, "cannot hold"),
    ],
)
def test_leaves_that_jax_cannot_hold(leaf, message):
    with pytest.raises(UsageError, match=message):
        plan(args=({"w": leaf}, X))
    with pytest.raises(UsageError, match=r"args\[1\] is .* cannot hold"):
        autopar.parallelize(step, "fast-link:8")(jnp.ones(W.shape), leaf)


def test_what_init_cannot_create():
    parallel = autopar.parallelize(step, "fast-link:8")
    with pytest.raises(TraceError, match=r"(?s)`create`, which creates the state, raised TypeError.*close over: init\(lambda key") as error:

        def create(key, size):
            return jnp.ones((size, 32))

        parallel.init(create, jax.random.key(0), 16, batch=X)
    assert isinstance(error.value.__cause__, TypeError)
    with pytest.raises(TraceError, match="raised ZeroDivisionError"):
        parallel.init(lambda: 1 / 0, batch=X)
    with pytest.raises(UsageError, match="not callable"):
        parallel.init(jnp.ones(W.shape), batch=X)
    assert parallel.init(lambda key: create(key, 16), jax.random.key(0), batch=X).shape == (16, 32)


def test_init_with_a_batch_that_does_not_fit():
    with pytest.raises(UsageError, match="can be called neither with the state and the batch as they are nor spread"):
        autopar.parallelize(lambda w, x, y, z: w, "fast-link:8").init(lambda: jnp.ones(W.shape), batch=(1.0, 2.0))


# --- options --------------------------------------------------------------------------------------------------------------------------


def test_what_are_no_options():
    for run in (autopar.plan, lambda f, args, where, options: autopar.parallelize(f, where, options=options)):
        with pytest.raises(UsageError, match=r"not a dict: pass autopar.Options\(\*\*options\)"):
            run(step, (W, X), "fast-link:8", options={"donate": False})
        with pytest.raises(UsageError, match=r"not an int: pass autopar.Options"):
            run(step, (W, X), "fast-link:8", options=3)


def test_an_unknown_option_names_the_one_that_was_meant():
    with pytest.raises(UsageError, match="unknown option memory_byte. Did you mean memory_bytes"):
        autopar.parallelize(step, "fast-link:8", memory_byte=3)


@pytest.mark.parametrize(
    "options",
    [
        *({"memory_bytes": 0}, {"memory_fraction": 1.5}, {"solver": "cplex"}, {"emitter": "pmap"}),
        *({"reduce_dtype": "bfloat16"}, {"stages": 0}, {"microbatches": 0}, {"remat": "sometimes"}),
            *({"stages": "some"}, {"schedule": "2f2b"}, {"schedule": "1f1b"}),
        *({"memory_bytes": value} for value in ("8GiB", True, -1, math.inf, math.nan)),
        *({"memory_fraction": value} for value in ("a", 0, -0.5, math.nan, None)),
        *({"axis_names": value} for value in ((), ("x", "x"), "data", ("",), 3, ("x", 3))),
        *({"pins": value} for value in ([], {"w": 3}, {"w": "x"}, {3: P("x")}, {"w": P(3)}, {"w": P(P.UNCONSTRAINED)}, {"w": P("x", "x")})),
        *({"batch_argnums": value} for value in (2, -3, "x", 1.0)),
        *({"static_argnums": 0.5}, {"static_argnames": 3}, {"accumulate_dtype": "float31"}, {"donate": 1}, {"donate": "no"}),
        *({"time_limit_s": value} for value in (-1, 0, "1", math.nan, math.inf)),
        *({"gap": value} for value in (-1e-9, math.nan, "0.1", math.inf, None)),
    ],
)
def test_options_that_make_no_sense_or_are_not_there_yet(options):
    with pytest.raises(UsageError, match=next(iter(options)).removesuffix("s")):
        autopar.parallelize(step, "fast-link:8", **options)


@pytest.mark.parametrize(
    "pins, message",
    [
        ({"weights": P("x")}, "no parameter path matches the pins weights. Paths look like: w, x"),
        ({"w": P("model")}, "Set `axis_names` or pass a Mesh"),
        ({"w": P("x", None, None)}, "more entries than the 2 dimensions"),
        ({"w": P(("x", "y"), "x")}, "uses axis x twice"),
        ({"w*": P("x"), "*": P(None, "x")}, r"w is pinned in more than one way: 'w\*' says \[x, -\], '\*' says"),
    ],
)
def test_pins_that_cannot_hold(pins, message):
    with pytest.raises(UsageError, match=message):
        plan(pins=pins)


def test_pins_that_agree_and_a_whole_path_that_outranks_a_pattern():
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    for pins in ({"w*": P("x"), "?": P("x", None)}, {"?": P(None, "x"), "w": P("x")}, {"w": sharding}, {"w": ("x",)}, {"w": [["x"], None]}):
        found = plan(axis_names=("x",), pins=pins | {"x": P("x")})
        assert found.in_specs == (P("x", None), P("x", None))


def test_a_pin_that_does_not_divide():
    odd = jax.ShapeDtypeStruct((6, 32), jnp.float32)
    with pytest.raises(UsageError, match="does not fit w .* a dimension does not divide"):
        plan(args=(odd, jax.ShapeDtypeStruct((64, 6), jnp.float32)), pins={"w": P("x")})


def test_an_impossible_budget_says_what_would_do():
    args = (jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((64, 512), jnp.float32))
    with pytest.raises(InfeasibleError) as raised:
        plan(args=args, memory_bytes=10_000)
    error = raised.value
    assert error.budget_bytes == 10_000 < error.peak_bytes
    assert error.live and all(isinstance(what, str) and size > 0 for what, size in error.live)
    assert sorted((size for _, size in error.live), reverse=True) == [size for _, size in error.live]
    assert error.suggestions and str(error)
    assert plan(args=args, memory_bytes=error.peak_bytes).predicted.peak_bytes <= error.peak_bytes
    with pytest.raises(InfeasibleError):
        plan(args=args, memory_bytes=int(error.peak_bytes * 0.8))


# --- plan files -----------------------------------------------------------------------------------------------------------------------


def test_plan_files_that_are_none(tmp_path):
    whole = tmp_path / "plan.json"
    plan().save(whole)
    for name, text, message in (
        ("cut.json", whole.read_text()[:-200], "not JSON, or was cut off"),
        ("future.json", whole.read_text().replace('"schema": 3', '"schema": 99', 1), "schema 99; this version of autopar reads schema 3"),
        ("other.json", "[]", "a plan is a JSON object"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(PlanError, match=message):
            autopar.parallelize(step, plan=tmp_path / name)
    with pytest.raises(PlanError, match="absent.json cannot be read"):
        autopar.parallelize(step, plan="absent.json")
    with pytest.raises(UsageError, match="`plan` is an autopar.Plan or the path of one, not int"):
        autopar.parallelize(step, plan=3)


DAMAGES = {
    "a gate that is no op": lambda d: d["sharding"]["moves"][0].update(gate=99),
    "a value that is not there": lambda d: d["sharding"]["moves"][0].update(value=999),
    "a dimension that is not there": lambda d: d["sharding"]["moves"][0]["move"].update(dim=99, to_dim=99),
    "a negative dimension": lambda d: d["sharding"]["moves"][0]["move"].update(dim=-3, to_dim=-3),
    "a form of another rank": lambda d: d["sharding"]["moves"][0]["source"].update(dims=[["x"]] * 5),
    "no inputs": lambda d: d.update(inputs=[]),
    "inputs of another name": lambda d: d["inputs"][0].update(path="v"),
    "an output that lies otherwise": lambda d: d["outputs"][0]["sharding"].update(dims=[[], []]),
    "no strategies": lambda d: d["sharding"].update(strategies=[]),
    "no moves": lambda d: d["sharding"].update(moves=[]),
    "a pass that is not there": lambda d: d["sharding"]["strategies"][0].update(cuts=[], passes=[["x", -7]]),
    "a partial input": lambda d: d["sharding"]["inputs"][0].update(partial=[["x", "sum"]], dims=[[], []]),
    "moves that need each other": lambda d: d["sharding"]["moves"][0].update(source_generation=7),
    "options of no sense": lambda d: d["options"].update(memory_bytes="zz"),
    "a cluster of no sense": lambda d: d["cluster"]["device"].update(memory_bytes="zz"),
    "no cluster": lambda d: d.update(cluster={}),
}


@pytest.fixture(scope="module")
def document():
    found = plan(pins={"w": P("x"), "x": P("x")}, axis_names=("x",)).to_dict()
    assert found["sharding"]["moves"][0]["move"]["kind"] != "to_partial"
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_plan_damaged_by_hand_is_refused(document, damage, tmp_path):
    damaged = copy.deepcopy(document)
    DAMAGES[damage](damaged)
    (tmp_path / "plan.json").write_text(json.dumps(damaged))
    with pytest.raises(PlanError):
        autopar.parallelize(step, plan=tmp_path / "plan.json").plan(W, X)


def test_where_a_plan_cannot_be_saved(tmp_path):
    with pytest.raises(PlanError, match="cannot be written to .*absent/plan.json: No such file"):
        plan().save(tmp_path / "absent" / "plan.json")


def test_what_is_no_path():
    for run in (plan().save, autopar.Plan.load):
        with pytest.raises(UsageError, match="path is a string or an os.PathLike, not an int"):
            run(3)


def test_a_plan_is_compared_with_a_plan():
    with pytest.raises(UsageError, match="compared with another autopar.Plan, not an int"):
        plan().diff(3)


@pytest.mark.parametrize("given", [(3, "i -> i"), ("", "i -> i"), ("foo", None), ("foo", 3), ("foo", "i -> i -> i")])
def test_what_is_no_rule(given):
    with pytest.raises(RuleError):
        autopar.register_rule(*given)
    with pytest.raises(RuleError, match="`local` of the rule for `foo` must be a function"):
        autopar.register_rule("foo", "i -> i", local=3)


def test_a_plan_is_verified_for_its_own_program_alone():
    with pytest.raises(PlanError, match="belongs to another program"):
        plan().verify(lambda w, x: step(w * 2, x), (jnp.ones(W.shape), jnp.ones(X.shape)))
    with pytest.raises(UsageError, match="is a shape"):
        plan().verify(step, (W, X))


def test_every_error_is_one_of_ours():
    for name in autopar.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(autopar, name), AutoparError)


# --- the devices at hand --------------------------------------------------------------------------------------------------------------


def gpus(kind, nodes=1, each=8):
    return [SimpleNamespace(platform="gpu", device_kind=kind, process_index=n) for n in range(nodes) for _ in range(each)]


def tpus(kind, *box, slices=1, cores=1):
    """Chips as JAX lists them: the first coordinate runs fastest, 2-D toruses have a third one of 0."""
    x, y, z = (*box, 1)[:3]
    chips = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [
        SimpleNamespace(platform="tpu", device_kind=kind, process_index=0, slice_index=s, coords=c, core_on_chip=core)
        for s in range(slices)
        for c in chips
        for core in range(cores)
    ]


@pytest.mark.parametrize(
    "devices, preset, count",
    [
        (gpus("NVIDIA H100 80GB HBM3"), "h100-sxm:8", 8),
        (gpus("NVIDIA H100 80GB HBM3", nodes=2), "h100-sxm:2x8", 16),
        (gpus("NVIDIA H100 80GB HBM3", nodes=2, each=4), "h100-sxm:2x4", 8),
        (gpus("NVIDIA H100 80GB HBM3", nodes=16, each=1), "h100-sxm:2x8", 16),
        (gpus("NVIDIA H200", each=1), "h200-sxm:1", 1),
        (gpus("NVIDIA B200"), "b200-sxm:8", 8),
        (gpus("NVIDIA A100-SXM4-40GB"), "a100-40:8", 8),
        (gpus("NVIDIA A100-SXM4-80GB", each=4), "a100-80:4", 4),
        (gpus("Tesla V100-SXM2-16GB"), "v100-p3:8", 8),
        (gpus("Tesla V100-SXM3-32GB", each=16), "v100-dgx2:16", 16),
        (gpus("NVIDIA GB200", each=4), "gb200-nvl72:4", 4),
        (gpus("NVIDIA GeForce RTX 4090", nodes=2), "rtx4090:2x8", 16),
        (tpus("TPU v5 lite", 2, 4), "v5e:1x4x2", 8),
        (tpus("TPU v5", 2, 2, 4), "v5p:1x4x2x2", 16),
        (tpus("TPU v4", 2, 2, 1, slices=2), "v4:2x1x2x2", 8),
        (tpus("TPU v6 lite", 4, 4), "v6e:1x4x4", 16),
        (tpus("TPU v3", 2, 2, cores=2), "v3:1x2x2", 8),
        (tpus("TPU7x", 2, 2, 1, cores=2), "v7x:1x1x2x2", 8),
    ],
)
def test_devices_at_hand_are_known_by_kind_and_shape(devices, preset, count):
    assert preset_of_devices(devices) == preset
    assert cluster_of_devices(devices).num_devices == len(devices) == count


def test_simulated_devices_are_the_host():
    assert preset_of_devices(jax.devices()) == "host:8"


@pytest.mark.parametrize(
    "kind", ["NVIDIA GeForce RTX 3090", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "TPU v2"]
)
def test_devices_that_no_preset_describes(kind):
    devices = tpus(kind, 2, 2) if kind.startswith("TPU") else gpus(kind)
    with pytest.raises(ClusterError, match="no preset describes devices of kind .*closest"):
        cluster_of_devices(devices)
