"""Files of published measurements to cases: one reader for each set of columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fidelity.case import Case, Layout, Model, Share, Skipped, Unmapped

Row = Mapping[str, str]
GIB = 2**30


def read(files: Iterable[Path]) -> Iterator[Case | Skipped]:
    """Every row of the files that is marked usable or partly so, as a case or as what is in the way."""
    for file in files:
        with file.open(newline="") as text:
            reader = csv.DictReader(line for line in text if not line.startswith("#"))
            make = _reader(reader.fieldnames or ())
            for number, row in enumerate(reader, 1):
                if row.get("usable", "N") != "N":
                    yield _judged(file.name, number, row, make)


def _judged(file: str, number: int, row: Row, make: Callable[[Row], Case] | None) -> Case | Skipped:
    table = row.get("table") or row.get("section") or file
    try:
        if make is None:
            raise Unmapped("the file has columns of no known table of step times")
        found = make(row)
    except Unmapped as error:
        return Skipped(file, table, number, row["usable"], str(error))
    except (KeyError, ValueError) as error:
        return Skipped(file, table, number, row["usable"], f"a figure is missing or no number ({error})")
    return replace(found, file=file, table=table, row=number, usable=row["usable"])


def _reader(columns: Iterable[str]) -> Callable[[Row], Case] | None:
    """The reader that knows these columns."""
    known = set(columns)
    return next((make for needed, make in READERS if needed <= known), None)


def number(row: Row, name: str, otherwise: int | None = None) -> int:
    """A whole number of a row. Raises `Unmapped` where it is not given."""
    if row.get(name):
        return int(float(row[name]))
    if otherwise is None:
        raise Unmapped(f"{name} is not given")
    return otherwise


def seconds(row: Row, *names: str) -> float | None:
    """The first of these columns that has a figure."""
    return next((float(row[name]) for name in names if row.get(name)), None)


def remat_of(words: str) -> str:
    """What is made again, from the publisher's words."""
    words = words.lower()
    if words.startswith(("full", "yes", "true", "per layer")):
        return "full"
    if words.startswith("selective") or "minimal" in words:
        return "dots"
    return "none"


def dtype_of(words: str) -> str:
    """The dtype of arithmetic."""
    words = words.lower()
    if "fp8" in words:
        raise Unmapped("8-bit floats: the zoo's models have no such layers")
    return "float16" if "fp16" in words else "float32" if words.startswith("fp32") else "bfloat16"


def parts(batch: int, micro: int, data: int) -> int:
    """Microbatches of `micro` examples on each of `data` devices."""
    if batch % (micro * data):
        raise Unmapped(f"a batch of {batch} is no whole number of microbatches of {micro} on {data} devices")
    return batch // (micro * data)


def each(layers: int, stages: int) -> int:
    """Layers of each stage. Raises `Unmapped` where they are not equally many."""
    if layers % stages:
        raise Unmapped(f"{layers} layers do not divide into {stages} stages, and how they are shared out is not given")
    return layers // stages


def gpt(row: Row, *, layers: str = "layers", heads: str = "heads", seq: str = "seq", **changes: object) -> Model:
    """A GPT of a row's sizes."""
    sizes = {"hidden": number(row, "hidden"), "heads": number(row, heads), "seq": number(row, seq), "vocab": number(row, "vocab", 51200)}
    return Model("gpt-2.6b", number(row, layers), tuple({**sizes, **changes}.items()))


def megatron(row: Row) -> Case:
    """Megatron-LM's tables."""
    step = seconds(row, "step_time_s", "step_time_s_derived")
    if step is None:
        raise Unmapped("it gives no step time")
    data, tensor, pipeline = number(row, "dp", 1), number(row, "tp"), number(row, "pp", 1)
    batch = number(row, "gbs", number(row, "mbs", 0) * data or None)
    old = "2020" in row["system"] or "2020" in row["table"]
    software = "megatron-core" if "Core" in row["system"] else "megatron-2020" if old else "megatron"
    if not row["mbs"]:
        raise Unmapped("the microbatch is not given")
    sequence, chunks = row["seq_par"] == "yes", number(row, "vpp_chunks", 1)
    layout = Layout(
        data=data,
        tensor=tensor,
        remat=remat_of(row["recompute"]),
        sequence_parallel=sequence,
        microbatches=parts(batch, number(row, "mbs"), data),
    )
    if pipeline > 1:
        share = Share(each(number(row, "layers"), pipeline * chunks), data, tensor, sequence)
        schedule = "interleaved" if chunks > 1 else "1f1b"
        layout = replace(layout, shares=(share,) * (pipeline * chunks), schedule=schedule, interleave=chunks)
    gpus, nodes = number(row, "gpus"), number(row, "gpus_per_node", 8)
    found = _case(software, row["hw"], gpus, nodes, gpt(row), layout, batch, row["precision"], step)
    return replace(found, layer="one transformer layer" in row["table"])


def alpa(row: Row) -> Case:
    """Alpa's tables: GPT, mixture of experts and Wide-ResNet on several logical meshes."""
    layout = _alpa_layout(row)
    machine, fits = row["gpu"], {"ok": True, "OOM": False}.get(row["status"])
    peak = float(row["peak_mem_GiB"]) * GIB if row["peak_mem_GiB"] else None
    batch = number(row, "global_batch")
    software = {"megatron": "megatron-2020", "deepspeed": "deepspeed"}.get(row["method"], "alpa")
    step = seconds(row, "latency_s", "latency_s_derived")
    if step is None and fits is not False:
        raise Unmapped("it gives no step time")
    found = _case(
        software, machine, number(row, "num_gpus"), number(row, "gpus_per_host"), _alpa_model(row), layout, batch, row["dtype"], step
    )
    other = "" if software == "alpa" else f" by {software}"
    group = f"{row['table']}: {row['model_name']} on {row['num_gpus']}{other}"
    return replace(found, peak_bytes=peak, fits=fits, group=group)


def _alpa_layout(row: Row) -> Layout:
    method = row["method"].removeprefix("alpa.")
    words = row["plan"]
    if method == "heuristic":
        raise Unmapped("its heuristic has no name among ours")
    stages = _alpa_stages(row)
    if stages:
        return Layout(shares=stages, schedule="1f1b", zero=0 if method == "megatron" else 2, **_alpa_parts(row))
    first, second = number(row, "dp", 1), number(row, "op", 1)
    if not row["dp"] and number(row, "num_gpus") > 1:
        shape = re.search(r"logical(\d+)x(\d+)", words) or re.search(r"logical_shapes=\[\[(\d+); (\d+)\]\]", words)
        if not shape:
            raise Unmapped("the logical mesh is not given")
        first, second = int(shape[1]), int(shape[2])
    same = _alpa_parts(row)
    zero = {"data_parallel": 0, "zero_2": 2, "zero_3": 3, "deepspeed": 2, "megatron": 0}.get(method)
    if zero is not None:
        return Layout(data=first, tensor=second, zero=zero, **same)
    if not row["model"].startswith("GPT") and min(first, second) > 1:
        raise Unmapped("what Alpa's programme chose on two axes is not published")
    if row["model"].startswith("MoE"):
        return Layout(expert=first, tensor=second, zero=2, **same)
    if row["model"].startswith("Wide"):
        return Layout(data=first, tensor=second, free=True, **same)
    return Layout(data=first, tensor=second, zero=2, **same)


def _alpa_parts(row: Row) -> dict[str, Any]:
    """What is made again, and in how many microbatches: as many as were fastest, where that is what is said."""
    remat = remat_of(row["remat"])
    best = re.search(r"micro-batch count is the best of (\d+)\.\.(\d+)", row["notes"])
    if row["num_microbatches"] or not best:
        return {"remat": remat, "microbatches": number(row, "num_microbatches")}
    counts = [int(best[1])]
    while counts[-1] < int(best[2]):
        counts.append(2 * counts[-1])
    return {"remat": remat, "counts": tuple(counts)}


def _alpa_stages(row: Row) -> tuple[Share, ...]:
    """The pipeline stages of a row of Alpa's, none for a single one. Raises `Unmapped` where they are not given."""
    words = row["plan"]
    if number(row, "pp", 1) > 1 and not row["model"].startswith("Wide"):
        experts = row["model"].startswith("MoE")
        layers = each(number(row, "layers") // (2 if experts else 1), number(row, "pp"))
        return (Share(layers, number(row, "dp", 1), number(row, "op", 1)),) * number(row, "pp")
    if row["model"].startswith("Wide") and not row["pp"] == "1" and "logical" not in words:
        return _blocks(words)
    lists = re.search(r"(?:layers|forward_stage_layer_ids)='?(\[\[.*?\]\])", words)
    if lists:
        logical = re.search(r"(?:logical|submesh_logical_shapes)='?(\[\[.*?\]\])", words)
        assert logical
        groups, meshes = _numbers(lists[1]), _numbers(logical[1])
        return _grouped(row, [len(group) for group in groups], [(d, t) for d, t in meshes])
    found = re.findall(r"\[([\d.,]+)(?: of \d+)?\]@(?:mesh)?[\dx]+ logical(\d+)x(\d+)", words)
    return _grouped(row, [_count(ids) for ids, _, _ in found], [(int(d), int(t)) for _, d, t in found])


def _blocks(words: str) -> tuple[Share, ...]:
    """Stages of a Wide-ResNet's blocks, as in `[0-8]@4 dp4; [9-10]@1`; each on one device where no number is given."""
    found = re.findall(r"\[(\d+)(?:-(\d+))?\](?:@(\d+))?", words)
    return tuple(Share(int(last or first) - int(first) + 1, int(devices or 1)) for first, last, devices in found)


def _numbers(text: str) -> list[list[int]]:
    """Lists in lists, as in `[[0; 1]; [2]]`."""
    return [[int(n) for n in part.split(";")] for part in re.findall(r"\[([\d; ]+)\]", text)]


def _count(ids: str) -> int:
    """How many numbers `0,1` or `0..3` names."""
    first, _, last = ids.partition("..")
    return int(last) - int(first) + 1 if last else len(ids.split(","))


def _grouped(row: Row, groups: Sequence[int], meshes: Sequence[tuple[int, int]]) -> tuple[Share, ...]:
    """Stages of so many of Alpa's layers each, which are as many of the model's each."""
    if len(groups) < 2:
        return ()
    blocks = 16 if row["model"].startswith("Wide") else number(row, "layers") // (2 if row["model"].startswith("MoE") else 1)
    size = each(blocks, sum(groups))
    free = row["model"].startswith("Wide")
    return tuple(Share(size * n, d, t, free=free) for n, (d, t) in zip(groups, meshes, strict=True))


def _alpa_model(row: Row) -> Model:
    if row["model"].startswith("Wide"):
        stages = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[number(row, "layers")]
        changes = {"channels": number(row, "base_channels"), "width": number(row, "width_factor"), "stages": stages}
        return Model("wresnet-250m", 0, tuple({**changes, "image": number(row, "img")}.items()))
    if row["model"].startswith("MoE"):
        sizes = {name: number(row, name) for name in ("hidden", "heads", "seq", "vocab", "experts")}
        return Model("moe-1.3b", number(row, "layers"), tuple({**sizes, "group": number(row, "moe_group", 2048)}.items()))
    return gpt(row, tied=False)


def mosaic(row: Row) -> Case:
    """LLM Foundry's FSDP runs."""
    zero = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row["sharding"]]
    if row["act_cpu_offload"] == "True":
        raise Unmapped("activations are kept on the host")
    remat = "full" if row["act_ckpt"] == "True" else "none"
    layout = Layout(data=number(row, "gpus"), zero=zero, remat=remat, microbatches=number(row, "grad_accum"))
    nics = re.search(r"(\d+) Gbps", row["section"])
    machine = row["gpu"].replace("_", "-") + (f" (8x {int(nics[1]) // 8}Gb/s)" if nics else "")
    step = seconds(row, "step_time_s_derived")
    model, batch = gpt(row), number(row, "gbs")
    return _case("llm-foundry", machine, number(row, "gpus"), number(row, "gpus_per_node"), model, layout, batch, row["precision"], step)


def maxtext(row: Row) -> Case:
    """MaxText and others: JAX on TPU and GPU."""
    step = seconds(row, "step_time_s", "step_time_s_derived")
    if step is None or not row["layers"]:
        raise Unmapped("it gives no step time" if step is None else "the model's sizes are not given")
    chips, slices, inner = number(row, "chips"), number(row, "slices", 1), number(row, "chips_per_slice", number(row, "chips"))
    tensor = re.search(r"TP (\d+)", row["plan"])
    if not re.match(r"FSDP \d+", row["plan"]):
        raise Unmapped("the plan is not given")
    t = int(tensor[1]) if tensor else 1
    layout = Layout(data=inner // t, replica=slices, tensor=t, zero=3, remat=remat_of(row["remat"]))
    tpu = row["accelerator"].startswith("TPU")
    machine = row["accelerator"]
    software, model, batch = "maxtext" if tpu else "maxtext-gpu", _maxtext_model(row), number(row, "global_batch")
    return _case(software, machine, chips, inner if tpu else 8, model, layout, batch, row["dtype"], step)


def _maxtext_model(row: Row) -> Model:
    if row["experts"]:
        raise Unmapped("a mixture of experts of another make than the zoo's")
    if "silu" in row["mlp_type"]:
        sizes = {"hidden": number(row, "emb"), "ffn": number(row, "mlp")}
        same = {name: number(row, name) for name in ("heads", "kv_heads", "seq", "vocab")}
        return Model("llama3-8b", number(row, "layers"), tuple({**sizes, **same}.items()))
    sizes = {"hidden": number(row, "emb"), "ffn": number(row, "mlp"), "head_size": number(row, "head_dim")}
    same = {name: number(row, name) for name in ("heads", "seq", "vocab")}
    return Model("gpt-2.6b", number(row, "layers"), tuple({**sizes, **same}.items()))


def training(row: Row) -> Case:
    """torchtitan's and others' runs of Llama."""
    step = seconds(row, "step_time_s", "step_time_s_derived")
    if step is None or not row["layers"]:
        raise Unmapped("it gives no step time" if step is None else "the model's sizes are not given")
    dtype_of(row["precision"])
    if not row["dp"] and not row["fsdp"]:
        raise Unmapped("the plan is not given")
    if number(row, "pp", 1) > 1:
        raise Unmapped("pipeline stages: the zoo's Llama is not cut into parts")
    software, data, shard = _trainer(row), number(row, "dp", 1), number(row, "fsdp", 1)
    batch = number(row, "gbs")
    layout = Layout(
        replica=data if shard > 1 else 1,
        data=shard if shard > 1 else data,
        tensor=number(row, "tp", 1),
        context=number(row, "cp", 1),
        zero=3 if shard > 1 else 0,
        remat=remat_of(row["recompute"]),
        microbatches=parts(batch, number(row, "mbs"), data * shard) if row["mbs"] else 1,
    )
    sizes = {name: number(row, name) for name in ("hidden", "heads", "kv_heads", "ffn", "vocab", "seq")} if row["ffn"] else None
    model = Model("llama3-8b", number(row, "layers"), tuple(sizes.items())) if sizes else gpt(row)
    dtype = row["precision"]
    found = _case(software, row["hw"], number(row, "gpus"), number(row, "gpus_per_node", 8), model, layout, batch, dtype, step)
    return replace(found, peak_bytes=float(row["mem_GiB"]) * GIB if row["mem_GiB"] else None, fits=True)


def _trainer(row: Row) -> str:
    """The software that ran a row."""
    words = row["framework"].lower()
    if "torchtitan" in words:
        return "torchtitan compiled" if row["compile"] == "yes" else "torchtitan"
    core = "nemo" in words or "core" in words
    return "megatron-core" if core else "megatron" if "megatron" in words else "torch"


def _case(
    software: str, machine: str, devices: int, per_node: int, model: Model, layout: Layout, batch: int, dtype: str, step: float | None
) -> Case:
    """A case whose place in its file is filled in later. Raises `Unmapped` for plans that cannot be asked for."""
    if layout.devices != devices:
        raise Unmapped(f"the plan is for {layout.devices} devices, the machine has {devices}")
    return Case("", "", 0, "", software, machine, devices, min(per_node, devices), model, layout, batch, dtype_of(dtype), step)


READERS: tuple[tuple[set[str], Callable[[Row], Case]], ...] = (
    ({"vpp_chunks", "tp", "pp", "gbs"}, megatron),
    ({"latency_s", "num_gpus", "method"}, alpa),
    ({"sharding", "act_ckpt", "grad_accum"}, mosaic),
    ({"accelerator", "chips_per_slice"}, maxtext),
    ({"framework", "fsdp", "local_batch"}, training),
)
