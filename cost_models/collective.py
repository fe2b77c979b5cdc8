"""Closed forms for collectives on one level of links: how many bytes a device sends, and in how many steps.

`nbytes` is always the operand on one device: the shard for an all-gather, the full local operand for everything else.
The forms are the textbook ones of ring and tree algorithms; see Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), sections 3 and 4.
"""

from __future__ import annotations

from cost_models.curve import Curve
from cost_models.errors import ClusterError
from cost_models.link import Link

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute")


def check_kind(kind: str) -> None:
    """Raise `ClusterError` unless `kind` is one of `KINDS`."""
    if kind not in KINDS:
        raise ClusterError(f"unknown collective {kind!r}; known are {', '.join(KINDS)}.")


def ring_bytes(kind: str, nbytes: float, size: int) -> float:
    """Bytes that each of `size` devices sends, for a ring (all-to-all: directly to each peer)."""
    if kind == "all_gather":
        return (size - 1) * nbytes
    if kind == "all_reduce":
        return 2 * (size - 1) / size * nbytes
    if kind == "permute":
        return nbytes if size > 1 else 0.0
    return (size - 1) / size * nbytes


def ring_steps(kind: str, size: int) -> int:
    """Messages that follow one another in a ring. An all-to-all's messages overlap: it pays as a tree does."""
    if size == 1:
        return 0
    if kind == "permute":
        return 1
    if kind == "all_to_all":
        return tree_depth(size)
    return 2 * (size - 1) if kind == "all_reduce" else size - 1


def tree_depth(size: int) -> int:
    """`ceil(log2 size)`."""
    return (size - 1).bit_length()


def level_curves(link: Link, kind: str, size: int, bytes_per_s: float) -> dict[str, Curve]:
    """Curves of a collective whose `size` devices see one kind of link, each sending at `bytes_per_s`.

    An all-reduce runs as a ring, `2(n-1)` steps of `S/n` bytes, or as a pipelined tree, `2 log2 n` steps and `2 S` bytes. All-to-all and
    permute go straight to their peers.
    """
    name = "direct" if kind in ("all_to_all", "permute") else "ring"
    found = {name: link.curve(ring_bytes(kind, 1.0, size), ring_steps(kind, size), bytes_per_s)}
    if kind == "all_reduce":
        found["tree"] = link.curve(2.0, 2 * tree_depth(size), bytes_per_s)
    return found
