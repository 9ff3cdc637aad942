"""What manifest.json of a variant says: every parameter of the model and how its delta is stored.

    delta = sum_p diag(scale_p) sign_p diag(column_p) + up down

Kinds: "same" (the base's own, nothing stored), "delta" (those of `<param>.sign`, `.scale`,
`.column`, `.up` and `.down` that its encoding has), "raw" (`<param>.raw`, the fine-tune's whole
tensor), "tied" (the same matrix as `source`, nothing stored). A manifest is read as hostile input:
whatever is wrong with it is one BundleError. Its own checksum finds damage that would still parse.
Schema 1 had signs with row or matrix scales only, as the kind "sign"; it is read as what it means.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from soupkit.checks import is_budget
from soupkit.config import check_variant_name
from soupkit.delta import layout
from soupkit.errors import BundleError
from soupkit.files import canonical_json
from soupkit.fingerprint import is_digest
from soupkit.forms import Encoding, SignScale
from soupkit.tensorfile import DTYPES, TensorSpec, is_count, is_shape

SCHEMA = 2
WEIGHTS_NAME = "variant.safetensors"
MANIFEST_NAME = "manifest.json"

Kind = Literal["same", "delta", "raw", "tied"]

_BITS = {
    "bit_order": "least significant bit first along in",
    "sign_of_zero": "+1",
    "pack_padding": "each row is padded to whole bytes; padding bits are never read",
}
# What a reader in another language has to know about the packed bytes, by schema.
ENCODING = {
    1: _BITS,
    SCHEMA: {**_BITS, "delta": "sum over planes of diag(scale) sign diag(column), plus up down"},
}
# Which figure of a report the bytes of a stored part belong to.
PART_KINDS = {
    "sign": "signs",
    "scale": "scales",
    "column": "scales",
    "up": "factors",
    "down": "factors",
    "raw": "raw",
}
_SINCE_SCHEMA_2 = {"rank", "encoding"}


def matrix_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """[out, in] of the matrix that a parameter's delta describes: [batch * out, in] of its layout.

    Raises:
        ValueError: a vector has none.
    """
    kind = layout(name, shape)
    if kind == "vector":
        raise ValueError(f"{name}: a tensor of shape {tuple(shape)} is no matrix")
    if kind == "experts":
        return shape[0] * shape[1], shape[2]
    return shape[0], math.prod(shape[1:])


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the low-rank factors of a fine-tune's tensor: its own if it has 16 bits, else float32."""
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """How one parameter is stored.

    Attributes:
        name: the parameter. kind: see the module. shape, dtype: of the fine-tune's tensor, dtype in
            the words of safetensors ("BF16"). planes: sign planes (0 if no signs). scale_axis:
            "row", "matrix", "column" or "rank1" (None if no signs). bytes: stored in the file.
            residual_energy: ||delta - decoded||^2 / ||delta||^2. source: of a tied parameter, the
            one it is the same as. rank: of the low-rank part (0 if none). encoding: the text form
            of the soupkit.encoding.Encoding that it was encoded with (None for other kinds).
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    planes: int = 0
    scale_axis: SignScale | None = None
    bytes: int = 0
    residual_energy: float = 0.0
    source: str | None = None
    rank: int = 0
    encoding: str | None = None

    def stored_specs(self) -> dict[str, TensorSpec]:
        """Names, dtypes and shapes of this parameter's tensors in variant.safetensors."""
        if self.kind == "raw":
            return {f"{self.name}.raw": TensorSpec(DTYPES[self.dtype], self.shape)}
        if self.kind != "delta":
            return {}
        rows, columns = matrix_shape(self.name, self.shape)
        parts: dict[str, TensorSpec] = {}
        if self.planes:
            # Experts have a matrix each in the one that is stored, so their scales are repeated.
            is_per_row = self.scale_axis in ("row", "rank1") or (
                self.scale_axis == "matrix" and layout(self.name, self.shape) == "experts"
            )
            width = rows if is_per_row else 1
            parts["sign"] = TensorSpec(torch.uint8, (self.planes, rows, -(-columns // 8)))
            parts["scale"] = TensorSpec(torch.float32, (self.planes, width))
            if self.scale_axis in ("column", "rank1"):
                parts["column"] = TensorSpec(torch.float32, (self.planes, columns))
        if self.rank:
            dtype = factor_dtype(DTYPES[self.dtype])
            parts["up"] = TensorSpec(dtype, (rows, self.rank))
            parts["down"] = TensorSpec(dtype, (self.rank, columns))
        return {f"{self.name}.{part}": spec for part, spec in parts.items()}


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that manifest.json says.

    Attributes:
        name: of the variant when it was written. base_fingerprint: of the base it belongs to.
        digest: content digest of variant.safetensors. tensors: one entry a parameter, sorted by
            name.
        companions: file name -> "sha256:<hex>". history: merges of the run, oldest first. metrics:
            of the run at its end. versions: of the packages that wrote it.
        budget: of an export under one, see soupkit.budget.Plan.to_json.
        per_module: a delta acts in its own module alone, also where the base ties its weight to
            another's, as LoRA does; never so in a file.
    """

    name: str
    base_fingerprint: str
    digest: str
    tensors: tuple[TensorEntry, ...]
    companions: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    per_module: bool = False

    def entries(self) -> dict[str, TensorEntry]:
        """The entries by parameter name."""
        return {entry.name: entry for entry in self.tensors}

    def stored_specs(self) -> dict[str, TensorSpec]:
        """What variant.safetensors must hold, by tensor name."""
        return {name: spec for entry in self.tensors for name, spec in entry.stored_specs().items()}

    def to_json(self) -> dict[str, Any]:
        """The document that from_json reads."""
        body = {
            "schema": SCHEMA,
            "name": self.name,
            "base_fingerprint": self.base_fingerprint,
            "digest": self.digest,
            "encoding": ENCODING[SCHEMA],
            "companions": dict(self.companions),
            "history": [dict(event) for event in self.history],
            "metrics": dict(self.metrics),
            "versions": dict(self.versions),
            "budget": dict(self.budget),
            "tensors": [{**asdict(entry), "shape": list(entry.shape)} for entry in self.tensors],
        }
        return {**body, "checksum": _checksum(body)}

    @classmethod
    def from_json(cls, document: Any) -> "Manifest":
        """Parse a manifest that may be hostile. Raises BundleError that says what is wrong."""
        _need(isinstance(document, dict), "is not a JSON object")
        schema = document.get("schema")
        _need(
            type(schema) is int and schema in ENCODING,
            f"has schema {schema!r}; known are 1 to {SCHEMA}",
        )
        body = {key: value for key, value in document.items() if key != "checksum"}
        try:
            checksum = _checksum(body)
        except ValueError as error:
            raise BundleError(f"manifest.json {error}") from None
        _need(
            document.get("checksum") == checksum,
            "does not match its checksum: it was damaged or edited",
        )
        try:
            check_variant_name(body.get("name"))  # type: ignore[arg-type]  # it checks the type
        except ValueError as error:
            raise BundleError(f"manifest.json: {error}") from None
        for key in ("base_fingerprint", "digest"):
            _need(is_digest(body.get(key)), f"has no {key}")
        _need(
            body.get("encoding") == ENCODING[schema],
            f"has the encoding {body.get('encoding')!r}; known is {ENCODING[schema]}",
        )
        for key, kind in (
            ("companions", dict),
            ("metrics", dict),
            ("versions", dict),
            ("history", list),
        ):
            _need(isinstance(body.get(key), kind), f"has no {key}")
        _need(is_budget(body.get("budget", {})), "has a budget of another form")
        _need(isinstance(body.get("tensors"), list), "lists no tensors")
        _need(
            all(isinstance(event, dict) for event in body["history"]),
            "has a history of other things than events",
        )
        for name, digest in body["companions"].items():
            _need(is_plain_file_name(name) and is_digest(digest), f"has the companion {name!r}")
        tensors = tuple(
            _entry(item if schema == SCHEMA else _upgraded(item)) for item in body["tensors"]
        )
        names = [entry.name for entry in tensors]
        _need(names == sorted(set(names)), "lists its tensors out of order or twice")
        return cls(
            name=body["name"],
            base_fingerprint=body["base_fingerprint"],
            digest=body["digest"],
            tensors=tensors,
            companions=body["companions"],
            history=tuple(body["history"]),
            metrics=body["metrics"],
            versions=body["versions"],
            budget=body.get("budget", {}),
        )


def itemise(folder: Path, entries: tuple[TensorEntry, ...]) -> dict[str, int]:
    """Bytes of a variant folder on disk, by kind; see soupkit.export.ExportReport."""
    sizes = dict.fromkeys(PART_KINDS.values(), 0)
    for entry in entries:
        for name, spec in entry.stored_specs().items():
            sizes[PART_KINDS[name.rpartition(".")[2]]] += spec.nbytes
    total = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    sizes["other"] = total - sum(sizes.values())
    return {**sizes, "total": total, "weights": (folder / WEIGHTS_NAME).stat().st_size}


def model_bf16_bytes(entries: tuple[TensorEntry, ...]) -> int:
    """Bytes that all unique parameters of the fine-tune take in bfloat16."""
    return 2 * sum(math.prod(entry.shape) for entry in entries if entry.kind != "tied")


def is_plain_file_name(name: str) -> bool:
    """Whether `name` is one visible path part, so that joined to a folder it stays inside."""
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\\0")


def _checksum(body: Mapping[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(canonical_json(body).encode()).hexdigest()


def _need(condition: object, complaint: str) -> None:
    if not condition:
        raise BundleError(f"manifest.json {complaint}")


def _upgraded(item: Any) -> Any:
    """An entry of schema 1 as one of schema 2; what is wrong with it stays for `_entry`."""
    if not isinstance(item, dict) or _SINCE_SCHEMA_2 & item.keys():
        raise BundleError("manifest.json has a tensor that is none of schema 1")
    _need(item.get("kind") != "delta", "has the kind 'delta', which schema 1 has not")
    encoding = None
    if item.get("kind") == "sign":
        planes, axis = item.get("planes"), item.get("scale_axis")
        _need(axis in ("row", "matrix"), f"scales signs by {axis!r}")
        item = {**item, "kind": "delta"}
        encoding = axis if planes == 1 else f"{axis}-x{planes}"
    return {**item, "rank": 0, "encoding": encoding}


def _entry(item: Any) -> TensorEntry:
    _need(isinstance(item, dict), "has a tensor that is not an object")
    fields = set(TensorEntry.__dataclass_fields__)
    _need(
        set(item) == fields,
        f"has a tensor with the fields {sorted(item)}; needed are {sorted(fields)}",
    )
    name = item["name"]
    _need(isinstance(name, str) and name, f"has a tensor named {name!r}")
    _need(item["kind"] in get_args(Kind), f"stores {name!r} as {item['kind']!r}")
    _need(is_shape(item["shape"]), f"gives {name!r} the shape {item['shape']!r}")
    _need(
        isinstance(item["dtype"], str) and item["dtype"] in DTYPES,
        f"gives {name!r} the dtype {item['dtype']!r}",
    )
    energy = item["residual_energy"]
    _need(
        type(energy) in (int, float) and 0 <= energy <= 1,
        f"gives {name!r} the residual energy {energy!r}",
    )
    _need(is_count(item["bytes"]), f"gives {name!r} {item['bytes']!r} bytes")
    entry = TensorEntry(**{**item, "shape": tuple(item["shape"])})
    _check_kind(entry)
    stored = sum(spec.nbytes for spec in entry.stored_specs().values())
    _need(
        entry.bytes == stored, f"gives {name!r} {entry.bytes} bytes where its shape needs {stored}"
    )
    return entry


def _check_kind(entry: TensorEntry) -> None:
    """Raise BundleError unless the fields that depend on the kind fit it."""
    name = entry.name
    _need(type(entry.planes) is int, f"gives {name!r} {entry.planes!r} planes")
    _need(type(entry.rank) is int, f"gives {name!r} the rank {entry.rank!r}")
    if entry.kind == "delta":
        _check_delta(entry)
    else:
        _need(entry.planes == 0, f"gives {name!r} planes without a delta")
        _need(entry.rank == 0, f"gives {name!r} a rank without a delta")
        _need(entry.scale_axis is None, f"gives {name!r} a scale axis without a delta")
        _need(entry.encoding is None, f"gives {name!r} an encoding without a delta")
    if entry.kind == "tied":
        _need(
            isinstance(entry.source, str) and entry.source != name,
            f"ties {name!r} to {entry.source!r}",
        )
    else:
        _need(entry.source is None, f"gives {name!r} a source though it is not tied")


def _check_delta(entry: TensorEntry) -> None:
    """Raise BundleError unless planes, scale axis and rank are those of the encoding and fit the
    shape.
    """
    name, text = entry.name, entry.encoding
    _need(layout(name, entry.shape) != "vector", f"gives a delta to {name!r}, {entry.shape}")
    try:
        encoding = Encoding.parse(text or "")
    except ValueError as error:
        raise BundleError(f"manifest.json gives {name!r} a wrong {error}") from None
    planes = encoding.stored_planes
    _need(entry.planes == planes, f"gives {name!r} {entry.planes} planes, {text} has {planes}")
    axis = encoding.scale if planes else None
    _need(entry.scale_axis == axis, f"gives {name!r} the scale axis {entry.scale_axis!r}: {text}")
    rank = min(encoding.rank, *matrix_shape(name, entry.shape))
    _need(entry.rank == rank, f"gives {name!r} the rank {entry.rank}; {text} and its shape: {rank}")
