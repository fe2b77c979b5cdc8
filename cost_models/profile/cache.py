"""Measured figures on disk, one JSON file per machine, device count and JAX version."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

Figures = dict[str, Any]
_SCHEMA = 1


def path(devices: int, folder: Path | None = None) -> Path:
    """Where the figures for `devices` simulated devices of this machine are kept."""
    key = [_SCHEMA, devices, version("jax"), version("jaxlib"), platform.machine(), _processor(), cores(), memory_bytes()]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return (folder or Path(user_cache_dir("autopar"))) / f"host-{devices}-{digest}.json"


def load_or_measure(file: Path, measure: Callable[[], Figures], complete: Callable[[Figures], bool]) -> Figures:
    """The figures in `file`; measured and written there if the file is missing, unreadable or incomplete.

    A folder that cannot be written costs a measurement each time, never an error.
    """
    found = _read(file)
    if found is not None and complete(found):
        return found
    figures = measure()
    with contextlib.suppress(OSError):
        _write(file, figures)
    return figures


def _read(file: Path) -> Figures | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(file: Path, figures: Figures) -> None:
    """Whole or not at all, since two processes may measure at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    draft.replace(file)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory in bytes; 8 GiB where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30


def _processor() -> str:
    """The processor's model name where the system shows one, so that a cache on a shared disk is not taken for another machine's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
