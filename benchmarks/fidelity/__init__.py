"""Published step times and memories beside predictions: `python -m benchmarks.fidelity FILE... [--json -] [--fit]`.

Each usable row is mapped to `autopar.manual(...)` on the zoo's own models (`read`, `case`), priced (`price`) and judged (`judge`). The rows
that `calibration.toml` beside this names served to fit one efficiency per machine and software, and do not count in the errors.
"""
