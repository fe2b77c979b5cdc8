"""A timeline as trace-event JSON, which Perfetto and chrome://tracing show.

The format: "Trace Event Format" (Google, 2016); complete events `X` in microseconds, counters `C`, names of tracks as metadata `M`.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.ir.plan import Plan
from autopar.report.stages import stage_timeline
from autopar.report.timeline import COPIES, Timeline

PROCESS = 1
FIRST = ("forward", "backward", "made again", "update", COPIES)
"""Tracks of ops, from above; those of collectives follow."""


def perfetto_json(plan: Plan, timeline: Timeline) -> str:
    """One JSON document: ops by phase, collectives by axis, memory of one device as a counter."""
    tracks = [t for t in FIRST if any(s.track == t for s in timeline.spans)]
    tracks += sorted({s.track for s in timeline.spans} - set(tracks))
    number = {track: n for n, track in enumerate(tracks, 1)}
    events: list[dict[str, Any]] = [_named("process_name", 0, f"predicted step of one device, mesh {plan.mesh}")]
    events += [_named("thread_name", n, track) for track, n in number.items()]
    events += [_event("thread_sort_index", n, {"sort_index": n}) for n in number.values()]
    for s in timeline.spans:
        place = {"ph": "X", "pid": PROCESS, "tid": number[s.track], "cat": s.track}
        events.append({"name": s.name, **place, "ts": 1e6 * s.start_s, "dur": 1e6 * s.seconds, "args": dict(s.details)})
    last = None
    for seconds, nbytes in timeline.memory:
        if nbytes != last:
            counter = {"ph": "C", "pid": PROCESS, "ts": 1e6 * seconds, "args": {"bytes": nbytes}}
            events.append({"name": "memory", **counter})
            last = nbytes
    return _document(plan, events)


def _document(plan: Plan, events: list[dict[str, Any]]) -> str:
    about = {"target": plan.target, "cluster": plan.cluster.get("name", ""), "step_time_s": plan.predicted.step_time_s}
    about |= {"peak_bytes": plan.predicted.peak_bytes}
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events})


def stages_json(plan: Plan) -> str:
    """The predicted step of a plan in stages: a track for each group of devices with its tasks, and one for each link with what crosses."""
    found = stage_timeline(plan)
    number = {track: n for n, track in enumerate((*found.devices, *found.links), 1)}
    events: list[dict[str, Any]] = [_named("process_name", 0, f"predicted step, {plan.schedule}, mesh {plan.mesh}")]
    events += [_named("thread_name", n, track) for track, n in number.items()]
    events += [_event("thread_sort_index", n, {"sort_index": n}) for n in number.values()]
    for s in found.spans:
        place = {"ph": "X", "pid": PROCESS, "tid": number[s.track], "cat": "tasks" if s.track in found.devices else "transfers"}
        events.append({"name": s.name, **place, "ts": 1e6 * s.start_s, "dur": 1e6 * s.seconds, "args": dict(s.details)})
    return _document(plan, events)


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return _event(what, track, {"name": name})


def _event(what: str, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": track, "args": args}
