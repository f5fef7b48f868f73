from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, reference
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import load_file, save_file

from megatron_logra import distributed
from megatron_logra.config import ParallelConfig, config_from_dict
from megatron_logra.errors import UserError
from megatron_logra.model import smollm2
from megatron_logra.model.context_parallel import own_share
from megatron_logra.model.gpt import build_model, transformer_config
from megatron_logra.model.huggingface import load_hf_weights, read_spec
from megatron_logra.model.tokenizer import load_tokenizer


def ours(
    directory: Path | str,
    pg: ProcessGroupCollection,
    precision: str = "fp32",
    parallel: dict[str, Any] | None = None,
) -> GPTModel:
    config, arguments = transformer_config(
        config_from_dict(
            {
                "model": {"hf": str(directory)},
                "train": {"precision": precision, "seq_length": 96},
                "parallel": parallel or {},
            }
        )
    )
    model = build_model(config, arguments, pg).eval()
    load_hf_weights(directory, model)
    return model


@torch.no_grad()
def logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None, runtime_gather_output=True)


def sequences(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [3, 40], longer than any window, and a mask of rows padded on the right."""
    tokens = torch.randint(131, (3, 40), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 31:], mask[1, 7:] = 0, 0
    return tokens, mask


@torch.no_grad()
def expected(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
    """Logits of whole rows, and of those that the mask leaves."""
    whole, masked = model(tokens).logits, model(tokens, attention_mask=mask).logits
    assert whole.std() > 0.1
    return whole, masked[mask == 1]


def assert_same_logits(model: GPTModel, tokens: Any, mask: Any, want: Any) -> None:
    whole, masked = want
    got = logits(model, tokens)[..., : whole.shape[-1]]
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
    got = logits(model, tokens.masked_fill(mask == 0, 0))
    got = got[mask == 1][..., : whole.shape[-1]]
    torch.testing.assert_close(got, masked, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(
    family: str, tied: bool, tmp_path: Path, pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = reference(family, generator, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    tokens, mask = sequences(generator)
    assert_same_logits(ours(tmp_path, pg), tokens, mask, expected(model, tokens, mask))


def test_logits_equal_transformers_on_two_ranks(
    ranks: Any, tmp_path: Path, generator: torch.Generator
) -> None:
    cases = []
    for number, family in enumerate(FAMILIES):
        model = reference(family, generator, tie_word_embeddings=number % 2 == 0)
        directory = tmp_path / family
        model.save_pretrained(directory)
        tokens, mask = sequences(generator)
        cases.append((directory, tokens, mask, expected(model, tokens, mask)))
    ranks.run(2, _compare_all, cases)


def test_logits_equal_transformers_on_context_parallel_ranks(
    ranks: Any, tmp_path: Path, generator: torch.Generator
) -> None:
    """Windows, two rotary bases and layers without RoPE, where positions are divided."""
    cases = []
    for family in ("mistral", "smollm3", "gemma3"):
        model = reference(family, generator)
        model.save_pretrained(tmp_path / family)
        tokens, _ = sequences(generator)
        with torch.no_grad():
            cases.append((tmp_path / family, tokens, model(tokens).logits))
    ranks.run(2, _compare_own_positions, cases)


@torch.no_grad()
def _compare_own_positions(cases: list[Any]) -> None:
    parallel = {"context": 2}
    pg = distributed.initialize(ParallelConfig(**parallel), 0)
    for directory, tokens, want in cases:
        model = ours(directory, pg, parallel=parallel)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        mine = (own_share(values, pg.cp) for values in (tokens, positions))
        torch.testing.assert_close(model(*mine, None), own_share(want, pg.cp), rtol=1e-4, atol=1e-4)


def _compare_all(cases: list[Any]) -> None:
    parallel = {"tensor": 2}
    pg = distributed.initialize(ParallelConfig(**parallel), 0)
    for directory, *case in cases:
        assert_same_logits(ours(directory, pg, parallel=parallel), *case)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 7000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}


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
        {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 7000.0},
        YARN,
        YARN | {"attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
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


UNEVEN = (("gate", 57), ("up", 55))


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
    expect_error(tmp_path, pg, "model.layers.0.mlp.up_proj.weight is [55, 42]", "[56, 72]")
    sizes = {f"model.layers.0.mlp.{n}_proj.weight": torch.zeros(s, 72) for n, s in UNEVEN}
    write(good | sizes)  # together as large as they should be
    expect_error(tmp_path, pg, "model.layers.0.mlp.gate_proj.weight is [57, 72]", "[56, 72]")
    write(good | {name: torch.zeros(35)})
    expect_error(tmp_path, pg, f"{name} is [35]", "[24]")
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
        ({"head_dim": -1}, "head_dim"),
        ({"num_key_value_heads": 4}, "divisor of num_attention_heads=6"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "42"}, "hidden_size='42': expected a positive integer"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "dynamic, llama3, yarn"),
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
        "How many legs does a spider have?",
        "Write one sentence about the sea.",
        "Is 17 a prime number?",
        "Translate 'good morning' into Spanish.",
        "Who wrote Hamlet?",
        "List the first five even numbers.",
        "What is the opposite of cold?",
        "Explain what a verb is.",
        "Give me a name for a grey cat.",
        "What do bees make?",
        "Sort these numbers: 9, 2, 5.",
        "Which planet is closest to the sun?",
        "Finish the sentence: The train was late because",
        "What is 12 times 3?",
        "Spell the word 'necessary' backwards.",
        "Wie viele Tage hat eine Woche?",
        "Write a Python function that returns the larger of two numbers.",
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
