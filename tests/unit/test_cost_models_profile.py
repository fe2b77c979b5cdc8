"""The host's measured figures: cache, failure, and one real measurement."""

import json
import subprocess
import sys

import pytest

import cost_models
from cost_models.profile import cache, host

KINDS = cost_models.KINDS
FIGURES = {
    "title": "fake",
    "device": {
        "peak_flops": {"float32": 2e9, "float64": 1e9, "bfloat16": 1e9},
        "vector_flops": 1e9,
        "memory_bytes": 10**9,
        "memory_bytes_per_s": 1e9,
        "launch_seconds": 1e-6,
    },
    "topology": {
        "kind": "shared-memory",
        "shape": [4],
        "call_seconds": dict.fromkeys(KINDS, 1e-5),
        "bytes_per_s": dict.fromkeys(KINDS, 1e9),
    },
}


@pytest.fixture
def runs(monkeypatch):
    """Device counts that were measured; the measuring itself is replaced."""
    counted = []
    monkeypatch.setattr(host, "run_child", lambda devices: counted.append(devices) or FIGURES)
    return counted


def test_a_measurement_is_made_once_and_then_read(runs, tmp_path):
    assert host.figures(4, tmp_path) == host.figures(4, tmp_path) == FIGURES
    assert runs == [4]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"device": 3}', json.dumps(FIGURES).replace("1000000000.0", "-1")])
def test_a_corrupt_cache_is_measured_again(runs, tmp_path, content):
    file = cache.path(4, tmp_path)
    file.write_text(content)
    assert host.figures(4, tmp_path) == FIGURES
    assert runs == [4] and json.loads(file.read_text()) == FIGURES


def test_a_cache_that_cannot_be_written_only_costs_time(runs, tmp_path):
    (tmp_path / "blocked").write_text("a file, not a folder")
    assert host.figures(4, tmp_path / "blocked") == FIGURES


def test_device_counts_have_their_own_cache_files(tmp_path):
    assert cache.path(4, tmp_path) != cache.path(8, tmp_path)


def test_the_host_cluster_is_built_from_what_was_measured(monkeypatch):
    monkeypatch.setattr(host, "figures", lambda devices: FIGURES)
    cluster = cost_models.load_cluster("host:2x2")
    assert (cluster.shape, cluster.num_devices, cluster.device.memory_bytes) == ((2, 2), 4, 10**9)
    assert cluster.collective_seconds("all_gather", 1e6, ((4, 1),)) == pytest.approx(1e-5 + 4e6 / 1e9)


@pytest.mark.parametrize("output", ["", "not json", '{"device": 1}'])
def test_a_measurement_that_fails_names_the_way_without_it(monkeypatch, output):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, output, ""))
    with pytest.raises(cost_models.ClusterError, match="measure=False"):
        host.run_child(2)


def test_the_childs_device_count_replaces_the_parents(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_cpu_enable_fast_math=false")
    flags = host._environment(8)["XLA_FLAGS"].split()
    assert flags == ["--xla_cpu_enable_fast_math=false", "--xla_force_host_platform_device_count=8"]


def test_loading_clusters_does_not_import_jax():
    load = "import sys, cost_models.profile.host; cost_models.load_cluster('host:8', measure=False)"
    command = [sys.executable, "-c", f"{load}; print('jax' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.slow
def test_this_machine_can_be_measured(tmp_path, capfd):
    found = host.figures(4, tmp_path)
    assert host.complete(found) and found["topology"]["shape"] == [4]
    assert 1e8 < found["device"]["peak_flops"]["float32"] < 1e13 and found["device"]["launch_seconds"] < 1e-3
    assert "measuring 4 simulated devices" in capfd.readouterr().err
