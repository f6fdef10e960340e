"""Two models with as few weights as possible: what each mode loads, and that no mode changes a number."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from peft import get_peft_model
from tests import tiny
from tests.unit.auditing.making import CHECKED, LoraConfig, encodings, literal, move, plain, write_adapter

from holdfast.auditing import pair as pair_module
from holdfast.auditing.measure import measure_pair
from holdfast.auditing.pair import open_pair
from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.models.handle import load_model

ROWS = encodings(9)
COLUMNS = ("nll_before", "nll_after", "first_before", "first_after")


@pytest.fixture(scope="module")
def second(tmp_path_factory, base):
    return write_adapter(tmp_path_factory.mktemp("second"), base, seed=6, config=tiny.lora(modules_to_save=["lm_head"]))


def measured(before, after, *, kl=True, batch_tokens=40, **options):
    with open_pair(before, after, device="cpu", **options) as pair:
        return pair, measure_pair(pair, ROWS, first_k=2, kl=kl, batch_tokens=batch_tokens)


def agrees(found, before, after):
    for i, row in enumerate(ROWS):
        expected = literal(before, after, row, 2)
        for unit in CHECKED:
            assert found.degradation(unit)[i] == pytest.approx(expected[unit], abs=2e-5), unit
    assert np.ptp(found.degradation("nll_sum")) > 0.1


def test_an_adapter_on_its_base_loads_the_base_once(base, adapter, monkeypatch):
    loads = counted(monkeypatch)
    pair, found = measured(base, adapter)
    assert (pair.mode, len(loads), pair.dtype) == ("adapter", 1, "float32")
    agrees(found, plain(base), plain(adapter, base))
    assert found.tokens.tolist() == [row.n_labels for row in ROWS]
    assert found.first_tokens.tolist() == [min(2, row.n_labels) for row in ROWS]


def test_adapter_off_is_the_base_bit_for_bit(base, adapter):
    _, switched = measured(base, adapter)
    pair, alone = measured(base, base)
    assert pair.mode == "one model"
    assert np.array_equal(switched.nll_before, alone.nll_before)
    assert np.array_equal(switched.first_before, alone.first_before)
    assert not np.array_equal(switched.nll_after, alone.nll_after)


def test_adapter_off_is_the_base_bit_for_bit_where_the_adapter_has_its_own_head(base, second):
    _, switched = measured(base, second)
    _, alone = measured(base, base)
    assert np.array_equal(switched.nll_before, alone.nll_before)
    agrees(switched, plain(base), plain(second, base))


def test_the_adapter_may_be_the_before_side(base, adapter):
    pair, found = measured(adapter, base)
    assert pair.mode == "adapter"
    agrees(found, plain(adapter, base), plain(base))


def test_two_adapters_share_a_base_and_are_switched(base, adapter, second, monkeypatch):
    loads = counted(monkeypatch)
    pair, found = measured(adapter, second)
    assert (pair.mode, len(loads)) == ("two adapters", 1)
    agrees(found, plain(adapter, base), plain(second, base))
    _, back = measured(second, adapter)
    agrees(back, plain(second, base), plain(adapter, base))


def test_a_model_against_itself_is_exactly_zero(base, monkeypatch):
    loads = counted(monkeypatch)
    pair, found = measured(base, base)
    assert (pair.mode, len(loads)) == ("one model", 1)
    assert all(not found.degradation(unit).any() for unit in CHECKED)


def test_a_copy_of_a_base_is_that_base(base, adapter, tmp_path):
    copy = shutil.copytree(base, tmp_path / "copy")
    assert open_pair(copy, adapter, device="cpu").mode == "adapter"
    assert open_pair(copy, base, device="cpu").mode == "one model"


def test_two_models_are_never_in_memory_together(base, other, monkeypatch):
    loads = counted(monkeypatch)
    with open_pair(base, other, device="cpu") as pair:
        assert pair.mode == "two models"
        seen = []
        for name, _model in pair.sides():
            # The weights of a freed model are gone even where a caller still names it.
            seen.append((name, [str(next(m.parameters()).device) for m in loads]))
        found = measure_pair(pair, ROWS, first_k=2)
    assert seen == [("before", ["cpu"]), ("after", ["meta", "cpu"])]
    assert found.kl is None
    with pytest.raises(UnsupportedError, match="kl_token was not measured"):
        found.degradation("kl_token")


def test_two_models_are_held_together_for_kl_and_agree_with_one_at_a_time(base, other):
    pair, held = measured(base, other)
    assert pair.mode == "two models"
    agrees(held, plain(base), plain(other))
    _, apart = measured(base, other, kl=False)
    for name in COLUMNS:
        assert np.array_equal(getattr(held, name), getattr(apart, name)), name


def test_an_adapter_whose_biases_are_trained_is_not_switched_off(other, tmp_path):
    torch.manual_seed(0)
    config = tiny.LlamaConfig(**{**tiny.model().config.to_dict(), "attention_bias": True})
    base = tmp_path / "biased"
    tiny.LlamaForCausalLM(config).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    adapter = write_adapter(tmp_path / "adapter", base, config=tiny.lora(bias="lora_only"))
    pair, found = measured(base, adapter)
    assert pair.mode == "two models"
    agrees(found, plain(base), plain(adapter, base))


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_takes_a_part_of_the_base_is_not_switched_off(base, adapter, tmp_path, start):
    changed = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": start}))
    assert open_pair(base, changed, device="cpu").mode == "two models"


def test_an_adapter_trained_on_an_adapter_rests_on_the_merged_one(base, adapter, tmp_path):
    merged = load_model(adapter)
    on_top = move(get_peft_model(merged, tiny.lora()), 0.3)
    on_top.save_pretrained(tmp_path / "top")
    pair, found = measured(adapter, tmp_path / "top")
    assert pair.mode == "adapter"
    agrees(found, load_model(adapter), on_top.eval())
    pair, back = measured(tmp_path / "top", adapter)
    assert pair.mode == "adapter"
    agrees(back, on_top.eval(), load_model(adapter))


def test_models_in_memory(base, other):
    before, after = tiny.model(), tiny.model(seed=1)
    pair, found = measured(before, after, processing_class=tiny.tokenizer())
    assert pair.mode == "two models"
    agrees(found, before.eval(), after.eval())
    assert next(before.parameters()).device.type == "cpu"
    assert pair.before.sha256 != pair.after.sha256
    with pytest.raises(ConfigError, match="without a tokenizer"):
        open_pair(before, after)


@pytest.mark.parametrize("inner", [False, True])
def test_a_peft_model_in_memory_is_its_own_before(inner):
    adapted = move(get_peft_model(tiny.model(), tiny.lora(dropout=0.5)), 0.3).train()
    before = adapted.get_base_model()
    pair, found = measured(before, adapted, processing_class=tiny.tokenizer())
    assert pair.mode == "adapter"
    assert adapted.training
    adapted.eval()
    agrees(found, tiny.model().eval(), adapted)


def test_strength_scales_the_change_of_the_weights(base, adapter):
    with open_pair(base, adapter, device="cpu") as pair:
        full = measure_pair(pair, ROWS, first_k=2)
        for strength in (0.0, 0.5):
            pair.set_strength(strength)
            found = measure_pair(pair, ROWS, first_k=2)
            expected = plain(base)
            state = torch.no_grad()
            with state:
                for name, module in plain(adapter, base).named_modules():
                    if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
                        delta = strength * 2.0 * module.lora_B["default"].weight @ module.lora_A["default"].weight
                        expected.get_submodule(name.removeprefix("base_model.model.")).weight += delta
            for i, row in enumerate(ROWS):
                assert found.degradation("nll_sum")[i] == pytest.approx(
                    literal(plain(base), expected, row, 2)["nll_sum"], abs=2e-5
                )
        pair.set_strength(1.0)
        again = measure_pair(pair, ROWS, first_k=2)
    assert np.array_equal(full.nll_after, again.nll_after)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (tiny.lora(use_dora=True), "DoRA"),
        (tiny.lora(modules_to_save=["lm_head"]), "modules_to_save"),
        (tiny.lora(lora_bias=True), "lora_bias"),
    ],
)
def test_strength_is_refused_by_name(base, tmp_path, config, why):
    adapter = write_adapter(tmp_path / "adapter", base, config=config)
    with pytest.raises(UnsupportedError, match=why):
        open_pair(base, adapter, device="cpu").set_strength(0.5)


def test_strength_needs_the_base_as_before(base, other, adapter):
    with pytest.raises(UnsupportedError, match="before is not its base"):
        open_pair(other, adapter, device="cpu").set_strength(0.5)
    with pytest.raises(UnsupportedError, match="not an adapter"):
        open_pair(base, other, device="cpu").set_strength(0.5)


def test_figures_are_bound_to_the_precision_that_auto_means_here(base, adapter, monkeypatch):
    for fast, bound in (("float32", "float32"), ("bfloat16", "auto")):
        monkeypatch.setattr("holdfast.auditing.pair.fast_dtype", lambda device, fast=fast: fast)
        with open_pair(base, adapter, device="cpu") as pair:
            assert pair.bound_dtype == bound


def test_what_cannot_work_is_refused(base, adapter, tmp_path):
    with pytest.raises(UnsupportedError, match="float16"):
        open_pair(base, adapter, dtype="float16")
    half = tmp_path / "half"
    tiny.saved(half, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="fp16"):
        measured(base, half, kl=False)
    head = write_adapter(tmp_path / "head", base, config=LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UnsupportedError, match="output head"):
        measured(base, head)
    pickled = shutil.copytree(adapter, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="pickled"):
        open_pair(base, pickled)
    prompts = shutil.copytree(adapter, tmp_path / "prompts")
    config = json.loads((prompts / "adapter_config.json").read_text())
    (prompts / "adapter_config.json").write_text(
        json.dumps(config | {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4})
    )
    with pytest.raises(UnsupportedError, match="prompt-learning"):
        open_pair(base, prompts)


def test_differing_tokenizers_are_refused_until_one_is_chosen(base, tmp_path):
    changed = shutil.copytree(base, tmp_path / "changed")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace("<|end|>", "<eos>")
    tokenizer.save_pretrained(changed)
    with pytest.raises(CheckpointError, match="different chat templates:") as refused:
        open_pair(base, changed)
    assert refused.value.exit_code == 6
    assert open_pair(base, changed, tokenizer="before").tokenizers.before.chat_template == tiny.CHAT_TEMPLATE
    assert open_pair(base, changed, tokenizer="after").tokenizers.before.chat_template == tokenizer.chat_template
    own = open_pair(base, changed, tokenizer="own")
    assert own.tokenizers.own
    assert "+" in own.tokenizers.template_sha256
    with pytest.raises(ConfigError, match="'sme' is not a choice"):
        open_pair(base, changed, tokenizer="sme")


def counted(monkeypatch) -> list:
    """The models that are loaded from now on."""
    loads: list = []
    load = pair_module.load_model  # type: ignore[attr-defined]

    def loading(*args, **kwargs):
        loads.append(load(*args, **kwargs))
        return loads[-1]

    monkeypatch.setattr(pair_module, "load_model", loading)
    return loads


def test_a_pair_s_files_are_hashed_again(base, adapter, tmp_path):
    """What came in memory has no files; a file of either model that changed is named."""
    copy = shutil.copytree(adapter, tmp_path / "adapter")
    with open_pair(base, copy) as pair:
        pair.require_unchanged()
        config = copy / "adapter_config.json"
        config.write_text(config.read_text() + "\n", encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"adapter_config\.json was changed"):
            pair.require_unchanged()
    model = plain(base)
    with open_pair(model, model, processing_class=tiny.tokenizer()) as pair:
        pair.require_unchanged()
