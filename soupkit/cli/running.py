"""Commands that run something: serve, bench."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soupkit.cli.app import BaseOption, FamilyPath, Json, command, parse_path
from soupkit.cli.console import Dtype, leave_signals, parse_bytes, print_json, show_progress

if TYPE_CHECKING:
    from soupkit.bench.rows import Row


class Engine(str, Enum):
    """What generates."""

    transformers = "transformers"
    vllm = "vllm"


class Bench(str, Enum):
    """Benchmarks."""

    kernel = "kernel"
    merge = "merge"
    export = "export"
    serve = "serve"
    load = "load"
    cache = "cache"
    pool = "pool"
    fleet = "fleet"


@command
def serve(
    family: FamilyPath,
    base: BaseOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    device: Annotated[str | None, typer.Option(help="As in cpu, cuda, cuda:1.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="To compute in.")] = None,
    cache_bytes: Annotated[
        str | None, typer.Option(help="What resident variants may hold, as in 20GB.")
    ] = None,
    host_cache_bytes: Annotated[
        str | None, typer.Option(help="What variants may hold in host memory, with a GPU.")
    ] = None,
    pool: Annotated[
        Path | None,
        typer.Option(help="Pool of LoRA adapters to serve too: `soupkit pool`.", parser=parse_path),
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(help="Adapters that come into the pool when asked for.", parser=parse_path),
    ] = None,
    pin: Annotated[list[str] | None, typer.Option(help="Variant that is never evicted.")] = None,
    auto_pin: Annotated[
        int, typer.Option(help="So many of the most asked for are not evicted.", min=0)
    ] = 0,
    max_running: Annotated[int | None, typer.Option(help="Requests generated at a time.")] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Requests waiting before 429, half of them for one model.")
    ] = None,
    max_wait: Annotated[
        float | None, typer.Option(help="Seconds that a request may wait before 503.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Processes with the base each, behind one address.", min=1)
    ] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(help="Processes, and GPUs, that share the base of a replica.", min=1)
    ] = 1,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key to ask for.")] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the key to load and unload variants.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="What generates.")] = Engine.transformers,
) -> None:
    """Serve the base and all variants of a family over HTTP, in OpenAI's shapes.

    Example: soupkit serve family --port 8000 --cache-bytes 2GB
    """
    shared: dict[str, Any] = {
        "base": base,
        "host": host,
        "port": port,
        "dtype": dtype.value if dtype else None,
        "cache_bytes": parse_bytes(cache_bytes),
        "pin": pin or (),
        "max_running": max_running,
    }
    host_bytes = parse_bytes(host_cache_bytes)
    if engine is Engine.vllm:
        own = {
            "device": device, "pool": pool, "adapters": adapters, "auto-pin": auto_pin or None,
            "max-queue": max_queue, "max-wait": max_wait, "admin-key-file": admin_key_file,
            "replicas": None if replicas == 1 else replicas,
        }  # fmt: skip
        _refuse_for_vllm(own)
        _serve_with_vllm(
            family,
            **shared,
            host_cache_bytes=host_bytes,
            tensor_parallel=tensor_parallel,
            api_key_file=api_key_file,
        )
        return
    leave_signals()
    run: Callable[..., None]
    if replicas == tensor_parallel == 1:
        from soupkit.serving.server import run
    else:
        from soupkit.serving import front_app

        run = partial(front_app.run, replicas=replicas, tensor_parallel=tensor_parallel)
    run(
        family,
        **shared,
        device=device,
        host_cache_bytes=host_bytes or 0,
        pool=pool,
        adapters=adapters,
        auto_pin=auto_pin,
        max_queue=max_queue,
        max_wait_seconds=max_wait,
        api_key_file=api_key_file,
        admin_key_file=admin_key_file,
    )


def _refuse_for_vllm(given: dict[str, Any]) -> None:
    from soupkit.serving.vllm.command import NOT_VLLM

    for flag, value in given.items():
        if value is not None:
            raise ValueError(f"--{flag} does not go with --engine vllm: {NOT_VLLM[flag]}")


def _serve_with_vllm(family: Path, *, api_key_file: Path | None, **options: Any) -> None:
    from soupkit.serving.listening import read_keys
    from soupkit.serving.vllm import command

    keys, _ = read_keys(api_key_file, None)
    command.run(command.command(family, **options, keys=keys))


@command
def bench(
    what: Annotated[Bench, typer.Argument(help="What to measure.")],
    family: Annotated[
        Path | None,
        typer.Argument(help="The family to serve, for `serve` and `load`, and to check `fleet`."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and repetitions.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="With `kernel`, on a GPU: results, races, times, tuning."),
    ] = False,
    large: Annotated[
        bool, typer.Option("--large", help="With `export` and `merge`: models of 8 GB.")
    ] = False,
    mergekit: Annotated[
        str | None,
        typer.Option(
            help="With `merge`: mergekit-yaml of another venv, to merge the same folders.",
            envvar="SOUPKIT_MERGEKIT",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a hot path against a baseline of the same run.

    Example: soupkit bench kernel --quick
    """
    from soupkit.bench.rows import document, show

    if what is not Bench.fleet and (family is None) == (what in (Bench.serve, Bench.load)):
        raise ValueError("give a family to `bench serve`, `load` and `fleet`, and to no other")
    if check:
        if what is not Bench.kernel or quick:
            raise ValueError("give --check to `bench kernel`, and without --quick")
        _check_kernel(as_json=as_json)
        return
    if large and (quick or what not in (Bench.export, Bench.merge)):
        raise ValueError("give --large to `bench export` or `bench merge`, and without --quick")
    rows, model = _measure(what, family, quick=quick, large=large, mergekit=mergekit)
    if as_json:
        print_json(document(what.value, rows, model))
        return
    if rows:
        show(what.value, rows)
    if model:
        show(what.value, model, title="A model, not a measurement: there is no GPU here")


def _measure(
    what: Bench, family: Path | None, *, quick: bool, large: bool, mergekit: str | None
) -> "tuple[list[Row], list[Row]]":
    """Rows that were measured, and rows of a model."""
    import importlib

    checked = "_check" if what is Bench.fleet and family is not None else ""
    module = importlib.import_module(f"soupkit.bench.{what.value}{checked}")
    if what is Bench.fleet and family is None:
        with show_progress("simulating") as progress:
            return [], module.run(quick=quick, progress=progress)
    if what is Bench.kernel:
        return module.run(quick=quick), module.model(quick=quick)
    if family is not None:
        return module.run(quick=quick, family=family), []
    if what in (Bench.cache, Bench.pool):
        return module.run(quick=quick), []
    given: dict[str, Any] = {"program": mergekit} if what is Bench.merge else {}
    with show_progress("measuring") as progress:
        return module.run(quick=quick, large=large, progress=progress, **given), []


def _check_kernel(*, as_json: bool) -> None:
    """Check the kernel and show what there is, also when interrupted."""
    from soupkit.bench import kernel_check

    found = kernel_check.Check()
    try:
        with show_progress("checking") as progress:
            kernel_check.run(found, progress=progress)
    finally:
        if found.report.found:
            # The document has stdout for itself.
            kernel_check.show(found, on_stderr=as_json)
            if as_json:
                print_json(kernel_check.document(found))
    if found.report.failed:
        raise SystemExit(1)
