"""`benchmarks.curves`: conventions of published figures, what is left out, and the bar."""

import json

import pytest

import cost_models
from benchmarks import calibrate, curves
from benchmarks.machines import cluster_of, preset_of

HEADER = "kind,op,hardware,nodes,devices,size_bytes,time_us,algbw_GBps,busbw_GBps,algo,usable"
ROWS = list(curves.run([curves.DATA]))


def row(**given):
    plain = {"kind": "collective", "op": "all_reduce", "hardware": "8x H100 SXM", "nodes": "1", "devices": "8", "usable": "Y"}
    return dict.fromkeys(HEADER.split(","), "") | plain | {"size_bytes": "8000000"} | given


def test_the_bar_is_met_on_rows_that_served_no_fit():
    overall = curves.summaries(ROWS)[-1]
    assert overall.rows > 100 and overall.median_error < curves.MEDIAN_BAR


def test_calibration_rows_and_small_ones_do_not_count():
    fitted = [each for each in ROWS if each.calibration]
    assert len(fitted) >= 25 and not any(each.counts for each in fitted)
    assert all(each.size_bytes > 1e6 for each in ROWS if each.counts)
    named = curves.calibration_rows()
    read = curves.read([curves.DATA])
    for group in named:
        assert any(curves.is_calibration(each, [group]) for each in read), group


@pytest.mark.parametrize("preset", sorted({fit["preset"] for fit in curves.fits()}))
def test_the_presets_have_the_figures_that_the_calibration_gives(preset):
    fits = [fit for fit in curves.fits() if fit["preset"] == preset]
    for line in calibrate.report(curves.read([curves.DATA]), fits).splitlines():
        value, now = float(line.split(" = ")[1].split()[0]), float(line.split("(now ")[1].split(";")[0])
        assert value == pytest.approx(now, rel=0.02), line


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"time_us": "100"}, 1e-4),
        ({"algbw_GBps": "80"}, 1e-4),
        ({"busbw_GBps": "140"}, 2 * 7 / 8 * 8e6 / 140e9),
        ({"op": "all_gather", "busbw_GBps": "70"}, 7 / 8 * 8e6 / 70e9),
        ({"op": "all_gather", "hardware": "TPU v7x 2x2x1", "devices": "4", "busbw_GBps": "60"}, 2 * 3 * 8e6 / 60e9),
    ],
)
def test_bandwidths_are_read_by_their_convention(given, seconds):
    assert curves.price(row(**given), cluster_of(row(**given)))[0] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("hardware", "preset", "shape"),
    [
        ("8x A100 SXM NVLink3/NVSwitch", "a100-80", (1, 8)),
        ("A100-40GB (AWS p4d.24xlarge, 4x100Gb EFA)", "a100-40", (1, 8)),
        ("GB200 NVL72", "gb200-nvl72", (1, 8)),
        ("8x V100, 2 NVLinks", "v100-p3", (1, 8)),
        ("TPU v6e-256", "v6e", (1, 16, 16)),
        ("TPU v7x 2x2x2", "v7x", (1, 2, 2, 2)),
        ("8x A100 80GB", "a100-80", (1, 8)),
    ],
)
def test_machines_are_known_by_their_authors_names(hardware, preset, shape):
    assert preset_of(hardware) == preset
    assert cluster_of(row(hardware=hardware, devices="" if "TPU" in hardware else "8")).shape == shape


def test_network_interfaces_in_a_name_replace_the_presets():
    topology = cluster_of(row(hardware="A100 8/node, 4x HDR 200Gb", nodes="2", devices="16")).topology
    assert topology.network.bytes_per_s == 100e9 / 8 and topology.devices_per_nic == 2
    for text in ("8x A100 80GB", "V100 p3.16xlarge 25 Gbps"):
        own = cost_models.load_cluster(preset_of(text)).topology.network
        assert cluster_of(row(hardware=text)).topology.network == own


def test_slices_named_by_cores_have_half_as_many_chips():
    shapes = {name: cluster_of(row(hardware=f"TPU {name}", devices="")).shape for name in ("v4-16", "v5p-128", "v5e-16")}
    assert shapes == {"v4-16": (1, 2, 2, 2), "v5p-128": (1, 4, 4, 4), "v5e-16": (1, 4, 4)}


def test_a_row_that_names_a_ring_is_priced_as_one():
    ring, best = (curves.judge(row(busbw_GBps="300", size_bytes="8589934592", algo=algo), []) for algo in ("ring", ""))
    assert ring.predicted_s > 1.2 * best.predicted_s


def test_any_file_with_the_columns_can_be_given(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    values = [row(time_us="100"), row(hardware="a machine of my own", time_us="1"), row(op="broadcast", time_us="1"), row(usable="N")]
    file.write_text("\n".join(["# mine", HEADER, *(",".join(each.values()) for each in values)]))
    status = curves.main([str(file), "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and len(found["rows"]) == 3 and [each["reason"] != "" for each in found["rows"]] == [False, True, True]
    assert status == (0 if found["passed"] else 1) and found["summary"][-1]["rows"] == 1


def test_the_table_names_the_calibration_and_what_has_no_price(capsys):
    assert curves.main([]) == 0
    text = capsys.readouterr().out
    assert "calibration: all_reduce 8x A100" in text and "not priced" in text and " all\n" in text
