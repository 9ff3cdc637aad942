"""JSON lines of prompt and answer for `soupkit distill` and `report`, from CSV or JSONL files.

    python recipes/smollm2/lines.py --data a.csv --limit 400 --out smollm2/data/words-distill.jsonl
    python recipes/smollm2/lines.py --data dev.csv --without a.csv --out smollm2/data/heldout.jsonl

With --without, each prompt is taken once and none that is also in those files. The report compares
answers as text; evaluate.py, which takes any expression of the right value, finds a few more right.
"""

import argparse
import json
from pathlib import Path
from random import Random

from task import held_out, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--without", type=Path, nargs="+", help="the files of the training")
    parser.add_argument("--limit", type=int, help="so many lines, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    examples = load(options.data)
    if options.without:
        examples = held_out(load(options.without), examples)
    if options.limit is not None:
        Random(options.seed).shuffle(examples)
        examples = examples[: options.limit]
    rows = ({"prompt": example.prompt, "answer": example.answer} for example in examples)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.out}: {len(examples)} prompts")


if __name__ == "__main__":
    main()
