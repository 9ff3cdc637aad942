"""What vLLM loads by the entry point `vllm.general_plugins`: a family on vLLM's engine.

    SOUPKIT_FAMILY=family vllm serve BASE --enable-lora --enforce-eager ...

It is loaded in each of vLLM's processes, and leaves vLLM as it is unless SOUPKIT_FAMILY names a
family. `soupkit serve --engine vllm` starts a server with all that it needs (vllm/command.py).
"""

import os


def register() -> None:
    """Prepares this process to serve the family that the environment names, if it names one.

    Raises:
        ServingError: this vLLM is not of the minor that was tested, or a setting is wrong.
    """
    from .vllm.settings import settings

    if settings() is None:
        return
    import vllm

    from .vllm.hooks import install
    from .vllm.limits import check_version

    check_version(vllm.__version__)
    # The model runner that was tested; with Triton, vLLM prefers another.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    # Without it vLLM looks up no names beside the base's. The routes that it opens too are closed
    # by models.py, unless the settings say otherwise.
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    install()
