"""From an architecture name to a running model.

The composition root, the one package that sees the other three. `names.py` is the table of
architecture names, `registry.py` answers questions about it and takes registrations,
`architecture.py` decides which name a config.json is of; `model.py` is what a builder is told and
returns, `deepseek_v4.py` builds, `build.py` is the way in. `explain.py` says what would run and
why; `cli*.py` is the command `dsv4`; `builtin/` holds the model files that ship with it. Names are
data: a refusal tells the field, the value, what is allowed and the remedy, before anything is
allocated.
"""
