"""Windows over a cut dimension, against counting every position that they read."""

from __future__ import annotations

from itertools import product
from math import gcd

import pytest

from autopar.ir.graph import Aval, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.strategy import Strategy
from autopar.rules.halo import Reach, Slide, reaches
from autopar.rules.notation import build


def read(slide: Slide, low: int, first: int, windows: int) -> list[list[int | None]]:
    """Per window from `first` on: the elements of the image that it reads, None where none stands."""

    def element(position: int) -> int | None:
        at, between = divmod(position, slide.dilation)
        return at if not between and 0 <= at < slide.image else None

    return [[element(o * slide.stride + k * slide.spread - low) for k in range(slide.window)] for o in range(first, first + windows)]


def slides() -> list[tuple[Slide, int]]:
    found = []
    for window, stride, dilation, spread, low, parts in product((1, 2, 3, 5), (1, 2), (1, 2), (1, 2, 3), (-1, 0, 1, 2, 5), (2, 4)):
        image = 8 * stride
        windows = image * dilation // stride
        if gcd(image, windows) % parts == 0:
            high = (windows - 1) * stride + (window - 1) * spread - low - (image - 1) * dilation
            found.append((Slide(image, window, windows, stride, (low, high), dilation, spread), parts))
    return found


def reach_of(slide: Slide, parts: int) -> Reach:
    params = {"window_dimensions": (slide.window,), "window_strides": (slide.stride,), "padding": (slide.padding,)}
    params |= {"base_dilation": (slide.dilation,), "window_dilation": (slide.spread,)}
    avals, sizes = (Aval((slide.image,), "float32"),), {"h": gcd(slide.image, slide.windows)}
    dims = [("h", "image")], [("h", "output")]
    rule = build([dims[0]], [dims[1]], avals, (Aval((slide.windows,), "float32"),), sizes=sizes, methods={"h": "halo"})
    op = Op("reduce_window_sum", tuple(params.items()), (0,), (1,))
    (found,) = reaches(op, rule, Strategy((("h", ("x",)),)), LogicalMesh(("x",), (parts,)))
    return found


def test_every_device_reads_from_its_bordered_block_what_the_whole_reads():
    for slide, parts in slides():
        r, block, mine = reach_of(slide, parts), slide.image // parts, slide.windows // parts
        local = Slide(r.left + block + r.right, slide.window, mine, slide.stride, r.padding, slide.dilation, slide.spread)
        for device in range(parts):
            start = device * block - r.left
            whole = read(slide, slide.padding[0], device * mine, mine)
            there = {e: e + start for e in range(local.image) if 0 <= e + start < slide.image}
            here = [[there.get(e) for e in window] for window in read(local, r.padding[0], 0, mine)]
            assert whole == here, (slide, parts, device)
            assert local.last == (local.image - 1) * local.dilation + r.padding[1]


def drifting() -> list[tuple[Slide, int]]:
    found = []
    sizes = (8, 10, 12), (2, 3, 5), (1, 2, 3), (1, 2), (1, 2), (0, 1, -1), (0, 2)
    for image, window, stride, dilation, spread, low, high in product(*sizes):
        positions = low + (image - 1) * dilation + 1 + high - (window - 1) * spread - 1
        windows = positions // stride + 1
        slide = Slide(image, window, windows, stride, (low, high), dilation, spread)
        found += [(slide, p) for p in (2, 3, 4) if windows > 1 and gcd(image, windows) % p == 0 and not slide.follows]
    return found


def element(position: int, r: Reach, start: int, image: int) -> int | None:
    """What stands at a position of a padded block with borders: an element of the image, whose block begins with `start`, or nothing."""
    at, between = divmod(position - r.padding[0], r.dilation)
    there = not between and 0 <= at < r.left + r.block + r.right and 0 <= at + start - r.left < image
    return at + start - r.left if there else None


def test_every_device_whose_windows_drift_takes_what_the_whole_reads_from_its_bordered_block():
    assert len(drifting()) > 100
    for slide, parts in drifting():
        r, block, mine = reach_of(slide, parts), slide.image // parts, slide.windows // parts
        local = Slide(r.extent, slide.window, mine, slide.stride, (0, 0), 1, slide.spread)
        length = (r.left + block + r.right - 1) * slide.dilation + 1 + sum(r.padding)
        for device in range(parts):
            begin = r.begin + device * r.drift
            assert 0 <= begin and begin + r.extent <= length
            positions = [[o * slide.stride + k * slide.spread for k in range(slide.window)] for o in range(mine)]
            here = [[element(begin + p, r, device * block, slide.image) for p in window] for window in positions]
            assert read(slide, slide.padding[0], device * mine, mine) == here, (slide, parts, device)
            assert local.last + 1 == r.extent


def test_borders_are_no_wider_than_some_device_needs():
    for slide, parts in slides():
        r, block, mine = reach_of(slide, parts), slide.image // parts, slide.windows // parts
        needed = [(e, d) for d in range(parts) for w in read(slide, slide.padding[0], d * mine, mine) for e in w if e is not None]
        assert r.left >= max((d * block - e for e, d in needed), default=0)
        assert r.right >= max((e - (d + 1) * block + 1 for e, d in needed), default=0)
        if slide.dilation == slide.stride == slide.spread == 1:
            assert r.left == min(max(0, slide.padding[0]), block * (parts - 1))
            assert r.right == min(max(0, slide.window - 1 - slide.padding[0]), block * (parts - 1))


@pytest.mark.parametrize(("count", "hops"), [(0, ()), (2, (2,)), (3, (3,)), (7, (3, 3, 1))])
def test_a_border_wider_than_a_block_comes_from_several_devices(count, hops):
    assert Reach(0, ("x",), 8, 3, count, 0, (0, 0)).hops(count) == hops
