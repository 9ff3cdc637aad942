"""Held-out JSON lines of prompt and answer for `soupkit report`, from CSV or JSONL files.

    python recipes/smollm2/heldout.py --train a.csv --data dev.csv --out smollm2/heldout.jsonl

Prompts that are also training prompts are left out, and each is taken once. The report compares
answers as text; evaluate.py, which takes any expression of the right value, finds a few more right.
"""

import argparse
import json
from pathlib import Path

from task import held_out, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="held-out files")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    examples = held_out(load(options.train), load(options.data))
    rows = ({"prompt": example.prompt, "answer": example.answer} for example in examples)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.out}: {len(examples)} held-out prompts")


if __name__ == "__main__":
    main()
