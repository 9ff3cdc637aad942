"""Task descriptions and shell commands of tldr-pages, split by page: the held-out ones are unseen.

    python recipes/smollm2/shell.py --pages tldr/pages --out smollm2/data

PAGES is the folder `pages` of github.com/tldr-pages/tldr (CC BY 4.0), or a file of JSON lines with
keys cmd (the page), desc and code. Writes shell-train.jsonl and shell-heldout.jsonl.
"""

import argparse
import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

# In a page:  "- Create an archive:" and, after an empty line, "`tar cf {{target.tar}} {{file}}`".
ENTRY = re.compile(r"^- (.+?):?\n\n`(.+)`$", re.MULTILINE)
# "{{[-f|--file]}}" is one option, short or long; the long one is taken.
OPTION = re.compile(r"\{\{\[[^|\]]*\|([^\]]*)\]\}\}")
# One page of so many is held out.
HELD_OUT = 10


def entries(pages: Path) -> Iterator[tuple[str, str, str]]:
    """(page, description, command) of each entry, in the order of files and lines."""
    if pages.is_dir():
        for path in sorted(pages.rglob("*.md")):
            for text, code in ENTRY.findall(path.read_text(encoding="utf-8")):
                code = OPTION.sub(r"\1", code)
                yield path.stem, text, code.replace("{{", "").replace("}}", "")
        return
    with pages.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield row["cmd"], row["desc"], row["code"]


def is_held_out(page: str) -> bool:
    return int(sha256(page.encode()).hexdigest(), 16) % HELD_OUT == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=Path, required=True, help="folder or JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    options = parser.parse_args()
    parts: dict[str, dict[str, str]] = {"train": {}, "heldout": {}}
    for page, text, code in entries(options.pages):
        prompt = f"Task ({page}): {text}\nCommand:"
        parts["heldout" if is_held_out(page) else "train"].setdefault(prompt, f" {code}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        path = options.out / f"shell-{name}.jsonl"
        lines = (json.dumps({"prompt": prompt, "answer": rows[prompt]}) for prompt in rows)
        path.write_text("".join(line + "\n" for line in lines))
        print(f"{path}: {len(rows)} commands")


if __name__ == "__main__":
    main()
