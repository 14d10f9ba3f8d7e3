"""From an architecture name to a running model.

The composition root, the one package that sees the other three. `registry.py` maps names to
builders, `model.py` is the record that a builder returns, `deepseek_v4.py` and `deepseek_v4_mtp.py`
build; `cli.py` is the command `dsv4`; `builtin/` holds the model files that ship with it. vLLM is
met in `vllm_*.py` and nowhere else. Names are data: a refusal tells the field, the value, what is
allowed and the remedy, before anything is allocated.
"""
