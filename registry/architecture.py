"""Which architecture a config.json is of, decided from its fields, with the reason."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """An architecture name, and why it is that one."""

    name: str
    why: tuple[str, ...]


def choose(raw: Mapping[str, Any], asked: str | None = None) -> Choice:
    """The architecture of a parsed config.json; `asked` decides, if given.

    A checkpoint with a vision encoder carries the name of its text model: the fields decide, not
    the name. Raises ValueError if the file does not tell one name.
    """
    if asked is not None:
        return Choice(name=asked, why=("asked for by the caller",))
    inner = raw.get("text_config")
    places = {**(inner if isinstance(inner, Mapping) else {}), **raw}
    name, why = _named(places)
    vision = [k for k in ("vision_config", "vision_n_layers") if places.get(k) not in (None, 0, {})]
    if vision and name == "DeepseekV4ForCausalLM":
        told = f"config.json has {vision[0]}: it is the model with a vision encoder"
        return Choice(name="DeepseekV4ForConditionalGeneration", why=(why, told))
    return Choice(name=name, why=(why,))


def _named(raw: Mapping[str, Any]) -> tuple[str, str]:
    names = raw.get("architectures")
    if names is None:
        kind = raw.get("model_type")
        known = {
            "deepseek_v4": "DeepseekV4ForCausalLM",
            "deepseek_v41": "DeepseekV41ForCausalLM",
        }
        if kind not in known:
            raise ValueError(
                f"config.json has no architectures, and model_type is {kind!r}; "
                f"name the architecture in the file or on the call"
            )
        return known[kind], f"architectures is absent; model_type is {kind!r}"
    good = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    if not good:
        raise ValueError(f"architectures is {names!r} in config.json; it must hold one name")
    return names[0], f"architectures in config.json is {names!r}"
