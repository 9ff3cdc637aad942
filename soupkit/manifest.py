"""What manifest.json of a variant says: every parameter of the model and how its delta is stored.

Kinds: "same" (the base's own, nothing stored), "sign" (`<param>.sign` and `<param>.scale`), "raw"
(`<param>.raw`, the fine-tune's whole tensor), "tied" (the same matrix as `source`, nothing stored).
A manifest is read as hostile input: whatever is wrong with it is one BundleError. Its own checksum
finds damage that would still parse.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from soupkit.config import MAX_PLANES, check_variant_name
from soupkit.delta import layout
from soupkit.errors import BundleError
from soupkit.files import canonical_json
from soupkit.fingerprint import is_digest
from soupkit.tensorfile import DTYPES, TensorSpec, is_count, is_shape

SCHEMA = 1
WEIGHTS_NAME = "variant.safetensors"
MANIFEST_NAME = "manifest.json"

Kind = Literal["same", "sign", "raw", "tied"]

# What a reader in another language has to know about the packed bytes.
ENCODING = {
    "bit_order": "least significant bit first along in",
    "sign_of_zero": "+1",
    "pack_padding": "each row is padded to whole bytes; padding bits are never read",
}


def matrix_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """[out, in] of the matrix that a parameter's signs describe: [batch * out, in] of its layout.

    Raises:
        ValueError: a vector has no signs.
    """
    kind = layout(name, shape)
    if kind == "vector":
        raise ValueError(f"{name}: a tensor of shape {tuple(shape)} has no sign matrix")
    if kind == "experts":
        return shape[0] * shape[1], shape[2]
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """How one parameter is stored.

    Attributes:
        name: the parameter. kind: see the module. shape, dtype: of the fine-tune's tensor, dtype in
            the words of safetensors ("BF16"). planes: sign planes (0 if no signs). scale_axis:
            "row" or "matrix" (None if no signs). bytes: stored in the file. residual_energy:
            ||delta - decoded||^2 / ||delta||^2. source: of a tied parameter, the one it is the same
            as.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    planes: int = 0
    scale_axis: str | None = None
    bytes: int = 0
    residual_energy: float = 0.0
    source: str | None = None

    def stored_specs(self) -> dict[str, TensorSpec]:
        """Names, dtypes and shapes of this parameter's tensors in variant.safetensors."""
        if self.kind == "raw":
            return {f"{self.name}.raw": TensorSpec(DTYPES[self.dtype], self.shape)}
        if self.kind != "sign":
            return {}
        rows, columns = matrix_shape(self.name, self.shape)
        per_row = self.scale_axis == "row" or layout(self.name, self.shape) == "experts"
        return {
            f"{self.name}.sign": TensorSpec(torch.uint8, (self.planes, rows, -(-columns // 8))),
            f"{self.name}.scale": TensorSpec(torch.float32, (self.planes, rows if per_row else 1)),
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that manifest.json says.

    Attributes:
        name: of the variant when it was written. base_fingerprint: of the base it belongs to.
        digest: content digest of variant.safetensors. tensors: one entry a parameter, sorted by
            name.
        companions: file name -> "sha256:<hex>". history: merges of the run, oldest first. metrics:
            of the run at its end. versions: of the packages that wrote it.
    """

    name: str
    base_fingerprint: str
    digest: str
    tensors: tuple[TensorEntry, ...]
    companions: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

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
            "encoding": ENCODING,
            "companions": dict(self.companions),
            "history": [dict(event) for event in self.history],
            "metrics": dict(self.metrics),
            "versions": dict(self.versions),
            "tensors": [{**asdict(entry), "shape": list(entry.shape)} for entry in self.tensors],
        }
        return {**body, "checksum": _checksum(body)}

    @classmethod
    def from_json(cls, document: Any) -> "Manifest":
        """Parse a manifest that may be hostile. Raises BundleError that says what is wrong."""
        _need(isinstance(document, dict), "is not a JSON object")
        _need(
            document.get("schema") == SCHEMA, f"has schema {document.get('schema')!r}, not {SCHEMA}"
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
            body.get("encoding") == ENCODING,
            f"has the encoding {body.get('encoding')!r}; known is {ENCODING}",
        )
        for key, kind in (
            ("companions", dict),
            ("metrics", dict),
            ("versions", dict),
            ("history", list),
        ):
            _need(isinstance(body.get(key), kind), f"has no {key}")
        _need(isinstance(body.get("tensors"), list), "lists no tensors")
        _need(
            all(isinstance(event, dict) for event in body["history"]),
            "has a history of other things than events",
        )
        for name, digest in body["companions"].items():
            _need(is_plain_file_name(name) and is_digest(digest), f"has the companion {name!r}")
        tensors = tuple(_entry(item) for item in body["tensors"])
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
        )


def itemise(folder: Path, entries: tuple[TensorEntry, ...]) -> dict[str, int]:
    """Bytes of a variant folder on disk, by kind; see soupkit.export.ExportReport."""
    sizes = {"signs": 0, "scales": 0, "raw": 0}
    for entry in entries:
        for name, spec in entry.stored_specs().items():
            kind = {"sign": "signs", "scale": "scales", "raw": "raw"}[name.rpartition(".")[2]]
            sizes[kind] += spec.nbytes
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
    if entry.kind == "sign":
        _need(
            layout(name, entry.shape) != "vector", f"gives signs to {name!r} of shape {entry.shape}"
        )
        _need(
            type(entry.planes) is int and 1 <= entry.planes <= MAX_PLANES,
            f"gives {name!r} {entry.planes!r} planes, not 1 to {MAX_PLANES}",
        )
        _need(
            entry.scale_axis in ("row", "matrix"),
            f"gives {name!r} the scale axis {entry.scale_axis!r}",
        )
    else:
        _need(
            type(entry.planes) is int and entry.planes == 0, f"gives {name!r} planes without signs"
        )
        _need(entry.scale_axis is None, f"gives {name!r} a scale axis without signs")
    if entry.kind == "tied":
        _need(
            isinstance(entry.source, str) and entry.source != name,
            f"ties {name!r} to {entry.source!r}",
        )
    else:
        _need(entry.source is None, f"gives {name!r} a source though it is not tied")
