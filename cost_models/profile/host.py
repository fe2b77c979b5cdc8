"""Simulated devices of this machine, measured with all of them busy at once.

The measuring runs in a child process, `python -m cost_models.profile.host --devices N`, which prints the figures as JSON on standard
output: the device count is fixed when JAX starts, and the caller's JAX stays as it is. Only the child imports JAX (`measure`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from math import isfinite
from pathlib import Path
from typing import Any

from cost_models.cluster import Cluster
from cost_models.collective import KINDS
from cost_models.errors import ClusterError
from cost_models.fit import Sample, summarise
from cost_models.measured import Measured
from cost_models.presets import load_cluster
from cost_models.profile import cache
from cost_models.profile.figures import Points, fitted
from cost_models.profile.questions import Question

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_TIME_LIMIT_S = 120


def figures(devices: int, folder: Path | None = None) -> dict[str, Any]:
    """Figures of `devices` simulated devices in the layout of a preset, from the cache or measured now (some ten seconds).

    Raises `ClusterError` if the measurement fails.
    """
    return cache.load_or_measure(cache.path(devices, folder), lambda: run_child(devices), complete)


def run_child(devices: int) -> dict[str, Any]:
    """Measure in a child process, with one line about it on standard error."""
    print(f"measuring {devices} simulated devices on this machine, once ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "cost_models.profile.host", "--devices", str(devices)]
    try:
        done = subprocess.run(command, env=_environment(devices), capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise ClusterError(f"measuring this machine failed: {' '.join(detail)} {_instead(devices)}") from error
    if not complete(found):
        raise ClusterError(f"measuring this machine gave unusable figures. {_instead(devices)}")
    return found


def _instead(devices: int) -> str:
    return f"For built-in figures call load_cluster('host:{devices}', measure=False)."


def _environment(devices: int) -> dict[str, str]:
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_COUNT_FLAG)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = " ".join([*kept, f"{_COUNT_FLAG}={devices}"])
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}


def complete(found: dict[str, Any]) -> bool:
    """Whether all figures are there, and positive numbers."""
    try:
        device, topology = found["device"], found["topology"]
        numbers = [device[name] for name in ("vector_flops", "memory_bytes", "memory_bytes_per_s", "launch_seconds")]
        numbers += [device["peak_flops"][dtype] for dtype in ("float32", "float64", "bfloat16")]
        numbers += [topology[table][kind] for table in ("call_seconds", "bytes_per_s") for kind in KINDS]
        return topology["kind"] == "shared-memory" and all(isfinite(number) and number > 0 for number in numbers)
    except (KeyError, TypeError):
        return False


def measure(devices: int) -> dict[str, Any]:
    """Measure in this process, which must have been started with `devices` simulated devices: a few points of a profile."""
    import jax

    from cost_models.profile.bench import Bench

    bench = Bench(jax.devices()[:devices])
    points: dict[str, dict[str, Sample]] = {}
    for question in quick(devices):
        points.setdefault(question.curve, {})[question.at] = summarise(bench.ask(question))
    found = figures_of(points, load_cluster(f"host:{devices}", measure=False))
    found["device"]["memory_bytes"] = cache.memory_bytes() // devices
    return found


def quick(devices: int) -> list[Question]:
    """The least that prices need: some ten seconds of a profile's questions."""
    large = max(2**12, 2**22 // devices)
    found = [Question("launch", "chain"), Question("memory", str(2 * large)), Question("vector float32", str(2 * large))]
    found += [Question(f"matmul {dtype}", "1x256x256x256") for dtype in ("float32", "float64", "bfloat16")]
    sizes = (2**11, large) if devices > 1 else ()
    return found + [Question(f"collective {kind} {devices}:1", str(size)) for kind in KINDS for size in sizes]


def figures_of(points: Points, start: Cluster) -> dict[str, Any]:
    """The figures of `quick`'s points in the layout of a preset."""
    cluster = fitted(points, start)
    device = cluster.device.to_dict()
    shared = cluster.topology.base if isinstance(cluster.topology, Measured) else cluster.topology
    kept = ("vector_flops", "memory_bytes", "memory_bytes_per_s", "launch_seconds")
    peaks = {dtype: device["peak_flops"][dtype] for dtype in ("float32", "float64", "bfloat16")}
    return {
        "title": "simulated device of this host, measured",
        "device": {"peak_flops": peaks, **{name: device[name] for name in kept}},
        "topology": {**shared.to_dict(), "shape": [cluster.num_devices]},
    }


def main() -> None:
    """Print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description="Measure simulated devices of this machine.")
    parser.add_argument("--devices", type=int, required=True)
    print(json.dumps(measure(parser.parse_args().devices)))


if __name__ == "__main__":
    main()
