"""A step as a loop over microbatches: the graph of `separate`'s answer, with what runs before the loop, in it, and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import CheckError
from autopar.ir.dtypes import accumulation_dtype
from autopar.ir.graph import BOUNDARY, GATE, ROOT, Aval, Constant, Graph, Op, Operand, Phase, Region
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import Reduction, TensorSharding
from autopar.ir.strategy import Strategy, operand_sharding, result_sharding
from autopar.rules.passing import is_zero
from autopar.trace import compat
from autopar.trace.flatten import Builder, Where
from autopar.trace.hoist import grouped
from autopar.trace.microbatch.separate import Separation
from autopar.trace.order import compact, live
from autopar.trace.program import Equation, Flattened, Program
from autopar.trace.simplify import simplify

Lower = Callable[..., Sequence[Any]]
"""How an op runs on its part: `(op, equation, rule, strategy, avals in, avals out, operands, number of the part, as_written)`."""

_ADD: dict[Reduction, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
}


def divide(
    graph: Graph, program: Program, rules: Sequence[ShardingRule], parts: Separation, lower: Lower, as_written: bool = False
) -> Flattened:
    """The program that runs a step as a loop over microbatches, inputs, outputs and their order unchanged.

    Each input that is cut is read part by part, as a scan reads what it runs over. Sums of narrow floats are added up in float32 and
    rounded once, unless `as_written`.
    """
    divider = _Divider(graph, program, rules, parts, lower, as_written)
    return divider.flattened()


@dataclass
class _Loop:
    """The ops of the new program, by place."""

    before: list[Op] = field(default_factory=list)
    entering: list[Op] = field(default_factory=list)
    inside: list[Op] = field(default_factory=list)
    leaving: list[Op] = field(default_factory=list)
    after: list[Op] = field(default_factory=list)


class _Divider:
    def __init__(
        self, graph: Graph, program: Program, rules: Sequence[ShardingRule], parts: Separation, lower: Lower, as_written: bool
    ):
        self.old, self.program, self.rules, self.parts = graph, program, rules, parts
        self.lower, self.as_written = lower, as_written
        self.region = len(graph.regions)
        self.builder = Builder(equations=list(program.equations))
        self.loop = _Loop()
        self.outer: dict[int, int] = {}
        """Old value -> the same whole, outside of the loop."""
        self.forms: dict[tuple[int, TensorSharding], list[tuple[int, int]]] = {}
        """Old value and form -> where it is there inside of the loop: (region, new value)."""
        self.known: dict[Any, Any] = {}
        """Jaxprs of ops on their part, by what they depend on."""
        self.seen: dict[int, dict[Any, Any]] = {}
        """Ops that are there already, by place."""
        self.index = -1

    def flattened(self) -> Flattened:
        old, builder = self.old, self.builder
        builder.avals.extend(old.avals[v] for v in old.inputs)
        self.outer.update({v: n for n, v in enumerate(old.inputs)})
        self._begin()
        for i in sorted(self.parts.before):
            self._copy(i, self.loop.before, "forward")
        for i in sorted(self.parts.inside):
            self._within(i, self.parts.inside[i])
        self._bring_out()
        for i in sorted(self.parts.after):
            self._copy(i, self.loop.after, self.old.ops[i].phase)
        place = self.loop
        ops = (*place.before, *place.entering, *place.inside, *place.leaving, *place.after)
        lifted = [number for number, _ in builder.lifted.values()]
        graph = replace(
            old,
            avals=tuple(builder.avals),
            inputs=(*range(len(old.inputs)), *lifted),
            input_names=(*old.input_names, *(f"constant[{old.num_constants + n}]" for n in range(len(lifted)))),
            num_constants=old.num_constants + len(lifted),
            outputs=tuple(self.outer[o] if isinstance(o, int) else o for o in old.outputs),
            ops=tuple(ops),
            regions=self._regions(),
        )
        constants = (*self.program.constants, *(c for _, c in builder.lifted.values()))
        graph = compact(live(simplify(grouped(graph), [e.literals for e in builder.equations])))
        return Flattened(graph, Program(tuple(builder.equations), constants, self.program.literal_outputs))

    def _regions(self) -> tuple[Region, ...]:
        """The old regions, those inside of the loop with it as their parent, and the loop itself."""
        within = {self.old.path(self.old.ops[i].region)[0] for i in self.parts.inside if self.old.ops[i].region != ROOT}
        old = (replace(r, parent=self.region) if n in within else r for n, r in enumerate(self.old.regions))
        return (*old, Region("scan", ROOT, self.parts.count, self.equation))

    def _begin(self) -> None:
        """The loop over the microbatches, with the number of each."""
        self.builder.equations.append(Equation(compat.loop_equation(self.parts.count), {}))
        self.equation = len(self.builder.equations) - 1
        (numbers,) = self._run(lambda: jnp.arange(self.parts.count, dtype=jnp.int32), [], self.loop.before, ROOT)
        self.index = self._enter("loop_slice", numbers, Aval((), "int32"))

    # Inside of the loop

    def _within(self, i: int, strategy: Strategy) -> None:
        op, rule = self.old.ops[i], self.rules[i]
        region = op.region if op.region != ROOT else self.region
        needed = [operand_sharding(rule, strategy, k) for k in range(len(op.operands))]
        operands = [self._read(o, needed[k], self._around(op, k), op) for k, o in enumerate(op.operands)]
        forms = [result_sharding(rule, strategy, k) for k in range(len(op.results))]
        avals = [self._local(self.old.avals[r], s) for r, s in zip(op.results, forms, strict=True)]
        as_it_is = op.primitive in BOUNDARY or op.primitive == GATE or self._is_whole(strategy, op, needed)
        if as_it_is:
            results = [self.builder.value_of(a) for a in avals]
            self.loop.inside.append(replace(op, operands=tuple(operands), results=tuple(results), region=region))
        else:
            results = self._on_part(i, strategy, operands, region)
        home = self._home(op, region)
        for r, form, new in zip(op.results, forms, results, strict=True):
            self.forms.setdefault((r, form), []).append((home, new))

    def _around(self, op: Op, operand: int) -> int:
        """The region in which an op reads an operand."""
        if op.primitive == "branch_join" and operand:
            return [n for n, r in enumerate(self.old.regions) if r.parent == op.param("region")][operand - 1]
        if op.primitive in ("loop_exit", "loop_stack", "loop_test"):
            return int(op.param("region"))
        return op.region if op.region != ROOT else self.region

    def _home(self, op: Op, region: int) -> int:
        """The region in which an op's results stand."""
        return int(op.param("region")) if op.primitive in ("loop_carry", "loop_slice", "loop_view") else region

    def _is_whole(self, strategy: Strategy, op: Op, needed: Iterable[TensorSharding]) -> bool:
        return strategy.is_whole and all(s.is_replicated for s in needed)

    def _local(self, aval: Aval, form: TensorSharding) -> Aval:
        return Aval(form.local_shape(aval.shape, self.parts.mesh), form.local_dtype(aval.dtype, self.as_written), aval.weak_type)

    def _read(self, operand: Operand, form: TensorSharding, region: int, reader: Op) -> Operand:
        """An operand inside of the loop in the form that its reader needs."""
        if not isinstance(operand, int):
            return self._first_alone(operand, form, region, reader)
        path = self._path(region)
        for home, new in self.forms.get((operand, form), ()):
            if home in path:
                return new
        if operand in self.outer and not form.partial:
            new = self._as_it_is(operand) if form.is_replicated else self._slice(operand, form)
            home = self.region
        else:
            if form.is_replicated:
                raise CheckError(f"`{reader.primitive}` at {reader.source} reads all of value {operand}, which is there in parts alone.")
            whole = self._read(operand, TensorSharding.replicated(len(form.dims)), region, reader)
            new, home = self._part_of(operand, whole, form, region, reader), region
        self.forms.setdefault((operand, form), []).append((home, new))
        return new

    def _first_alone(self, constant: Constant, form: TensorSharding, region: int, reader: Op) -> Operand:
        """A literal; where it joins what is added up, it counts in the first microbatch alone."""
        if not form.is_sum or is_zero(constant.text):
            return constant
        value = self.program.equations[reader.equation].literals[reader.operands.index(constant)]
        dtype = compat.struct(self._local(constant.aval, form)).dtype
        (new,) = self._run(lambda index: jnp.where(index == 0, value, 0).astype(dtype), [self.index], self.loop.inside, region, reader)
        return new

    def _path(self, region: int) -> tuple[int, ...]:
        """The regions around what stands in `region`, those outside of the loop included."""
        inner = self.old.path(region) if region not in (self.region, ROOT) else ()
        return (ROOT, self.region, *inner)

    def _as_it_is(self, value: int) -> int:
        """An outer value inside of the loop; what is large is brought in, so that it may be converted on either side."""
        aval = self.old.avals[value]
        if value in self.old.free or aval.size == 1:
            return self.outer[value]
        return self._enter("loop_read", self.outer[value], aval)

    def _slice(self, value: int, form: TensorSharding) -> int:
        """What the loop reads of an outer value, part by part."""
        d = next(d for d, axes in enumerate(form.dims) if axes)
        count, aval = self.parts.count, self.old.avals[value]

        def in_parts(x: Any) -> Any:
            shape = (*aval.shape[:d], count, aval.shape[d] // count, *aval.shape[d + 1 :])
            return jnp.moveaxis(jax.lax.reshape(x, shape), d, 0)

        (stacked,) = self._run(in_parts, [self.outer[value]], self.loop.before, ROOT)
        return self._enter("loop_slice", stacked, self._local(aval, form))

    def _part_of(self, value: int, whole: Operand, form: TensorSharding, region: int, reader: Op) -> int:
        """A form of a value that is whole inside of the loop: its part, or itself in the first microbatch and nothing in others."""
        aval, count = self.old.avals[value], self.parts.count
        nothing = self._is_zero(value)

        def part(index: Any, x: Any) -> Any:
            if form.partial:
                wide = x.astype(form.local_dtype(aval.dtype, self.as_written))
                return jnp.where(index == 0, wide, jnp.zeros_like(wide)) if form.is_sum and not nothing else wide
            d = next(d for d, axes in enumerate(form.dims) if axes)
            blocks = jax.lax.reshape(x, (*aval.shape[:d], count, aval.shape[d] // count, *aval.shape[d + 1 :]))
            return jax.lax.dynamic_index_in_dim(blocks, index, d, keepdims=False)

        (new,) = self._run(part, [self.index, whole], self.loop.inside, region, reader)
        return new

    def _is_zero(self, value: int) -> bool:
        """Whether a value is a literal zero spread over a shape."""
        p = self.old.producer.get(value)
        op = self.old.ops[p] if p is not None else None
        spread = op.operands[0] if op is not None and op.primitive == "broadcast_in_dim" else None
        return isinstance(spread, Constant) and is_zero(spread.text)

    def _on_part(self, i: int, strategy: Strategy, operands: Sequence[Operand], region: int) -> list[int]:
        """The ops that run an op on its part."""
        op, rule = self.old.ops[i], self.rules[i]
        avals_in = tuple(self.old.aval(o) for o in op.operands)
        avals_out = tuple(self.old.avals[r] for r in op.results)
        equation = self.program.equations[op.equation]
        values = [o for o in operands if isinstance(o, int)]

        def run(index: Any, *xs: Any) -> list[Any]:
            given = iter(xs)
            filled = [next(given) if isinstance(o, int) else equation.literals[k] for k, o in enumerate(operands)]
            found = self.lower(op, equation, rule, strategy, avals_in, avals_out, filled, self.parts.mesh, index, self.as_written)
            return list(found)

        texts = tuple(o if isinstance(o, Constant) else None for o in operands)
        key = (op.primitive, op.params, texts, avals_in, avals_out, rule, strategy, tuple(self.builder.avals[v] for v in values))
        known = None if "<" in str(op.params) else key
        return self._run(run, [self.index, *values], self.loop.inside, region, op, known)

    def _run(
        self,
        function: Callable[..., Any],
        operands: Sequence[Operand],
        place: list[Op],
        region: int,
        like: Op | None = None,
        key: Any = None,
    ) -> list[int]:
        """Add the ops of a JAX function of these values to `place`, with phase, scope and source of another op."""
        closed = self.known.get(key) if key is not None else None
        if closed is None:
            specs = [compat.struct(self.old.aval(o) if not isinstance(o, int) else self.builder.avals[o]) for o in operands]
            closed = compat.make_jaxpr(lambda *xs: function(*xs), specs)
            if key is not None:
                self.known[key] = closed
        builder = self.builder
        builder.ops, builder.seen = place, self.seen.setdefault(id(place), {})
        first = len(place)
        source = like.source if like is not None else ""
        results = builder.body(closed, list(operands), Where(like.scope if like is not None else "", source, region))
        if like is not None:
            place[first:] = [
                replace(op, phase=like.phase, scope=like.scope, source=like.source, again=like.again, part=like.part)
                for op in place[first:]
            ]
        return [self._value(r, place, region) for r in results]

    def _value(self, result: Any, place: list[Op], region: int) -> int:
        """A result as a value; a literal becomes one by an op."""
        if isinstance(result, int):
            return result
        constant = result.constant
        self.builder.equations.append(Equation(compat.copy_equation((), constant.aval.dtype), {0: result.value}))
        new, last = self.builder.value_of(constant.aval), len(self.builder.equations) - 1
        place.append(Op("copy", (), (constant,), (new,), equation=last, region=region))
        return new

    # Into the loop and out of it

    def _port(self, kind: str, place: list[Op], operand: Operand, aval: Aval, position: int, phase: Phase, like: Op | None = None) -> int:
        result = self.builder.value_of(aval)
        params = (("position", position), ("region", self.region))
        scope, source, part = (like.scope, like.source, like.part) if like is not None else ("", "", -1)
        place.append(Op(kind, params, (operand,), (result,), phase, scope, source, self.equation, part=part))
        return result

    def _enter(self, kind: str, operand: Operand, aval: Aval) -> int:
        return self._port(kind, self.loop.entering, operand, aval, len(self.loop.entering), "forward")

    def _bring_out(self) -> None:
        """What is read after the loop: sums added up in it, parts joined, and what is the same in every microbatch as the last left it."""
        read = {o for i in self.parts.after for o in self.old.ops[i].inputs} | self.old.output_values
        for i in sorted(self.parts.inside):
            op = self.old.ops[i]
            for r in op.results:
                if r in read and r not in self.outer:
                    self.outer[r] = self._out(r, op)

    def _out(self, value: int, like: Op) -> int:
        form, aval = self.parts.made[value], self.old.avals[value]
        (_, new), *_ = self.forms[value, form]
        if form.partial:
            return self._added_up(new, aval, form.partial[0][1], like)
        if form.is_replicated:
            return self._carry(new, lambda last, x: x, 0, self._local(aval, form), like, "last")
        d = next(d for d, axes in enumerate(form.dims) if axes)
        part = self._local(aval, form)
        every = replace(part, shape=(self.parts.count, *part.shape))
        stacked = self._port("loop_stack", self.loop.leaving, new, every, new, like.phase, like)

        def join(x: Any) -> Any:
            return jax.lax.reshape(jnp.moveaxis(x, 0, d), aval.shape)

        return self._run(join, [stacked], self.loop.after, ROOT, like)[0]

    def _added_up(self, part: int, aval: Aval, kind: Reduction, like: Op) -> int:
        """The sum (or max, ...) of a partial value over the microbatches, in the value's own dtype."""
        held = self.builder.avals[part]
        wide = held if self.as_written else replace(held, dtype=accumulation_dtype(held.dtype) if kind == "sum" else held.dtype)

        def add(so_far: Any, x: Any) -> Any:
            return _ADD[kind](so_far, x.astype(so_far.dtype))

        total = self._carry(part, add, _identity(kind, wide.dtype), wide, like, kind)
        if self.builder.avals[total] == aval:
            return total

        def narrowed(x: Any) -> Any:
            return compat.with_type_strength(x.astype(aval.dtype), aval.weak_type)

        return self._run(narrowed, [total], self.loop.after, ROOT, like, ("narrowed", self.builder.avals[total], aval))[0]

    def _carry(self, part: int, step: Callable[[Any, Any], Any], start: Any, aval: Aval, like: Op, key: str) -> int:
        """What a carried value is after the loop that begins as `start` everywhere and goes on by `step`, named `key`, with each `part`."""
        aval = replace(aval, weak_type=False)
        dtype = compat.struct(aval).dtype
        (begin,) = self._run(lambda: jnp.full(aval.shape, start, dtype), [], self.loop.before, ROOT, key=("begin", aval, start))
        position = len(self.loop.entering)
        so_far = self._port("loop_carry", self.loop.entering, begin, aval, position, "forward", like)
        known = key, aval, self.builder.avals[part]
        (after,) = self._run(lambda a, b: step(a, b).astype(dtype), [so_far, part], self.loop.inside, self.region, like, known)
        return self._port("loop_exit", self.loop.leaving, after, aval, position, like.phase, like)

    # Outside of the loop

    def _copy(self, i: int, place: list[Op], phase: Phase) -> None:
        op = self.old.ops[i]
        results = tuple(self.builder.value_of(self.old.avals[r]) for r in op.results)
        operands = tuple(self.outer[o] if isinstance(o, int) else o for o in op.operands)
        self.outer.update(zip(op.results, results, strict=True))
        place.append(replace(op, operands=operands, results=results, phase=phase))


def _identity(kind: Reduction, dtype: str) -> Any:
    """What changes nothing under a reduction."""
    if kind in ("and", "or"):
        return kind == "and"
    if kind == "sum":
        return 0
    numbers = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else None
    if numbers is not None:
        return numbers.min if kind == "max" else numbers.max
    return -np.inf if kind == "max" else np.inf
