"""Lower a step for an Ascend NPU without one, and say how far that was proved.

`python -m tools.graph tiny --bucket decode` captures the step's graph on meta tensors, lists every
operator with what becomes of it, and exits with 1 if anything is missing. Three levels of evidence:

1. static     every operator is in the shipped list of torchair's converters; needs torch only.
2. converted  torchair's own converters emitted a GE graph; needs the files of the torch_npu wheel
              (`pip install --no-deps --target DIR torch_npu`, then `--torch-npu DIR`), not CANN.
              `tools.graph_interpret` also runs such a graph on CPU and compares it with the step.
3. run        a graph ran on an NPU. Never reached by this tool, nor by this project so far.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from compiler import torchair_list, torchair_vendor
from compiler.torchair_ops import NPU
from dsv4.config import preset
from dsv4.context import Ctx
from dsv4.ops import PLAIN
from tools import graph_scene
from tools.graph_capture import Captured, capture, statuses
from tools.graph_captured import Operator, Report
from tools.graph_wheel import Wheel, find, why_not

BUCKETS = graph_scene.BUCKETS


def report(
    ctx: Ctx, bucket: graph_scene.Bucket, wheel: Wheel | None, *, draft: bool = False
) -> Report:
    """Lower one graph as far as can be: through `wheel`, or by the list alone without one."""
    fn, args = graph_scene.step(graph_scene.scene(ctx.cfg, bucket), ctx, draft=draft)
    if wheel is None:
        library = torchair_vendor.declare()
        captured = capture(fn, args)
        del library
        version = torchair_list.read().torch_npu
        return Report(version, _operators(captured), _written(captured), None)
    from tools.graph_torchair import convert  # only where its files are

    done, lowered = convert(fn, args, wheel)
    assert done.captured is not None
    operators = _operators(done.captured)
    for op in operators:
        op.emitted = done.emitted[op.name]
        op.error = done.errors.get(op.name)
    return Report(wheel.version, operators, _written(done.captured), lowered)


def _operators(captured: Captured) -> tuple[Operator, ...]:
    listed = statuses(captured)
    return tuple(Operator(n, captured.operators[n], status) for n, status in listed.items())


def _written(captured: Captured) -> tuple[str, ...]:
    return tuple(sorted(captured.written))


def lines(r: Report, untried: str | None) -> list[str]:
    """The report as text. `untried`: why torchair's converters were not."""
    low, missing = r.lowered, r.missing
    out = [f"{'operator':44} {'calls':>5}  {'listed':8} {'result':9}  GE operators"]
    for op in r.operators:
        good = "listed" if low is None else "converted"
        result = "missing" if op.name in missing else good
        kinds = ", ".join(f"{ge} x{n}" for ge, n in sorted(op.emitted.items()))
        out.append(f"{op.name:44} {op.count:5}  {op.listed or '-':8} {result:9}  {kinds}")
    out += [f"missing: {name}: {why}" for name, why in missing.items()]
    out.append(f"written pools: {len(r.written)}")
    if low is not None:
        places = sum(pool.in_place for pool in low.pools)
        out += [
            f"in place: {places} of {len(r.written)}; _ref_data_idx = {list(low.ref_inputs)}",
            f"TensorMove operators left: {len(low.copies)} {list(low.copies)}",
            f"GE graph: {sum(low.ops.values())} operators of {len(low.ops)} types",
            f"outputs without a dtype until torchair fills in float: {low.untyped}",
        ]
    out += [f"fault: {fault}" for fault in r.faults]
    calls = sum(op.count for op in r.operators)
    out += [
        f"{len(r.operators)} operators, {calls} calls: {len(missing)} missing, "
        f"{len(r.faults)} faults",
        *_evidence(r, untried),
    ]
    return out


def _evidence(r: Report, untried: str | None) -> list[str]:
    table = torchair_list.read()
    absent = sum(op.listed is None for op in r.operators)
    partial = sum(op.listed == "PARTIAL" for op in r.operators)
    static = (
        f"{len(r.operators) - absent} of {len(r.operators)} operators are in the list of "
        f"converters of torch_npu {table.torch_npu}, {partial} of them for some arguments only"
    )
    if r.lowered is None:
        converted = f"not tried: {untried}"
    elif r.missing:
        converted = f"no: converters of torch_npu {r.torch_npu} failed"
    else:
        converted = (
            f"yes: by torchair of torch_npu {r.torch_npu}, without CANN. Not shown: that CANN has "
            f"a kernel for every shape and dtype, and its numbers"
        )
    return [
        f"evidence 1 static:    {static}",
        f"evidence 2 converted: {converted}",
        "evidence 3 run:       no: needs CANN and an NPU; never run on one",
    ]


def main(argv: Sequence[str]) -> int:
    """0 if every operator lowers and every written pool is written in place, else 1."""
    p = argparse.ArgumentParser(
        prog="python -m tools.graph", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument("preset", help="tiny, flash, pro, bench_1b or bench_100m")
    p.add_argument("--layers", type=int, help="cut the model to so many layers, one of each plan")
    p.add_argument("--bucket", choices=sorted(BUCKETS), default="decode")
    p.add_argument("--tokens", type=int, help="tokens of the step")
    p.add_argument("--seqs", type=int, help="sequences of the step")
    p.add_argument("--context", type=int, help="positions a sequence can have")
    p.add_argument("--plain", action="store_true", help="the plain operators, not the NPU's")
    p.add_argument("--draft", action="store_true", help="the draft module's step")
    p.add_argument("--torch-npu", type=Path, metavar="DIR", help="an unpacked torch_npu")
    p.add_argument("--static", action="store_true", help="stop at the list of converters")
    p.add_argument("--out", type=Path, help="write the GE graph's text to this file")
    given = p.parse_args(argv)
    changes = {n: v for n in ("tokens", "seqs", "context") if (v := getattr(given, n)) is not None}
    try:
        cfg = preset(given.preset)
        cfg = graph_scene.cut(cfg, given.layers) if given.layers is not None else cfg
        bucket = graph_scene.sized(BUCKETS[given.bucket], changes)
        wheel = find(given.torch_npu)
        untried = "--static" if given.static else why_not(wheel)
        wheel = wheel if untried is None else None
        if untried is not None and (given.out is not None or given.torch_npu is not None):
            raise ValueError(f"there is no GE graph: {untried}")
        ctx = Ctx(cfg, ops=PLAIN if given.plain else NPU)
        r = report(ctx, bucket, wheel, draft=given.draft)
    except ValueError as error:
        p.error(str(error))
    print("\n".join(lines(r, untried)))
    if given.out is not None and r.lowered is not None:
        given.out.write_text(r.lowered.text, encoding="utf-8")
        print(f"GE graph text: {given.out}")
    return 1 if r.missing or r.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
