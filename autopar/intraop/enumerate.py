"""From a graph on a logical mesh to the `Problem` that a solver sees, with what is needed to read its answer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.costs import Pricer
from autopar.intraop.clusters import Cluster
from autopar.intraop.networks import EARLY, LATE, Member, Network, Opening, SideBuilder, Use, User, Vector, add_network
from autopar.intraop.reshard import border_shardings
from autopar.intraop.restrict import Barred
from autopar.intraop.shape import Shape
from autopar.intraop.space import Space, build_space
from autopar.intraop.states import StateGraph, state_graph
from autopar.ir.dtypes import accumulation_dtype, itemsize
from autopar.ir.graph import Aval, Constant, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.problem import Floats, Problem, Usage
from autopar.ir.same import Same
from autopar.ir.sharding import Reduction, TensorSharding
from autopar.trace.recompute import Doubled

Pins = Mapping[int, tuple[TensorSharding, ...]]


@dataclass(frozen=True, eq=False)
class Layout:
    """How a `Problem` was laid out: which node stands for what, and which columns for which conversions.

    Nodes come in order: cluster classes, then the border nodes of inputs and free outputs. `borders[n]` are the shardings of a
    border node; `input_node` and `output_node` give the node of each input value and output position that has one.
    """

    shape: Shape
    mesh: LogicalMesh
    spaces: tuple[Space, ...]
    borders: Mapping[int, tuple[TensorSharding, ...]]
    input_node: Mapping[int, int]
    output_node: Mapping[int, int]
    networks: tuple[Network, ...]
    openings: tuple[tuple[Opening, ...], ...]


@dataclass
class _Value:
    """Where a value comes from and who needs it, in terms of nodes."""

    node: int
    vector: Vector
    users: dict[tuple[int, Vector, int], list[Use]] = field(default_factory=dict)
    again: tuple[int, Vector] | None = None


def enumerate_problem(
    shape: Shape,
    pricer: Pricer,
    budget: float | None = None,
    pins: Pins | None = None,
    layered: bool = True,
    doubled: Doubled | None = None,
    only: Sequence[Sequence[int]] | None = None,
) -> tuple[Problem, Layout]:
    """The intra-op programme on `pricer.mesh`, priced, with its layout.

    `pins` restricts the shardings of graph inputs, by value, and of output k under -1 - k. `layered` lets conversions be made again for
    backward. With `doubled`, whose graph is that of `shape`, late users take a value as it was kept or made again, and the first choice
    of what may be left out is that it is: such a problem says what to make again, and has no plan. With `only` each node has but these
    choices of the whole problem, beside being left out.
    """
    return _Enumerator(shape, pricer, budget, dict(pins or {}), layered, doubled, only).run()


class _Enumerator:
    def __init__(
        self,
        shape: Shape,
        pricer: Pricer,
        budget: float | None,
        pins: dict[int, Any],
        layered: bool,
        doubled: Doubled | None,
        only: Sequence[Sequence[int]] | None,
    ):
        self.only = only
        self.twin = {} if doubled is None else doubled.twin
        self.first = {w: v for v, w in self.twin.items()}
        spare = frozenset() if doubled is None else doubled.added | doubled.idle
        self.optional = frozenset(
            c for c, members in enumerate(shape.folded.members) if all(spare.issuperset(shape.clusters[m].ops) for m in members)
        )
        self.shape, self.pricer, self.budget, self.pins, self.layered = shape, pricer, budget, pins, layered
        self.graph, self.mesh, self.memo = shape.graph, pricer.mesh, pricer.memo
        self.end = len(self.graph.ops)
        # Values below this many bytes are left out of the memory rows: together they are below one part in a thousand.
        every = sum(a.nbytes for a in self.graph.avals) / self.mesh.num_devices
        self.small = min(budget, every) / 1e3 / max(1, len(self.graph.avals)) if budget else np.inf
        self.tied = {o: self.graph.inputs[i] for i, o in shape.carried}
        self.olds: dict[int, list[int]] = {}
        for k, o in enumerate(self.graph.outputs):
            if isinstance(o, int) and k in self.tied:
                self.olds.setdefault(o, []).append(self.tied[k])
        self.vectors: dict[Any, Vector] = {}
        self.numbers: dict[int, int] = {}
        """Vectors in the order in which they came, which is the same each time."""
        self.nbytes: dict[Any, Floats] = {}
        self.alone: dict[int, TensorSharding | None] = {}
        self.known: dict[int, tuple[int, Member]] = {}
        self.parts: dict[int, tuple[Floats, Floats]] = {}
        ops = self.graph.ops
        self.rounds = {ops[j].operands[0]: ops[i].results[0] for i, j in self.graph.goes_round if ops[j].primitive == "loop_exit"}
        self.exits = {begin: i for i, begin in self.graph.begins.items()}
        self.last_phase = [op.phase for op in self.graph.ops] + ["update"]

    def run(self) -> tuple[Problem, Layout]:
        shape = self.shape
        first = [shape.clusters[members[0]] for members in shape.folded.members]
        self.spaces = tuple(build_space(self.graph, shape.rules, cluster, self.mesh, shape.limits, self.memo) for cluster in first)
        node_costs = [self._cost(c) for c in range(len(self.spaces))]
        self._border_nodes(node_costs)
        values = self._values()
        networks = self._networks(values)
        offsets = np.concatenate([[0], np.cumsum([len(c) for c in node_costs])]).astype(int)
        builder = SideBuilder(int(offsets[-1]), [int(o) for o in offsets])
        openings = tuple(add_network(n, builder, self._state_bytes(n), self.small) for n in networks)
        side, rows = builder.finish()
        members = shape.folded.members
        spare = sum(self._launches(shape.clusters[members[c][0]]) * len(members[c]) for c in self.optional)
        problem = Problem(
            tuple(node_costs),
            (),
            tuple(self._usages(values)) if self.budget else (),
            side,
            rows,
            self.end + 1,
            budget=self.budget,
            constant_cost=self.pricer.cluster.launch_seconds * (shape.charges.launches - spare),
        )
        layout = Layout(shape, self.mesh, self.spaces, self.borders, self.input_node, self.output_node, tuple(networks), openings)
        return problem, layout

    def _cost(self, c: int) -> Floats:
        """Seconds of a class by choice, times its members."""
        members = self.shape.folded.members[c]
        cluster, space = self.shape.clusters[members[0]], self.spaces[c]
        seconds = self._seconds(cluster.ops[0], space, 0) if space.single else self._merged_cost(cluster, space)
        if self.only is not None:
            seconds = seconds[list(self.only[c])]
        if c in self.optional:
            seconds = np.append(0.0, seconds + self.pricer.cluster.launch_seconds * self._launches(cluster))
        return seconds * len(members)

    def _launches(self, cluster: Cluster) -> int:
        """How many kernels begin in a cluster."""
        return sum(self.shape.charges.groups[i] == i for i in cluster.ops)

    def _seconds(self, i: int, space: Space, position: int) -> Floats:
        """Seconds per step of op i, at a position in its cluster, by choice."""
        op, rule = self.graph.ops[i], self.shape.rules[i]
        reads, writes = self.shape.charges.reads[i], self.shape.charges.writes[i]
        operands, results = self._avals(i)

        def once() -> Floats:
            strategies = [space.strategy(position, s) for s in range(len(space))]
            return np.array([self.pricer.op(op, rule, s, operands, results, reads, writes) for s in strategies], np.float64)

        what = op.primitive, op.params, tuple(map(Same, op.subgraphs)), operands, results
        key = "seconds", space.choices_of(position), what, reads, writes
        return self.graph.times[i] * self.memo.get(key, once)

    def _merged_cost(self, cluster: Cluster, space: Space) -> Floats:
        """A merged cluster's ops priced one by one, equal ops once."""
        total = np.zeros(len(space))
        groups: dict[Any, tuple[int, int, int]] = {}
        for j, i in enumerate(cluster.ops):
            charged = (self.shape.charges.reads[i], self.shape.charges.writes[i])
            classes = tuple(sorted(space.classes[j].items()))
            key = (id(self.shape.rules[i]), charged, self.graph.ops[i].primitive, classes, self._avals(i), self.graph.times[i])
            first, position, count = groups.get(key, (i, j, 0))
            groups[key] = (first, position, count + 1)
        for i, j, count in groups.values():
            total += count * self._seconds(i, space, j)
        return total

    def _avals(self, i: int) -> Any:
        op = self.graph.ops[i]
        return tuple(self.graph.aval(o) for o in op.operands), tuple(self.graph.avals[r] for r in op.results)

    def _border_nodes(self, node_costs: list[Floats]) -> None:
        """A node per kind of input that lies by itself, and per output that is not state: any border sharding. What comes from other
        pipeline stages or goes to them takes its time on the way; the rest is free."""
        self.borders: dict[int, tuple[TensorSharding, ...]] = {}
        self.input_node: dict[int, int] = {}
        self.output_node: dict[int, int] = {}
        kinds: dict[Hashable, int] = {}

        def node(kind: Hashable, shardings: tuple[TensorSharding, ...]) -> int:
            if kind not in kinds:
                kinds[kind] = len(node_costs)
                shardings = shardings if self.only is None else tuple(shardings[s] for s in self.only[len(node_costs)])
                self.borders[len(node_costs)] = shardings
                node_costs.append(np.zeros(len(shardings)))
            return kinds[kind]

        for v in self.graph.inputs:
            if v not in self.shape.member_input:
                n = self.input_node[v] = node(self._input_kind(v), self.pins.get(v) or self._border_of(v))
                node_costs[n] = node_costs[n] + self._on_the_way(v, self.borders[n])
        for k, o in enumerate(self.graph.outputs):
            if isinstance(o, int) and k not in self.tied and o not in self.graph.free:
                n = self.output_node[k] = node(("out", k), self.pins.get(-1 - k) or self._border_of(o, False))
                node_costs[n] = node_costs[n] + self._on_the_way(o, self.borders[n])

    def _on_the_way(self, v: int, shardings: tuple[TensorSharding, ...]) -> Floats:
        """Seconds per step in which a value goes from stage to stage, by the sharding in which it does."""
        rate, aval = self.shape.streamed.get(v, 0.0), self.graph.avals[v]
        return np.array([rate * s.local_bytes(aval, self.mesh) if rate else 0.0 for s in shardings])

    def _border_of(self, v: int, going_in: bool = True) -> tuple[TensorSharding, ...]:
        """The shardings that an input or an output may have."""
        found, limits = border_shardings(self.graph.avals[v], self.mesh), self.shape.limits
        return found if limits is None else limits.border(v, found, self.mesh, going_in)

    def _barred(self, v: int) -> Barred:
        """The moves that must not be made of a value."""
        return frozenset() if self.shape.limits is None else self.shape.limits.barred(v, self.mesh)

    def _input_kind(self, v: int) -> Hashable:
        """Inputs with equal avals, users and next value share a node when the program is folded."""
        if len(self.shape.folded.members) == len(self.shape.clusters):
            return v
        users = tuple(sorted((self._class(u), self.shape.position.get(u, -1), k) for u, k in self.graph.uses.get(v, ())))
        nexts = [self.graph.outputs[o] for o, w in self.tied.items() if w == v]
        makers = tuple(self._class(self.graph.producer.get(o, -1)) for o in nexts if isinstance(o, int))
        limits = self.shape.limits
        kind = limits and (limits.labels.dims[v], v in limits.parameters, v in limits.other_state)
        return (self.graph.avals[v], users, makers, self.pins.get(v), kind)

    def _class(self, i: int) -> int:
        c = self.shape.cluster_of.get(i)
        return -1 if c is None else self.shape.folded.class_of[c]

    def _vector(self, key: tuple[Any, ...], make: Any) -> Vector:
        found = self.vectors.get(key)
        if found is None:
            found = make()
            if key[0] == "border":
                found = self.memo.one(found)
            elif self.only is not None or key[1] in self.optional:
                left = found if self.only is None else tuple(found[s] for s in self.only[key[1]])
                found = self.memo.one((None, *left) if key[1] in self.optional else left)
            self.vectors[key] = found
            self.numbers.setdefault(id(found), len(self.numbers))
        return found

    def _source(self, v: int) -> tuple[int, Vector]:
        """Node and sharding by choice of a value where it is made."""
        p = self.graph.producer.get(v)
        if p is not None:
            c, j = self._class(p), self.shape.position[p]
            r = self.graph.ops[p].results.index(v)
            return c, self._vector(("out", c, j, r), lambda: self.spaces[c].result(j, r))
        if v in self.shape.member_input:
            cluster, n = self.shape.member_input[v]
            c = self.shape.folded.class_of[cluster]
            return c, self._vector(("in", c, n), lambda: self.spaces[c].input(n))
        return self._border(self.input_node[v])

    def _values(self) -> dict[int, _Value]:
        """Every value that depends on inputs, with its users outside its own cluster."""
        graph = self.graph
        found = {v: _Value(*self._source(v)) for v in graph.inputs}
        for i, op in enumerate(graph.ops):
            if i not in self.shape.cluster_of:
                continue
            c, j = self._class(i), self.shape.position[i]
            for k, o in enumerate(op.operands):
                if isinstance(o, Constant) or o in graph.free:
                    continue
                vector = self._vector(("use", c, j, k), lambda c=c, j=j, k=k: self.spaces[c].operand(j, k))
                self._use(found[o], c, vector, i, k)
            for r in op.results:
                found[r] = _Value(*self._source(r))
        for k, o in enumerate(graph.outputs):
            if isinstance(o, int) and o not in graph.free:
                node, vector = self._source(self.tied[k]) if k in self.tied else self._border(self.output_node[k])
                self._use(found[o], node, vector, self.end, k)
        for v, w in self.twin.items():
            self._pair(found[v], found[w])
        return found

    def _pair(self, kept: _Value, again: _Value) -> None:
        """What reads a value made again may read the one that was kept instead."""
        for user, uses in again.users.items():
            if not self._same(again, user):
                kept.users.setdefault(user, []).extend(uses)
                kept.again = again.node, again.vector

    def _border(self, node: int) -> tuple[int, Vector]:
        return node, self._vector(("border", node), lambda: self.borders[node])

    def _use(self, value: _Value, node: int, vector: Vector, i: int, k: int) -> None:
        layer = EARLY if self.last_phase[i] == "forward" else LATE
        value.users.setdefault((node, vector, layer), []).append((i, k))

    def _networks(self, values: Mapping[int, _Value]) -> list[Network]:
        """One network per kind of value whose users may need another sharding than it has."""
        kinds: dict[Hashable, list[tuple[int, _Value, list[tuple[int, Vector, int]]]]] = {}
        for v, value in values.items():
            for wanted in () if v in self.first else self._groups(v, value):
                users = sorted(wanted, key=lambda u: (u[0], u[2], self.numbers[id(u[1])]))
                aval, layers = self.graph.avals[v], self._layers(v, value, users)
                needs = tuple((n, id(w), k) for n, w, k in users)
                times = self.graph.value_times(v)
                again = value.again and (value.again[0], id(value.again[1]))
                held = self._is_held(v, value, users)
                kept = self._is_kept(v)
                kind = (value.node, id(value.vector), aval, needs, layers, held, times, again, self._barred(v), kept)
                kinds.setdefault(kind, []).append((v, value, users))
        return [self._network(members) for members in kinds.values()]

    def _groups(self, v: int, value: _Value) -> list[list[tuple[int, Vector, int]]]:
        """The users that need another sharding, in groups that share conversions.

        An input is there to the end, so its use in the update starts afresh instead of keeping what backward gathered.
        """
        wanted = [u for u in value.users if not self._same(value, u)]
        if v in self.graph.producer:
            return [wanted] if wanted else []
        late = [u for u in wanted if all(self.last_phase[i] == "update" for i, _ in value.users[u])]
        return [g for g in ([u for u in wanted if u not in late], late) if g]

    def _same(self, value: _Value, user: tuple[int, Vector, int]) -> bool:
        node, vector, layer = user
        if node == value.node:
            return vector is value.vector  # equal vectors are one
        if value.again is not None and layer == LATE:
            return False
        alone = self._alone(vector)
        return alone is not None and alone == self._alone(value.vector)

    def _alone(self, vector: Vector) -> TensorSharding | None:
        """The one sharding of a vector that has no other."""
        if id(vector) not in self.alone:
            self.alone[id(vector)] = vector[0] if all(s == vector[0] for s in vector) else None
        return self.alone[id(vector)]

    def _layers(self, v: int, value: _Value, wanted: Sequence[tuple[int, Vector, int]]) -> int:
        """Two layers where a value that matters to memory is converted for late uses long after it is made or read early."""
        if not self.layered or self.graph.avals[v].nbytes <= self.small or not any(k == LATE for _, _, k in wanted):
            return 1
        member = self._member(v, value, wanted)
        return 2 if member.late > member.early + 2 or value.again is not None else 1

    def _member(self, v: int, value: _Value, users: Sequence[tuple[int, Vector, int]]) -> Member:
        """What these users do with a value; remembered, as it is asked for more than once."""
        count, member = self.known.get(v, (0, None))
        if member is None or count != len(users) or v not in self.graph.producer:
            member = self._met(v, value, users)
            self.known[v] = len(users), member
        return member

    def _met(self, v: int, value: _Value, users: Sequence[tuple[int, Vector, int]]) -> Member:
        made = self.graph.producer.get(v, -1)
        early = [self.graph.reach(v, i) for u in users if u[2] == EARLY for i, _ in value.users[u]]
        late = [self.graph.reach(v, i) for u in users if u[2] == LATE for i, _ in value.users[u]]
        last = max(stop for _, stop in (*early, *late))
        first_late = min(start for start, _ in late or early)
        uses = tuple(tuple(value.users[u]) for u in users)
        return Member(v, uses, made, max((stop for _, stop in early), default=made), first_late, last, self._held(v, value))

    def _is_held(self, v: int, value: _Value, users: Sequence[tuple[int, Vector, int]]) -> bool:
        """Whether the value is still there as it was made when it is first read late."""
        member = self._member(v, value, users)
        return member.held >= member.late

    def _held(self, v: int, value: _Value) -> int:
        """The last op that reads a value as it is made; inputs stay to the end."""
        if v not in self.graph.producer:
            return self.end
        own = [self.graph.reach(v, i)[1] for u, uses in value.users.items() if self._same(value, u) for i, _ in uses]
        return max(own, default=self.graph.producer[v])

    def _network(self, members: list[tuple[int, _Value, list[tuple[int, Vector, int]]]]) -> Network:
        v, value, users = members[0]
        aval = self.graph.avals[v]
        vectors = (value.vector, value.again[1] if value.again else (), *(w for _, w, _ in users))
        shardings = {s for vector in vectors for s in vector if s is not None}
        graph = self._states(aval, tuple(sorted({kind for s in shardings for _, kind in s.partial})), self._barred(v))
        layers = self._layers(v, value, users)
        own = [self._member(m, mv, mu) for m, mv, mu in members]
        held = all(m.held >= m.late for m in own)
        return Network(
            value.node,
            value.vector,
            aval,
            tuple(User(n, w, k) for n, w, k in users),
            tuple(own),
            graph,
            layers,
            held,
            self.graph.value_times(v),
            value.again,
            self.shape.flight if self._is_kept(v) else 1,
        )

    def _states(self, aval: Aval, kinds: tuple[Reduction, ...], barred: Barred) -> StateGraph:
        key = "states", aval.shape, aval.dtype, kinds, barred
        return self.memo.get(key, lambda: state_graph(aval, self.mesh, kinds, self.pricer.move, barred))

    def _state_bytes(self, network: Network) -> list[int]:
        if network.members[0].value in self.shape.streamed:
            return [0] * len(network.graph.states)
        return [s.local_bytes(network.aval, self.mesh, self.pricer.as_written) for s in network.graph.states]

    def _usages(self, values: Mapping[int, _Value]) -> list[Usage]:
        """Bytes of every value in the sharding in which it is made, while it lives; equal intervals of one node are added up."""
        total: dict[tuple[int, int, int], Floats] = {}
        for v, value in values.items():
            if self.graph.avals[v].nbytes <= self.small or not self._in_memory(v):
                continue
            start, stop = self._interval(v, value)
            nbytes = self._local_bytes(value.vector, self.graph.avals[v])
            nbytes = nbytes * self.shape.flight if self._in_flight(v, stop) else nbytes
            key = (value.node, start, stop)
            total[key] = total[key] + nbytes if key in total else nbytes
        return [Usage(node, start, stop, nbytes) for (node, start, stop), nbytes in total.items()]

    def _is_kept(self, v: int) -> bool:
        """Whether each microbatch in flight keeps a value from its forward to its backward, if backward does not make it again."""
        return v in self.shape.kept or (self.shape.flight > 1 and v in self.twin)

    def _in_flight(self, v: int, stop: int) -> bool:
        """Whether a value is kept as it is made, to `stop`, by each microbatch of a pipeline stage that is between forward and backward."""
        return v in self.shape.kept and stop > min(i for i, _ in self.graph.uses[v] if self.graph.ops[i].phase == "backward")

    def _local_bytes(self, vector: Vector, aval: Aval) -> Floats:
        """Bytes on one device by choice."""
        key = (id(vector), aval.shape, aval.dtype)
        if key not in self.nbytes:
            shards, summed = self._parts(vector)
            wide = itemsize(aval.dtype if self.pricer.as_written else accumulation_dtype(aval.dtype))
            self.nbytes[key] = aval.size / shards * np.where(summed, wide, itemsize(aval.dtype))
        return self.nbytes[key]

    def _parts(self, vector: Vector) -> tuple[Floats, Floats]:
        """By choice: into how many parts a value is cut (infinitely many where it is not there), and whether it is a partial sum."""
        if id(vector) not in self.parts:
            shards = [np.inf if s is None else s.shards(self.mesh) for s in vector]
            self.parts[id(vector)] = np.array(shards, np.float64), np.array([s is not None and s.is_sum for s in vector])
        return self.parts[id(vector)]

    def _in_memory(self, v: int) -> bool:
        if v in self.shape.streamed:
            return False
        p = self.graph.producer.get(v)
        if p is None:
            return True
        op = self.graph.ops[p]
        renamed = op.primitive == "reshape" and op.operands[0] in self.shape.member_input  # the same bytes under another shape
        return op.results.index(v) in self.shape.charges.writes[p] and not renamed

    def _interval(self, v: int, value: _Value) -> tuple[int, int]:
        """From where a value is made to its last use as it is; inputs live throughout, and hold the state's next value too."""
        p = self.graph.producer.get(v)
        if p is None:
            return 0, self.end + 1
        if self._carried_out(v) or self._goes_round(v, p):
            return p, p + 1
        wanted = [u for u in value.users if not self._same(value, u)]
        last = self._held(v, value)
        if v in self.first:
            return p, 1 + max([last, *(self.graph.reach(v, i)[1] for uses in value.users.values() for i, _ in uses)])
        if wanted:
            member = self._member(v, value, wanted)
            last = max(last, member.early if self._layers(v, value, wanted) == 2 else member.last)
        op = self.graph.ops[p]
        if op.primitive == "loop_carry":  # what leaves the loop is what it has carried, in the same place
            last = max(last, self.exits.get(p, self.graph.spans[op.param("region")][1]))
        start = self.graph.spans[op.param("region")][0] if op.primitive == "loop_stack" else p
        return start, min(last, self.end) + 1

    def _goes_round(self, v: int, made: int) -> bool:
        """Whether a value is a loop's next carried one, written over the last one where nobody in the loop reads that any more."""
        carried = self.rounds.get(v)
        return carried is not None and max((i for i, _ in self.graph.uses.get(carried, ())), default=-1) <= made

    def _carried_out(self, v: int) -> bool:
        """Whether a value is the state's next one, written over the old one where nobody reads that any more."""
        if not self.shape.donated or v not in self.graph.output_values:
            return False
        made = self.graph.producer[v]
        return any(max((i for i, _ in self.graph.uses.get(old, ())), default=-1) <= made for old in self.olds.get(v, ()))


def layer_of(graph: Graph, use: Use) -> int:
    """The layer in which a use reads: early in forward, late after."""
    i, _ = use
    return EARLY if i < len(graph.ops) and graph.ops[i].phase == "forward" else LATE
