"""Where Megatron-Bridge comes in, and what is said where it cannot: it is not installed here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from families import reference
from helpers import tiny_config
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file

from megatron_logra import cli, convert
from megatron_logra.config import config_from_dict
from megatron_logra.errors import UserError
from megatron_logra.model import bridge
from megatron_logra.model.families import FAMILIES
from megatron_logra.model.twin import has_twin
from megatron_logra.rl.policy import build_policy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of an architecture that is no family of ours."""
    directory = tmp_path / "hf"
    directory.mkdir()
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megatron.bridge that is found, but cannot be imported."""
    package = tmp_path / "site" / "megatron" / "bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('no\\n engine')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()


def assert_names_what_serves(line: str, directory: Path) -> None:
    assert line.startswith(f"{directory}/config.json: architecture Qwen3_5ForConditional")
    assert "\n" not in line
    for words in (*FAMILIES, "pip install 'megatron-logra[bridge]'", "with Transformer Engine"):
        assert words in line


def test_without_it_the_refusal_names_the_families_and_what_to_install(model, tmp_path, capsys):
    assert bridge.lack() == "megatron-bridge is not installed"
    assert not bridge.serves(model)
    assert cli.main(["convert", "from-hf", str(model), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.strip().removeprefix("megatron-logra: error: ")
    assert_names_what_serves(line, model)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    with pytest.raises(UserError) as caught:
        build_policy(config_from_dict({"model": {"hf": str(model), "tokenizer": "bytes"}}))
    assert_names_what_serves(str(caught.value), model)


def test_an_installation_that_cannot_be_imported_is_a_refusal_with_the_reason(model, broken):
    reason = "megatron-bridge cannot be imported: RuntimeError: no engine"
    assert bridge.lack() == reason
    with pytest.raises(UserError) as caught:
        bridge.serves(model)
    assert str(caught.value).endswith(f"{', '.join(FAMILIES)}; {reason}")


def test_families_of_ours_do_not_go_through_it(model, broken):
    for name in [*FAMILIES, "Gemma3ForConditionalGeneration"]:
        (model / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert not bridge.serves(model)


def test_its_models_are_refused_without_transformer_engine(model):
    with pytest.raises(UserError, match="needs a GPU, Transformer Engine"):
        bridge.BridgedModel(config_from_dict({"model": {"hf": str(model), "tokenizer": "bytes"}}))


def test_tensors_written_as_they_come_are_all_there(tmp_path, generator):
    tensors = {
        f"t{i}": torch.randn(size, generator=generator).to(torch.bfloat16)
        for i, size in enumerate([(30, 4), (1,), (50, 7), (2, 2, 2), (9,)])
    }
    for most, files in ((10**6, 1), (300, 3)):
        directory = tmp_path / str(most)
        directory.mkdir()
        places = convert._write_stream(directory, iter(tensors.items()), most)
        assert set(places.values()) == set(directory.glob("*.safetensors"))
        assert len(set(places.values())) == files
        for name, tensor in tensors.items():
            assert torch.equal(load_file(places[name])[name], tensor)
        index = directory / "model.safetensors.index.json"
        assert index.exists() == (files > 1)
        if files > 1:
            written = json.loads(index.read_text())
            assert written["weight_map"] == {name: path.name for name, path in places.items()}
            assert written["metadata"]["total_size"] == 2 * sum(t.numel() for t in tensors.values())
        assert len(list(directory.iterdir())) == files + (files > 1)


@pytest.mark.parametrize(
    ("whole", "text", "precision"),
    [
        ({"dtype": "bfloat16"}, None, "bf16"),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, "bf16"),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, "fp32"),
        ({"dtype": "float16"}, None, "fp32"),
        ({}, None, "fp32"),
    ],
)
def test_the_precision_of_a_conversion_loses_nothing(model, whole, text, precision):
    config = whole | ({"text_config": text} if text else {})
    (model / "config.json").write_text(json.dumps(config))
    assert convert._precision(model) == precision


def test_a_twin_is_for_models_that_were_built_here():
    """Parameters of the same shapes do not make another program's layers the same."""

    class Provider(TransformerConfig):
        pass

    layer = type("Linear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch"})
    for kind in (TransformerConfig, Provider):
        model = torch.nn.Sequential(layer())
        model.config = kind(num_layers=1, hidden_size=8, num_attention_heads=2)
        assert has_twin(model) == (kind is TransformerConfig)


def test_layers_without_generation_are_refused_where_it_begins(tmp_path, pg, generator):
    reference("llama", generator, vocab_size=300).save_pretrained(tmp_path)
    config = tiny_config({}, train={"seq_length": 16})
    policy = build_policy(
        config.model_copy(
            update={"model": config.model.model_copy(update={"spec": None, "hf": str(tmp_path)})}
        )
    )
    policy.engine()
    policy.tconfig.experimental_attention_variant = "gated_delta_net"
    with pytest.raises(UserError, match=r"cannot generate with its gated_delta_net layers"):
        policy.engine()
