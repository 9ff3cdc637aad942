"""What the fine-tuning recipes share: data, what is refused at once, which checkpoint is next."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import serving_kit

PATH = Path(__file__).resolve().parents[1] / "recipes" / "sft_kit.py"
NEEDED = ["--data", "d.jsonl", "--family", "f", "--name", "n"]


@pytest.fixture(scope="module")
def kit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sft_kit", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parse(kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    base = tmp_path / "b"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')

    def parsed(*more: str):
        words = ["recipe", "--base", str(base), *NEEDED, "--out", str(tmp_path / "run"), *more]
        monkeypatch.setattr(sys, "argv", words)
        return kit.parse(kit.flags("A recipe.\nMore of it."))

    return parsed


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def test_only_answers_are_learned_and_the_last_tenth_is_held_out(kit, parse, tmp_path) -> None:
    rows = [{"prompt": f"{i}:", "answer": "a\u2028b"} for i in range(20)]
    options = parse("--data", write(tmp_path / "rows.jsonl", rows))
    train, held_out = kit.load_rows(options, serving_kit.TOKENIZER)
    assert (len(train), len(held_out)) == (18, 2)
    row = held_out[-1]
    text = serving_kit.TOKENIZER.decode(row["input_ids"])
    assert text == "19:a\u2028b</s>"
    assert row["labels"] == [-100] * 3 + row["input_ids"][3:]


def test_a_prompt_that_leaves_no_room_for_its_answer_is_left_out(
    kit, parse, tmp_path, capsys
) -> None:
    rows = [{"prompt": "p" * length, "answer": "abc"} for length in (3, 8, 7, 12, 2)]
    options = parse("--data", write(tmp_path / "rows.jsonl", rows), "--max-length", "8")
    train, held_out = kit.load_rows(options, serving_kit.TOKENIZER)
    assert [len(row["input_ids"]) for row in train + held_out] == [7, 8, 6]
    assert all(len(row["labels"]) == len(row["input_ids"]) for row in train + held_out)
    assert all(row["labels"][-1] != -100 for row in train + held_out)
    assert "2 prompts leave no answer" in capsys.readouterr().out


def test_rows_of_a_batch_are_padded_and_padding_is_not_learned(kit) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = {name: tensor.tolist() for name, tensor in kit.collate(rows).items()}
    assert batch == {
        "input_ids": [[5, 6, 7], [8, 0, 0]],
        "labels": [[-100, 6, 7], [8, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }


def test_a_data_set_is_read_by_its_columns(kit, parse, tmp_path, monkeypatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sums").mkdir()
    write(tmp_path / "sums" / "train.jsonl", [{"question": "1+1", "value": "2"}] * 3)
    options = parse("--data", str(tmp_path / "sums"), "--columns", "question", "value")
    assert kit.read(options) == [("1+1", "2")] * 3


@pytest.mark.parametrize(
    "row", [{"prompt": "a"}, {"prompt": "a", "answer": 3}, ["prompt", "answer"], "text", None]
)
def test_a_line_that_is_no_example_is_named(kit, parse, tmp_path, row) -> None:
    data = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}, row])
    with pytest.raises(SystemExit, match=r'rows\.jsonl, line 2: needs {"prompt": "'):
        kit.read(parse("--data", data))


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(kit, parse) -> None:
    with pytest.raises(SystemExit, match="no such file"):
        kit.read(parse())


def test_too_few_examples_are_refused(kit, parse, tmp_path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(SystemExit, match="1 usable examples: two are the least"):
        kit.load_rows(parse("--data", data), serving_kit.TOKENIZER)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rank", "4", "--energy", "0.9"), "give one of the two"),
        (("--method", "ema", "--feed-back"), "never sees"),
        (("--method", "tea"), "method"),
        (("--encoding", "row-x9"), "row-x9"),
        (("--name", "base"), "kept for the base"),
        (("--merge-every", "0"), "merge_every_n_steps"),
        (("--base", "/no/model"), "--base /no/model is no folder of a model, nor one of the hub"),
        (("--base", "no/model"), "--base no/model is no folder of a model, nor one of the hub"),
    ],
)
def test_what_soupkit_refuses_is_told_before_anything_is_loaded(parse, capsys, words, says) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_run_goes_on_from_its_newest_complete_checkpoint_if_asked(
    kit, parse, tmp_path, capsys
) -> None:
    out = tmp_path / "run"
    assert parse("--resume").checkpoint is None
    for step, name in ((9, "complete"), (10, "trainer_state.json"), (11, "model.safetensors")):
        folder = out / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / name).touch()
    assert parse("--resume").checkpoint == out / "checkpoint-10"
    with pytest.raises(SystemExit):
        parse()
    assert "checkpoint-10 is of an earlier run: add --resume" in capsys.readouterr().err


def test_the_two_newest_checkpoints_are_kept(kit, tmp_path) -> None:
    for step in (8, 9, 10, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        kit.mark_complete(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-100"}


def test_a_failure_names_what_is_kept(kit, parse, tmp_path, capsys) -> None:
    options = parse("--steps", "9")

    def fail() -> str:
        with pytest.raises(OSError, match="full"), kit.nothing_lost(options):
            raise OSError("full")
        return capsys.readouterr().out

    assert fail() == ""
    for step, says in ((4, "will go on from there"), (9, "will export again")):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        kit.mark_complete(folder)
        assert f"checkpoint-{step} is complete: the same command with --resume {says}" in fail()
