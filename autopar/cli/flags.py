"""Flags that commands share, and the fields of `Options` as flags."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from autopar.compiler import Options
from autopar.errors import UsageError

Batch = Annotated[int | None, typer.Option("--batch", metavar="N", help="Global batch; for your own target, passed to it as `batch`.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write one JSON document to a file, or to standard output.")]
Keyword = Annotated[
    list[str] | None,
    typer.Option("-k", metavar="NAME=VALUE", help="An argument of the target's callable, or a field of a zoo model."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4} | {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def byte_count(text: str) -> int:
    """A number of bytes.

    >>> byte_count("65536"), byte_count("1.5KiB"), byte_count("80GB")
    (65536, 1536, 80000000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if not found or found[2] not in _UNITS:
        raise UsageError(f"{text!r} is no number of bytes; write 65536, 64KiB, 1.5GiB or 80GB.")
    return int(float(found[1]) * _UNITS[found[2]])


def pin(text: str) -> tuple[str, tuple[str | tuple[str, ...] | None, ...]]:
    """`PATH=SPEC`, where SPEC gives the mesh axes of each dimension as plans print them.

    >>> pin("state.params['w']=x,-")
    ("state.params['w']", ('x', None))
    >>> pin("*=[-, x+y]")
    ('*', (None, ('x', 'y')))
    """
    path, equals, spec = text.rpartition("=")
    if not equals or not path:
        raise UsageError(f"--pin takes PATH=SPEC, as in --pin \"state.params['w']=x,-\", not {text!r}.")
    return path, tuple(map(_axes, spec.strip().strip("[]").split(","))) if spec.strip(" []") else ()


def _axes(text: str) -> str | tuple[str, ...] | None:
    names = tuple(name.strip() for name in text.split("+"))
    return None if names in (("-",), ("None",), ("",)) else names[0] if len(names) == 1 else names


def _flag(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="The plan", **settings)


_D = Options()
FLAGS: tuple[tuple[str, Any, Any], ...] = (
    ("memory_bytes", Annotated[str | None, _flag(metavar="SIZE", help="Memory that a plan may use on each device, as in 40GiB.")], None),
    ("memory_fraction", Annotated[float, _flag(help="Share of a device's memory that a plan may use.")], _D.memory_fraction),
    (
        "pins",
        Annotated[list[str] | None, _flag("--pin", metavar="PATH=SPEC", help="Fix a leaf's mesh axes, one for each dimension.")],
        None,
    ),
    ("axis_names", Annotated[str, _flag(metavar="A,B,...", help="Names of the mesh's axes.")], ",".join(_D.axis_names)),
    ("donate", Annotated[bool, _flag("--donate/--no-donate", help="Let a step reuse the memory of the state it gets.")], _D.donate),
    ("reduce_dtype", Annotated[str, _flag(metavar="DTYPE", help="Partial sums are reduced in float32 or as_written.")], _D.reduce_dtype),
    (
        "microbatches",
        Annotated[str, _flag(metavar="N|auto", help="Parts of the batch that run one after the other; auto: as many as memory asks for.")],
        str(_D.microbatches),
    ),
    (
        "stages",
        Annotated[str, _flag(metavar="N|auto|off", help="Pipeline stages; auto: as many as are fastest.")],
        str(_D.stages),
    ),
    (
        "schedule",
        Annotated[str, _flag(metavar="NAME", help="Of pipeline stages: auto, gpipe, 1f1b, eager_1f1b, interleaved, zero_bubble, forward.")],
        _D.schedule,
    ),
    (
        "accumulate_dtype",
        Annotated[str, _flag(metavar="DTYPE", help="Sums over microbatches are kept in float32 or as_written.")],
        _D.accumulate_dtype,
    ),
    (
        "batch_argnums",
        Annotated[list[int] | None, _flag("--batch-argnum", metavar="N", help="Position of the argument that holds the batch.")],
        None,
    ),
    ("remat", Annotated[str, _flag(metavar="NAME", help="What is made again after forward: auto, none, dots or full.")], _D.remat),
    ("zero", Annotated[str, _flag(metavar="LEVEL", help="What may be kept in more parts than used in: auto, 0 to 3.")], _D.zero),
    ("solver", Annotated[str, _flag(metavar="NAME", help="highs or pulp.")], _D.solver),
    (
        "time_limit_s",
        Annotated[float | None, _flag("--time-limit", metavar="SECONDS", help="For the solver, on each mesh.")],
        _D.time_limit_s,
    ),
    ("gap", Annotated[float, _flag(help="Relative gap at which an answer counts as optimal.")], _D.gap),
    ("emitter", Annotated[str, _flag(metavar="NAME", help="shard_map or jit.")], _D.emitter),
)
"""Field of `Options`, type of its flag, default."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces a command's parameter `options` by the `FLAGS`.

    The command gets a function that makes `Options` of them, so that a value that is refused is reported as any other error.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "options"]
    flags = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kind) for name, kind, value in FLAGS]

    @functools.wraps(command)
    def with_flags(*args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name, _, _ in FLAGS}
        command(*args, options=lambda: options_of(given), **kwargs)

    with_flags.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    return with_flags


def options_of(given: Mapping[str, Any]) -> Options:
    """`Options` from the values of flags. Raises `UsageError` for one that makes no sense."""
    fields = dict(given)
    memory, pins, names = fields.pop("memory_bytes"), fields.pop("pins"), fields.pop("axis_names")
    count, batch, stages = fields.pop("microbatches", "auto"), fields.pop("batch_argnums", None), fields.pop("stages", _D.stages)
    fields |= {"zero": int(fields["zero"])} if str(fields.get("zero")).isdigit() else {}
    return Options(
        microbatches=int(count) if count.isdigit() else count,
        stages=int(stages) if str(stages).isdigit() else stages,
        batch_argnums=tuple(batch or ()),
        memory_bytes=None if memory is None else byte_count(memory),
        pins=dict(map(pin, _texts(pins))),
        axis_names=tuple(name.strip() for name in names.split(",")),
        **fields,
    )


def _texts(values: Sequence[str] | None) -> Sequence[str]:
    return values or ()
