"""One sitting of a profile: what is missing is measured until the time is up, and written down on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.cluster import Cluster
from cost_models.errors import ClusterError
from cost_models.fit import Sample, summarise
from cost_models.profile import figures, store
from cost_models.profile.figures import Accuracy
from cost_models.profile.questions import Question

Ask = Callable[[Question], Sequence[float]]
Progress = Callable[[int, int, str], None]
"""Told how many points are there, of how many, and which curve is measured next."""

_SAVE_EVERY_S = 10.0
_NOISY = 0.1


@dataclass(frozen=True)
class Session:
    """Where the profile is written, what `start` knows beforehand, and what tells one machine from another (`where`)."""

    file: Path
    start: Cluster
    where: Mapping[str, Any]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Outcome:
    """A profile: the cluster, its accuracy per curve, points that are there, were added, and are still missing, and what failed."""

    cluster: Cluster
    accuracy: tuple[Accuracy, ...]
    points: int
    added: int
    missing: int
    failed: tuple[str, ...] = ()


def measure(session: Session, ask: Ask, budget_s: float, progress: Progress, clock: Callable[[], float] = time.monotonic) -> Outcome:
    """Ask what the file does not yet answer until `budget_s` seconds are over, and write the profile, also when interrupted.

    Where time is left, points whose repeats were far apart are measured once more.

    A question that fails (a dtype or a size that the devices cannot run) is left out and named. Raises `ClusterError` for a file that
    cannot be used, before anything is measured, and where no question could be answered at all.
    """
    points = store.load_points(session.file, session.where)
    begin = saved = clock()
    before, failed = _count(points), []
    store.check_writable(session.file)
    try:
        for question in _due(session, points):
            if clock() - begin >= budget_s:
                break
            progress(_count(points), len(session.questions), question.curve)
            try:
                _keep(points, question, _answered(ask(question)))
            except Exception as error:  # whatever a backend raises for what it cannot run
                reason = str(error).strip() or type(error).__name__
                failed.append(f"{question.curve} {question.at}: {reason.splitlines()[0]}")
            if clock() - saved >= _SAVE_EVERY_S:
                _write(session, points)
                saved = clock()
    finally:
        if _count(points):
            cluster, accuracy = _write(session, points)
    if not _count(points):
        reason = f"the first that failed: {failed[0]}" if failed else "give it more time"
        raise ClusterError(f"nothing could be measured in {budget_s:g} s, so no profile was written; {reason}.")
    progress(_count(points), len(session.questions), "")
    missing = sum(each.at not in points.get(each.curve, {}) for each in session.questions)
    return Outcome(cluster, tuple(accuracy), _count(points), _count(points) - before, missing, tuple(failed))


def _due(session: Session, points: Mapping[str, Mapping[str, Sample]]) -> Iterator[Question]:
    """What is missing, then once more what was just measured with repeats far apart, the worst first: something else ran meanwhile."""
    missing = [each for each in session.questions if each.at not in points.get(each.curve, {})]
    yield from missing
    spreads = {each: points[each.curve][each.at].spread for each in missing if each.at in points.get(each.curve, {})}
    yield from sorted((each for each, spread in spreads.items() if spread > _NOISY), key=lambda each: -spreads[each])


def _keep(points: dict[str, dict[str, Sample]], question: Question, sample: Sample) -> None:
    """Of two samples of one point, the one whose repeats agree better."""
    curve = points.setdefault(question.curve, {})
    if question.at not in curve or sample.spread < curve[question.at].spread:
        curve[question.at] = sample


def _answered(seconds: Sequence[float]) -> Sample:
    sample = summarise(seconds)
    if not sample.seconds > 0:
        raise ClusterError("it took no time")
    return sample


def _count(points: Mapping[str, Mapping[str, Sample]]) -> int:
    return sum(map(len, points.values()))


def _write(session: Session, points: Mapping[str, Mapping[str, Sample]]) -> tuple[Cluster, list[Accuracy]]:
    """Fit what is there, and save it. Curves without a point are left out."""
    answered = {name: samples for name, samples in points.items() if samples}
    cluster = replace(figures.fitted(answered, session.start), name=str(session.file))
    accuracy = figures.accuracy(answered, cluster)
    store.save(session.file, cluster, sources(answered, session), answered, session.where, accuracy)
    return cluster, accuracy


def sources(points: Mapping[str, Any], session: Session) -> dict[str, str]:
    """Where each figure comes from, by the start of its dotted name."""
    here = f"measured on {session.where['devices']} x {session.where['device_kind']}"
    given = f"not measured: {session.start.name}"
    found = {"": given, "device.memory_bytes": "as the machine or its preset says"}
    by_curve = {"memory": "device.memory_bytes_per_s", "vector": "device.vector_flops", "launch": "device.launch_seconds"}
    for curve in points:
        what, *rest = curve.split(" ")
        if what == "matmul":
            found |= {f"device.peak_flops.{rest[0]}": here, "device.matmul_efficiency": here, "device.half_flops": here}
        elif what in by_curve:
            found[by_curve[what]] = here
        elif what == "collective":
            found |= {"topology": here, "topology.base.network": given}
            size, stride = map(int, rest[1].split(":"))
            if size * stride > session.start.topology.dims[-1]:
                found["topology.base.network"] = here
    return found | {"device.memory_efficiency": here} if "memory" in points else found
