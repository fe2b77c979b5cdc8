"""Real text that every Python has at hand: the source files of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autopar.models.base import ModelError


def corpus(limit: int = 4_000_000) -> np.ndarray:
    """Up to `limit` bytes of the standard library's top-level modules, in order of their names, as uint8."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if not parts:
        raise ModelError("this Python has no standard library sources on disk, so there is no text to read.")
    return np.frombuffer(b"".join(parts)[:limit], np.uint8)


def corpus_batches(batch: int, seq: int, steps: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """`steps` batches `{"tokens": (batch, seq), "labels": (batch, seq)}` of int32 bytes; a label is the byte that follows.

    Windows are drawn with `seed`: the same on every call, for a given Python. They fit `build("gpt-demo")`.
    """
    text = corpus().astype(np.int32)
    if len(text) <= seq:
        raise ModelError(f"the text has {len(text)} bytes, which is too short for seq={seq}.")
    random = np.random.default_rng(seed)
    for _ in range(steps):
        starts = random.integers(0, len(text) - seq, batch)
        windows = text[starts[:, None] + np.arange(seq + 1)]
        yield {"tokens": windows[:, :-1], "labels": windows[:, 1:]}
