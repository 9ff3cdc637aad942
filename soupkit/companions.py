"""Companion files of a model folder: tokenizer, generation settings, configuration; kept byte for
byte, never rebuilt.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from soupkit.files import file_digest

# Tokenizer, generation and configuration files: what a variant must keep byte for byte to behave as
# trained.
_COMPANIONS = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.(json|model|txt)|.*tokenizer\.model|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt|bpe)|merges\.txt|sp(iece|m)\.model|sentencepiece.*\.model|.*\.tiktoken"
    r"|chat_template\.(jinja|json)|(pre)?processor_config\.json"
)


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a model's tokenizer, generation settings or
    configuration.
    """
    return _COMPANIONS.fullmatch(name) is not None


def companion_files(folder: Path) -> dict[str, Path]:
    """The companion files of a folder by name, sorted."""
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if is_companion(path.name) and path.is_file()
    }


def copy_companions(source: Path, base: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """Copy companion files of `source` that the base lacks or has with other bytes; returns their
    hashes.

    Raises:
        OSError: a file cannot be read or written.
    """
    digests: dict[str, str] = {}
    for name, path in companion_files(source).items():
        if name in base and base[name].read_bytes() == path.read_bytes():
            continue
        shutil.copyfile(path, folder / name)
        digests[name] = file_digest(folder / name)
    return digests
