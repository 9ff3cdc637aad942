"""Generated orders in plain words and their JSON: a task that a small model can learn wholly.

    python recipes/smollm2/orders.py --out smollm2/data

Writes orders-train.jsonl and orders-heldout.jsonl, of two seeds; no order is in both.
"""

import argparse
import json
from collections.abc import Set
from pathlib import Path
from random import Random

TRAIN_SEED, HELD_OUT_SEED = 1, 2

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve")
WORTH = dict(zip(NUMBERS, (*range(1, 11), 12), strict=True))
ITEMS = "mug plate lamp chair desk towel pillow basket kettle clock vase mirror blanket tray bowl"
COLOURS = "red blue green black white grey yellow brown"
SIZES = "small medium large"
NAMES = "Anna Ben Carla David Elif Farid Greta Hugo Ines Jonas Kemal Lena Mira Nils Olga Pavel"
CITIES = "Graz Lyon Porto Turin Ghent Oslo Krakow Zadar Basel Cork Malmo Leipzig"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday"
FORMS = (
    "Please send {goods} to {name} in {city}{day}.",
    "{name} from {city} would like {goods}{day}.",
    "Could you ship {goods} to {city}{day}? They are for {name}.",
    "I need {goods}{day}. My name is {name} and I live in {city}.",
)


def order(random: Random) -> dict[str, str]:
    """One order as {"prompt", "answer"}: one or two goods, a size and a day only now and then."""

    def one_of(words: str) -> str:
        return random.choice(words.split())

    goods, told = [], []
    for _ in range(random.choice((1, 1, 2))):
        item, colour = one_of(ITEMS), one_of(COLOURS)
        size = one_of(SIZES) if random.random() < 0.5 else None
        word = random.choice(NUMBERS)
        count = WORTH[word]
        written = word if random.random() < 0.5 else str(count)
        told.append(
            " ".join(filter(None, (written, size, colour, item if count == 1 else f"{item}s")))
        )
        goods.append({"item": item, "count": count, "colour": colour, "size": size})
    name, city = one_of(NAMES), one_of(CITIES)
    day = one_of(DAYS) if random.random() < 0.6 else None
    sentence = random.choice(FORMS).format(
        goods=" and ".join(told), name=name, city=city, day=f" by {day}" if day else ""
    )
    answer = {"name": name, "city": city, "day": day, "goods": goods}
    return {"prompt": f"Order: {sentence}\nJSON:", "answer": f" {json.dumps(answer)}"}


def orders(count: int, *, seed: int, without: Set[str] = frozenset()) -> list[dict[str, str]]:
    """So many orders of different prompts, none of them in `without`."""
    random = Random(seed)
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        one = order(random)
        if one["prompt"] not in without:
            found[one["prompt"]] = one
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--train", type=int, default=600, help="orders to train on")
    parser.add_argument("--held-out", type=int, default=1200)
    options = parser.parse_args()
    train = orders(options.train, seed=TRAIN_SEED)
    seen = frozenset(one["prompt"] for one in train)
    held_out = orders(options.held_out, seed=HELD_OUT_SEED, without=seen)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("heldout", held_out)):
        path = options.out / f"orders-{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} orders")


if __name__ == "__main__":
    main()
