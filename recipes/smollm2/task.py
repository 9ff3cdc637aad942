"""Prompts and answers from CSV or JSONL files, and when an answer is right.

CSV: arithmetic word problems in SVAMP's layout (columns Question, Numbers, Equation, Answer). The
model writes the expression, e.g. `( 7 + 2 ) * 3`; it is right when its value is the answer's.
JSONL: one {"prompt": ..., "answer": ...} a line; an answer is right when it equals the given one.
"""

import ast
import csv
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Example:
    prompt: str
    answer: str
    value: float | None  # what the answer evaluates to; None: compare the text

    def is_right(self, text: str) -> bool:
        if self.value is None:
            return text.strip() == self.answer
        value = evaluate(text)
        return value is not None and math.isclose(value, self.value, rel_tol=1e-3, abs_tol=1e-6)


def evaluate(expression: str) -> float | None:
    """The value of + - * / and parentheses over numbers; None for anything else."""

    def walk(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](walk(left), walk(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -walk(operand)
        raise ValueError(ast.dump(node))

    try:
        return walk(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def infix(tokens: list[str]) -> str:
    """Prefix notation (`+ 7 * 2 3`) to fully parenthesised infix; consumes the tokens it used."""
    head = tokens.pop(0)
    if head not in "+-*/":
        return head
    left, right = infix(tokens), infix(tokens)
    return f"( {left} {head} {right} )"


def word_problem(row: dict[str, str]) -> Example:
    question, equation = row["Question"], row["Equation"].split()
    numbers = [n.removesuffix(".0") for n in row["Numbers"].split()]
    # From the last to the first: number1 is a prefix of number10.
    for index in reversed(range(len(numbers))):
        question = question.replace(f"number{index}", numbers[index])
    tokens = [numbers[int(t[6:])] if t.startswith("number") else t for t in equation]
    expression = infix(tokens).removeprefix("( ").removesuffix(" )")  # the outermost pair
    return Example(f"Problem: {question}\nExpression:", f" {expression}", evaluate(expression))


def load(paths: Sequence[Path]) -> list[Example]:
    examples = []
    for path in paths:
        with path.open(newline="") as file:
            if path.suffix == ".csv":
                examples += [word_problem(row) for row in csv.DictReader(file)]
            else:
                rows = [json.loads(line) for line in file if line.strip()]
                examples += [Example(row["prompt"], row["answer"], None) for row in rows]
    return examples


def held_out(train: Sequence[Example], candidates: Sequence[Example]) -> list[Example]:
    """The candidates whose prompt is not also a training prompt, and each prompt once."""
    seen = {example.prompt for example in train}
    fresh = []
    for example in candidates:
        if example.prompt not in seen:
            seen.add(example.prompt)
            fresh.append(example)
    return fresh


def encode(examples: Sequence[Example], tokenizer) -> list[dict[str, list[int]]]:
    """Prompt + answer + end of text; labels are -100 on the prompt, so only answers are learned."""
    rows = []
    for example in examples:
        prompt = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return rows


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Right-padded batch; padding is masked and carries no loss."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(key: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", -100),
        "attention_mask": torch.tensor(mask),
    }
