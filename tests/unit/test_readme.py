"""What the README shows works: its make targets exist, its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ((?:[a-z]+-)*[a-z]+)`", README.read_text()))
    for block in re.findall(r"^```(?:\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL):
        named |= set(re.findall(r"^\$? *make ([a-z][a-z-]*)", block, re.MULTILINE))
        named |= set(re.findall(r"&& make ([a-z][a-z-]*)", block))
    assert named, "the README should say how to run autopar: `make demo`"
    assert named <= targets


def test_the_python_that_the_readme_shows_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = blocks("python")
    assert shown, "the README should show autopar in Python"
    names: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(shown, start=1):
        exec(compile(block, f"README.md, block {number}", "exec"), names)
