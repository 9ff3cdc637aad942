"""The HTML page of a quality report: tables of every figure and, with matplotlib, plots of them.

One file that asks no network for anything: no script, plots as SVG in data URLs. The same document
gives the same bytes with the same matplotlib. What is measured, and how, is soupkit.report's.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.7rem 0 1.2rem; }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; }
.met { color: #17692c; } .not { color: #a3201b; } .open { color: #7a5b00; }
figure { display: inline-block; margin: 0 1rem 1rem 0; } img { max-width: 100%; }
"""
TITLES = (
    "model",
    "encoding",
    "bytes",
    "of bf16",
    "loss",
    "KL",
    "KL of row",
    "KL verdict",
    "exact match",
    "only here / only full",
    "difference, 95 %",
    "verdict",
)
_PLACES = (1, 2, 4, 8, 16, 32, 64)
_CLASSES = {"met": "met", "not met": "not", "undecided": "open"}


def cells(result: Mapping[str, Any]) -> list[str]:
    """One result of a report as the texts of TITLES; "" for what does not apply."""

    def told(key: str, form: Callable[[Any], str]) -> str:
        return "" if result[key] is None else form(result[key])

    discordant, difference = "", ""
    if result["interval"] is not None:
        low, high = (100 * limit for limit in result["interval"])
        discordant = f"{result['only_here']} / {result['only_full']}"
        difference = f"{100 * result['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"
    return [
        result["model"],
        result["encoding"] or "",
        told("bytes", "{:,}".format),
        told("share", lambda share: f"1/{1 / share:.1f}" if share else "0"),
        told("loss", "{:.4f}".format),
        told("kl", "{:.5f}".format),
        told("kl_of_row", "{:.3f}".format),
        result["kl_verdict"] or "",
        told("exact_match", "{:.2%}".format),
        discordant,
        difference,
        result["verdict"] or "",
    ]


def legend(document: Mapping[str, Any]) -> list[str]:
    """What the columns mean and what the goal is, in sentences."""
    goal, data = document["goal"], document["data"]
    points = -100 * goal["difference"]
    lines = [
        "Loss and KL(full || model): nats an answer token, float32 weights. KL of row: over that "
        "of plain row scales, one bit a weight (--encoding row measures them beside a distilled "
        "variant); the goal is 1/2 for a distilled plane, 1/4 for two planes.",
        "Exact match: greedy. Difference: points of exact match to the full fine-tune, "
        f"{document['interval']}.",
        f"Goal: at most {points:g} points below the full fine-tune. Met or not met if the whole "
        "interval is on one side of that, else undecided.",
    ]
    if data["prompts"] < goal["prompts"]:
        lines.append(
            f"The data have {data['prompts']:,} prompts; the goal is judged on {goal['prompts']:,}."
        )
    return lines


def layer_rows(variant: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(titles, rows) of the relative residual energy by layer."""
    shown = [one for one in variant["results"] if one["layers"]]
    labels = list(dict.fromkeys(label for one in shown for label in one["layers"]))
    rows = [
        [label, *(_number(one["layers"].get(label), "{:.4f}") for one in shown)] for label in labels
    ]
    return ["layer", *(one["model"] for one in shown)], rows


def frontier_rows(variant: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(titles, rows) of what other budgets would buy, of models exported under one."""
    rows = [
        [
            result["model"],
            f"{point['budget_bytes']:,}",
            f"{point['bytes']:,}",
            _number(point["lost_energy"], "{:.4f}"),
        ]
        for result in variant["results"]
        for point in result["frontier"]
    ]
    return ["model", "budget, bytes", "variant.safetensors, bytes", "lost energy"], rows


def spectrum_rows(variant: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(titles, rows) of singular values over the largest."""
    rows = []
    for name, values in variant["spectra"].items():
        shares = [values[k - 1] / (values[0] or 1.0) if k <= len(values) else None for k in _PLACES]
        rows.append([name, *(_number(share, "{:.4f}") for share in shares)])
    return ["delta of", *(f"value {k}" for k in _PLACES)], rows


def render(document: Mapping[str, Any]) -> str:
    """The page of a report's document."""
    data = document["data"]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>soupkit report</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>Quality of {html.escape(document['family'])}</h1>",
        f"<p>{html.escape(data['path'])}: {data['examples']:,} held-out examples, "
        f"{data['prompts']:,} of them prompts; {html.escape(data['digest'])}</p>",
        *(f"<p>{html.escape(line)}</p>" for line in legend(document)),
    ]
    for variant in document["variants"]:
        parts += _section(variant)
    parts.append(
        f"<p>soupkit {html.escape(document['soupkit'])}, torch {html.escape(document['torch'])}</p>"
        "</body></html>"
    )
    return "\n".join(parts) + "\n"


def _section(variant: Mapping[str, Any]) -> list[str]:
    full = variant["full"] or "not given: no KL and no difference"
    parts = [
        f"<h2>{html.escape(variant['name'])}</h2>",
        f"<p>Full fine-tune: {html.escape(full)}. {variant['answer_tokens']:,} answer tokens. The "
        f"model has {variant['model_bf16_bytes']:,} bytes in bf16.</p>",
        _table(TITLES, (cells(result) for result in variant["results"])),
        *_plots(variant),
    ]
    for title, (titles, rows) in (
        ("Relative residual energy, mean of a layer's deltas", layer_rows(variant)),
        ("Singular values over the largest", spectrum_rows(variant)),
        ("What a budget buys", frontier_rows(variant)),
    ):
        if rows:
            parts += [f"<h3>{html.escape(title)}</h3>", _table(titles, rows)]
    return parts


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _cell(text: str) -> str:
    kind = f' class="{_CLASSES[text]}"' if text in _CLASSES else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _plots(variant: Mapping[str, Any]) -> list[str]:
    """Figures as inline images; a sentence where matplotlib is absent."""
    try:
        import matplotlib
    except ImportError:
        return ["<p>No plots: matplotlib is not installed (extra train).</p>"]
    drawn = []
    # One salt for ids and no date: the same figures give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "soupkit"}):
        for title, draw in (
            ("residual energy by layer", _draw_layers),
            ("spectra of deltas", _draw_spectra),
            ("bytes against KL", _draw_bytes),
        ):
            image = _image(title, draw, variant)
            if image:
                drawn.append(f"<figure>{image}</figure>")
    return drawn


def _image(
    title: str, draw: Callable[[Any, Mapping[str, Any]], bool], variant: Mapping[str, Any]
) -> str:
    """One plot as an img element; "" if there is nothing to draw."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    canvas: Any = FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    if not draw(axes, variant):
        return ""
    axes.set_title(title)
    file = io.BytesIO()
    canvas.print_svg(file, metadata={"Date": None})
    data = base64.b64encode(file.getvalue()).decode("ascii")
    name = html.escape(f"{title}, {variant['name']}", quote=True)
    return f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'


def _draw_layers(axes: Any, variant: Mapping[str, Any]) -> bool:
    for result in variant["results"]:
        numbered = {int(k): v for k, v in result["layers"].items() if k.isdigit()}
        if numbered:
            axes.plot(list(numbered), list(numbered.values()), marker=".", label=result["model"])
    if not axes.lines:
        return False
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative residual energy")
    axes.legend(fontsize="small")
    return True


def _draw_spectra(axes: Any, variant: Mapping[str, Any]) -> bool:
    for name, values in variant["spectra"].items():
        shares = [value / values[0] for value in values if value > 0]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker=".", markersize=3, label=name)
    if not axes.lines:
        return False
    axes.set_yscale("log")
    axes.set_xlabel("singular value")
    axes.set_ylabel("over the largest")
    axes.legend(fontsize="x-small")
    return True


def _draw_bytes(axes: Any, variant: Mapping[str, Any]) -> bool:
    for result in variant["results"]:
        # A KL of 0 has no place on a log axis.
        if result["bytes"] and result["kl"]:
            axes.plot(result["bytes"] / 1e6, result["kl"], marker="o", linestyle="")
            axes.annotate(result["model"], (result["bytes"] / 1e6, result["kl"]), fontsize="small")
    if not axes.lines:
        return False
    axes.margins(0.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("variant.safetensors, MB")
    axes.set_ylabel("KL(full || model), nats a token")
    return True
