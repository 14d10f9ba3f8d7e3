"""transformers' eager DeepSeek V4, in a process of its own, from the same checkpoint.

One sample is one forward call with its cache. A decode context is really computed: one sequence in
chunks of 1,024 tokens, then repeated for the whole batch with transformers' own `reorder_cache`;
each sequence is then fed tokens of its own, so that they choose experts of their own.
"""

import argparse
import importlib.metadata
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM, DynamicCache

from tests.bench.case import STEPS, Case
from tests.bench.contestant import reserve_output, sample, serve, timed

FILL = 1024  # tokens


class Transformers:
    """The model as `from_pretrained` makes it."""

    def __init__(self, directory: str) -> None:
        """Load the checkpoint."""
        loaded: Any = DeepseekV4ForCausalLM.from_pretrained(
            directory,
            dtype=torch.bfloat16,
            attn_implementation="eager",
            output_loading_info=True,
        )
        self.model, told = loaded
        wrong = {k: v for k, v in told.items() if v}
        if wrong:
            raise ValueError(f"transformers did not load {directory} whole: {wrong}")
        self.model.eval()
        self.generator = torch.Generator().manual_seed(1)
        self._case: Case | None = None
        self._cache: DynamicCache | None = None

    def hello(self) -> dict[str, Any]:
        """See `Contestant`."""
        config = self.model.config
        experts = getattr(config, "_experts_implementation", None)
        return {
            "versions": f"transformers {importlib.metadata.version('transformers')}, "
            f"torch {torch.__version__}",
            "threads": torch.get_num_threads(),
            "how": f"attention {config._attn_implementation}, experts {experts}, whole prompts",
            "workarounds": [],
        }

    def _forward(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def _ids(self, *shape: int) -> Tensor:
        return torch.randint(2, self.model.config.vocab_size, shape, generator=self.generator)

    @torch.no_grad()
    def logits(self, prompt: list[int], token: int, steps: int) -> Tensor:
        """See `Contestant`."""
        cache = DynamicCache(config=self.model.config)
        parts = [prompt, *([token] for _ in range(steps))]
        return torch.cat([self._forward(torch.tensor([p]), cache)[:, -1] for p in parts])

    @torch.no_grad()
    def prepare(self, case: Case) -> str | None:
        """See `Contestant`."""
        self._case = case
        if case.decode:
            self._cache = DynamicCache(config=self.model.config)
            for start in range(0, case.tokens, FILL):
                self._forward(self._ids(1, min(FILL, case.tokens - start)), self._cache)
            if case.batch > 1:
                first: Any = torch.zeros(case.batch, dtype=torch.long)
                self._cache.reorder_cache(first)
        return None

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """See `Contestant`. Decode contexts grow by four tokens with each sample."""
        case = self._case
        assert case is not None
        if not case.decode:
            ids, cache = self._ids(1, case.tokens), DynamicCache(config=self.model.config)
            return sample(lambda: [timed(lambda: self._forward(ids, cache))])
        held = self._cache
        assert held is not None
        steps = self._ids(STEPS, case.batch, 1)
        return sample(lambda: [timed(lambda x=x: self._forward(x, held)) for x in steps])

    def release(self) -> None:
        """See `Contestant`."""
        self._case = self._cache = None


def main() -> None:
    """Serve the parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    output = reserve_output()
    torch.set_num_threads(args.threads)
    serve(Transformers(args.directory), output)


if __name__ == "__main__":
    main()
