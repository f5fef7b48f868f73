"""examples/smollm2_135m, on a tiny model: train, export, evaluate the export with transformers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import save_tiny_llama
from safetensors.torch import load_file

from megatron_logra import cli
from megatron_logra.config import SamplingConfig, load_config
from megatron_logra.model.gpt import build_model, transformer_config
from megatron_logra.model.huggingface import load_hf_weights
from megatron_logra.rollout.static_engine import StaticEngine

REPO = Path(__file__).resolve().parents[1]
CONFIG = REPO / "examples" / "smollm2_135m" / "train.yaml"


def eval_hf() -> Any:
    spec = importlib.util.spec_from_file_location("eval_hf", REPO / "tools" / "eval_hf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "model", 261)


@pytest.mark.parametrize("kind", ["logra", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_step_is_trained_exported_and_evaluated_with_transformers(
    kind: str, directory: Path, tmp_path: Path, pg: Any
) -> None:
    run_dir = tmp_path / "run"
    overrides = [
        *(f"model.hf={directory}", "model.tokenizer=bytes", f"optimizer.kind={kind}"),
        *("train.steps=1", "train.prompts_per_step=2", "train.precision=fp32", "sketch.rank=8"),
        # A wrong integer scores more than none, so that a random model has something to learn.
        *("algorithm.failure_reward=-1.0", "rollout.sampling.stop=[]", "train.seq_length=256"),
        *("eval.problems=3", "eval.samples=2", f"logging.run_dir={run_dir}"),
        *("rollout.sampling.max_tokens=12", "logging.tensorboard=false"),
        *("eval.at_start=false", "eval.at_end=false"),
    ]
    assert cli.main(["train", str(CONFIG), *overrides]) == 0
    exported = tmp_path / "exported"
    assert cli.main(["convert", "to-hf", str(run_dir), str(exported)]) == 0
    before, after = (load_file(d / "model.safetensors") for d in (directory, exported))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)

    tool, out = eval_hf(), tmp_path / "eval_hf.json"
    command = [str(CONFIG), *overrides, "--model", str(exported), "--json", str(out)]
    assert tool.main(command) == 0
    assert cli.main(["eval", str(CONFIG), *overrides]) == 0
    theirs, ours = (json.loads(p.read_text()) for p in (out, run_dir / "eval.json"))
    for key in ("pass@1", "reward_mean", "truncated", "n", "problems", "greedy"):
        assert theirs[key] == ours[key], key

    # The same tokens from both engines, at prompts of mixed lengths.
    model = build_model(*transformer_config(load_config(CONFIG, overrides)), pg)
    load_hf_weights(exported, model)
    options = {"stop_ids": frozenset({7}), "pad_id": 0, "batch_size": 5}
    engine = StaticEngine([model], max_sequence_length=64, pg=pg, **options)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    other = tool.TransformersEngine(loaded.eval(), longest=64, **options)
    prompts = [torch.randint(261, (n,)).tolist() for n in (3, 9, 5)]
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(temperature=temperature, max_tokens=10)
        found = [
            e.generate(prompts, 3, sampling, seed=4, update=2, stream="eval")
            for e in (engine, other)
        ]
        tokens = [[[r.token_ids for r in group] for group in groups] for groups in found]
        assert tokens[0] == tokens[1]


def test_the_configuration_is_valid_for_both_kinds() -> None:
    for kind in ("logra", "adam"):
        config = load_config(CONFIG, ["model.hf=x", f"optimizer.kind={kind}"])
        assert len(config.environment) == 5 and config.train.steps > 25


def test_a_directory_that_is_no_model_is_exit_2(tmp_path: Path, capsys: Any) -> None:
    command = [str(CONFIG), "model.hf=x", "--model", str(tmp_path)]
    assert eval_hf().main(command) == 2
    assert str(tmp_path) in capsys.readouterr().err
