"""Every way of lying to every other: the cheapest moves between two shardings, run on devices, beside numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from autopar.emit.collectives import apply_move, axis_index
from autopar.intraop.reshard import Path, cheapest
from autopar.intraop.states import StateGraph, state_graph
from autopar.ir.graph import Aval
from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import Reduction, TensorSharding

LINE, SQUARE, UNEVEN = (LogicalMesh(n, s) for n, s in ((("x",), (4,)), (("x", "y"), (2, 2)), (("x", "y"), (2, 3))))
SHAPES = {LINE: (4, 8, 12), SQUARE: (4, 8), UNEVEN: (6, 12)}
# Reduction -> how numpy does it, and what changes nothing.
REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "or": np.logical_or, "and": np.logical_and}
Block = np.ndarray
Pair = tuple[TensorSharding, TensorSharding, Path]


def price(move, source, aval) -> float:
    return 1.0 if move.communicates else 0.1


def states(mesh: LogicalMesh, dtype: str, kinds: Sequence[Reduction]) -> tuple[Aval, StateGraph]:
    aval = Aval(SHAPES[mesh], dtype)
    return aval, state_graph(aval, mesh, tuple(kinds), price)


def values(shape: tuple[int, ...], dtype: str, random: np.random.Generator) -> Block:
    """Numbers whose sums over a few devices are exact in every dtype, and whose squares of neighbours differ."""
    whole = random.integers(-50, 50, shape)
    if dtype == "complex64":
        return (whole + 1j * random.integers(-50, 50, shape)).astype(dtype)
    return whole > 0 if dtype == "bool" else whole.astype("float32" if dtype == "bfloat16" else dtype)


def devices(mesh: LogicalMesh) -> Iterator[dict[str, int]]:
    """Each device's position by axis."""
    for place in product(*map(range, mesh.sizes)):
        yield dict(zip(mesh.names, place, strict=True))


def block(x: Block, sharding: TensorSharding, mesh: LogicalMesh, place: dict[str, int]) -> Block:
    """The part of `x` that belongs on one device, partial or not."""
    for d, axes in enumerate(sharding.dims):
        index = 0
        for a in axes:
            index = index * mesh.by_name[a] + place[a]
        part = x.shape[d] // mesh.size(axes)
        x = np.take(x, range(index * part, (index + 1) * part), axis=d)
    return x


def contributions(x: Block, kind: Reduction, count: int, random: np.random.Generator) -> list[Block]:
    """`count` arrays that give `x` when reduced."""
    if kind == "sum":
        parts = [values(x.shape, str(x.dtype), random) for _ in range(count - 1)]
        return [*parts, (x - sum(parts, np.zeros_like(x))).astype(x.dtype)]
    owner = random.integers(0, count, x.shape)
    other = {"max": -99, "min": 99, "or": False, "and": True}[kind]
    return [np.where(owner == n, x, np.asarray(other, x.dtype)) for n in range(count)]


def spread(x: Block, sharding: TensorSharding, mesh: LogicalMesh, random: np.random.Generator) -> Block:
    """All devices' parts of `x`, by position in the mesh.

    Where a value is partial with two kinds, each element is so with one of them alone: no op makes both of one element.
    """
    kinds = sorted({k for _, k in sharding.partial})
    axes = {k: [a for a, kind in sharding.partial if kind == k] for k in kinds}
    shares = {k: contributions(x, k, mesh.size(axes[k]), random) for k in kinds}
    owner = random.integers(0, max(1, len(kinds)), x.shape)

    def part(place: dict[str, int]) -> Block:
        index = {k: int(np.ravel_multi_index([place[a] for a in axes[k]], [mesh.by_name[a] for a in axes[k]])) for k in kinds}
        y = x
        for n, k in enumerate(kinds):
            share = shares[k][index[k]]
            y = np.where(owner == n, np.zeros_like(x) if k != "sum" and index.get("sum", 0) else share, y)
        return block(y, sharding, mesh, place)

    parts = [part(p) for p in devices(mesh)]
    return np.stack(parts).reshape(*mesh.sizes, *parts[0].shape)


def check(found: Block, x: Block, sharding: TensorSharding, mesh: LogicalMesh) -> None:
    """Reduced over its partial axes, each device's part is the part of `x` that belongs there."""
    for a, kind in sharding.partial:
        n = mesh.names.index(a)
        found = np.repeat(REDUCE[kind].reduce(found, axis=n, keepdims=True), mesh.by_name[a], axis=n)
    for place in devices(mesh):
        np.testing.assert_array_equal(found[tuple(place.values())], block(x, sharding, mesh, place))


def run(pairs: Sequence[Pair], aval: Aval, mesh: LogicalMesh) -> None:
    """All pairs in one program: what lies as the first of a pair is moved to lie as the second."""
    random = np.random.default_rng(0)
    x = values(aval.shape, aval.dtype, random)
    lead = len(mesh.names)
    sources = list(dict.fromkeys(s for s, _, _ in pairs))
    parts = [jnp.asarray(spread(x, s, mesh, random)).astype(s.local_dtype(aval.dtype)) for s in sources]

    def body(*locals_: jax.Array) -> list[jax.Array]:
        start = {s: y.reshape(y.shape[lead:]) for s, y in zip(sources, locals_, strict=True)}
        return [moved(start[s], s, path, aval, mesh).reshape((1,) * lead + t.local_shape(aval.shape, mesh)) for s, t, path in pairs]

    jax_mesh = Mesh(np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.sizes), mesh.names)
    specs = PartitionSpec(*mesh.names)
    program = jax.jit(jax.shard_map(body, mesh=jax_mesh, in_specs=specs, out_specs=specs, check_vma=False))
    for (source, target, path), found in zip(pairs, program(*parts), strict=True):
        assert found.dtype == target.local_dtype(aval.dtype)
        try:
            check(np.asarray(found).astype(x.dtype), x, target, mesh)
        except AssertionError as error:
            raise AssertionError(f"{aval} from {source} to {target} by {', '.join(map(str, path.moves))}") from error


def moved(x: jax.Array, source: TensorSharding, path: Path, aval: Aval, mesh: LogicalMesh) -> jax.Array:
    """The local part after the moves of a path; partial sums of narrow floats are held wider."""
    for move, target in zip(path.moves, path.shardings, strict=True):
        held = target.local_dtype(aval.dtype)
        x = x.astype(held) if move.kind == "to_partial" else x
        x = apply_move(move, x, mesh.size(move.axes), axis_index).astype(held)
    return x


def arcs(graph: StateGraph) -> list[Pair]:
    """Every elementary move between two states, as a path of one."""
    return [(graph.states[a.tail], graph.states[a.head], Path(a.seconds, (a.move,), (graph.states[a.head],))) for a in graph.arcs]


@pytest.mark.parametrize("mesh", [LINE, SQUARE, UNEVEN], ids=str)
def test_the_cheapest_moves_lead_from_every_sharding_to_every_other(mesh):
    aval, graph = states(mesh, "float32", ["sum"])
    run([(s, t, cheapest([(s, 0.0)], t, aval, mesh, price)[1]) for s in graph.states for t in graph.states], aval, mesh)


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        ("float32", ("max", "sum")),
        ("bfloat16", ("sum",)),
        ("int32", ("max", "min", "sum")),
        ("bool", ("and", "or")),
        ("complex64", ("sum",)),
    ],
)
def test_every_move_keeps_every_dtype_whole(dtype, kinds):
    aval, graph = states(SQUARE, dtype, kinds)
    run(arcs(graph), aval, SQUARE)


def test_typed_keys_move_as_their_data():
    aval, graph = states(SQUARE, "key<fry>", ())
    data = np.arange(np.prod(aval.shape) * 2, dtype=np.uint32).reshape(*aval.shape, 2)
    pairs = arcs(graph)

    def body(numbers: jax.Array) -> list[jax.Array]:
        whole = jax.random.wrap_key_data(numbers)
        found = []
        for source, target, path in pairs:
            _, out = cheapest([(TensorSharding.replicated(2), 0.0)], source, aval, SQUARE, price)
            y = whole
            for move in (*out.moves, *path.moves):
                y = apply_move(move, y, SQUARE.size(move.axes), axis_index)
            local = jax.random.key_data(y)
            found.append(local.reshape(1, 1, *target.local_shape(aval.shape, SQUARE), 2))
        return found

    jax_mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), SQUARE.names)
    program = jax.jit(jax.shard_map(body, mesh=jax_mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("x", "y"), check_vma=False))
    for (_, target, _), found in zip(pairs, program(data), strict=True):
        extended = TensorSharding((*target.dims, ()))
        check(np.asarray(found), data, extended, SQUARE)
