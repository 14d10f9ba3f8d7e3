"""Frozen dataclasses as pytree nodes.

A node's tensor fields are leaves; `static` fields and fields holding None are structure. This is
the only file that imports `torch.utils._pytree`, which is private but is the one Dynamo traces.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import torch.utils._pytree as pytree

T = TypeVar("T")


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A hashable field that is part of the tree's structure, not a leaf."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def node(cls: type[T]) -> type[T]:
    """Class decorator: a frozen, keyword-only dataclass registered as a pytree node."""
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = tuple((f.name, "static" in f.metadata) for f in dataclasses.fields(made))

    def split(x: Any) -> tuple[list[tuple[str, Any]], tuple[tuple[str, Any], ...]]:
        kept: list[tuple[str, Any]] = []
        rest: list[tuple[str, Any]] = []
        for name, is_static in fields:
            value = getattr(x, name)
            (rest if is_static or value is None else kept).append((name, value))
        return kept, tuple(rest)

    def flatten(x: Any) -> tuple[list[Any], Any]:
        kept, rest = split(x)
        return [v for _, v in kept], (tuple(n for n, _ in kept), rest)

    def flatten_with_keys(x: Any) -> tuple[list[Any], Any]:
        kept, rest = split(x)
        keyed = [(pytree.GetAttrKey(n), v) for n, v in kept]
        return keyed, (tuple(n for n, _ in kept), rest)

    def unflatten(values: Any, context: Any) -> Any:
        names, rest = context
        return made(**dict(zip(names, values, strict=True)), **dict(rest))

    pytree.register_pytree_node(
        made,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return made


def tmap(fn: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Apply `fn` leaf by leaf; every tree in `rest` must have the structure of `tree`."""
    return pytree.tree_map(fn, tree, *rest)


def leaves(tree: Any) -> list[Any]:
    """The leaves in field order."""
    return pytree.tree_leaves(tree)


def paths(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path: {"layers.3.attn.wq_a": leaf}."""
    keyed, _ = pytree.tree_flatten_with_path(tree)
    return {pytree.keystr(k).replace("[", ".").replace("]", "").lstrip("."): v for k, v in keyed}


def from_paths(like: T, values: dict[str, Any]) -> T:
    """The tree with the structure of `like` and the leaves of `values`, found by dotted path."""
    keyed, structure = pytree.tree_flatten_with_path(like)
    names = [pytree.keystr(k).replace("[", ".").replace("]", "").lstrip(".") for k, _ in keyed]
    return pytree.tree_unflatten([values[name] for name in names], structure)


def floats(tree: Any) -> dict[str, Any]:
    """The floating-point leaves by path: what `torch.func.grad` can be taken over."""
    return {n: t for n, t in paths(tree).items() if t.is_floating_point()}


def replaced(tree: T, values: dict[str, Any]) -> T:
    """`tree` with some leaves replaced, by path. Raises ValueError for a path it lacks."""
    named = paths(tree)
    if unknown := sorted(values.keys() - named.keys()):
        raise ValueError(f"the tree has no {', '.join(unknown[:5])}")
    return from_paths(tree, named | values)
