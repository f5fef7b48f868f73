"""Conversions between Hugging Face directories and Megatron's distributed checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, reference
from safetensors.torch import load_file, save_file
from test_huggingface import assert_same_logits, expected, sequences

from megatron_logra import checkpoint, cli, distributed
from megatron_logra.config import ParallelConfig, config_from_dict
from megatron_logra.convert import from_hf, to_hf
from megatron_logra.model.gpt import build_model, transformer_config
from megatron_logra.model.huggingface import load_hf_weights
from megatron_logra.model.parameters import named_parameters


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def assert_same_tensors(directory: Path, other: Path) -> None:
    ours, theirs = tensors_of(directory), tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def identified(directory: Path) -> None:
    """Give every number of every tensor a value that occurs nowhere else."""
    first = 0
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            numbers = torch.arange(first, first + tensor.numel(), dtype=torch.int32)
            tensors[name] = numbers.view(torch.float32).reshape(tensor.shape).to(tensor.dtype)
            first += tensor.numel()
        save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_equal(family, tied, tmp_path, generator):
    source = tmp_path / "hf"
    reference(family, generator, tie_word_embeddings=tied).save_pretrained(source)
    identified(source)
    from_hf(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", source)
    before, after = (
        json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "back")
    )
    assert after == before


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_text_part_of_an_image_model_becomes_a_text_model(in_memory, tmp_path, generator):
    """Gemma 3 as it is published: what sees images is left out, and the rest is as it was."""
    text = reference("gemma3", generator, tie_word_embeddings=True)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=1
    )
    whole = transformers.Gemma3ForConditionalGeneration(config)
    language = whole.model.language_model
    language.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path / "hf")
    if in_memory:  # as the modules are called; the published files have other names
        (path,) = (tmp_path / "hf").glob("*.safetensors")
        published = load_file(path)
        assert all(not name.startswith("model.") for name in published)
        save_file(
            {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
            | {"lm_head.weight": language.embed_tokens.weight.detach().clone()},
            path,
            {"format": "pt"},
        )
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert config_of(tmp_path / "back")["architectures"] == ["Gemma3ForCausalLM"]
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert isinstance(exported, transformers.Gemma3ForCausalLM)
    tokens = torch.randint(131, (2, 40), generator=generator)
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, text(tokens).logits)
    cfg = config_from_dict(
        {
            "model": {"hf": str(tmp_path / "hf"), "tokenizer": "bytes"},
            "train": {"precision": "fp32", "seq_length": 64},
        }
    )
    tconfig, arguments = transformer_config(cfg)
    model = build_model(tconfig, arguments, distributed.initialize(ParallelConfig(), 0))
    load_hf_weights(tmp_path / "hf", model)
    back = dict(named_parameters(model))
    other = build_model(tconfig, arguments, distributed.initialize(ParallelConfig(), 0))
    load_hf_weights(tmp_path / "back", other)
    assert all(torch.equal(parameter, back[name]) for name, parameter in named_parameters(other))


def test_types_and_shards_are_kept_or_changed_on_request(tmp_path, generator):
    model = reference("qwen3", generator).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=30_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")
    to_hf(tmp_path / "megatron", tmp_path / "wide", dtype=torch.float32)
    for name, tensor in tensors_of(tmp_path / "wide").items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.state_dict()[name].float())
    for directory, dtype in (("back", torch.bfloat16), ("wide", torch.float32)):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        assert loaded.dtype == dtype
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor.to(dtype)), name


def test_a_converted_model_fits_every_layout_and_comes_back_from_it(ranks, tmp_path, generator):
    """Loaded at TP1, TP2 (with a padded vocabulary) and PP2, saved and exported from there."""
    cases = []
    for number, family in enumerate(("llama", "qwen2-window", "smollm3", "gemma3")):
        model = reference(family, generator, tie_word_embeddings=number % 2 == 0)
        hf, megatron = tmp_path / family, tmp_path / f"{family}-megatron"
        model.save_pretrained(hf)
        from_hf(hf, megatron)
        tokens, mask = sequences(generator)
        cases.append((hf, megatron, (tokens, mask, expected(model, tokens, mask))))
    layouts = {"tp1": (1, {}), "tp2": (2, {"tensor": 2}), "pp2": (2, {"pipeline": 2})}
    for name, (size, parallel) in layouts.items():
        ranks.run(size, _load_compare_save, parallel, cases, name)
        for hf, megatron, _ in cases:
            saved, back = Path(f"{megatron}-{name}") / "iter_0000000", Path(f"{hf}-from-{name}")
            to_hf(saved, back, like=hf)
            assert_same_tensors(back, hf)
    # Saved under one layout, loaded under another.
    moved = [(hf, Path(f"{megatron}-tp2") / "iter_0000000", case) for hf, megatron, case in cases]
    ranks.run(2, _load_compare_save, {"pipeline": 2}, moved, "moved")


def _load_compare_save(parallel: dict[str, int], cases: list[Any], name: str) -> None:
    pg = distributed.initialize(ParallelConfig(**parallel), 0)
    for hf, megatron, case in cases:
        config = {
            "model": {"hf": str(hf)},
            "train": {"precision": "fp32", "seq_length": 64, "seed": 5},
            "parallel": parallel,
        }
        model = build_model(*transformer_config(config_from_dict(config)), pg)
        loaded = checkpoint.load(megatron, checkpoint.weights_state([model]))
        checkpoint.set_weights([model], loaded)
        if "pipeline" not in parallel:
            assert_same_logits(model.eval(), *case)
        found = {name: parameter.clone() for name, parameter in named_parameters(model)}
        load_hf_weights(hf, model)
        for key, parameter in named_parameters(model):
            assert torch.equal(found[key], parameter), key
        described = checkpoint.read_description(megatron)
        root = Path(f"{megatron}-{name}")
        state = checkpoint.weights_state([model])
        checkpoint.save(root, 0, state, {"model": described["model"]}, keep=1)


def test_hashes_of_what_was_read_and_written_are_kept(tmp_path, generator):
    reference("llama", generator).save_pretrained(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    for source, result in (("hf", "megatron"), ("megatron", "back")):
        record = json.loads((tmp_path / result / "conversion.json").read_text())
        assert record["source"] == str(tmp_path / source)
        for directory, hashes in ((source, record["read"]), (result, record["written"])):
            assert hashes
            for name, value in hashes.items():
                data = (tmp_path / directory / name).read_bytes()
                assert hashlib.sha256(data).hexdigest() == value
        assert {p.name for p in (tmp_path / result).iterdir()} - record["written"].keys() <= {
            "conversion.json",
            "integrity.json",
        }


PEAK = """
import sys
from pathlib import Path
from megatron_logra import platform
platform.quieten()
from megatron_logra.convert import from_hf, to_hf

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10

small, large, out = map(Path, sys.argv[1:])
from_hf(small, out / "warm"), to_hf(out / "warm", out / "warm-back")
for function, source, target in ((from_hf, large, out / "a"), (to_hf, out / "a", out / "b")):
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak()
    function(source, target)
    print(peak() - before)
"""


def test_the_peak_of_memory_is_below_two_layers_and_the_embedding(tmp_path, generator):
    sizes = {"num_hidden_layers": 12, "hidden_size": 576, "intermediate_size": 1600}
    model = reference("llama", generator, vocab_size=6000, **sizes)
    reference("llama", generator).save_pretrained(tmp_path / "small")
    model.save_pretrained(tmp_path / "large")
    layer = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    embedding = 4 * model.model.embed_tokens.weight.numel()
    assert layer > 10 << 20 < embedding
    script = [sys.executable, "-c", PEAK, tmp_path / "small", tmp_path / "large", tmp_path]
    root = Path(__file__).parents[1]
    # The C library keeps small blocks that were freed; those of a real model's size it gives back.
    environment = os.environ | {"PYTHONPATH": str(root), "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for peak in map(int, done.stdout.split()):
        print(f"peak {peak >> 20} MiB, a layer {layer >> 20}, the embedding {embedding >> 20}")
        assert peak < 2 * layer + embedding
    assert_same_tensors(tmp_path / "b", tmp_path / "large")


def run_cli(capsys: Any, *arguments: Any) -> tuple[int, str]:
    code = cli.main(["convert", *map(str, arguments)])
    stderr = capsys.readouterr().err
    return code, "\n".join(line for line in stderr.splitlines() if " % " not in line)


def expect_refusal(
    capsys: Any, target: Path, *texts: str, way: str = "from-hf", source: Path
) -> None:
    before = sorted(target.parent.iterdir())
    capsys.readouterr()
    code, stderr = run_cli(capsys, way, source, target)
    assert code == 2 and "\n" not in stderr, stderr
    for text in texts:
        assert text in stderr
    assert sorted(target.parent.iterdir()) == before  # nothing is left behind


def test_faulty_sources_are_refused_by_name_and_nothing_is_left(tmp_path, generator, capsys):
    source, target = tmp_path / "hf", tmp_path / "megatron"
    model = reference("llama", generator)
    model.save_pretrained(source, max_shard_size="20KB")
    whole = shutil.copytree(source, tmp_path / "whole")

    def refused(*texts: str) -> None:
        expect_refusal(capsys, target, *texts, source=source)
        shutil.rmtree(source)
        shutil.copytree(whole, source)

    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    refused(shard.name, "missing")
    shard.write_bytes(shard.read_bytes()[:-7])
    refused(shard.name, "not a complete safetensors file")
    shard.write_bytes(b"\xff" * 100)
    refused(shard.name, "not a complete safetensors file")
    config = config_of(source)
    changes = {"intermediate_size": 55, "num_hidden_layers": 3, "vocab_size": 130, "head_dim": 14}
    for key, value in changes.items():
        (source / "config.json").write_text(json.dumps(config | {key: value}))
        refused(str(source))
    tensors = load_file(shard)
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, shard)
    refused(shard.name, "I8", "F32")
    (source / "config.json").write_text(
        json.dumps(config | {"architectures": ["MambaForCausalLM"]})
    )
    refused("MambaForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM")
    assert run_cli(capsys, "from-hf", source, target)[0] == 0
    expect_refusal(capsys, target, str(target), "exists", source=source)


def test_faulty_checkpoints_are_refused_by_name_and_nothing_is_left(tmp_path, generator, capsys):
    hf, other, source = tmp_path / "hf", tmp_path / "other", tmp_path / "megatron"
    reference("llama", generator).save_pretrained(hf)
    reference("llama", generator, num_hidden_layers=3).save_pretrained(other)
    from_hf(hf, source)
    target = tmp_path / "back"
    with pytest.raises(Exception, match="num_layers 2, here 3"):
        to_hf(source, target, like=other)
    data = source / "__0_0.distcp"
    good = data.read_bytes()
    for bad in (good[:-9], good[:500] + b"\0" + good[501:]):
        data.write_bytes(bad)
        expect_refusal(capsys, target, "damaged", data.name, way="to-hf", source=source)
    data.unlink()
    expect_refusal(capsys, target, data.name, way="to-hf", source=source)
    expect_refusal(capsys, target, "no such checkpoint", way="to-hf", source=tmp_path / "none")


def test_a_disk_without_room_is_reported_before_anything_is_written(tmp_path, capsys, generator):
    source = tmp_path / "hf"
    reference("llama", generator, intermediate_size=8).save_pretrained(source)
    config = config_of(source)
    width = shutil.disk_usage(tmp_path).free // (3 * 42 * 4)  # more than there is, in one layer
    changed = config | {"num_hidden_layers": 1, "intermediate_size": width}
    (source / "config.json").write_text(json.dumps(changed))
    (source / "model.safetensors").unlink()
    sparse_llama(source, changed)
    expect_refusal(capsys, tmp_path / "megatron", "GiB are free", source=source)


def sparse_llama(directory: Path, config: dict[str, Any]) -> None:
    """A safetensors file of zeros that take no room on disk."""
    hidden, ffn, at = config["hidden_size"], config["intermediate_size"], "model.layers.0."
    q, kv = 6 * config["head_dim"], 2 * config["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (131, hidden),
        "lm_head.weight": (131, hidden),
        "model.norm.weight": (hidden,),
        f"{at}input_layernorm.weight": (hidden,),
        f"{at}post_attention_layernorm.weight": (hidden,),
        f"{at}self_attn.q_proj.weight": (q, hidden),
        f"{at}self_attn.k_proj.weight": (kv, hidden),
        f"{at}self_attn.v_proj.weight": (kv, hidden),
        f"{at}self_attn.o_proj.weight": (hidden, q),
        f"{at}mlp.gate_proj.weight": (ffn, hidden),
        f"{at}mlp.up_proj.weight": (ffn, hidden),
        f"{at}mlp.down_proj.weight": (hidden, ffn),
    }
    header, place = {}, 0
    for name, shape in shapes.items():
        end = place + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)


@pytest.mark.parametrize("way", ["from-hf", "to-hf"])
def test_a_write_that_fails_leaves_nothing(way, tmp_path, generator, capsys):
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    reference("llama", generator).save_pretrained(hf)
    from_hf(hf, megatron)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, former[1]))
    try:
        source = hf if way == "from-hf" else megatron
        expect_refusal(capsys, tmp_path / "new", "cannot be written", way=way, source=source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_killed_conversion_never_looks_finished(tmp_path, generator):
    hf, target = tmp_path / "hf", tmp_path / "out" / "megatron"
    sizes = {"num_hidden_layers": 24, "hidden_size": 384, "intermediate_size": 1500}
    reference("llama", generator, **sizes).save_pretrained(hf)
    root = Path(__file__).parents[1]
    command = [sys.executable, root / "tools/convert_from_hf.py", hf, target]
    environment = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(" 20 %"):
            process.kill()
            break
    process.stderr.close()
    assert process.wait() == -signal.SIGKILL
    (unfinished,) = (tmp_path / "out").iterdir()
    assert unfinished.name.startswith(".unfinished-")
    assert not (unfinished / "checkpoint.json").exists()
    from_hf(hf, target)
    assert list((tmp_path / "out").iterdir()) == [target]
    to_hf(target, tmp_path / "back")
    assert_same_tensors(tmp_path / "back", hf)
