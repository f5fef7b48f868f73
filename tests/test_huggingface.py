from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import load_file, save_file

from megatron_logra.config import config_from_dict
from megatron_logra.errors import UserError
from megatron_logra.model import smollm2
from megatron_logra.model.gpt import build_model, transformer_config
from megatron_logra.model.huggingface import load_hf_weights, read_spec
from megatron_logra.model.tokenizer import load_tokenizer

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "vocab_size": 131,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "sliding_window": None,
}


def reference(family: str, generator: torch.Generator, **changes: Any) -> torch.nn.Module:
    """A random model of transformers, in which every norm weight and bias is random too."""
    config_class, model_class = FAMILIES[family]
    model = model_class(config_class(**(SIZES | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def ours(directory: Path | str, pg: ProcessGroupCollection, precision: str = "fp32") -> GPTModel:
    config, arguments = transformer_config(
        config_from_dict(
            {
                "model": {"hf": str(directory)},
                "train": {"precision": precision, "seq_length": 96},
            }
        )
    )
    model = build_model(config, arguments, pg).eval()
    load_hf_weights(directory, model)
    return model


@torch.no_grad()
def logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(
    family: str, tied: bool, tmp_path: Path, pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = reference(family, generator, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(131, (3, 23), generator=generator)
    with torch.no_grad():
        want = model(tokens).logits
    assert want.std() > 0.1
    imported = ours(tmp_path, pg)
    torch.testing.assert_close(logits(imported, tokens), want, rtol=1e-4, atol=1e-4)
    # Rows padded on the right, against transformers' attention mask.
    mask = torch.ones_like(tokens)
    mask[0, 15:], mask[1, 7:] = 0, 0
    with torch.no_grad():
        masked = model(tokens, attention_mask=mask).logits
    got = logits(imported, tokens.masked_fill(mask == 0, 0))
    torch.testing.assert_close(got[mask == 1], masked[mask == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 7000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_rope_scaling_equals_transformers(
    rope: dict[str, Any], tmp_path: Path, pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    changes = {"rope_parameters": rope, "max_position_embeddings": 16384}
    model = reference("llama", generator, **changes)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(131, (1, 90), generator=generator)
    with torch.no_grad():
        want = model(tokens).logits
    torch.testing.assert_close(logits(ours(tmp_path, pg), tokens), want, rtol=1e-4, atol=1e-4)


def test_old_form_of_the_rope_keys_means_the_same(
    tmp_path: Path, generator: torch.Generator
) -> None:
    reference("llama", generator).save_pretrained(tmp_path)
    new = read_spec(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path) == new


def test_sharded_and_bf16_checkpoints_load_the_same_weights(
    tmp_path: Path, pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = reference("qwen3", generator).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = ours(tmp_path / "one", pg), ours(tmp_path / "many", pg)
    narrow = ours(tmp_path / "one", pg, precision="bf16")
    for a, b, c in zip(one.parameters(), many.parameters(), narrow.parameters(), strict=True):
        assert a.dtype == torch.float32 and c.dtype == torch.bfloat16
        assert torch.equal(a, b) and torch.equal(a, c.float())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.k_proj", "self_attn.v_proj"),
        ("input_layernorm", "post_attention_layernorm"),
        ("self_attn.q_norm", "self_attn.k_norm"),
    ],
)
def test_every_block_has_its_own_place(
    first: str, second: str, tmp_path: Path, pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    """Two blocks of equal shape, exchanged in the file, are not mistaken for each other."""
    model = reference("qwen3", generator)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    a, b = (f"model.layers.1.{name}.weight" for name in (first, second))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    save_file(tensors, file, {"format": "pt"})
    tokens = torch.randint(131, (2, 20), generator=generator)
    with torch.no_grad():
        before = model(tokens).logits
        model.load_state_dict(tensors)
        after = model(tokens).logits
    # Exchanging the norms of q and k moves the products less than anything else.
    assert (before - after).abs().max() > 1e-3
    torch.testing.assert_close(logits(ours(tmp_path, pg), tokens), after, rtol=1e-4, atol=1e-4)


def expect_error(directory: Path, pg: ProcessGroupCollection, *texts: str) -> None:
    with pytest.raises(UserError) as caught:
        ours(directory, pg)
    message = str(caught.value)
    assert "\n" not in message
    for text in (str(directory), *texts):
        assert text in message


def test_every_tensor_must_fit(
    tmp_path: Path, pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    reference("qwen2", generator).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.self_attn.k_proj.bias"

    def write(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, file, {"format": "pt"})

    write({n: t for n, t in good.items() if n != name})
    expect_error(tmp_path, pg, name, "missing")
    write(good | {"model.layers.2.mlp.up_proj.weight": torch.zeros(2)})
    expect_error(tmp_path, pg, "model.layers.2.mlp.up_proj.weight", "no place")
    write(good | {"model.layers.0.mlp.up_proj.weight": torch.zeros(55, 42)})
    expect_error(tmp_path, pg, "model.layers.0.mlp.up_proj.weight [55, 42]", "[112, 42]")
    write(good | {name: torch.zeros(35)})
    expect_error(tmp_path, pg, f"{name} [35]", "decoder.layers.1.self_attention.linear_qkv.bias")
    write(good | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)})
    ours(tmp_path, pg)


def test_a_stored_copy_of_tied_embeddings_must_be_one(
    tmp_path: Path, pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    reference("llama", generator, tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    ours(tmp_path, pg)
    tensors["lm_head.weight"][5, 7] += 1
    save_file(tensors, file, {"format": "pt"})
    expect_error(tmp_path, pg, "lm_head.weight", "no place")


def test_damaged_files_are_named(
    tmp_path: Path, pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = reference("llama", generator)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    expect_error(tmp_path, pg, shard.name, "not a complete safetensors file")
    shard.write_bytes(b"")
    expect_error(tmp_path, pg, shard.name, "not a complete safetensors file")
    shard.unlink()
    expect_error(tmp_path, pg, shard.name, "missing")
    other = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.write_bytes(other.read_bytes())
    expect_error(tmp_path, pg, shard.name, "is missing")
    index.write_text("{]")
    expect_error(tmp_path, pg, index.name, "not valid JSON")
    index.unlink()
    expect_error(tmp_path, pg, "expected model.safetensors")
    (tmp_path / "config.json").unlink()
    expect_error(tmp_path, pg, "config.json", "No such file")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "supported: LlamaForCausalLM"),
        ({"architectures": None}, "supported: LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "42"}, "hidden_size: expected a positive integer"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
)
def test_unsupported_models_are_refused(
    changes: dict[str, Any], text: str, tmp_path: Path, pg: ProcessGroupCollection,
    generator: torch.Generator,
) -> None:  # fmt: skip
    reference("llama", generator).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    expect_error(tmp_path, pg, "config.json", text)


@pytest.mark.slow
def test_smollm2_speaks_as_in_transformers(pg: ProcessGroupCollection) -> None:
    directory = smollm2.fetch()
    imported = ours(directory, pg)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config = config_from_dict({"model": {"hf": str(directory)}})
    tokenizer = load_tokenizer(config.model, imported.vocab_size)
    questions = [
        "What is the capital of France?",
        "What is 7 + 8? Reply with only the final answer.",
        "Name three colours of the rainbow.",
    ]
    for question in questions:
        prompt = torch.tensor([tokenizer.encode_chat([{"role": "user", "content": question}])])
        with torch.no_grad():
            want = model(prompt).logits
            answer = model.generate(prompt, max_new_tokens=16, do_sample=False)
        torch.testing.assert_close(logits(imported, prompt), want, rtol=1e-3, atol=1e-3)
        sequence = prompt
        while sequence.shape[1] < answer.shape[1]:
            token = logits(imported, sequence)[:, -1:].argmax(-1)
            sequence = torch.cat([sequence, token], 1)
        assert sequence.tolist() == answer.tolist()
        if "France" in question:
            assert "Paris" in tokenizer.decode(answer[0, prompt.shape[1] :].tolist())
