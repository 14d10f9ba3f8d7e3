"""Where the model is that ships with this package."""

import importlib.resources
from pathlib import Path


def path() -> Path:
    """Its directory. Raises ValueError if this installation has none."""
    folder = Path(str(importlib.resources.files("registry"))) / "builtin"
    if not (folder / "config.json").is_file():
        raise ValueError(f"this installation has no built-in model in {folder}; name a model")
    return folder
