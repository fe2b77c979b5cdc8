"""TARGET of a command: a zoo name, `package.module:callable` or `file.py:callable`, turned into a function and its arguments."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.errors import AutoparError, ModelError, TraceError, UsageError

FORMS = "a zoo name (`autopar models` lists them), `package.module:callable` or `file.py:callable`"


@dataclass(frozen=True)
class Target:
    """What is to be planned: `function(*args)`. `name` is as the user wrote it."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def load_target(text: str, batch: int | None = None, keywords: Mapping[str, Any] | None = None, abstract: bool = True) -> Target:
    """Build a target; a zoo model's arguments are shapes where `abstract`, else arrays.

    Raises `ModelError` or `UsageError` for a name that leads nowhere or takes other arguments, `TraceError` where the user's code raises.
    """
    keywords = dict(keywords or {})
    if ":" not in text:
        return _from_zoo(text, batch, keywords, abstract)
    place, _, name = text.rpartition(":")
    make = _attribute(_module(place), name, text)
    if batch is not None:
        keywords["batch"] = batch
    _check_keywords(make, keywords, text)
    made = _guarded(f"`{text}`", lambda: make(**keywords))
    if not (isinstance(made, Sequence) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise ModelError(f"`{text}` must return (function, args), where args is the tuple that the function is called with.")
    return Target(text, made[0], tuple(made[1]))


def _from_zoo(name: str, batch: int | None, keywords: Mapping[str, Any], abstract: bool) -> Target:
    from autopar import models  # flax and optax, which only zoo models need

    if name not in models.names():
        close = difflib.get_close_matches(name, models.names(), n=4, cutoff=0.4)
        hint = f"Close matches: {', '.join(close)}." if close else f"Give {FORMS}."
        where = f" To plan your own function, name it: {name}:callable." if name.endswith(".py") else ""
        raise ModelError(f"no model is called {name!r}. {hint}{where}")
    if batch is not None and batch < 1:
        raise UsageError(f"a batch has at least one example, not {batch}.")
    try:
        function, args = models.build(name, batch=batch, abstract=abstract, **keywords)
    except AutoparError:
        raise
    except Exception as error:
        given = ", ".join(f"{k}={v!r}" for k, v in keywords.items())
        raise ModelError(f"{name} cannot be built with {given or f'batch {batch}'}: {error}") from error
    return Target(name, function, args)


def _module(place: str) -> ModuleType:
    """The module of that dotted name, or in that file; the folder it is in can be imported from, as when Python runs it."""
    if not place.endswith(".py"):
        _add_path(Path.cwd())
        if not place or not _exists(place):
            raise ModelError(f"there is no module {place!r} here. Give {FORMS}.")
        return _guarded(f"importing {place}", lambda: importlib.import_module(place))
    path = Path(place).resolve()
    if not path.is_file():
        raise ModelError(f"there is no file {place}. Give {FORMS}.")
    _add_path(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{place} cannot be imported as Python.")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[path.stem] = module
    _guarded(f"importing {place}", lambda: loader.exec_module(module))
    return module


def _exists(module: str) -> bool:
    """Whether a module can be found; its parents are imported to tell."""
    parent = module.rpartition(".")[0]
    if parent and not _exists(parent):
        return False
    try:
        return _guarded(f"importing {parent}", lambda: importlib.util.find_spec(module)) is not None
    except TraceError as error:
        if isinstance(error.__cause__, (ModuleNotFoundError, ValueError)):  # the parent is no package, or the name is no name
            return False
        raise


def _add_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _attribute(module: ModuleType, name: str, text: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found
    there = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
    close = difflib.get_close_matches(name, there, n=3, cutoff=0.4) or there[:5]
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ModelError(f"`{text}`: {module.__name__} has no function {name!r}.{hint}")


def _check_keywords(make: Callable[..., Any], keywords: Mapping[str, Any], text: str) -> None:
    try:
        inspect.signature(make).bind(**keywords)
    except TypeError as error:
        given = ", ".join(f"{k}={v!r}" for k, v in keywords.items()) or "no arguments"
        raise UsageError(f"`{text}` cannot be called with {given}: {error}. Give its arguments with -k name=value.") from None
    except ValueError:  # no signature to be had
        return


def _guarded(what: str, call: Callable[[], Any]) -> Any:
    """What `call` gives; anything that the user's code raises becomes a `TraceError`."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise TraceError(f"{what} raised {type(error).__name__}: {error}") from error


def keyword_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """`name=value` texts as keyword arguments; values are Python literals, anything else is text.

    >>> keyword_arguments(["layers=2", "dtype=float32", "widths=(1, 2)"])
    {'layers': 2, 'dtype': 'float32', 'widths': (1, 2)}
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"-k takes name=value, not {text!r}.")
        found[name] = _literal(value)
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
