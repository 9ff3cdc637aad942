"""The recipes: what they count as a right answer, and that they run from start to end."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import serving_kit

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "smollm2"


@pytest.fixture(scope="module")
def task() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_task", RECIPE / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expression", "value"),
    [("7 + 2", 9), (" ( 7 + 2 ) * 3", 27), ("-4 / 8", -0.5), ("6", 6), ("1.5 * 2", 3)],
)
def test_an_expression_is_worth_its_value(task: ModuleType, expression: str, value: float) -> None:
    assert task.evaluate(expression) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "7 +", "1 / 0", "x + 1", "__import__('os')", "2 ** 9", "(" * 10_000, "True + 1j"]
)
def test_what_is_no_arithmetic_has_no_value(task: ModuleType, text: str) -> None:
    assert task.evaluate(text) is None


def test_a_word_problem_becomes_an_infix_expression(task: ModuleType) -> None:
    row = {
        "Question": "number0 bags of number1 and number10 more ?",
        "Numbers": " ".join(str(n) + ".0" for n in range(2, 13)),
        "Equation": "+ * number0 number1 number10",
    }
    example = task.word_problem(row)
    assert example.prompt == "Problem: 2 bags of 3 and 12 more ?\nExpression:"
    assert example.answer == " ( 2 * 3 ) + 12"
    assert example.is_right("12 + 2 * 3")
    assert not example.is_right("2 * ( 3 + 12 )")


def test_held_out_prompts_are_new_and_counted_once(task: ModuleType) -> None:
    a, b, c = (task.Example(prompt, "x", None) for prompt in "abc")
    assert task.held_out([a], [a, b, c, b]) == [b, c]


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(RECIPE / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_smollm2_recipe_slice_trains_exports_and_serves_a_tiny_model(tmp_path: Path) -> None:
    base = serving_kit.make_base(tmp_path / "base")
    tokenizer = serving_kit.make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(base)
    rows = [{"prompt": f"{i} times 2 is", "answer": f" {2 * i}"} for i in range(180)]
    for name, part in {"train": rows[:160], "dev": rows[150:]}.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)
    train, data = str(tmp_path / "train.jsonl"), str(tmp_path / "dev.jsonl")
    shared = ("--out", str(tmp_path), "--name", "double", "--train", train)

    run("finetune.py", "--base", str(base), *shared, "--steps", "8", "--merge-every", "2")
    printed = run("evaluate.py", *shared, "--data", data)

    assert "20 held-out prompts" in printed
    assert "equal to the restored model's: 20 of 20" in printed
    lines = tmp_path / "heldout.jsonl"
    assert "20 held-out" in run("heldout.py", "--train", train, "--data", data, "--out", str(lines))
    assert [json.loads(line) for line in lines.read_text().splitlines()] == rows[160:]
