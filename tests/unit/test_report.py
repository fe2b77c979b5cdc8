"""Tables, explanations, differences and HTML of a plan written by hand."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autopar.errors import UsageError
from autopar.ir.graph import Aval, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Collective, Leaf, Plan, PlannedMove, Predicted, Sent, ShardingPlan, Solve, Stage, Timings, WholeOp
from autopar.ir.sharding import Move, TensorSharding
from autopar.ir.strategy import WHOLE, Strategy
from autopar.report.brief import brief_table
from autopar.report.diff import SAME, diff
from autopar.report.explain import explain
from autopar.report.fold import fold_collectives, fold_leaves, fold_ops, fold_paths, leaf_bytes, memory_budget
from autopar.report.html import plan_html
from autopar.report.perfetto import stages_json
from autopar.report.stages import stage_timeline
from autopar.report.table import plan_table, render
from autopar.report.text import plan_text
from autopar.report.units import bytes_text, seconds_text
from autopar.schedule import build

MESH = LogicalMesh(("x", "y"), (2, 4))
LAYERS = 12
GIB = 2**30


def weights(layer: int) -> tuple[Leaf, ...]:
    cut = TensorSharding((("x",), ()))
    both = TensorSharding((("x",), ("y",)))
    mlp = TensorSharding(((), ("y",)))
    return (
        Leaf(f"params/layers_{layer}/attn/kernel", (768, 768), "float32", "state", cut),
        Leaf(f"params/layers_{layer}/mlp_0/kernel", (768, 3072), "float32", "state", mlp),
        Leaf(f"opt_state/0/mu/layers_{layer}/attn/kernel", (768, 768), "float32", "state", both),
    )


def plan_by_hand() -> Plan:
    """Twelve layers on eight devices; every figure is chosen, none computed."""
    inputs = tuple(leaf for layer in range(LAYERS) for leaf in weights(layer))
    scale = Leaf("params/ln_f/scale", (768,), "float32", "state", TensorSharding(((),)))
    tokens = Leaf("batch/tokens", (64, 1024), "int32", "batch", TensorSharding((("x", "y"), ())))
    key = Leaf("key", (), "key<fry>", "constant", TensorSharding(()))
    gathers = tuple(
        Collective(f"c{i}", "all_gather", ("x",), 2, 1_179_648, "float32", 2, 4e-5, f"layers_{i}/attn/kernel", "forward", "gpt.py:41")
        for i in range(LAYERS)
    )
    reduce = Collective("c12", "all_reduce", ("x", "y"), 8, 4, "float32", 1, 2e-5, "loss", "forward", "gpt.py:88")
    scatter = Collective("c13", "reduce_scatter", ("y",), 4, 9_437_184, "float32", 1, 9e-4, "gradient", "backward", "gpt.py:52")
    source = inputs[0].sharding
    gather = Move("all_gather", ("x",), dim=0)
    moves = (
        PlannedMove(0, gather, source, gather.apply(source), "c0"),
        PlannedMove(0, gather, source, gather.apply(source), "c1", generation=1, gate=7),
        PlannedMove(9, Move("slice", ("y",), dim=1), TensorSharding(((), ())), TensorSharding(((), ("y",)))),
    )
    strategies = (Strategy((("b", ("x",)), ("n", ("y",)))), WHOLE, Strategy((("k", ("y",)),), (("x", 0),)))
    leaves = (*inputs, scale, tokens, key)
    return Plan(
        fingerprint="0123456789abcdef" * 4,
        target="gpt-demo",
        cluster={"name": "h100-sxm:1x8", "device": {"name": "h100", "memory_bytes": 80 * GIB}},
        sharding=ShardingPlan(MESH, strategies, tuple(v.sharding for v in leaves), (), moves, frozenset({(7, 1, 1), (5, 0, 2)})),
        inputs=leaves,
        outputs=(*inputs, scale, Leaf("loss", (), "float32", "output", TensorSharding(()))),
        collectives=(*gathers, reduce, scatter),
        whole=(WholeOp("fft", "gpt.py:60", 2, 3.2e9, 2.5e-4, True), WholeOp("custom_thing", "gpt.py:61", 1, 0.0, 1e-3, False)),
        predicted=Predicted(0.0123, 0.0105, 0.0025, 0.0018, 0.0, 36 * GIB, 12 * GIB, 24 * GIB, 4.2e13, 0.431),
        solve=Solve("highs", "optimal", 0.0123, 0.0122, 0.0081, 1200, 900, "fold"),
        timings=Timings(1.5, 0.2, 3.0, 0.0, 4.7),
        cost_split=(("matmul", 0.008), ("memory-bound", 0.0025), ("all_gather", 0.00096), ("reduce_scatter", 0.0009)),
        live=(("activations of layers 0 to 11", 20 * GIB), ("optimizer state", 8 * GIB), ("params <f32> & grads", 8 * GIB)),
        candidates=(("x=8", 0.0151), ("x=2 y=4", 0.0123)),
        options={"memory_fraction": 0.9},
        notes=("`fft` at gpt.py:60 runs whole: its dimension must not be cut.",),
    )


def stage(n: int, sends: tuple[Sent, ...]) -> Stage:
    """Six layers on four devices; the second stage is a little dearer."""
    mesh = LogicalMesh(("x",), (4,))
    cut, whole = TensorSharding((("x",), ())), TensorSharding(((), ()))
    gather = Move("all_gather", ("x",), dim=0)
    sharding = ShardingPlan(mesh, (Strategy((("b", ("x",)),)), WHOLE), (cut,), (whole,), (PlannedMove(0, gather, cut, whole, "c0"),))
    seconds = (1e-4, 1e-3 * (1 + n / 2), 1e-3, 1e-3, 2e-4)
    return Stage((6 * n, 6 * n + 6), (4 * n, 4), sharding, (3, 5) if n else (), *seconds, 2 * GIB, (9 - n) * GIB, GIB // 2, 2 - n, sends)


def staged_by_hand() -> Plan:
    """Two stages of four devices, four microbatches."""
    cut = TensorSharding((("x",), ()))
    stages = stage(0, (Sent(1, "each", 1, 3 * 2**20, 1e-4),)), stage(1, (Sent(0, "each", 1, 3 * 2**20, 1e-4), Sent(0, "after", 2, 8, 1e-5)))
    inputs = tuple(Leaf(f"params/layers_{i}/kernel", (768, 768), "float32", "state", cut, i // 6) for i in range(LAYERS))
    tokens = Leaf("batch/tokens", (64, 1024), "int32", "batch", cut)
    gathers = [Collective("c0", "all_gather", ("x",), 4, 589_824, "float32", 4, 4e-5, "kernel", "forward", "gpt.py:41", n) for n in (0, 1)]
    return replace(
        plan_by_hand(),
        sharding=ShardingPlan(LogicalMesh(("stage", "x"), (2, 4)), (), tuple(leaf.sharding for leaf in (*inputs, tokens)), ()),
        inputs=(*inputs, tokens),
        outputs=inputs,
        collectives=tuple(gathers),
        whole=(),
        predicted=replace(plan_by_hand().predicted, step_time_s=0.01741, bubble_s=0.004),
        stages=stages,
        layers=tuple(range(10, 120, 10)),
        microbatches=4,
        schedule="1f1b",
        remat="auto",
        notes=(),
    )


@pytest.fixture
def plan():
    return plan_by_hand()


def test_the_reports_of_a_plan_in_stages_are_the_golden_ones(golden):
    plan = staged_by_hand()
    golden("stages_table.txt", render(plan_table(plan)))
    golden("stages_brief.txt", render(brief_table(plan)))
    golden("stages_text.txt", plan_text(plan))
    golden("stages_explain.txt", explain(plan) + explain(plan, "layers_7") + explain(plan, "c0"))


def test_the_schedule_adds_up_to_what_the_simulator_says():
    plan = staged_by_hand()
    found = stage_timeline(plan)
    assert found.devices == ("devices 0 to 3 (stage 0)", "devices 4 to 7 (stage 1)")
    assert max(s.start_s + s.seconds for s in found.spans) == pytest.approx(found.seconds)
    for n, name in enumerate(found.devices):
        spans = [s for s in found.spans if s.track == name]
        assert [s.name for s in spans if s.name[0] in "FB"] == [str(t) for t in build("1f1b", 2, 4).orders[n]]
        for before, after in itertools.pairwise(sorted(spans, key=lambda s: s.start_s)):
            assert after.start_s >= before.start_s + before.seconds - 1e-12  # a device does one thing at a time
        assert sum(s.seconds for s in spans) == pytest.approx(1e-4 + 4 * (3e-3 + 5e-4 * n) + 2e-4)
    events = json.loads(stages_json(plan))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[e["tid"]] for e in events if e.get("cat") == "transfers"} == set(found.links)
    assert sum(e["ph"] == "X" for e in events) == len(found.spans)


def test_the_schedule_is_drawn_a_row_for_each_group_of_devices():
    plan = staged_by_hand()
    root = ET.fromstring(plan_html(plan))
    (drawn,) = [svg for svg in root.iter("svg") if svg.get("aria-label") == "schedule"]
    rows = {rect.get("y") for rect in drawn.iter("rect")}
    assert len(rows) == 2 and len(list(drawn.iter("rect"))) == 2 * (4 * 2 + 2)
    assert "9.00 GiB" in ["".join(cell.itertext()) for cell in root.iter("td")]
    long = plan_html(replace(plan, microbatches=1000))
    assert long.count("<rect") < 1_200 and "the first 1000 of 4004 tasks" in long


def test_a_difference_of_stages_names_the_stage():
    plan = staged_by_hand()
    moved = replace(plan, stages=(replace(plan.stages[0], layers=(0, 5)), replace(plan.stages[1], layers=(5, 12))))
    assert diff(plan, moved).splitlines() == [
        "Layout",
        "  stage 0: layers 0 to 5 on devices 0 to 3 (x=4) -> layers 0 to 4 on devices 0 to 3 (x=4)",
        "  stage 1: layers 6 to 11 on devices 4 to 7 (x=4) -> layers 5 to 11 on devices 4 to 7 (x=4)",
    ]
    fewer = replace(plan, collectives=plan.collectives[:1])
    assert "  all_gather over x, forward: kernel in stage 1: 4 times, 2.25 MiB, 160 us -> none" in diff(plan, fewer).splitlines()


def test_the_table_of_a_plan_is_the_golden_one(plan, golden):
    golden("plan_table.txt", render(plan_table(plan)))


def test_the_text_of_a_plan_is_the_golden_one(plan, golden):
    golden("plan_text.txt", plan_text(plan))


def test_the_explanation_of_a_plan_is_the_golden_one(plan, golden):
    golden("plan_explain.txt", explain(plan))


def test_the_text_does_not_change_with_the_time_that_planning_took(plan):
    slower = replace(plan, timings=Timings(9.0, 9.0, 9.0, 9.0, 36.0), solve=replace(plan.solve, variables=7, constraints=8))
    assert plan_text(slower) == plan_text(plan)


def test_the_table_fits_a_narrow_terminal_and_loses_no_leaf(plan):
    narrow = render(plan_table(plan), width=72)
    assert max(map(len, narrow.splitlines())) <= 72
    folded = re.sub(r"\s", "", narrow)
    for group in fold_leaves(plan.inputs, plan.mesh):
        assert bytes_text(group.nbytes).replace(" ", "") in folded


def test_a_plan_of_nothing_still_prints():
    mesh = LogicalMesh((), ())
    empty = Plan("", "", {}, ShardingPlan(mesh, (), (), ()), (), (), (), (), Predicted(), Solve(), Timings())
    assert "one device" in render(plan_table(empty))
    assert "not solved" in explain(empty)
    assert ET.fromstring(plan_html(empty)) is not None
    assert plan_text(empty).startswith("plan \nmesh one device\n")


def test_equal_layers_are_one_row_with_the_bytes_of_all(plan):
    groups = {g.path: g for g in fold_leaves(plan.inputs, plan.mesh)}
    attention = groups["params/layers_{0..11}/attn/kernel"]
    assert (attention.count, attention.nbytes) == (12, 12 * 768 * 768 * 4 // 2)
    assert groups["opt_state/0/mu/layers_{0..11}/attn/kernel"].nbytes == 12 * 768 * 768 * 4 // 8
    assert sum(g.nbytes for g in groups.values()) == sum(leaf_bytes(leaf, plan.mesh) for leaf in plan.inputs)


def test_a_layer_that_lies_otherwise_is_a_row_of_its_own(plan):
    other = replace(plan.inputs[0], sharding=TensorSharding(((), ())))
    paths = [g.path for g in fold_leaves((other, *plan.inputs[1:]), plan.mesh)]
    assert "params/layers_0/attn/kernel" in paths
    assert "params/layers_{1..11}/attn/kernel" in paths


def expand(pattern: str) -> list[str]:
    """All paths that a pattern stands for."""
    parts = re.split(r"\{(.*?)\}", pattern)
    choices = []
    for i, part in enumerate(parts):
        low, dots, high = part.partition("..")
        choices.append([part] if i % 2 == 0 else list(map(str, range(int(low), int(high) + 1))) if dots else part.split(","))
    return ["".join(chosen) for chosen in itertools.product(*choices)]


@settings(max_examples=200, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(["00", "01", "7"])), min_size=1, max_size=40))
def test_folded_paths_stand_for_exactly_the_paths_given(numbers):
    paths = [f"a/b_{i}/c{j}_{k}/w" for i, j, k in sorted(numbers)]
    folded = fold_paths(paths)
    assert sorted(p for pattern, _ in folded for p in expand(pattern)) == sorted(paths)
    assert [count for _, count in folded] == [len(expand(pattern)) for pattern, _ in folded]


def test_ops_are_listed_by_place_the_most_work_first():
    def op(primitive: str, scope: str, result: int) -> Op:
        params = (("dimension_numbers", (((1,), (0,)), ((), ()))),) if primitive == "dot_general" else ()
        return Op(primitive, params, (0, 0) if primitive == "dot_general" else (0,), (result,), scope=scope)

    kinds = ("sin", "h_0/mlp"), ("dot_general", "h_0/mlp"), ("sin", "head"), ("dot_general", "h_1/mlp"), ("sin", "h_1/mlp")
    ops = tuple(op(primitive, scope, n + 1) for n, (primitive, scope) in enumerate(kinds))
    graph = Graph((Aval((8, 8), "float32"),) * 6, (0,), (5,), ops)
    assert fold_ops(graph, range(5)) == ["h_{0..1}/mlp: 1 dot_general, 1 others", "head: 1 others"]
    assert fold_ops(graph, [2], most=0) == []


def test_collectives_are_grouped_by_what_they_do_the_dearest_first(plan):
    groups = fold_collectives(plan.collectives)
    assert [(g.kind, g.purpose, g.count, g.times) for g in groups] == [
        ("all_gather", "layers_*/attn/kernel", 12, 24),
        ("reduce_scatter", "gradient", 1, 1),
        ("all_reduce", "loss", 1, 1),
    ]
    assert groups[0].nbytes == 24 * 1_179_648
    assert groups[0].seconds == pytest.approx(24 * 4e-5)


@pytest.mark.parametrize(
    ("options", "cluster", "budget"),
    [
        ({"memory_bytes": 5 * GIB, "memory_fraction": 0.5}, {"device": {"memory_bytes": 80 * GIB}}, 5 * GIB),
        ({"memory_bytes": None, "memory_fraction": 0.5}, {"device": {"memory_bytes": 80 * GIB}}, 40 * GIB),
        ({}, {"memory_bytes": 16 * GIB}, 16 * GIB),
        ({}, {"name": "host:8"}, None),
    ],
)
def test_the_budget_is_what_was_asked_or_a_part_of_the_device(plan, options, cluster, budget):
    assert memory_budget(replace(plan, options=options, cluster=cluster)) == budget


def test_explaining_a_leaf_says_how_it_lies_and_what_it_costs(plan):
    text = explain(plan, "params/layers_0/attn/kernel")
    assert "float32[768,768] [x, -], cut in 2: dimension 0 over x; 1.12 MiB per device" in text
    assert "c0 all_gather over x (2 devices), forward: layers_0/attn/kernel (gpt.py:41); 1.12 MiB float32, 2 times a step" in text
    assert "c1 " in text  # the second gather of the same value
    assert "c13" not in text


def test_explaining_a_part_of_a_path_lists_all_that_have_it(plan):
    assert explain(plan, "mlp_0").count("(state, in)") == LAYERS
    assert "It takes part in no collective." in explain(plan, "tokens")


def test_explaining_an_id_a_source_line_or_a_primitive_finds_it(plan):
    assert explain(plan, "c13").count("\n") == 3
    assert "reduce_scatter over y" in explain(plan, "c13")
    assert "all_reduce over x+y" in explain(plan, "gpt.py:88")
    assert "custom_thing gpt.py:61, has no sharding rule" in explain(plan, "custom_thing")


def test_explaining_what_is_not_there_names_what_comes_close(plan):
    with pytest.raises(UsageError, match="Did you mean `params/ln_f/scale`"):
        explain(plan, "params/ln_f/scael")
    with pytest.raises(UsageError, match="nothing in the plan is called `zzz`"):
        explain(plan, "zzz")


def test_a_plan_does_not_differ_from_itself(plan):
    assert diff(plan, plan_by_hand()) == SAME


def test_a_difference_names_each_change_once(plan):
    cut = TensorSharding(((), ("x",)))
    inputs = tuple(replace(leaf, sharding=cut) if "params/layers" in leaf.path and "attn" in leaf.path else leaf for leaf in plan.inputs)
    other = replace(
        plan,
        inputs=inputs,
        collectives=plan.collectives[1:-1],
        microbatches=4,
        remat="auto",
        recomputed=(3, 5),
        predicted=replace(plan.predicted, step_time_s=0.0246, peak_bytes=18 * GIB),
        options={"memory_fraction": 0.5},
    )
    assert diff(plan, other).splitlines() == [
        "Program",
        "  option memory_fraction: 0.9 -> 0.5",
        "Layout",
        "  microbatches: 1 -> 4",
        "  remat: none -> auto",
        "  values recomputed: 0 -> 2",
        "Inputs",
        "  params/layers_{0..11}/attn/kernel (12 leaves): float32[768,768] [x, -] in 2 -> float32[768,768] [-, x] in 2",
        "Collectives per step",
        "  all_gather over x, forward: layers_*/attn/kernel: 24 times, 27.0 MiB, 960 us -> 22 times, 24.8 MiB, 880 us",
        "  reduce_scatter over y, backward: gradient: 1 times, 9.00 MiB, 900 us -> none",
        "Predicted",
        "  step time: 12.3 ms -> 24.6 ms (+100.0 %)",
        "  peak memory per device: 36.0 GiB -> 18.0 GiB (-50.0 %)",
    ]


def test_plans_of_two_programs_are_said_to_be_that(plan):
    other = replace(plan, fingerprint="f" * 64, target="mlp", inputs=plan.inputs[1:])
    text = diff(plan, other)
    assert "different programs: gpt-demo (01234567), mlp (ffffffff)" in text
    assert "params/layers_0/attn/kernel: float32[768,768] [x, -] in 2 -> absent" in text


def test_the_html_is_one_well_formed_fragment_that_fetches_nothing(plan):
    html = plan_html(plan)
    root = ET.fromstring(html)
    assert root.tag == "div"
    assert len(root.findall(".//svg")) == 3
    assert not re.search(r"https?:|src=|href=|url\(|<script", html)
    cells = ["".join(cell.itertext()) for cell in root.iter("td")]
    assert "params/layers_{0..11}/attn/kernel" in cells
    assert "[x+y, -]" in cells


def test_text_in_the_html_is_escaped(plan):
    evil = '<script>alert("1")</script>'
    poisoned = replace(
        plan,
        target=evil,
        notes=(evil,),
        cost_split=((evil, 1.0),),
        live=((evil, 10),),
        inputs=(replace(plan.inputs[0], path=evil),),
        collectives=(replace(plan.collectives[0], purpose=evil),),
        cluster={"name": evil},
    )
    html = plan_html(poisoned)
    assert "<script" not in html
    assert sum(evil in text for text in ET.fromstring(html).itertext()) >= 6


def test_a_mesh_of_four_thousand_devices_is_drawn_in_part(plan):
    large = LogicalMesh(("x", "y"), (64, 64))
    html = plan_html(replace(plan, sharding=replace(plan.sharding, mesh=large), inputs=(), outputs=()))
    assert html.count("<rect") < 400
    assert "the first 16 x 16 shown" in html


def test_the_bars_are_as_long_as_the_seconds(plan):
    svg = ET.fromstring(plan_html(plan)).findall(".//svg")[1]
    widths = [float(rect.get("width")) for rect in svg.iter("rect")]
    assert widths == pytest.approx([260 * s / 0.008 for s in (0.008, 0.0025, 0.00096, 0.0009)], abs=0.1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (3.2e-9, "3.20 ns"), (9.996e-7, "1.00 us"), (0.001, "1.00 ms"), (0.5, "500 ms"), (123, "123 s"), (float("inf"), "inf s")],
)
def test_times_have_three_digits(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(1023, "1023 B"), (1024, "1.00 KiB"), (1023.9 * 1024, "1.00 MiB"), (2**50 * 5000, "5000 PiB")]
)
def test_sizes_have_binary_units(nbytes, text):
    assert bytes_text(nbytes) == text
