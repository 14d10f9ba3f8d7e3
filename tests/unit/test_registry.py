"""The table of architectures. Ids J1, J5, ... are of the log of faults that others met."""

import logging
import multiprocessing
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from registry import registry as module
from registry.architecture import choose
from registry.names import ENTRIES
from registry.registry import Registry, Snapshot, default_registry

# Every name that the two engines register, and whose alias it is.
NAMES = [
    "Gemma4ForConditionalGeneration",
    "KimiLinearForCausalLM",
    "KimiK3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiK3MTPModel",
    "K3DSparkModel",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "DeepSeekV4MTPModel",
    "DSparkDraftModel",
    "DeepseekV41DSparkModel",
    "LlamaForCausalLMVwnEagle3",
    "Qwen3DSparkModel",
    "Glm5DSparkForCausalLM",
    "Qwen3OmniDSparkModel",
    "DFlash2DraftModel",
    "DeepSeekMTPModel",
    "DeepseekV32MTPModel",
    "GlmMoeDsaForCausalLM",
    "Eagle3LlamaForCausalLM",
    "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Glm5NextMTPModel",
    "LlamaForCausalLMEagle3",
]
BUILT = {"DeepseekV4ForCausalLM", "DeepSeekV4MTPModel"}


def test_all_names_are_there() -> None:
    assert len(NAMES) == 27
    table = Registry()
    assert {e.name for e in ENTRIES} == {*NAMES, "DSparkV41DraftModel"}
    assert len(ENTRIES) == 28
    for name in NAMES:
        entry = table.entry(name)
        assert entry.state == ("built" if name in BUILT else "planned")
        assert entry.target if name in BUILT else entry.needs


@pytest.mark.parametrize("name", sorted({*NAMES, "DSparkV41DraftModel"} - BUILT))
def test_a_planned_name_is_refused_with_what_it_needs(name: str) -> None:
    table = Registry()
    with pytest.raises(ValueError, match=f"'{name}'.* is planned, not built: ") as caught:
        table.lookup(name)
    assert table.entry(name).needs in str(caught.value)


@pytest.mark.parametrize("name", sorted(BUILT))
def test_a_built_name_has_a_builder(name: str) -> None:
    assert callable(Registry().builder(name))


def test_j6_both_names_of_one_draft_are_one_entry() -> None:
    table = Registry()
    assert table.entry("DSparkV41DraftModel") is table.entry("DeepseekV41DSparkModel")
    assert table.entry("KimiK3ForCausalLM") is table.entry("KimiLinearForCausalLM")
    with pytest.raises(ValueError, match=r"alias of DeepseekV41DSparkModel.*planned"):
        table.lookup("DSparkV41DraftModel")
    with pytest.raises(ValueError, match=r"alias of DeepseekV41DSparkModel; register that"):
        table.register("DSparkV41DraftModel", "a:b", override=True)


def test_j6_d11_an_unknown_name_is_refused_with_the_nearest() -> None:
    """D11 is the same for parser names, which this version has none of: list what is known."""
    with pytest.raises(ValueError, match=r"unknown; built: DeepSeekV4MTPModel.*nearest: Deepseek"):
        Registry().lookup("DeepSeekV4ForCausalLM")
    with pytest.raises(ValueError, match=r"'' is unknown"):
        Registry().lookup("")


def test_registration_is_lazy() -> None:
    table = Registry()
    table.register("MineForCausalLM", "no.such.module:build")
    assert "no" not in sys.modules
    assert table.lookup("MineForCausalLM").target == "no.such.module:build"
    with pytest.raises(ValueError, match=r"'no.such.module:build', which cannot be imported"):
        table.builder("MineForCausalLM")


def test_a_builder_must_be_there_and_callable(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = types.ModuleType("fake_builders")
    fake.build, fake.constant = len, 3
    monkeypatch.setitem(sys.modules, "fake_builders", fake)
    table = Registry()
    for i, attribute in enumerate(("build", "constant", "absent")):
        table.register(f"Mine{i}", f"fake_builders:{attribute}")
    assert table.builder("Mine0") is len
    for name in ("Mine1", "Mine2"):
        with pytest.raises(ValueError, match="not there or cannot be called"):
            table.builder(name)


def test_a_duplicate_is_refused_naming_the_winner() -> None:
    table = Registry()
    before = table.digest()
    with pytest.raises(ValueError, match=r"already served by registry.deepseek_v4:build .*a.b:c"):
        table.register("DeepseekV4ForCausalLM", "a.b:c")
    assert table.digest() == before


def test_the_same_registration_again_changes_nothing() -> None:
    table = Registry()
    before = table.snapshot()
    entry = table.entry("DeepseekV4ForCausalLM")
    assert table.register(entry.name, entry.target) == entry
    assert table.snapshot() == before
    with pytest.raises(ValueError, match=r"version 1"):
        table.register(entry.name, entry.target, version="2")


def test_j5_an_override_is_logged_once_at_info(caplog: pytest.LogCaptureFixture) -> None:
    table = Registry()
    name = "DeepseekV4ForCausalLM"
    with caplog.at_level(logging.INFO, logger="registry"):
        for _ in range(3):
            table.register(name, "mine.model:build", override=True)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    want = f"{name}: mine.model:build overrides registry.deepseek_v4:build"
    assert record.getMessage() == want
    (override,) = table.overrides(name)
    assert (override.winner, override.loser) == ("mine.model:build", "registry.deepseek_v4:build")
    assert table.overrides("DeepSeekV4MTPModel") == ()


def test_a_planned_name_can_be_filled() -> None:
    table = Registry()
    table.register("GlmMoeDsaForCausalLM", "mine:build")
    assert table.lookup("GlmMoeDsaForCausalLM").state == "built"
    assert table.overrides() == ()


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("Mine", "module", "must be 'module:attribute'"),
        ("Mine", "a:b:c", "must be 'module:attribute'"),
        ("Mine", ":b", "must be 'module:attribute'"),
        ("Mine", "a/b:c", "must be 'module:attribute'"),
        ("Mine", "__main__:build", "no other process can import"),
        ("", "a:b", "must be an identifier"),
        ("My Model", "a:b", "must be an identifier"),
    ],
)
def test_malformed_registrations_are_refused(name: str, target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Registry().register(name, target)


def test_the_digest_sees_every_difference() -> None:
    changes: list[Callable[[Registry], Any]] = [
        lambda r: None,
        lambda r: r.register("Mine", "a:b"),
        lambda r: r.register("Mine", "a:c"),
        lambda r: r.register("Mine", "a:b", version="2"),
        lambda r: r.register("DeepseekV4ForCausalLM", "a:b", override=True),
        lambda r: r.register("GlmMoeDsaForCausalLM", "a:b"),
    ]
    digests = []
    for change in changes:
        table = Registry()
        change(table)
        digests.append(table.digest())
    assert len(set(digests)) == len(digests)
    assert Registry(reversed(ENTRIES)).digest() == digests[0]


def _digests(snapshot: Snapshot) -> tuple[str, str]:
    """In another process: its own table, and the one it was handed."""
    return default_registry().digest(), Registry.restore(snapshot).digest()


def test_j1_j3_registries_of_processes_are_compared_and_travel() -> None:
    """Equal by default; a registration made here only shows, and a snapshot carries it over."""
    table = Registry()
    table.register("MineForCausalLM", "mine:build")
    table.register("DeepseekV4ForCausalLM", "mine:build", override=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        own, restored = pool.apply(_digests, (table.snapshot(),))
    assert own == Registry().digest()
    assert restored == table.digest()
    table.require(restored)
    with pytest.raises(ValueError, match=f"registry {table.digest()}, the other one {own}.*snap"):
        table.require(own)
    assert Registry.restore(table.snapshot()).overrides() == table.overrides()


def test_threads_agree_on_one_winner() -> None:
    table = Registry()
    start = threading.Barrier(8)
    outcome = []

    def register(i: int) -> None:
        start.wait()
        try:
            table.register("MineForCausalLM", f"mine:build_{i}")
            outcome.append(f"mine:build_{i}")
        except ValueError as error:
            outcome.append(error)

    threads = [threading.Thread(target=register, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    winners = [o for o in outcome if isinstance(o, str)]
    assert winners == [table.lookup("MineForCausalLM").target]
    assert len(outcome) == 8


def test_the_default_registry_is_one_and_untouched_by_others() -> None:
    assert default_registry() is default_registry()
    Registry().register("MineForCausalLM", "mine:build")
    assert module.digest() == Registry().digest()
    assert module.lookup("DeepseekV4ForCausalLM").state == "built"
    with pytest.raises(ValueError, match="already served"):
        module.register("DeepseekV4ForCausalLM", "a:b")


# From config.json to a name.


@pytest.mark.parametrize(
    ("raw", "name", "why"),
    [
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepseekV4ForCausalLM", "architectures in"),
        ({"architectures": ["Llama"], "model_type": "deepseek_v4"}, "Llama", "architectures in"),
        ({"model_type": "deepseek_v4"}, "DeepseekV4ForCausalLM", "architectures is absent"),
        ({"model_type": "deepseek_v41"}, "DeepseekV41ForCausalLM", "architectures is absent"),
        ({"text_config": {"model_type": "deepseek_v4"}}, "DeepseekV4ForCausalLM", "absent"),
    ],
)
def test_the_fields_name_the_architecture(raw: dict[str, Any], name: str, why: str) -> None:
    choice = choose(raw)
    assert choice.name == name
    assert why in choice.why[0]
    assert choose(raw, "DeepSeekV4MTPModel").name == "DeepSeekV4MTPModel"


@pytest.mark.parametrize("field", [{"vision_config": {"n_layers": 3}}, {"vision_n_layers": 24}])
def test_d12_a_vision_encoder_is_decided_from_fields_and_told(field: dict[str, Any]) -> None:
    text = {"architectures": ["DeepseekV4ForCausalLM"]}
    for raw in (text | field, text | {"text_config": field}):
        choice = choose(raw)
        assert choice.name == "DeepseekV4ForConditionalGeneration"
        assert next(iter(field)) in choice.why[1]
        with pytest.raises(ValueError, match="planned, not built: the vision encoder"):
            Registry().lookup(choice.name)
    assert (
        choose(text | {"vision_n_layers": 0, "vision_config": None}).name
        == text["architectures"][0]
    )


@pytest.mark.parametrize(
    "raw", [{}, {"architectures": []}, {"architectures": ["A", "B"]}, {"architectures": "A"}]
)
def test_a_file_that_names_no_architecture_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="architecture"):
        choose(raw)
