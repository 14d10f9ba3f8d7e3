"""The architecture of one model: `Config`, the plan of each layer, and the presets.

A `Config` is frozen and holds architecture only: no mesh, no dtype, no runtime option. It is built
from a `config.json` by `config_json.read` or taken from `preset`. The layer plan is data: layers
branch on `LayerPlan` and never on a model's name. Spec section 1.
"""

import dataclasses
import enum
import math


class Kind(enum.Enum):
    """What a layer attends to besides its sliding window."""

    WINDOW = "window"  # nothing
    CSA = "csa"  # top-k of overlapping compressed entries, picked by the lightning indexer
    HCA = "hca"  # all entries of a coarse, non-overlapping compressor


class Router(enum.Enum):
    """How a layer picks its experts."""

    HASH = "hash"  # by token id, through a table
    TOPK = "topk"  # by score plus a correction bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN interpolation of rotary frequencies."""

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original: int = 65536  # tokens of the uninterpolated context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """One rotary table: its base, and YaRN or None."""

    theta: float
    yarn: Yarn | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Everything that distinguishes one layer from another."""

    kind: Kind
    rate: int  # tokens per compressed entry; 0 without a compressor
    router: Router
    rope: Rope

    @property
    def overlap(self) -> int:
        """Groups that one entry is made of: 2 in CSA (its own and the one before), else 1."""
        return 2 if self.kind is Kind.CSA else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """DeepSeek V4 architecture. Brackets: V4-Flash."""

    vocab: int  # [129280]
    dim: int  # [4096]
    heads: int  # [64]
    head_dim: int  # [512]
    rope_dim: int  # [64], the last dims of every head and indexer key
    q_rank: int  # [1024]
    o_groups: int  # [8]
    o_rank: int  # [1024], per group
    kinds: tuple[Kind, ...]  # one per backbone layer
    hash_layers: tuple[bool, ...]  # one per backbone layer
    mtp: int = 0  # draft modules, 0 or 1
    csa_rate: int = 4
    hca_rate: int = 128
    window: int = 128  # tokens a query sees, itself included
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 512  # entries
    experts: int  # [256]
    topk: int  # [6]
    expert_dim: int  # [2048]
    route_scale: float = 1.5
    swiglu_limit: float = 10.0
    streams: int = 4
    sinkhorn: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_theta: float = 160000.0
    yarn: Yarn | None = None  # on layers with a compressor only
    max_positions: int = 1048576  # tokens
    init_std: float = 0.02
    bos: int | None = 0
    eos: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, the value and what is allowed."""
        _check(self)

    @property
    def layers(self) -> int:
        """Backbone layers."""
        return len(self.kinds)

    @property
    def rates(self) -> tuple[int, ...]:
        """Distinct compression rates in use, ascending: the order of `Batch.closes`."""
        return tuple(sorted({self.rate(k) for k in self.kinds} - {0}))

    def rate(self, kind: Kind) -> int:
        """Tokens per compressed entry of a layer kind."""
        return {Kind.WINDOW: 0, Kind.CSA: self.csa_rate, Kind.HCA: self.hca_rate}[kind]

    @property
    def page_tokens(self) -> int:
        """Smallest page: at its end every group of every layer is closed."""
        return math.lcm(*self.rates) if self.rates else 1

    @property
    def plans(self) -> tuple[LayerPlan, ...]:
        """The plan of every backbone layer."""
        return tuple(
            self._plan(kind, hashed)
            for kind, hashed in zip(self.kinds, self.hash_layers, strict=True)
        )

    @property
    def mtp_plan(self) -> LayerPlan:
        """The draft module's block: window only, plain rope, top-k router. Spec section 11."""
        return self._plan(Kind.WINDOW, False)

    def _plan(self, kind: Kind, hashed: bool) -> LayerPlan:
        if kind is Kind.WINDOW:
            rope = Rope(theta=self.rope_theta)
        else:
            rope = Rope(theta=self.compress_theta, yarn=self.yarn)
        router = Router.HASH if hashed else Router.TOPK
        return LayerPlan(kind=kind, rate=self.rate(kind), router=router, rope=rope)


def _numbers(yarn: Yarn) -> tuple[float, float, float]:
    return yarn.factor, yarn.beta_fast, yarn.beta_slow


_ABOVE = (("route_scale", 0), ("swiglu_limit", 0), ("rope_theta", 1), ("compress_theta", 1))


def _check(cfg: Config) -> None:
    positive = (
        "vocab dim heads head_dim rope_dim q_rank o_groups o_rank window index_heads index_dim "
        "index_topk experts topk expert_dim streams sinkhorn csa_rate hca_rate max_positions"
    )
    for name in positive.split():
        value = getattr(cfg, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    # A rotary base of 1 has no longest wavelength: YaRN would divide by log(1).
    for name, floor in _ABOVE:
        value = getattr(cfg, name)
        if not (math.isfinite(value) and value > floor):
            raise ValueError(f"{name} is {value!r}; it must be a finite number above {floor}")
    for name in ("norm_eps", "hc_eps"):
        value = getattr(cfg, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value!r}; it must be a finite number of at least 0")
    rules = (
        (cfg.layers >= 1, f"kinds is empty; a model has at least one layer, got {cfg.kinds!r}"),
        (
            len(cfg.hash_layers) == cfg.layers,
            f"hash_layers has {len(cfg.hash_layers)} entries for {cfg.layers} layers",
        ),
        (
            cfg.rope_dim % 2 == 0 and cfg.rope_dim <= min(cfg.head_dim, cfg.index_dim),
            f"rope_dim is {cfg.rope_dim}; it must be even and at most head_dim ({cfg.head_dim}) "
            f"and index_dim ({cfg.index_dim})",
        ),
        (
            cfg.heads % cfg.o_groups == 0,
            f"o_groups is {cfg.o_groups}; it must divide the {cfg.heads} heads",
        ),
        (cfg.topk <= cfg.experts, f"topk is {cfg.topk} of {cfg.experts} experts"),
        (
            cfg.csa_rate != cfg.hca_rate,
            f"csa_rate and hca_rate are both {cfg.csa_rate}; they must differ",
        ),
        (cfg.mtp in (0, 1), f"mtp is {cfg.mtp}; this version has 0 or 1 draft modules"),
        (
            cfg.yarn is None
            or (cfg.yarn.original >= 1 and all(1e-6 <= n <= 1e6 for n in _numbers(cfg.yarn))),
            f"yarn is {cfg.yarn}; original must be at least 1, the others from 1e-6 to 1e6",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise ValueError(message)


def kinds_of(pattern: str) -> tuple[Kind, ...]:
    """Kinds from letters: w window, c CSA, h HCA."""
    return tuple({"w": Kind.WINDOW, "c": Kind.CSA, "h": Kind.HCA}[letter] for letter in pattern)


def hashed(count: int, layers: int) -> tuple[bool, ...]:
    """The first `count` of `layers` layers are hash-routed."""
    return tuple(i < count for i in range(layers))


_YARN = Yarn(factor=16.0)

_FLASH = Config(
    vocab=129280,
    dim=4096,
    heads=64,
    head_dim=512,
    rope_dim=64,
    q_rank=1024,
    o_groups=8,
    o_rank=1024,
    kinds=kinds_of("ww" + "ch" * 20 + "c"),
    hash_layers=hashed(3, 43),
    mtp=1,
    experts=256,
    topk=6,
    expert_dim=2048,
    yarn=_YARN,
)

_PRO = dataclasses.replace(
    _FLASH,
    dim=7168,
    heads=128,
    q_rank=1536,
    o_groups=16,
    kinds=kinds_of("hh" + "ch" * 29 + "c"),
    hash_layers=hashed(3, 61),
    index_topk=1024,
    experts=384,
    expert_dim=3072,
    route_scale=2.5,
)

_TINY = Config(
    vocab=2048,
    dim=192,
    heads=8,
    head_dim=64,
    rope_dim=16,
    q_rank=96,
    o_groups=2,
    o_rank=64,
    kinds=kinds_of("wchcc"),
    hash_layers=hashed(2, 5),
    mtp=1,
    window=128,
    index_heads=16,
    index_dim=32,
    index_topk=128,
    experts=8,
    topk=2,
    expert_dim=96,
    yarn=Yarn(factor=16.0, original=256),
    max_positions=4096,
)

# The peers' CPU kernels fix head_dim 512, index_dim 128, 256 experts and top-6.
_BENCH_100M = dataclasses.replace(
    _FLASH,
    vocab=8192,
    dim=256,
    heads=8,
    q_rank=192,
    o_groups=2,
    o_rank=128,
    kinds=kinds_of("wch"),
    hash_layers=hashed(1, 3),
    mtp=0,
    index_heads=16,
    expert_dim=128,
    max_positions=65536,
    yarn=Yarn(factor=16.0, original=4096),
)

_BENCH_1B = dataclasses.replace(
    _BENCH_100M,
    vocab=32768,
    dim=512,
    heads=16,
    q_rank=384,
    o_groups=4,
    o_rank=256,
    kinds=kinds_of("wchchc"),
    hash_layers=hashed(2, 6),
    index_heads=32,
    expert_dim=384,
)


def preset(name: str) -> Config:
    """A named config: flash, pro, tiny, bench_1b or bench_100m. Raises ValueError for others."""
    table = {
        "flash": _FLASH,
        "pro": _PRO,
        "tiny": _TINY,
        "bench_1b": _BENCH_1B,
        "bench_100m": _BENCH_100M,
    }
    if name not in table:
        raise ValueError(f"no preset {name!r}; there are {', '.join(table)}")
    return table[name]
