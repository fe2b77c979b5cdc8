"""Plans go to JSON and back unchanged; what is no plan is refused; a fingerprint changes exactly with the program."""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autopar.errors import CheckError, PlanError
from autopar.ir import plan as nouns
from autopar.ir.graph import Aval, Constant, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Collective, Leaf, Plan, PlannedMove, ShardingPlan
from autopar.ir.serialize import fingerprint, load_plan, plan_from_dict, plan_to_dict, save_plan
from autopar.ir.sharding import Move, TensorSharding
from autopar.ir.strategy import Strategy

MESHES = (LogicalMesh((), ()), LogicalMesh(("x",), (4,)), LogicalMesh(("x", "y"), (2, 4)), LogicalMesh(("a", "b", "c"), (2, 3, 2)))
DTYPES = ("float32", "bfloat16", "int8", "bool", "key<fry>", "float8_e4m3fn", "complex64", "uint32", "float0")
words = st.text(max_size=12)
counts = st.integers(0, 2**53)
seconds = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def shardings(draw, mesh):
    """A sharding of up to three dimensions that uses each axis at most once."""
    axes = draw(st.permutations(mesh.names))
    places = draw(st.lists(st.integers(-2, 2), min_size=len(axes), max_size=len(axes)))
    dims = tuple(tuple(a for a, p in zip(axes, places, strict=True) if p == d) for d in range(3))
    partial = tuple(sorted((a, draw(st.sampled_from(("sum", "max")))) for a, p in zip(axes, places, strict=True) if p == -2))
    return TensorSharding(dims, partial)


@st.composite
def leaves(draw, mesh):
    sharding = draw(shardings(mesh))
    local = draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))
    shape = tuple(n * mesh.size(axes) for n, axes in zip(local, sharding.dims, strict=True))
    return Leaf(draw(words), shape, draw(st.sampled_from(DTYPES)), draw(words), sharding)


def some(elements, most=3):
    return st.lists(elements, max_size=most).map(tuple)


def subsets(mesh):
    return st.lists(st.sampled_from(mesh.names), unique=True, max_size=2).map(tuple) if mesh.names else st.just(())


@st.composite
def sharding_plans(draw, mesh):
    strategy = subsets(mesh).map(lambda axes: Strategy(tuple((f"f{i}", (a,)) for i, a in enumerate(axes))))
    passing = st.sampled_from((*mesh.names, "")).map(lambda a: Strategy((), ((a, 0),)) if a else Strategy())
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "to_partial")
    move = st.builds(Move, st.sampled_from(kinds), subsets(mesh), st.integers(-1, 3), st.integers(-1, 3))
    moves = st.builds(PlannedMove, counts, move, shardings(mesh), shardings(mesh), words, st.integers(0, 1), st.integers(0, 1), counts)
    pairs = st.frozensets(st.tuples(counts, counts, counts), max_size=3)
    return ShardingPlan(
        mesh, draw(some(strategy | passing)), draw(some(shardings(mesh))), draw(some(shardings(mesh))), draw(some(moves)), draw(pairs)
    )


@st.composite
def plans(draw):
    mesh = draw(st.sampled_from(MESHES))
    dtype = st.sampled_from(DTYPES)
    collective = st.builds(Collective, words, words, subsets(mesh), counts, counts, dtype, counts, seconds, words, words, words)
    whole = st.builds(nouns.WholeOp, words, words, counts, seconds, seconds, st.booleans())
    sent = st.builds(nouns.Sent, counts, st.sampled_from(("before", "each", "after")), counts, counts, seconds)
    pair = st.tuples(counts, counts)
    numbers = (*(seconds for _ in range(5)), *(counts for _ in range(4)))
    stage = st.builds(nouns.Stage, pair, pair, sharding_plans(mesh), some(counts), *numbers, some(sent))
    return Plan(
        fingerprint=draw(words),
        target=draw(words),
        cluster=draw(st.dictionaries(words, json_values, max_size=3)),
        sharding=draw(sharding_plans(mesh)),
        inputs=draw(some(leaves(mesh))),
        outputs=draw(some(leaves(mesh))),
        collectives=draw(some(collective)),
        whole=draw(some(whole)),
        predicted=draw(st.builds(nouns.Predicted, seconds, seconds, seconds, seconds, seconds, counts, counts, counts, seconds, seconds)),
        solve=draw(st.builds(nouns.Solve, words, words, seconds, seconds, seconds, counts, counts, words)),
        timings=draw(st.builds(nouns.Timings, seconds, seconds, seconds, seconds, seconds)),
        cost_split=draw(some(st.tuples(words, seconds))),
        live=draw(some(st.tuples(words, counts))),
        candidates=draw(some(st.tuples(words, seconds))),
        options=draw(st.dictionaries(words, json_values, max_size=3)),
        notes=draw(some(words)),
        jax_version=draw(words),
        stages=draw(some(stage)),
        layers=draw(some(counts)),
        microbatches=draw(st.integers(1, 64)),
        schedule=draw(words),
        remat=draw(words),
    )


@pytest.fixture
def plan():
    return small_plan()


def small_plan() -> Plan:
    mesh = LogicalMesh(("x", "y"), (2, 4))
    weight = TensorSharding((("x",), ()))
    gather = Move("all_gather", ("x",), dim=0)
    move = PlannedMove(0, gather, weight, gather.apply(weight), "c0")
    sharding = ShardingPlan(mesh, (Strategy((("b", ("y",)),)),), (weight,), (weight,), (move,), frozenset({(0, 1, 1)}))
    return Plan(
        fingerprint="f" * 64,
        target="mlp",
        cluster={"name": "host:8", "memory_bytes": 2**30},
        sharding=sharding,
        inputs=(Leaf("params/w", (8, 4), "float32", "state", weight),),
        outputs=(Leaf("params/w", (8, 4), "float32", "state", weight),),
        collectives=(Collective("c0", "all_gather", ("x",), 2, 64, "float32", 1, 1e-5, "gather params/w", "forward", "m.py:3"),),
        whole=(nouns.WholeOp("fft", "m.py:9", 1, 1e6, 1e-5, True),),
        predicted=nouns.Predicted(step_time_s=1e-3, peak_bytes=10**6),
        solve=nouns.Solve("highs", "optimal", 1e-3, 1e-3, 0.0, 10, 20),
        timings=nouns.Timings(0.1, 0.2, 0.3, 0.0, 0.6),
        options={"memory_fraction": 0.9, "pins": {}},
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_a_plan_comes_back_from_json_as_it_was(plan):
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan), allow_nan=False))) == plan


def test_a_plan_comes_back_from_its_file_as_it_was(plan, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    save_plan(plan, str(path))
    assert load_plan(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_keys_are_the_attributes_of_a_plan(plan):
    document = plan_to_dict(plan)
    assert document["schema"] == 3
    assert document["mesh_shape"] == {"x": 2, "y": 4}
    for key, value in document.items():
        assert hasattr(plan, key), key
        assert json.loads(json.dumps(value)) == value
    promised = {"mesh_shape", "collectives", "predicted", "solve", "timings", "stages", "microbatches", "schedule", "remat"}
    assert promised <= set(document)
    assert document["collectives"][0]["nbytes"] == 64
    assert document["predicted"]["step_time_s"] == 1e-3


def test_every_collective_and_leaf_has_a_line_of_its_own_in_the_file(plan, tmp_path):
    save_plan(plan, tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert sum('"id": "c0", "kind": "all_gather"' in line for line in lines) == 1
    assert sum('"path": "params/w"' in line for line in lines) == 2
    assert any(line.strip().startswith('"step_time_s"') for line in lines)


def test_a_bound_that_is_infinite_survives(plan):
    open_ended = replace(plan, solve=replace(plan.solve, bound=-math.inf, gap=math.inf))
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(open_ended), allow_nan=False))) == open_ended


def test_numbers_of_numpy_are_written_as_numbers(plan):
    odd = replace(plan, predicted=replace(plan.predicted, peak_bytes=np.int64(7), mfu=np.float64(0.5)))
    assert plan_from_dict(plan_to_dict(odd)).predicted == replace(plan.predicted, peak_bytes=7, mfu=0.5)


def test_what_has_no_place_in_a_plan_file_is_refused_when_it_is_written(plan, tmp_path):
    with pytest.raises(PlanError, match="cannot be written"):
        save_plan(replace(plan, options={"f": print}), tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def places(value, path=()):
    """Every place inside the document, except within values whose form is free."""
    if path and path[0] in ("cluster", "options", "stages") and len(path) > 1:
        return
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def at(document, path):
    for key in path:
        document = document[key]
    return document


PLACES = [p for p in places(plan_to_dict(small_plan())) if p]


@pytest.mark.parametrize("path", PLACES, ids=lambda path: ".".join(map(str, path)))
def test_a_value_of_another_type_is_refused_by_name(path):
    document = copy.deepcopy(plan_to_dict(small_plan()))
    value = at(document, path)
    odd = 5 if isinstance(value, (str, dict, list)) else [None]
    at(document, path[:-1])[path[-1]] = odd
    with pytest.raises(PlanError) as error:
        plan_from_dict(document)
    assert [k for k in path if isinstance(k, str)][-1] in str(error.value)


@pytest.mark.parametrize("path", [p for p in PLACES if isinstance(p[-1], str)], ids=lambda path: ".".join(map(str, path)))
def test_a_missing_key_is_refused_by_name(path):
    document = copy.deepcopy(plan_to_dict(small_plan()))
    del at(document, path[:-1])[path[-1]]
    with pytest.raises(PlanError) as error:
        plan_from_dict(document)
    assert path[-1] in str(error.value)


@pytest.mark.parametrize("schema", [0, 1, 99, "2", True, None, 2.0])
def test_an_unknown_schema_is_refused_with_what_to_do(plan, schema):
    with pytest.raises(PlanError, match="reads schema 3. Plan again"):
        plan_from_dict(plan_to_dict(plan) | {"schema": schema})


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("inputs", 0, "dtype"), "float33", "dtype `float33`"),
        (("collectives", 0, "dtype"), "__import__('os')", "does not exist"),
        (("inputs", 0, "shape"), [7, 4], "cannot lie as"),
        (("inputs", 0, "shape"), [8], "cannot lie as"),
        (("inputs", 0, "sharding", "dims"), [["q"], []], "cannot lie as"),
        (("outputs", 0, "sharding", "dims"), [["x"], ["x"]], "cannot lie as"),
        (("collectives", 0, "axes"), ["q"], "uses axes q"),
        (("sharding", "strategies", 0, "cuts"), [["b", ["x"]], ["c", ["x"]]], "uses axes x, x"),
        (("sharding", "moves", 0, "move", "kind"), "teleport", "none of all_gather"),
        (("sharding", "mesh", "sizes"), [2, 0], "be positive"),
        (("sharding", "mesh", "sizes"), [2], "be positive"),
        (("mesh_shape",), {"x": 8}, "mesh_shape"),
        (("surprise",), 1, "unknown key surprise"),
        (("predicted", "surprise"), 1, "unknown key surprise"),
    ],
)
def test_what_does_not_hold_together_is_refused(plan, path, value, said):
    document = copy.deepcopy(plan_to_dict(plan))
    at(document, path[:-1])[path[-1]] = value
    with pytest.raises(PlanError, match=None) as error:
        plan_from_dict(document)
    assert said in str(error.value)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 0.999))
def test_a_truncated_file_is_refused(tmp_path_factory, part):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(small_plan(), path)
    text = path.read_text().rstrip()
    path.write_text(text[: int(part * len(text))])
    with pytest.raises(PlanError, match="not JSON, or was cut off"):
        load_plan(path)


@pytest.mark.parametrize("text", ["[]", "3", '"plan"', "null", "{}", "NaN", "[" * 100_000, '{"schema": 1}', "\x00"])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(path)


def test_a_file_that_is_absent_or_binary_is_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\x80\x04\x95")
    with pytest.raises(PlanError, match="not JSON"):
        load_plan(tmp_path / "bytes.json")


def test_a_plan_that_cannot_be_replaced_leaves_the_old_one(plan, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_plan(replace(plan, target="other"), path)
    assert load_plan(path) == plan
    assert len(list(tmp_path.iterdir())) == 1


# Fingerprints.

F32 = Aval((4, 4), "float32")


def graph(**changes) -> Graph:
    """`y = tanh(x @ w + 1); z = cond(y)`, with one op's fields changed."""
    body = changes.pop("body", Graph((F32,), (0,), (0,), ()))
    dot = Op("dot_general", (("dims", ((1,), (0,))), ("precision", None)), (0, 1), (2,))
    add = Op("add", (), (2, Constant(Aval((), "float32", True), "1.0")), (3,))
    cond = Op("cond", (), (3,), (4,), subgraphs=(body,))
    where = changes.pop("op", "dot")
    ops = {"dot": dot, "add": add, "cond": cond}
    of_op = {f.name for f in fields(Op)} & changes.keys()
    ops[where] = replace(ops[where], **{k: changes[k] for k in of_op})
    rest = {k: changes[k] for k in changes.keys() - of_op}
    return replace(Graph((F32,) * 5, (0, 1), (4,), tuple(ops.values()), ("x", "w"), ("z",)), **rest)


BASE = fingerprint(graph(), {"threefry_partitionable": True})


def same(g, **extra):
    return fingerprint(g, {"threefry_partitionable": True} | extra) == BASE


def test_a_fingerprint_is_the_same_in_every_process():
    assert BASE == fingerprint(graph(), {"threefry_partitionable": True})
    assert BASE == "e104b103d10d1a1c45d17fa7e5405e6a61270a9f1ed3050c7e77211bc5099848"


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "other.py:4"},
        {"scope": "layer_1"},
        {"phase": "backward"},
        {"equation": 17},
        {"input_names": ("a", "b")},
        {"output_names": ("q",)},
        {"params": (("precision", None), ("dims", ((1,), (0,))))},
    ],
)
def test_where_an_op_comes_from_does_not_change_the_fingerprint(changes):
    assert same(graph(**changes))


def test_the_numbers_of_values_do_not_change_the_fingerprint():
    g = graph()
    new = {0: 7, 1: 3, 2: 1, 3: 9, 4: 0}
    renamed = tuple(
        replace(op, operands=tuple(new[o] if isinstance(o, int) else o for o in op.operands), results=tuple(new[r] for r in op.results))
        for op in g.ops
    )
    assert same(Graph((F32,) * 10, (7, 3), (0,), renamed))


@pytest.mark.parametrize(
    "changes",
    [
        {"primitive": "dot"},
        {"params": (("dims", ((0,), (0,))), ("precision", None))},
        {"params": (("dims", ((1.0,), (0,))), ("precision", None))},
        {"params": (("dims", ((True,), (0,))), ("precision", None))},
        {"params": (("dims", ((1,), (0,))), ("precision", "None"))},
        {"params": (("dims", ((1,), (0,))),)},
        {"operands": (1, 0)},
        {"effects": True},
        {"op": "add", "operands": (2, Constant(Aval((), "float32", True), "2.0"))},
        {"op": "add", "operands": (2, Constant(Aval((), "float32", False), "1.0"))},
        {"op": "add", "operands": (2, 0)},
        {"op": "add", "operands": (0, Constant(Aval((), "float32", True), "1.0"))},
        {"body": Graph((F32,), (0,), (0,), (), num_constants=1)},
        {"body": Graph((F32, F32), (0,), (1,), (Op("tanh", (), (0,), (1,)),))},
        {"avals": (Aval((4, 4), "bfloat16"), *(F32,) * 4)},
        {"avals": (Aval((4, 4), "float32", True), *(F32,) * 4)},
        {"avals": (Aval((2, 8), "float32"), *(F32,) * 4)},
        {"avals": (*(F32,) * 2, Aval((16,), "float32"), *(F32,) * 2)},
        {"inputs": (1, 0)},
        {"outputs": (3,)},
        {"outputs": (4, 4)},
        {"num_constants": 1},
    ],
)
def test_whatever_changes_the_program_changes_the_fingerprint(changes):
    assert not same(graph(**changes))


def test_what_stands_beside_the_program_changes_the_fingerprint():
    assert not same(graph(), threefry_partitionable=False)
    assert not same(graph(), x64=True)
    assert fingerprint(graph(), {"a": 1, "b": 2}) == fingerprint(graph(), {"b": 2, "a": 1})


def test_a_memory_address_in_a_parameter_does_not_change_the_fingerprint():
    first, second = (graph(params=(("f", f"<function f at 0x{n:x}>"),)) for n in (0x7F00, 0x8F00))
    assert fingerprint(first, {}) == fingerprint(second, {})


def test_a_parameter_that_is_no_plain_data_is_a_fault_of_tracing():
    with pytest.raises(CheckError, match="plain data"):
        fingerprint(graph(params=(("f", print),)), {})


def chain(length: int) -> Graph:
    """A graph of many ops with parameters like those of real ones, and a shared body every tenth op."""
    body = Graph((F32, F32), (0,), (1,), (Op("tanh", (("accuracy", None),), (0,), (1,)),))
    params = (("dimension_numbers", (((1,), (0,)), ((), ()))), ("precision", None), ("preferred_element_type", "float32"))
    ops = tuple(
        Op("dot_general" if i % 10 else "scan", params, (i, max(i - 3, 0)), (i + 1,), subgraphs=() if i % 10 else (body,), source=f"m:{i}")
        for i in range(length)
    )
    return Graph((F32,) * (length + 1), (0,), (length,), ops)


def test_a_graph_of_twenty_thousand_ops_is_fingerprinted_in_half_a_second():
    g = chain(20_000)

    def spent() -> float:
        start = time.process_time()
        fingerprint(g, {})
        return time.process_time() - start

    assert min(spent() for _ in range(3)) < 0.5
