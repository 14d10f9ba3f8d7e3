"""What a checkpoint holds and what becomes of it, known before any tensor is allocated."""

import collections
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runtime.headers import CheckpointError, Fault

SHOWN = 20  # names in one message, per kind of fault

# Kind of fault -> what it means, and what to do.
_ADVICE = (
    ("broken", "broken files", "fetch these files again, or write the checkpoint again"),
    (
        "wrong_shape",
        "wrong shape",
        "config.json and the tensors must describe the same model; compare them",
    ),
    (
        "wrong_dtype",
        "wrong dtype",
        "allowed: BF16, F16, F32, F64; F8_E4M3 with a scale per 128x128 or 32x32 tile; I8 or U8 "
        "holding two fp4 values a byte, with a scale per 32 values; scales F8_E8M0, U8 (e8m0) or "
        "F32; any integer for tid2eid",
    ),
    (
        "missing",
        "missing",
        "config.json asks for them; it must belong to these files, and all files must be there",
    ),
    (
        "unexpected",
        "unexpected",
        "nothing in this model reads them; strict=False ignores them",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """One stored tensor that becomes parameters."""

    file: str
    tensor: str
    stored: str  # bf16, f16, f32, f64, fp8, fp4 or int
    num_bytes: int  # scales included
    paths: tuple[str, ...]  # of the leaves in `Params`
    expert: int | None  # None: no expert's, or all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Every tensor of a checkpoint: used, skipped, or why it is refused."""

    directory: Path
    files: tuple[str, ...]
    family: str  # official, transformers, or mixed (what transformers 5 writes by default)
    used: tuple[Use, ...]
    skipped: tuple[Fault, ...]  # the detail is the reason
    missing: tuple[Fault, ...]  # parameters and scales that no file holds
    unexpected: tuple[Fault, ...]
    wrong_shape: tuple[Fault, ...]
    wrong_dtype: tuple[Fault, ...]
    broken: tuple[Fault, ...]  # unreadable files, lying indices, tensors that stand twice
    hints: tuple[str, ...]  # what the faults together suggest

    @property
    def num_bytes(self) -> int:
        """Bytes of the used tensors, as stored."""
        return sum(use.num_bytes for use in self.used)

    def faults(self, *, strict: bool = True) -> dict[str, tuple[Fault, ...]]:
        """What refuses this checkpoint, by kind; without `strict`, unexpected tensors do not."""
        kinds = (kind for kind, _, _ in _ADVICE if strict or kind != "unexpected")
        found = {kind: getattr(self, kind) for kind in kinds}
        if found["broken"]:  # an unreadable file's tensors are not missing, only unread
            found["missing"] = ()
        return {kind: faults for kind, faults in found.items() if faults}

    def refuse(self, *, strict: bool = True) -> None:
        """Raise CheckpointError naming the first tensors of each fault; do nothing without one."""
        found = self.faults(strict=strict)
        if found:
            lines = [f"the checkpoint in {self.directory} cannot be loaded", *_told(found)]
            lines += [f"hint: {hint}" for hint in self.hints]
            raise CheckpointError("\n".join(lines))

    def summary(self) -> str:
        """The report in a few lines."""
        stored = collections.Counter(use.stored for use in self.used)
        formats = ", ".join(f"{count} {name}" for name, count in stored.most_common())
        lines = [
            f"{self.directory}: {len(self.files)} files, {self.family} names",
            f"used: {len(self.used)} tensors ({formats}), {self.num_bytes / 1e9:.3f} GB",
        ]
        reasons = collections.Counter(fault.detail for fault in self.skipped)
        lines += [f"skipped: {count} tensors: {reason}" for reason, count in reasons.items()]
        lines += _told(self.faults())
        return "\n".join(lines + [f"hint: {hint}" for hint in self.hints])

    def as_dict(self) -> dict[str, Any]:
        """The whole report as JSON types."""
        made = dataclasses.asdict(self)
        return made | {"directory": str(self.directory), "bytes": self.num_bytes}


def _told(found: dict[str, tuple[Fault, ...]]) -> Iterable[str]:
    """The lines on each kind of fault: the count, the first names, and what to do."""
    for kind, title, advice in _ADVICE:
        faults = found.get(kind, ())
        if faults:
            yield f"{title} ({len(faults)}): {advice}"
            yield from (f"  {fault}" for fault in faults[:SHOWN])
            if len(faults) > SHOWN:
                yield f"  and {len(faults) - SHOWN} more"
