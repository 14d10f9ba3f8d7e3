"""What a model directory's generation_config.json says about sampling."""

import json
from pathlib import Path
from typing import Any

GENERATION_CONFIG = "generation_config.json"
_FIELDS = ("temperature", "top_k", "top_p", "min_p")


def sampling_defaults(directory: str | Path) -> dict[str, Any]:
    """Arguments of `runtime.request.Sampling` that the model asks for; none means greedy.

    As elsewhere, `do_sample` decides: without it the other fields have no effect, with it an absent
    temperature is 1. Raises ValueError for a file that cannot be read; `Sampling` checks values.
    """
    file = Path(directory) / GENERATION_CONFIG
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}; it must hold an object")
    if raw.get("do_sample") is not True:
        return {}
    asked = {name: raw[name] for name in _FIELDS if raw.get(name) is not None}
    return {"temperature": 1.0} | asked
