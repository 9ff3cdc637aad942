"""Serving a family: one base in memory, every variant a few bits beside it, OpenAI's HTTP in front.

    request -> server -> service -> router (who waits for what) -> engine -> layers -> kernel
                            |          \\-> cache (what is resident)
                            \\-> loader threads: bundle on disk -> checked -> device

Importing this package loads none of torch, transformers and fastapi; `soupkit.serving.server.run`
does.
"""
