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
PARTS = ("train", "heldout")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", RECIPE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def task() -> ModuleType:
    return load("task")


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


def read_lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_orders_say_in_words_what_their_json_says() -> None:
    module = load("orders")
    rows = module.orders(300, seed=3)
    assert rows == module.orders(300, seed=3)
    for row in rows:
        sentence, answer = row["prompt"], json.loads(row["answer"])
        wanted = [answer["name"], answer["city"], *filter(None, [answer["day"]])]
        for one in answer["goods"]:
            counts = [str(one["count"]), *(w for w, n in module.WORTH.items() if n == one["count"])]
            goods = " ".join(filter(None, [one["size"], one["colour"], one["item"]]))
            assert any(f"{count} {goods}" in sentence for count in counts)
        assert all(word in sentence for word in wanted)
        assert (answer["day"] is None) == all(day not in sentence for day in module.DAYS.split())


def test_no_order_is_both_trained_and_held_out(tmp_path: Path) -> None:
    run("orders.py", "--out", str(tmp_path), "--train", "500", "--held-out", "800")
    train, held_out = (read_lines(tmp_path / f"orders-{part}.jsonl") for part in PARTS)
    prompts = {row["prompt"] for row in train} | {row["prompt"] for row in held_out}
    assert (len(train), len(held_out), len(prompts)) == (500, 800, 1300)


PAGE = """# tar

> Archiving utility.

- [c]reate an archive and write it to a file:

`tar cf {{path/to/target.tar}} {{path/to/file1 path/to/file2 ...}}`

- Extract verbosely:

`tar {{[-x|--extract]}} {{[-v|--verbose]}} < {{source.tar}}`
"""


def test_pages_become_tasks_and_commands_with_the_long_option(tmp_path: Path) -> None:
    page = tmp_path / "pages" / "common" / "tar.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)
    assert list(load("shell").entries(tmp_path / "pages")) == [
        (
            "tar",
            "[c]reate an archive and write it to a file",
            "tar cf path/to/target.tar path/to/file1 path/to/file2 ...",
        ),
        ("tar", "Extract verbosely", "tar --extract --verbose < source.tar"),
    ]


def test_held_out_commands_are_those_of_unseen_pages(tmp_path: Path) -> None:
    pages = tmp_path / "pages.jsonl"
    rows = [
        {"cmd": f"tool{i}", "desc": text, "code": f"tool{i} {text}"}
        for i in range(200)
        for text in ("start", "stop")
    ]
    pages.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    run("shell.py", "--pages", str(pages), "--out", str(tmp_path))
    train, held_out = (read_lines(tmp_path / f"shell-{part}.jsonl") for part in PARTS)
    tools = [{row["answer"].split()[0] for row in part} for part in (train, held_out)]
    assert tools[0].isdisjoint(tools[1])
    assert len(train) + len(held_out) == 400
    assert 5 <= len(tools[1]) <= 50
    assert {"prompt": "Task (tool0): stop\nCommand:", "answer": " tool0 stop"} in train + held_out


def test_lines_are_the_data_without_the_training(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "answer": f" {i}"} for i in (0, 1, 2, 2, 3, 4, 5)]
    for name, part in {"train": rows[:2], "data": rows}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    out, train = tmp_path / "out.jsonl", ("--without", str(tmp_path / "train.jsonl"))
    data = ("--data", str(tmp_path / "data.jsonl"), "--out", str(out))

    run("lines.py", *data, *train)
    assert [row["prompt"] for row in read_lines(out)] == ["2", "3", "4", "5"]
    run("lines.py", *data, "--limit", "3")
    drawn = read_lines(out)
    run("lines.py", *data, "--limit", "3", "--seed", "1")
    assert len(drawn) == 3
    assert drawn != read_lines(out)


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
