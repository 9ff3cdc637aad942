"""A family on vLLM: the variants travel where vLLM's own LoRA adapters do.

    request (model = variant's name)
      API process:    models -> copies -> store: a checked private copy in host memory
      engine process: engine hooks (a request is only admitted when its variant is registered)
      each worker:    worker -> bank -> sites: this rank's part in slots, acting per token

`soupkit.serving.vllm_plugin` is what vLLM loads; hooks.py lists each private name of vLLM that is
used. Nothing here needs transformers' continuous batching: vLLM pins an older transformers.
"""
