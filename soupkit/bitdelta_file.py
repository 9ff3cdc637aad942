"""Variants from files of the original BitDelta code (arXiv 2402.10193, FasterDecoding/BitDelta).

    W = W_base + coeff * sign

Such a file is a dict that torch.save wrote: of every compressed linear `NAME.mask`, int32 [in / 32,
out], in which bit b of word (j, n) is 1 where the delta of output n, input 32 j + b is not
negative, and `NAME.coeff`, one float; and whole tensors of the other trained parameters. What it
leaves out is the base's. It does not name its base: only shapes can be checked. It is read as
hostile input, without running what it pickles; no weight is trained or encoded anew here.
"""

import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soupkit.checkpoint import Checkpoint
from soupkit.errors import BundleError
from soupkit.export import ExportReport, Progress, export_variant
from soupkit.files import fault_text, open_regular
from soupkit.forms import RAW, Encoding
from soupkit.tensorfile import DTYPES
from soupkit_kernels import Delta

ENCODING = Encoding(scale="matrix")
_WORD = 32
_MASK, _COEFF = ".mask", ".coeff"


def import_bitdelta(
    base: Checkpoint,
    path: str | Path,
    *,
    family: str | Path,
    name: str,
    companions: Path | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Add a BitDelta file to a family as a variant of its base, sign for sign.

    Args:
        base, family, name, companions, progress: as in soupkit.export.export_variant.
        path: the file.

    Raises:
        BundleError: the file is no BitDelta file, damaged, hostile, or of another base; or the
            family is. CheckpointError, MergeError, OSError, ValueError: as export_variant does.
            The family is unchanged in every case.
    """
    path = Path(path)
    return export_variant(
        base,
        BitDeltaFile(path, base),
        family=family,
        name=name,
        encoding=RAW,
        companions=companions,
        history=({"imported": "BitDelta", "file": path.name},),
        progress=progress,
    )


class BitDeltaFile:
    """A BitDelta file over its base: a soupkit.delta.TensorSource whose signs are ready.

    Attributes:
        names: unique parameters of the model, sorted.
    """

    def __init__(self, path: Path, base: Checkpoint) -> None:
        """Open and check the file; tensors stay mapped.

        Raises:
            BundleError: see import_bitdelta.
        """
        self._path, self._base = path, base
        tensors = _load(path)
        self._masks = {
            _parameter(key, _MASK): one for key, one in tensors.items() if key.endswith(_MASK)
        }
        self._coeffs = {
            _parameter(key, _COEFF): one for key, one in tensors.items() if key.endswith(_COEFF)
        }
        self._whole = {
            key: one for key, one in tensors.items() if not key.endswith((_MASK, _COEFF))
        }
        self._check()
        given = {*self._masks, *self._whole}
        for alias, source in base.tied.items():
            # A head that is still the same as the input stays tied.
            if alias in self._whole and torch.equal(self.tensor(alias), self.tensor(source)):
                given.remove(alias)
        self.names: tuple[str, ...] = tuple(sorted({*base.names, *given}))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one parameter, without reading it."""
        return tuple(self._whole[name].shape) if name in self._whole else self._base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one parameter: the base's where the file has only signs or nothing of it."""
        return self._whole[name].dtype if name in self._whole else self._base.dtype(name)

    def tensor(self, name: str) -> Tensor:
        """The parameter where the file holds it whole, otherwise the base's."""
        return self._whole[name] if name in self._whole else self._base.tensor(name)

    def encoded(self, name: str) -> tuple[Encoding, Delta] | None:
        """The stored delta of a parameter; None where the file has no signs of it."""
        if name not in self._masks:
            return None
        out, width = self._base.shape(name)
        coeff = float(self._coeffs[name])
        bytes_of_words = self._masks[name].T.unsqueeze(-1) >> torch.tensor([0, 8, 16, 24])
        packed = bytes_of_words.bitwise_and_(0xFF).to(torch.uint8).reshape(1, out, width // 8)
        # A coefficient that training took below 0 turns all signs round.
        packed = packed.bitwise_not_() if coeff < 0 else packed
        return ENCODING, Delta(out, width, packed, torch.tensor([[abs(coeff)]]))

    def _check(self) -> None:
        if not self._masks:
            raise self._fault(f"no tensor is named NAME{_MASK}: it is no BitDelta file")
        if odd := sorted(self._masks.keys() ^ self._coeffs.keys()):
            raise self._fault(f"{odd[0]!r} has only one of {_MASK} and {_COEFF}; it needs both")
        if odd := sorted(self._masks.keys() & self._whole.keys()):
            raise self._fault(f"{odd[0]!r} is there as signs and as a whole tensor")
        known = {*self._base.names, *self._base.tied}
        if odd := sorted({*self._masks, *self._whole} - known):
            raise self._fault(
                f"{odd[0]!r} ({len(odd)} such names) is no parameter of the base {self._base.path}"
            )
        for name in self._masks:
            self._check_signs(name)
        for name, tensor in self._whole.items():
            if not tensor.is_floating_point():
                raise self._fault(f"{name!r} is {tensor.dtype}, not floating")

    def _check_signs(self, name: str) -> None:
        mask, coeff = self._masks[name], self._coeffs[name]
        shape = self._base.shape(name)
        wanted = (shape[1] // _WORD, shape[0]) if len(shape) == 2 else None
        if mask.dtype != torch.int32 or mask.shape != wanted or shape[1] % _WORD:
            raise self._fault(
                f"the signs of {name!r} are {mask.dtype} {tuple(mask.shape)}; the base's parameter "
                f"has shape {shape}, which needs torch.int32 [in / {_WORD}, out]"
            )
        if not coeff.is_floating_point() or coeff.numel() != 1 or not math.isfinite(coeff):
            raise self._fault(
                f"the coefficient of {name!r} is {coeff.dtype} {tuple(coeff.shape)}; needed is one "
                "finite float"
            )

    def _fault(self, text: str) -> BundleError:
        return BundleError(f"{self._path}: {text}")


def _parameter(key: str, ending: str) -> str:
    """ "q_proj.mask" -> "q_proj.weight": masks are named by module."""
    return f"{key.removesuffix(ending)}.weight"


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped; BundleError for all that is no plain dict of them."""
    _check_archive(path)
    try:
        with warnings.catch_warnings():
            # torch warns of pickles that it would not write itself.
            warnings.simplefilter("error")
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's own text tells to run what is pickled.
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"names {named[1]}, which is" if named else "holds what is"
        raise BundleError(
            f"{path}: its pickle {what} no tensor, so it is not run; if you trust the file, load "
            "it with torch and save anew only the dict of its tensors"
        ) from None
    except Exception as error:  # noqa: BLE001  # a hostile pickle may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BundleError(f"{path}: cannot be read as plain tensors: {reason}") from None
    if not isinstance(found, Mapping) or not found:
        raise BundleError(f"{path}: holds {type(found).__name__}, not a dict of tensors by name")
    return {_checked_name(path, key): _checked(path, key, one) for key, one in found.items()}


def _check_archive(path: Path) -> None:
    """Raise BundleError unless it is a zip file as torch.save writes them, which packs nothing."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            packed = [one for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
    except zipfile.BadZipFile:
        raise BundleError(
            f"{path}: no zip file, as torch.save writes them since 1.6, or truncated; load and "
            "save it anew with torch if you trust it"
        ) from None
    except (OSError, ValueError, NotImplementedError) as error:
        raise BundleError(fault_text(error, path)) from error
    if packed:
        raise BundleError(f"{path}: {packed[0].filename!r} is compressed; torch.save never does so")


def _checked_name(path: Path, key: Any) -> str:
    if not isinstance(key, str):
        raise BundleError(f"{path}: has a key of type {type(key).__name__}; needed are names")
    return key


def _checked(path: Path, key: str, value: Any) -> Tensor:
    """`value` if it is a dense tensor whose bytes all lie in the file."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise BundleError(f"{path}: {key!r} is a {type(value).__name__}, not a tensor")
    tensor: Tensor = value.detach()
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.dtype not in DTYPES.values():
        raise BundleError(f"{path}: {key!r} is no dense tensor of a usual dtype: {tensor.dtype}")
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise BundleError(f"{path}: {key!r} claims more entries than the file holds")
    return tensor
