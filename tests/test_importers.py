"""Importers: original BitDelta files, mergekit configs, and models that are no plain decoders."""

import itertools
import json
import os
import string
import zipfile

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

from soupkit.bitdelta_file import import_bitdelta
from soupkit.bundle import open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.cli import app
from soupkit.errors import BundleError, CheckpointError, SoupkitError
from soupkit.export import export_variant
from soupkit.merge_config import read_merge_config
from soupkit.restore import restore
from soupkit.verify import verify_family


def run(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


# BitDelta files


def packed_words(signs):
    """[out, in] of +-1 -> int32 [in / 32, out], bit by bit in Python."""
    out, width = signs.shape
    words = torch.zeros(width // 32, out, dtype=torch.int64)
    for n in range(out):
        for k in range(width):
            words[k // 32, n] += int(signs[n, k] > 0) << (k % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def bitdelta_of(base, *, dtype=torch.float16):
    """A dict as the original code saves it, and the dense model that it means, in float32."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(base / "model.safetensors")
    stored, dense = {}, {name: one.float() for name, one in tensors.items()}
    for name, tensor in tensors.items():
        if "proj" in name:
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            coeff = (torch.rand((), generator=generator) * 0.01).to(dtype)
            stored[name.replace(".weight", ".mask")] = packed_words(signs)
            # The original keeps it as a parameter.
            stored[name.replace(".weight", ".coeff")] = torch.nn.Parameter(coeff)
            dense[name] = tensor.float() + coeff.float() * signs.float()
        else:
            whole = (tensor + torch.randn(tensor.shape, generator=generator) * 0.01).to(dtype)
            stored[name] = torch.nn.Parameter(whole)
            dense[name] = whole.float()
    return stored, dense


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A tied Llama whose inputs are multiples of 32."""
    return make_wide(tmp_path_factory.mktemp("wide") / "base")


def make_wide(folder, *, dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return folder


def saved(document, path):
    torch.save(document, path)
    return path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_bitdelta_file_is_restored_bit_for_bit(wide_folder, tmp_path, dtype):
    stored, dense = bitdelta_of(wide_folder, dtype=dtype)
    path = saved(stored, tmp_path / "vicuna.pt")
    result = run("import-bitdelta", wide_folder, path, "--family", tmp_path / "f", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report["name"] == "vicuna"
    assert verify_family(tmp_path / "f") == []
    restore(tmp_path / "f", "vicuna", out=tmp_path / "dense")
    found = load_file(tmp_path / "dense" / "model.safetensors")
    assert found.keys() == dense.keys()
    assert all(torch.equal(found[name], dense[name]) for name in dense)
    manifest = open_variant(tmp_path / "f" / "variants" / "vicuna").manifest
    assert manifest.history == ({"imported": "BitDelta", "file": "vicuna.pt"},)
    kinds = {entry.name: (entry.kind, entry.encoding) for entry in manifest.tensors}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == ("delta", "matrix")
    assert kinds["model.embed_tokens.weight"] == ("raw", None)
    assert kinds["lm_head.weight"] == ("tied", None)


def test_a_base_in_bfloat16_is_not_rounded_again(tmp_path):
    folder = make_wide(tmp_path / "base", dtype=torch.bfloat16)
    stored, dense = bitdelta_of(folder)
    path = saved(stored, tmp_path / "x.pt")
    import_bitdelta(open_checkpoint(folder), path, family=tmp_path / "f", name="x")
    restore(tmp_path / "f", "x", out=tmp_path / "dense")
    found = load_file(tmp_path / "dense" / "model.safetensors")
    assert all(torch.equal(found[name], dense[name]) for name in dense)


def test_what_a_bitdelta_file_leaves_out_is_the_bases(wide_folder, tmp_path):
    name = "model.layers.1.self_attn.k_proj"
    signs = torch.ones(16, 32)
    signs[3, 31] = -1
    stored = {f"{name}.mask": packed_words(signs), f"{name}.coeff": torch.tensor([-0.25])}
    import_bitdelta(
        open_checkpoint(wide_folder), saved(stored, tmp_path / "x.pt"),
        family=tmp_path / "f", name="x",
    )  # fmt: skip
    variant = open_variant(tmp_path / "f" / "variants" / "x")
    assert {one.name for one in variant.manifest.tensors if one.kind != "same"} == {
        f"{name}.weight", "lm_head.weight",
    }  # fmt: skip
    delta = variant.delta(f"{name}.weight")
    # Stored as the format has it: a scale that is not negative, a 1 where the delta is not.
    assert delta.scale.tolist() == [[0.25]]
    assert torch.equal(delta.dense(torch.float32), -0.25 * signs)


def test_a_new_vocabulary_and_an_untied_head_are_taken(wide_folder, tmp_path):
    stored, dense = bitdelta_of(wide_folder, dtype=torch.float32)
    embed = torch.randn(101, 32)
    stored["model.embed_tokens.weight"] = stored["lm_head.weight"] = embed
    files = tmp_path / "tokenizer"
    files.mkdir()
    (files / "tokenizer_config.json").write_text('{"model_max_length": 9}')
    base = open_checkpoint(wide_folder)
    path = saved(stored, tmp_path / "x.pt")
    import_bitdelta(base, path, family=tmp_path / "f", name="same", companions=files)
    restore(tmp_path / "f", "same", out=tmp_path / "same")
    found = load_file(tmp_path / "same" / "model.safetensors")
    assert "lm_head.weight" not in found
    assert torch.equal(found["model.embed_tokens.weight"], embed)
    assert json.loads((tmp_path / "same" / "config.json").read_text())["vocab_size"] == 101
    told = json.loads((tmp_path / "same" / "tokenizer_config.json").read_text())
    assert told == {"model_max_length": 9}
    stored["lm_head.weight"] = embed + 1
    path = saved(stored, tmp_path / "y.pt")
    import_bitdelta(base, path, family=tmp_path / "f", name="untied")
    restore(tmp_path / "f", "untied", out=tmp_path / "untied")
    found = load_file(tmp_path / "untied" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], embed + 1)
    assert torch.equal(found["model.norm.weight"], dense["model.norm.weight"])


NAME = "model.layers.0.mlp.up_proj"
MASK, COEFF = torch.zeros(1, 64, dtype=torch.int32), torch.tensor(0.5)
GOOD = {f"{NAME}.mask": MASK, f"{NAME}.coeff": COEFF}
BAD = {
    "no dict": [MASK],
    "empty": {},
    "no masks": {"model.norm.weight": torch.ones(32)},
    "no coefficient": {f"{NAME}.mask": MASK},
    "no mask": {**GOOD, "model.layers.1.mlp.up_proj.coeff": COEFF},
    "both": {**GOOD, f"{NAME}.weight": torch.ones(64, 32)},
    "unknown": {**GOOD, "model.layers.0.mlp.up_proj.A": torch.ones(3)},
    "other module": {"model.layers.9.mlp.up_proj.mask": MASK,
                     "model.layers.9.mlp.up_proj.coeff": COEFF},
    "mask of bools": {**GOOD, f"{NAME}.mask": torch.ones(64, 32, dtype=torch.bool)},
    "mask of int64": {**GOOD, f"{NAME}.mask": MASK.long()},
    "mask not transposed": {**GOOD, f"{NAME}.mask": MASK.T.contiguous()},
    "mask of a vector": {"model.norm.mask": MASK, "model.norm.coeff": COEFF},
    "coefficients a row": {**GOOD, f"{NAME}.coeff": torch.ones(64)},
    "coefficient nan": {**GOOD, f"{NAME}.coeff": torch.tensor(float("nan"))},
    "whole number": {**GOOD, f"{NAME}.coeff": torch.tensor(1)},
    "number for a tensor": {**GOOD, "model.norm.weight": 1.0},
    "int for a norm": {**GOOD, "model.norm.weight": torch.ones(32, dtype=torch.int32)},
    "norm of nan": {**GOOD, "model.norm.weight": torch.full((32,), float("nan"))},
    "norm of another shape": {**GOOD, "model.norm.weight": torch.ones(33)},
    "key of a number": {**GOOD, 3: torch.ones(32)},
    "sparse": {**GOOD, "model.norm.weight": torch.ones(32).to_sparse()},
    "meta": {**GOOD, "model.norm.weight": torch.ones(32, device="meta")},
    "more than the file": {
        **GOOD, "model.embed_tokens.weight": torch.ones(1).expand(2**30, 32),
    },
    "complex": {**GOOD, "model.norm.weight": torch.ones(32, dtype=torch.complex64)},
    "code": {**GOOD, "model.norm.weight": os.system},
}  # fmt: skip


@pytest.mark.parametrize("document", BAD.values(), ids=BAD)
def test_a_wrong_bitdelta_file_is_refused_and_leaves_nothing(wide_folder, tmp_path, document):
    path = saved(document, tmp_path / "x.pt")
    result = run("import-bitdelta", wide_folder, path, "--family", tmp_path / "f")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("soupkit: ")
    assert result.stderr.count("\n") == 1
    assert not list((tmp_path / "f").glob("variants/*"))


def test_a_pickle_that_would_run_code_does_not(wide_folder, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = saved({"x": Payload()}, tmp_path / "x.pt")
    old = tmp_path / "old.pt"
    torch.save({"x": Payload()}, old, _use_new_zipfile_serialization=False)
    for one in (path, old):
        with pytest.raises(BundleError, match=str(one)) as caught:
            import_bitdelta(open_checkpoint(wide_folder), one, family=tmp_path / "f", name="x")
        # torch would tell to load it all the same.
        assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(BundleError, match=r"names posix\.mkdir, .*save anew only the dict"):
        import_bitdelta(open_checkpoint(wide_folder), path, family=tmp_path / "f", name="x")


def test_what_is_no_file_of_torch_is_refused(wide_folder, tmp_path):
    base = open_checkpoint(wide_folder)
    whole = saved(GOOD, tmp_path / "whole.pt").read_bytes()
    files = {"empty.pt": b"", "text.pt": b"no zip", "cut.pt": whole[: len(whole) // 2]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BundleError, match=name):
            import_bitdelta(base, tmp_path / name, family=tmp_path / "f", name="x")
    with (
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive,
        zipfile.ZipFile(tmp_path / "whole.pt") as source,
    ):
        for one in source.namelist():
            archive.writestr(one, source.read(one))
    with pytest.raises(BundleError, match="compressed"):
        import_bitdelta(base, tmp_path / "packed.pt", family=tmp_path / "f", name="x")
    with pytest.raises(BundleError, match="gone"):
        import_bitdelta(base, tmp_path / "gone.pt", family=tmp_path / "f", name="x")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(BundleError, match="regular"):
        import_bitdelta(base, tmp_path / "pipe.pt", family=tmp_path / "f", name="x")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_damaged_byte_is_an_error_of_ours_or_other_numbers(wide_folder, tmp_path, place, value):
    path = saved(GOOD, tmp_path / "x.pt")
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] = value
    path.write_bytes(content)
    try:
        import_bitdelta(open_checkpoint(wide_folder), path, family=tmp_path / "f", name="x")
    except SoupkitError:
        return
    assert verify_family(tmp_path / "f") == []


# Configs of mergekit


def written(document, path):
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def models(base_folder, make_finetune, tmp_path_factory):
    """A base and three fine-tunes of it."""
    folder = tmp_path_factory.mktemp("merged")
    return [
        base_folder,
        *(make_finetune(folder / f"ft-{seed}", base_folder, seed=seed) for seed in (1, 2, 3)),
    ]


def listed(models, weights):
    return [
        {"model": str(one), "parameters": {"weight": weight}}
        for one, weight in zip(models, weights, strict=True)
    ]


def merged(document, tmp_path, *more):
    path = written(document, tmp_path / "merge.yml")
    result = run("merge", "--config", path, "--out", tmp_path / "out", "--json", *more)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return load_file(tmp_path / "out" / "model.safetensors")


def close_to(found, models, coefficients):
    """Whether `found` is sum_i c_i W_i, in float64, to float32's rounding."""
    parts = [load_file(one / "model.safetensors") for one in models]
    assert found.keys() == parts[0].keys()
    for name in found:
        wanted = sum(c * part[name].double() for c, part in zip(coefficients, parts, strict=True))
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("weights", "coefficients", "parameters"),
    [
        ((1, 1, 1), (1 / 3, 1 / 3, 1 / 3), {}),
        ((2.0, 1, 1), (0.5, 0.25, 0.25), {"normalize": True}),
        ((3, -1, 0), (1.5, -0.5, 0), {}),
        ((-3, 1, 0), (1.5, -0.5, 0), {}),
        ((0.5, 0.25, 0.25), (0.5, 0.25, 0.25), {"normalize": False}),
    ],
)
def test_linear_is_the_weighted_mean(models, tmp_path, weights, coefficients, parameters):
    document = {
        "merge_method": "linear", "models": listed(models[1:], weights), "parameters": parameters,
    }  # fmt: skip
    close_to(merged(document, tmp_path), models[1:], coefficients)


def test_linear_with_one_weight_for_all_and_a_base_among_them(models, tmp_path):
    document = {
        "merge_method": "linear", "base_model": str(models[0]), "dtype": "float32",
        "models": [{"model": str(one)} for one in (models[1], models[0])],
        "parameters": {"weight": 0.7},
    }  # fmt: skip
    close_to(merged(document, tmp_path), models[:2], (0.5, 0.5))


@pytest.mark.parametrize(
    ("weights", "coefficients", "parameters"),
    [
        ((1.0, 0.5, 0.25), (-0.75, 1, 0.5, 0.25), {}),
        ((0.5, 0.25, 0.25), (0, 0.5, 0.25, 0.25), {"normalize": False, "int8_mask": True}),
        ((1, 2, 1), (0, 0.25, 0.5, 0.25), {"normalize": True}),
        ((1, 2, 1), (0.5, 0.125, 0.25, 0.125), {"normalize": True, "lambda": 0.5}),
        ((-0.5, 0.25, 0), (1.5, -1, 0.5, 0), {"lambda": 2}),
    ],
)
@pytest.mark.parametrize("with_base", [False, True])
def test_task_arithmetic_scales_the_deltas(
    models, tmp_path, weights, coefficients, parameters, with_base
):
    listing = listed(models[1:], weights)
    if with_base:
        # mergekit's own examples list it without parameters.
        listing.insert(0, {"model": str(models[0])})
    document = {
        "merge_method": "task_arithmetic", "base_model": str(models[0]), "models": listing,
        "parameters": parameters,
    }  # fmt: skip
    close_to(merged(document, tmp_path), models, coefficients)


def test_the_dtype_is_the_configs_unless_told_otherwise(models, tmp_path):
    document = {"merge_method": "linear", "models": listed(models[1:], (1, 1, 1))}
    path = written({**document, "dtype": "float16"}, tmp_path / "a.yml")
    assert read_merge_config(path).dtype == "float16"
    path = written({**document, "dtype": "float32", "out_dtype": "bfloat16"}, tmp_path / "b.yml")
    assert read_merge_config(path).dtype == "bfloat16"
    found = merged({**document, "dtype": "float16"}, tmp_path, "--dtype", "bfloat16")
    assert {one.dtype for one in found.values()} == {torch.bfloat16}
    result = run("merge", "--config", tmp_path / "merge.yml", "--out", tmp_path / "two")
    assert result.stdout.startswith(f"{tmp_path / 'two'}: linear of 3 checkpoints in ")
    found = load_file(tmp_path / "two" / "model.safetensors")
    assert {one.dtype for one in found.values()} == {torch.float16}


def test_a_config_may_be_json(models, tmp_path):
    document = {"merge_method": "linear", "models": listed(models[1:], (1, 1, 1))}
    close_to(merged(json.dumps(document), tmp_path), models[1:], (1 / 3,) * 3)


LISTING = [{"model": "a", "parameters": {"weight": 1}}, {"model": "b", "parameters": {"weight": 1}}]
LINEAR = {"merge_method": "linear", "models": LISTING}
TASK = {"merge_method": "task_arithmetic", "base_model": "c", "models": LISTING}
WITH = {"model": "b"}
# 2^26 entries when written out.
NEST = (
    "merge_method: [&a [x, x]"
    + "".join(
        f", &{two} [*{one}, *{one}]" for one, two in itertools.pairwise(string.ascii_lowercase)
    )
    + "]"
)
REFUSED = {
    "ties": ({**TASK, "merge_method": "ties"}, "merge_method 'ties'"),
    "slerp": ({**TASK, "merge_method": "slerp"}, "merge_method 'slerp'"),
    "dare": ({**TASK, "merge_method": "dare_linear"}, "merge_method 'dare_linear'"),
    "no method": ({"models": LISTING}, "merge_method None"),
    "slices": ({**LINEAR, "slices": []}, "'slices'"),
    "modules": ({**LINEAR, "modules": {}}, "'modules'"),
    "tokenizer_source": ({**LINEAR, "tokenizer_source": "union"}, "'tokenizer_source'"),
    "tokenizer": ({**LINEAR, "tokenizer": {}}, "'tokenizer'"),
    "chat_template": ({**LINEAR, "chat_template": "auto"}, "'chat_template'"),
    "density": (
        {**TASK, "models": [{"model": "a", "parameters": {"weight": 1, "density": 0.5}}]},
        "'density'",
    ),
    "lambda of linear": ({**LINEAR, "parameters": {"lambda": 1}}, "'lambda'"),
    "gradient": ({**LINEAR, "parameters": {"weight": [0, 1]}, "models": [WITH]}, "a list"),
    "filter": (
        {**LINEAR, "models": [{**WITH, "parameters": {"weight": [{"filter": "mlp", "value": 1}]}}]},
        "a list",
    ),
    "mapping": ({**LINEAR, "models": [{**WITH, "parameters": {"weight": {"value": 1}}}]}, "a dict"),
    "weight of text": ({**LINEAR, "parameters": {"weight": "1"}, "models": [WITH]}, "'1'"),
    "weight true": ({**LINEAR, "parameters": {"weight": True}, "models": [WITH]}, "True"),
    "weight nan": ({**LINEAR, "parameters": {"weight": float("nan")}, "models": [WITH]}, "nan"),
    "weight inf": ({**LINEAR, "parameters": {"weight": float("inf")}, "models": [WITH]}, "inf"),
    "weight huge": ({**LINEAR, "parameters": {"weight": 10**400}, "models": [WITH]}, "10000"),
    "no weight": ({**LINEAR, "models": [*LISTING, {"model": "d"}]}, "d has no weight"),
    "no models": ({"merge_method": "linear"}, "no models"),
    "models of names": ({**LINEAR, "models": ["a"]}, "'a', not a mapping"),
    "twice": ({**LINEAR, "models": [*LISTING, LISTING[0]]}, "'a' twice"),
    "base only": ({**TASK, "models": [{"model": "c"}]}, "beside base_model"),
    "no base": ({**TASK, "base_model": None}, "needs base_model"),
    "base apart": ({**LINEAR, "base_model": "c"}, "'c' is none of the models"),
    "adapter": ({**LINEAR, "models": [{**LISTING[0], "model": "a+b"}]}, "adapters"),
    "revision": ({**LINEAR, "models": [{**LISTING[0], "model": "a@main"}]}, "revisions"),
    "model of a mapping": ({**LINEAR, "models": [{"model": {"path": "a"}}]}, "a dict"),
    "not normal": ({**LINEAR, "parameters": {"normalize": False}}, "sum to 2"),
    "normalize of text": ({**LINEAR, "parameters": {"normalize": "yes please"}}, "normalize"),
    "nothing to normalise by": (
        {**LINEAR, "models": [LISTING[0], {**WITH, "parameters": {"weight": -1}}]}, "sum to 0",
    ),
    "dtype": ({**LINEAR, "dtype": "int8"}, "dtype 'int8'"),
    "list": ([LINEAR], "a list, not a mapping"),
    "text": ("merge", "'merge', not a mapping"),
    "no yaml": ("a: [", "no YAML"),
    "object": ("!!python/object/apply:os.system ['true']", "no YAML"),
    "nested": ("[" * 5000, "no YAML"),
    "aliases": (NEST, "merge_method a list"),
    "long": ("#" * 2**21, "bytes"),
}  # fmt: skip


@pytest.mark.parametrize(("document", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_means_something_else_is_refused_by_name(tmp_path, document, reason):
    path = written(document, tmp_path / "merge.yml")
    result = run("merge", "--config", path, "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"soupkit: {path}: ")
    assert reason in result.stderr
    assert len(result.stderr) < 600
    assert not (tmp_path / "out").exists()


def test_other_sizes_of_vocabulary_are_refused(models, make_finetune, tmp_path):
    # mergekit would cut the embedding; merge_checkpoints alone would keep the new rows.
    def widen(tensors):
        embed = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.cat([embed, embed[:2]])

    wide = make_finetune(tmp_path / "wide", models[0], edit=widen, config={"vocab_size": 101})
    for document in (
        {"merge_method": "linear", "models": listed([models[1], wide], (1, 1))},
        {
            "merge_method": "task_arithmetic", "base_model": str(models[0]),
            "models": listed([wide], (1,)),
        },
    ):  # fmt: skip
        path = written(document, tmp_path / "merge.yml")
        result = run("merge", "--config", path, "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert "disagree on its shape" in result.stderr


def test_config_and_the_other_arguments_exclude_each_other(tmp_path):
    for more in (("a",), ("a", "b"), ("--method", "mean"), ("--weights", "1"), ("--rank", "2")):
        result = run("merge", *more, "--config", "x", "--out", tmp_path / "out")
        assert result.exit_code == 2
    assert run("merge", "--out", tmp_path / "out").exit_code == 2
    assert run("merge", "a", "--out", tmp_path / "out").exit_code == 2
    result = run("merge", "--config", tmp_path / "gone.yml", "--out", tmp_path / "out")
    assert (result.exit_code, "gone.yml: No such file" in result.stderr) == (1, True)


def test_the_commands_tell_how_they_are_called():
    told = " ".join(run("import-bitdelta", "--help").stdout.split())
    assert "Example: soupkit import-bitdelta base diff.pt --family family" in told
    for arguments in ((), ("a",), ("a", "b"), ("a", "b", "--family", "f", "--nothing")):
        assert run("import-bitdelta", *arguments).exit_code == 2
    assert "linear or task_arithmetic" in " ".join(run("merge", "--help").stdout.split())


# Exports in bulk


def test_one_fine_tune_that_fails_does_not_keep_the_others_out(models, make_finetune, tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"][0] = float("nan")

    bad = make_finetune(tmp_path / "bad", models[0], edit=edit)
    family = tmp_path / "f"
    arguments = ("export", models[0], models[1], bad, models[2], "--family", family)
    result = run(*arguments, "--json")
    assert result.exit_code == 1
    first, second, third = json.loads(result.stdout)
    assert (first["name"], third["name"]) == ("ft-1", "ft-2")
    assert second["name"] == "bad"
    assert "model.norm.weight: nan at" in second["error"]
    told = f"soupkit: {second['error']}\nsoupkit: 1 of 3 not exported: bad\n"
    assert result.stderr == told
    assert verify_family(family) == []
    assert {path.name for path in (family / "variants").iterdir()} == {"ft-1", "ft-2"}
    result = run(*arguments)
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["ft-1", "ft-2"]
    assert result.stderr == told


def test_a_full_disk_ends_a_bulk_export_and_tells_what_is_there(models, tmp_path, monkeypatch):
    from soupkit import export as module

    real, calls = module.export_variant, []

    def full(*args, **kwargs):
        calls.append(kwargs["name"])
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "export_variant", full)
    result = run("export", *models, "--family", tmp_path / "f", "--json")
    assert result.exit_code == 1
    assert [one["name"] for one in json.loads(result.stdout)] == ["ft-1"]
    assert result.stderr == "soupkit: No space left on device\n"
    assert calls == ["ft-1", "ft-2"]


# Other architectures


def save_mixtral(folder, **options):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=67, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
        max_position_embeddings=32,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder, **options)
    return "AutoModelForCausalLM"


def save_qwen_moe(folder, **options):
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=67, hidden_size=32, intermediate_size=44, moe_intermediate_size=20,
        shared_expert_intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=3, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(folder, **options)
    return "AutoModelForCausalLM"


def save_fused_moe(folder):
    """Experts as one 3-D parameter."""
    return save_qwen_moe(folder, save_original_format=False)


def save_vit(folder):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    return "AutoModelForImageClassification"


def save_resnet(folder):
    """Convolutions, and batch norms with counters in int64."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[12, 20], depths=[1, 1], layer_type="basic", num_labels=5,
    )  # fmt: skip
    ResNetForImageClassification(config).save_pretrained(folder)
    return "AutoModelForImageClassification"


def save_whisper(folder):
    """Conv1d kernels, which are 3-D as fused experts are."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=67, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=36, decoder_ffn_dim=36, num_mel_bins=8,
        max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    return "AutoModelForSpeechSeq2Seq"


ARCHITECTURES = [
    save_mixtral, save_qwen_moe, save_fused_moe, save_vit, save_resnet, save_whisper,
]  # fmt: skip


def logits_of(folder, kind):
    import transformers

    model, info = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    generator = torch.Generator().manual_seed(5)
    given = {
        "AutoModelForCausalLM": lambda: {"input_ids": torch.arange(3, 19).unsqueeze(0)},
        "AutoModelForImageClassification": lambda: {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator)
        },
        "AutoModelForSpeechSeq2Seq": lambda: {
            "input_features": torch.randn(1, 8, 20, generator=generator),
            "decoder_input_ids": torch.arange(3, 11).unsqueeze(0),
        },
    }[kind]()
    with torch.no_grad():
        return model.eval()(**given).logits


def signs_by_hand(ours, theirs, *, is_batch):
    """theirs + mean |delta| of each output (of each of a batch) times the signs, in float64."""
    delta = ours.double() - theirs.double()
    rows = delta.flatten(0, 1) if is_batch else delta.flatten(1)
    scale = rows.abs().mean(1, keepdim=True)
    return (theirs.double() + (scale * torch.where(rows >= 0, 1, -1)).reshape(ours.shape)).float()


@pytest.mark.parametrize("save", ARCHITECTURES, ids=lambda one: one.__name__)
def test_other_architectures_are_exported_and_restored(save, make_finetune, tmp_path):
    from safetensors.torch import save_file
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        kind = save(tmp_path / "base")

    def positive(tensors):
        for name, tensor in tensors.items():
            if name.endswith("running_var"):
                tensor.abs_()

    tuned = make_finetune(tmp_path / "ft", tmp_path / "base", size=3e-2, edit=positive)
    base = open_checkpoint(tmp_path / "base")
    for encoding in ("row", "raw"):
        export_variant(
            base, open_checkpoint(tuned), family=tmp_path / "f", name=encoding,
            encoding=encoding, companions=tuned,
        )  # fmt: skip
    assert verify_family(tmp_path / "f") == []
    for name in ("row", "raw"):
        restore(tmp_path / "f", name, out=tmp_path / name)
    # Stored whole, it is the fine-tune.
    assert torch.equal(logits_of(tmp_path / "raw", kind), logits_of(tuned, kind))
    # In signs, it is the fine-tune with each matrix done by hand.
    weights = [load_file(one / "model.safetensors") for one in (tuned, tmp_path / "base")]
    entries = open_variant(tmp_path / "f" / "variants" / "row").manifest.entries()
    stored = {name for name, entry in entries.items() if entry.kind == "delta"}
    assert {
        name for name, one in weights[0].items() if one.ndim > 1 and one.numel() > 500
    } <= stored
    # Fused experts; and the positions of a ViT, [1, patches, hidden].
    batches = {n for n, one in weights[0].items() if one.ndim == 3 and not n.endswith(".weight")}
    by_hand = make_finetune(tmp_path / "hand", tuned, size=0.0)
    save_file(
        {
            name: signs_by_hand(one, weights[1][name], is_batch=name in batches)
            if name in stored else one
            for name, one in weights[0].items()
        },
        by_hand / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    wanted = logits_of(by_hand, kind)
    torch.testing.assert_close(logits_of(tmp_path / "row", kind), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.equal(wanted, logits_of(tuned, kind))


def test_experts_have_a_scale_for_each_row_of_each(make_finetune, tmp_path):
    save_fused_moe(tmp_path / "base")
    tuned = make_finetune(tmp_path / "ft", tmp_path / "base")
    base = open_checkpoint(tmp_path / "base")
    (name, *_) = [one for one in base.names if one.endswith("experts.gate_up_proj")]
    assert base.shape(name) == (3, 40, 32)
    for encoding in ("row", "matrix"):
        export_variant(
            base, open_checkpoint(tuned), family=tmp_path / "f", name=encoding, encoding=encoding
        )
        delta = open_variant(tmp_path / "f" / "variants" / encoding).delta(name)
        assert delta.scale.shape == (1, 120)
        per_expert = {len(set(one.tolist())) for one in delta.scale.view(3, 40)}
        assert per_expert == ({1} if encoding == "matrix" else {40})


def test_a_config_of_models_that_do_not_fit_is_refused(models, tmp_path):
    save_vit(tmp_path / "vit")
    path = written(
        {"merge_method": "linear", "models": listed([models[1], tmp_path / "vit"], (1, 1))},
        tmp_path / "merge.yml",
    )
    from soupkit.offline import merge_checkpoints

    plan = read_merge_config(path)
    with pytest.raises(CheckpointError):
        merge_checkpoints(
            open_checkpoint(plan.base), [open_checkpoint(one) for one in plan.checkpoints],
            out=tmp_path / "out", rule=plan.rule,
        )  # fmt: skip
