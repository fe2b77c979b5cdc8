"""Eight CPU devices for every test. Set before JAX is imported, and inherited by the programs that tests start.

A collective in which a device never arrives ends the process after a minute instead of hanging it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=30",
    "--xla_cpu_collective_call_terminate_timeout_seconds=60",
    "--xla_backend_optimization_level=0",  # LLVM's effort alone: tests compile many programs and run each a few times
)

assert "jax" not in sys.modules, "JAX was imported before its devices could be chosen here; look for a pytest plugin that imports it"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden("plan.txt", text)` compares text with tests/golden/plan.txt, or writes that file under `AUTOPAR_GOLDEN=write`."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if os.environ.get("AUTOPAR_GOLDEN") == "write":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"there is no {path}; make it with AUTOPAR_GOLDEN=write"
        assert text == path.read_text(encoding="utf-8")

    return check
