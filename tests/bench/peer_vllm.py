"""vLLM's own CPU DeepSeek V4, in a process and an environment of its own, same checkpoint.

The engine runs in this process, offline, one step at a time. The clock runs from the model's
forward to its logits (two hooks of torch), so neither scheduling nor sampling counts; the whole
engine step is recorded beside it. Contexts are really computed. Without AMX vLLM turns chunked
prefill and prefix caching off, so each prompt is one step.
"""

import argparse
import importlib
import os
import time
from typing import Any

import torch
from torch import Tensor

from tests.bench import vllm_kernels
from tests.bench.case import STEPS, Case
from tests.bench.contestant import reserve_output, sample, serve

FILL_S = 300.0  # what a context may cost to compute


class Vllm:
    """vLLM's offline engine."""

    def __init__(self, directory: str, longest: int, seqs: int, eager: bool) -> None:
        """Load the checkpoint into an engine for `seqs` sequences of `longest` tokens."""
        vllm: Any = importlib.import_module("vllm")
        self.version = vllm.__version__
        self.done = vllm_kernels.apply()
        self.sampling = vllm.SamplingParams
        llm = vllm.LLM(
            directory,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=seqs,
            enforce_eager=eager,
        )
        self.engine = llm.llm_engine
        self.begin_s = self.end_s = 0.0
        self.last: Tensor | None = None
        llm.apply_model(self._watch)
        self.vocab = self.engine.model_config.get_vocab_size()
        self.count = 0
        self._case: Case | None = None
        self._running: list[str] = []

    def _watch(self, model: torch.nn.Module) -> None:
        """Hooks that note when the forward begins and when its logits are there."""

        def begin(*_: object) -> None:
            self.begin_s = time.perf_counter()

        def end(_module: object, _inputs: object, logits: Tensor) -> None:
            self.end_s = time.perf_counter()
            self.last = logits

        model.register_forward_pre_hook(begin)
        model.get_submodule("logits_processor").register_forward_hook(end)

    def hello(self) -> dict[str, Any]:
        """See `Contestant`."""
        config = self.engine.vllm_config
        mode = config.compilation_config.mode
        return {
            "versions": f"vLLM {self.version}, torch {torch.__version__}",
            "threads": torch.get_num_threads(),
            "how": f"compilation mode {getattr(mode, 'name', mode)}, max_model_len "
            f"{config.model_config.max_model_len}, caches in fp8, whole prompts",
            "workarounds": self.done,
        }

    def _add(self, ids: list[int], **sampling: Any) -> str:
        self.count += 1
        name = str(self.count)
        params = self.sampling(ignore_eos=True, detokenize=False, **sampling)
        self.engine.add_request(name, {"prompt_token_ids": ids}, params)
        return name

    def _step(self) -> float:
        """One step of the engine: seconds from the model's forward to its logits."""
        self.engine.step()
        return self.end_s - self.begin_s

    def _ids(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.count)
        return torch.randint(2, self.vocab, (count,), generator=generator).tolist()

    def logits(self, prompt: list[int], token: int, steps: int) -> Tensor:
        """See `Contestant`."""
        self._add(prompt, max_tokens=1 + steps, allowed_token_ids=[token], temperature=0.0)
        out = []
        while self.engine.has_unfinished_requests():
            self._step()
            assert self.last is not None
            out.append(self.last[-1].float().clone())
        return torch.stack(out)

    def prepare(self, case: Case) -> str | None:
        """See `Contestant`. Sequences draw their tokens: they choose experts of their own."""
        self._case = case
        if not case.decode:
            return None
        begin = time.perf_counter()
        for i in range(case.batch):
            room = {"max_tokens": 250, "temperature": 1.0, "seed": i}
            self._running.append(self._add(self._ids(case.tokens), **room))
            if i == 0:
                self._step()
                whole_s = (time.perf_counter() - begin) * case.batch
                if whole_s > FILL_S:
                    self.release()
                    total = f"{case.batch * case.tokens:,} tokens"
                    return f"computing a context of {total} would take {whole_s / 60:.0f} minutes"
        scheduler = self.engine.engine_core.engine_core.scheduler
        while scheduler.waiting or any(r.num_output_tokens == 0 for r in scheduler.running):
            self._step()
        return None

    def run(self) -> dict[str, float]:
        """See `Contestant`. Decode contexts grow by four tokens with each sample."""
        case = self._case
        assert case is not None
        if not case.decode:
            self._add(self._ids(case.tokens), max_tokens=1)
        return sample(lambda: [self._step() for _ in range(STEPS if case.decode else 1)])

    def release(self) -> None:
        """See `Contestant`."""
        if self._running:
            self.engine.abort_request(self._running)
        self._running = []
        self._case = None


def environment(threads: int, scratch: str) -> dict[str, str]:
    """What vLLM reads from the environment: in this process, two cores, quiet, nothing shared."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": f"{scratch}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
    }


def main() -> None:
    """Serve the parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--seqs", type=int, required=True)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    output = reserve_output()
    serve(Vllm(args.directory, args.longest, args.seqs, args.eager), output)


if __name__ == "__main__":
    main()
