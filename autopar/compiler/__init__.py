"""From a traced program to a plan: `steps.py` lists the steps of the compile, each from one `Compilation` to the next."""

from autopar.compiler.compilation import Compilation, fingerprint_of, logical_meshes, roles_of
from autopar.compiler.options import Options
from autopar.compiler.search import compile_plan, without_collector
from autopar.compiler.steps import STEPS

__all__ = ["STEPS", "Compilation", "Options", "compile_plan", "fingerprint_of", "logical_meshes", "roles_of", "without_collector"]
