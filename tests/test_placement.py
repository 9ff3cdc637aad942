"""`soupkit plan`: bytes against cases worked by hand, and against files that are really written."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from soupkit.checkpoint import open_checkpoint
from soupkit.cli import app
from soupkit.export import export_variant
from soupkit.placement import KNOWN, plan, shape_for, shape_of

BY_NAME = {shape.name: shape for shape in KNOWN}


def run(*args: str):
    return CliRunner().invoke(app, ["plan", *args])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As the model cards count them.
        ("Llama-3.2-1B", 1_235_814_400),
        ("Llama-2-7B", 6_738_415_616),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-2-13B", 13_015_864_320),
        ("Llama-3.1-70B", 70_553_706_496),
    ],
)
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert BY_NAME[name].parameters == parameters


def test_an_adapter_of_the_paper_has_its_bytes() -> None:
    """algorithms.md 4.7.6: Llama-3.2-1B, attention, rank 32: 6.82 M numbers, 27.3 MB in float32."""
    found = plan(BY_NAME["Llama-3.2-1B"], adapters=1, rank=32, itemsize=4).items[1]
    assert found.nbytes == 4 * 32 * 16 * (4096 + 2560 + 2560 + 4096) == 27_262_976


def test_sixteen_gigabytes_hold_a_7b_base_and_eight_profiles() -> None:
    """The document's device; by hand: 8 x 2 x 32 x 32 x 4 x 8192 = 0.54 GB beside 13.48 GB."""
    found = plan(shape_for(7e9), adapters=8, rank=32, budget_bytes=16 * 10**9)
    assert found.total == 2 * 6_738_415_616 + 8 * 67_108_864
    assert found.fits
    assert found.more == {"LoRA adapter, rank 32, attention": 37}
    wide = plan(shape_for(7e9), variants=8, budget_bytes=16 * 10**9)
    assert not wide.fits
    assert list(wide.more.values()) == [2]


def test_a_variant_has_the_bytes_of_one_that_is_exported(
    make_llama, make_finetune, tmp_path
) -> None:
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16)
    finetuned = make_finetune(tmp_path / "ft", base)
    report = export_variant(
        open_checkpoint(base), open_checkpoint(finetuned), family=tmp_path / "f", name="x"
    )
    manifest = json.loads((report.path / "manifest.json").read_text())
    stored = sum(entry["bytes"] for entry in manifest["tensors"])
    shape = shape_of(json.loads((base / "config.json").read_text()), "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    assert shape.parameters == sum(one.numel() for one in model.parameters())
    assert plan(shape, variants=1).items[1].nbytes == stored


def test_the_command_line_tells_it(tmp_path) -> None:
    told = run("--params", "7e9", "--adapters", "8", "--rank", "32", "--budget-bytes", "16GB")
    assert told.exit_code == 0
    assert "Llama-2-7B" in told.stdout
    assert "it fits into 16.0 GB" in told.stdout
    document = json.loads(run("--params", "7e9", "--variants", "14", "--json").stdout)
    assert [item["what"] for item in document["items"]] == ["base, bf16", "1-bit variant"]
    assert document["bytes"] == sum(item["bytes"] for item in document["items"])
    assert run().exit_code == 2
    assert run("--params", "nan").exit_code == 1
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    odd = run("--base", str(tmp_path))
    assert (odd.exit_code, len(odd.stderr.splitlines())) == (1, 1)
    assert run("--base", str(tmp_path / "gone")).exit_code == 1


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"hidden_size": "x"}',
        '{"num_hidden_layers": 0}',
        '{"vocab_size": 1e400}',
        '{"num_attention_heads": 128}',  # no width is left for a head
        '{"num_key_value_heads": -2}',
        '{"num_key_value_heads": 3}',
        '{"num_attention_heads": 0}',
    ],
)
@pytest.mark.parametrize("more", [(), ("--gpus", "2", "--gpu-bytes", "1e9")])
def test_a_config_that_is_none_is_named_in_a_line(tmp_path, text, more) -> None:
    config = {
        "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "num_hidden_layers": 2, "vocab_size": 100,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert run("--base", str(tmp_path), "--variants", "2", *more).exit_code == 0
    is_object = text.startswith("{") and text != "{"
    file.write_text(json.dumps(config | json.loads(text)) if is_object else text)
    told = run("--base", str(tmp_path), "--variants", "2", *more)
    assert (told.exit_code, len(told.stderr.splitlines())) == (1, 1), told.exception
    assert tmp_path.name in told.stderr
