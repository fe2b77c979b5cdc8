"""Conversion trees as flows: per value a flow over elementary moves from the producer's sharding to each user's need.

A move that several users share is paid once: each user's flow on an arc is at most the arc's opening, and the cost is on the
opening. Where a value is wanted early (forward) and late (backward), the graph has two layers: waiting from one to the other
holds memory, and moving again in the late layer costs time again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.intraop.states import Arc, StateGraph
from autopar.ir.graph import Aval
from autopar.ir.problem import Floats, Ints, SideColumns, SideRows
from autopar.ir.sharding import TensorSharding

Vector = tuple[TensorSharding | None, ...]
Use = tuple[int, int]
EARLY, LATE = 0, 1
FEW = 4
"""States of a network up to which only cheapest ways between two of them are looked at: with more, a way by a third may serve two users."""


@dataclass(frozen=True)
class User:
    """A node that needs the value: its sharding by the node's choice, and the layer in which it reads."""

    node: int
    vector: Vector
    layer: int


@dataclass(frozen=True)
class Member:
    """One value of a network: its uses by user, and when it is made, last read early, first and last read late (op indices).

    `held` is the last time at which it is there in the sharding in which it was made, whatever its users do.
    """

    value: int
    uses: tuple[tuple[Use, ...], ...]
    made: int
    early: int
    late: int
    last: int
    held: int


@dataclass(frozen=True, eq=False)
class Network:
    """The conversions of equal values: one flow problem, `len(members)` times.

    `times` is how often each is made per step. `held` values are still there as they were made when they are first read late.
    `again` is the node that may make the value once more for its late users, with its sharding by choice (None: it does not). `flight` is
    of how many microbatches what waits from early to late stands there at once.
    """

    producer: int
    vector: Vector
    aval: Aval
    users: tuple[User, ...]
    members: tuple[Member, ...]
    graph: StateGraph
    layers: int
    held: bool
    times: int = 1
    again: tuple[int, Vector] | None = None
    flight: int = 1
    intervals: dict[object, tuple[Ints, Ints]] = field(default_factory=dict)

    def made(self, choice: Sequence[int]) -> TensorSharding:
        """The sharding in which these choices make the value."""
        return _there(self.vector[choice[self.producer]])

    def needed(self, n: int, choice: Sequence[int]) -> TensorSharding:
        """The sharding that user n needs by these choices."""
        return _there(self.users[n].vector[choice[self.users[n].node]])

    @property
    def sources(self) -> frozenset[int]:
        """The states in which the value may come in."""
        vectors = (self.vector, self.again[1] if self.again else ())
        return frozenset(self.graph.index[s] for vector in vectors for s in vector if s is not None)

    @property
    def targets(self) -> frozenset[int]:
        """The states in which users need it."""
        return frozenset(self.graph.index[s] for u in self.users for s in u.vector if s is not None)


def _there(sharding: TensorSharding | None) -> TensorSharding:
    assert sharding is not None, "a plan has no choice that is not to make a value"
    return sharding


@dataclass(frozen=True)
class Opening:
    """An arc that may be opened: a move within `layer`, or waiting in state `head` from early to late (`arc` is None).

    With `held`, what waits is the value as it was made, which is there anyway. `flows` are the side columns of the users' flows
    through it, where it has several users.
    """

    layer: int
    head: int
    arc: Arc | None
    column: int
    held: bool = False
    flows: tuple[int, ...] = ()


@dataclass
class SideBuilder:
    """Collects side columns and rows; choices are columns before them."""

    num_choices: int
    offsets: Sequence[int]
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    usage: list[tuple[int, Ints, Ints, float]] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add_column(self, cost: float, integer: bool) -> int:
        """A side column in [0, 1]; returns its side index."""
        self.cost.append(cost)
        self.upper.append(1.0)
        self.integer.append(integer)
        return len(self.cost) - 1

    def add_row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """A row over global columns."""
        r = len(self.lower)
        for c, v in terms:
            self.row.append(r)
            self.column.append(c)
            self.value.append(v)
        self.lower.append(lower)
        self.high.append(upper)

    def side(self, index: int) -> int:
        """Global column of a side column."""
        return self.num_choices + index

    def finish(self) -> tuple[SideColumns, SideRows]:
        counts = np.array([len(starts) for _, starts, _, _ in self.usage], dtype=np.int64)
        empty = [np.zeros(0, np.int64)]
        columns = SideColumns(
            np.array(self.cost, dtype=np.float64),
            np.array(self.upper, dtype=np.float64),
            np.array(self.integer, dtype=bool),
            np.repeat(np.array([column for column, _, _, _ in self.usage], dtype=np.int64), counts),
            np.concatenate([starts for _, starts, _, _ in self.usage] or empty),
            np.concatenate([stops for _, _, stops, _ in self.usage] or empty),
            np.repeat(np.array([nbytes for _, _, _, nbytes in self.usage], dtype=np.float64), counts),
        )
        rows = SideRows(
            np.array(self.row, dtype=np.int64),
            np.array(self.column, dtype=np.int64),
            np.array(self.value, dtype=np.float64),
            np.array(self.lower, dtype=np.float64),
            np.array(self.high, dtype=np.float64),
        )
        return columns, rows


def add_network(network: Network, builder: SideBuilder, local_bytes: Sequence[int], small: float) -> tuple[Opening, ...]:
    """Add a network's columns and rows. `local_bytes[s]` are the bytes of a form in state s; forms below `small` are not counted.

    With one user its flow is the opening; with several, each has a flow of its own below the openings.
    """
    counted = max(local_bytes, default=0) > small
    openings = _openings(network, builder, counted)
    for o in openings:
        _charge(network, o, builder, local_bytes[o.head], small)
        if o.held:
            _hold(network, o, builder)
    flows: dict[int, list[int]] = {}
    for user in network.users:
        if len(network.users) == 1:
            flow = {o: builder.side(o.column) for o in openings}
        else:
            usable = [o for o in openings if o.layer == EARLY and o.arc is not None or user.layer == LATE]
            flow = {}
            for o in usable:
                column = builder.add_column(0.0, False)
                flows.setdefault(o.column, []).append(column)
                flow[o] = builder.side(column)
                builder.add_row([(flow[o], 1.0), (builder.side(o.column), -1.0)], -np.inf, 0.0)
        _conserve(network, user, flow, builder)
    return tuple(Opening(o.layer, o.head, o.arc, o.column, o.held, tuple(flows.get(o.column, ()))) for o in openings)


def tighten(network: Network, openings: Sequence[Opening], choice: Sequence[int], side: Floats) -> None:
    """Settle, in place, what the solver may leave open since it costs no time: memory then counts only what is there.

    A value that waits as it was made, though it is there anyway, is not charged twice; what no user flows through is closed.
    """
    made = network.graph.index[network.made(choice)]
    charged = next((o for o in openings if o.arc is None and not o.held and o.head == made), None)
    free = next((o for o in openings if o.held and o.head == made), None)
    if charged is not None and free is not None:
        for old, new in zip((charged.column, *charged.flows), (free.column, *free.flows), strict=True):
            side[new] = min(1.0, side[new] + side[old])
            side[old] = 0.0
    for o in openings:
        if o.flows:
            side[o.column] = max(side[f] for f in o.flows)


def _openings(network: Network, builder: SideBuilder, counted: bool) -> tuple[Opening, ...]:
    """The arcs of a network. One user's flow takes a cheapest path by itself, unless forms are `counted` in memory: then it could split."""
    g, count = network.graph, len(network.members)
    sources, targets = network.sources, network.targets
    if len(network.users) == 1:
        arcs = g.useful(sources, targets)
    else:
        arcs = g.lean if len(sources | targets) > FEW else g.useful(sources | targets, targets)
    whole = counted or len(network.users) > 1 or network.layers == 2
    found = []
    used = {a.head for a in arcs} | sources
    for layer in range(network.layers):
        for a in arcs:
            if a.tail in used:
                found.append(Opening(layer, a.head, a, builder.add_column(a.seconds * count * network.times, whole)))
    if network.layers == 2:
        found.extend(Opening(LATE, s, None, builder.add_column(0.0, whole)) for s in sorted(used))
        if network.held:
            found.extend(Opening(LATE, s, None, builder.add_column(0.0, whole), True) for s in sorted(sources))
    return tuple(found)


def _hold(network: Network, opening: Opening, builder: SideBuilder) -> None:
    """A value waits free of charge only in the sharding in which it was made."""
    first = int(builder.offsets[network.producer])
    state = network.graph.states[opening.head]
    made_so = [(first + s, -1.0) for s, sharding in enumerate(network.vector) if sharding == state]
    builder.add_row([(builder.side(opening.column), 1.0), *made_so], -np.inf, 0.0)


def _charge(network: Network, opening: Opening, builder: SideBuilder, nbytes: int, small: float) -> None:
    """Memory of the form that an opening makes or keeps, for each member."""
    if nbytes <= small:
        return
    starts, stops = _intervals(network)["held" if opening.held else "wait" if opening.arc is None else opening.layer]
    if len(starts):
        builder.usage.append((opening.column, starts, stops, float(nbytes) * (network.flight if opening.arc is None else 1)))


def _intervals(network: Network) -> dict[object, tuple[Ints, Ints]]:
    """When a form is there, over all members: held as it was made beyond its own uses, waiting, made early, made late."""
    if not network.intervals:
        made, early, late, last, held = (
            np.array([getattr(m, name) for m in network.members], dtype=np.int64) for name in ("made", "early", "late", "last", "held")
        )
        in_two = network.layers == 2
        spans = {
            "held": (held + 1, last + 1),
            "wait": (early + 1, last + 1),
            EARLY: (np.maximum(made, 0), early + 1) if in_two else (late, last + 1),
            LATE: (late, last + 1),
        }
        network.intervals.update({kind: (a[a < b], b[a < b]) for kind, (a, b) in spans.items()})
    return network.intervals


def _conserve(network: Network, user: User, flow: dict[Opening, int], builder: SideBuilder) -> None:
    """What a state receives it sends on or is needed there: one row per layer and state."""
    g = network.graph
    top = user.layer if network.layers == 2 else EARLY
    rows: dict[tuple[int, int], dict[int, float]] = {}

    def term(layer: int, state: int, column: int, value: float) -> None:
        row = rows.setdefault((layer, state), {})
        row[column] = row.get(column, 0.0) + value

    for o, column in flow.items():
        if o.arc is None:
            term(EARLY, o.head, column, -1.0)
            term(LATE, o.head, column, 1.0)
        else:
            term(o.layer, o.arc.tail, column, -1.0)
            term(o.layer, o.head, column, 1.0)
    def end(layer: int, node: int, vector: Vector, value: float) -> None:
        for s, sharding in enumerate(vector):
            if sharding is not None:
                term(layer, g.index[sharding], int(builder.offsets[node]) + s, value)

    end(EARLY, network.producer, network.vector, 1.0)
    spare = None in user.vector or None in network.vector
    if network.again is not None and top == LATE:
        end(LATE, *network.again, 1.0)
        spare = True
    end(top, user.node, user.vector, -1.0)
    for row in rows.values():
        # What is not needed of several sources, or by nobody, may end anywhere.
        builder.add_row([(c, v) for c, v in row.items() if v], 0.0, np.inf if spare else 0.0)
