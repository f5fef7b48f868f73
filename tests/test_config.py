"""The configuration: what is refused, in which words, and what overrides reach."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from megatron_logra.config import (
    Config,
    config_from_dict,
    dump_yaml,
    load_config,
    parse_yaml,
    require_trainable,
)
from megatron_logra.errors import UserError

MODEL = "model: {hf: somewhere}\n"
SECTIONS = (
    "model, parallel, optimizer, sketch, step_control, algorithm, rollout, environment, train, "
    "eval, checkpoint, logging"
)
TRAIN = ", ".join(type(Config.model_fields["train"].default).model_fields)


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, list(overrides))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "FILE: expected a mapping of configuration sections; the file is empty"),
        ("[1]", "FILE: expected a mapping of configuration sections; got a list"),
        ("hello", "FILE: expected a mapping of configuration sections; got a str"),
        (
            "a: 1\nb: [",
            "FILE:2: not valid YAML: while parsing a flow node, expected the node content, "
            "but found '<stream end>'",
        ),
        (
            MODEL + "train:\n  steps: 5\n  seed: 1\n  steps: 6",
            "FILE:5: not valid YAML: the key steps is given twice",
        ),
        (MODEL + MODEL, "FILE:2: not valid YAML: the key model is given twice"),
        (
            MODEL + "? [a]\n: b",
            "FILE:2: not valid YAML: while constructing a mapping, found unhashable key",
        ),
        (MODEL + "1: x", f"1: a configuration key must be a name; expected one of: {SECTIONS}"),
        (
            MODEL + "train: {2: x}",
            f"train.2: a configuration key must be a name; expected one of: {TRAIN}",
        ),
        (MODEL + "trian: {}", f"trian: unknown configuration key; expected one of: {SECTIONS}"),
        (
            MODEL + "train: {stepz: 1}",
            f"train.stepz: unknown configuration key; expected one of: {TRAIN}",
        ),
        (
            MODEL + "step_control: {lr: {lrr: 1}}",
            "step_control.lr.lrr: unknown configuration key; expected one of: lr, min_lr, "
            "warmup_steps, decay_steps, decay, weight_decay, clip_grad",
        ),
        ("train: {}", "model: missing; expected: Which model is trained: either `hf` or `spec`."),
        (MODEL + "train: 3", "train: expected a section (a mapping of keys), got 3"),
        (MODEL + "train:", "train: expected a section (a mapping of keys), got None"),
        (MODEL + "train: {steps: '3'}", "train.steps: expected a valid integer, got '3'"),
        (MODEL + "train: {steps: 3.0}", "train.steps: expected a valid integer, got 3.0"),
        (MODEL + "train: {steps: true}", "train.steps: expected a valid integer, got True"),
        (MODEL + "train: {steps: 0}", "train.steps: expected greater than or equal to 1, got 0"),
        (
            MODEL + "train: {precision: fp16}",
            "train.precision: expected 'bf16' or 'fp32', got 'fp16'",
        ),
        (
            MODEL + "step_control: {alpha_max: .inf}",
            "step_control.alpha_max: expected a finite number, got inf",
        ),
        (
            MODEL + "step_control: {update_ratio: .nan}",
            "step_control.update_ratio: expected a finite number, got nan",
        ),
        (MODEL + "sketch: {targets: [1]}", "sketch.targets.0: expected a valid string, got 1"),
        (
            "model: {hf: a, spec: {num_layers: 1}}",
            "exactly one of model.hf and model.spec must be given",
        ),
        ("model: {}", "exactly one of model.hf and model.spec must be given"),
        (
            "model: {spec: {num_layers: 1}}",
            "model.spec needs model.tokenizer (a directory, or bytes)",
        ),
        (
            MODEL + "algorithm: grpo",
            "train.responses_per_prompt: grpo needs at least 2",
        ),
        (
            MODEL + "rollout: {engine: dynamic}\nparallel: {context: 2}",
            "rollout.engine: dynamic cannot have parallel.context=2; expected 1, or static",
        ),
        (
            MODEL + "rollout: {engine: dynamic}\nparallel: {pipeline: 2, virtual_pipeline: 2}",
            "rollout.engine: dynamic cannot have parallel.virtual_pipeline=2; "
            "expected 1, or static",
        ),
        (
            MODEL + "rollout: {dynamic: {cuda_graphs: -1}}",
            "rollout.dynamic.cuda_graphs: expected greater than or equal to 0, got -1",
        ),
        (
            MODEL + "parallel: {sequence: true}",
            "parallel.sequence: needs parallel.tensor > 1",
        ),
        (
            MODEL + "step_control: {kl_budget_final: 1e-3}",
            "step_control.kl_budget_final: 0.001 exceeds step_control.kl_budget=0.0002; "
            "expected at most that",
        ),
        (MODEL + "environment: 3", "environment: expected a valid list, got 3"),
        (
            MODEL + "environment: {kind: web}",
            "environment.0.kind: expected 'reasoning_gym', 'jsonl' or 'python', got 'web'",
        ),
    ],
)
def test_wrong_input_is_one_line_that_names_the_key(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    assert str(error.value) == message.replace("FILE", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ("temperature=0", "rollout.sampling.temperature: training needs more than 0"),
        ("top_p=0.9", "rollout.sampling: training needs the full distribution"),
        ("top_k=5", "rollout.sampling: training needs the full distribution"),
    ],
)
def test_sampling_that_gives_no_exact_ratios_is_for_generation_only(tmp_path, sampling, message):
    config = load(tmp_path, MODEL, f"rollout.sampling.{sampling}")
    with pytest.raises(UserError) as error:
        require_trainable(config)
    assert str(error.value).startswith(message)
    require_trainable(load(tmp_path, MODEL, f"rollout.sampling.{sampling}", "algorithm.name=sft"))
    require_trainable(load(tmp_path, MODEL))


def test_a_constant_budget_has_no_final_one(tmp_path):
    load(tmp_path, MODEL, "step_control.kl_budget=1e-6", "step_control.schedule=constant")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "train.steps: expected KEY=VALUE, such as train.steps=10"),
        ("=3", "=3: expected KEY=VALUE, such as train.steps=10"),
        ("train..steps=3", "train..steps=3: expected KEY=VALUE, such as train.steps=10"),
        ("train.steps=[", "train.steps: cannot read the value '['; expected YAML"),
        ("train.steps.x=1", "train.steps.x: train.steps is a value, not a section"),
        ("environment.2.task=x", "environment.2.task: 2 is not an index into a list of 2"),
        ("environment.task=x", "environment.task: task is not an index into a list of 2"),
        ("train.steps=many", "train.steps: expected a valid integer, got 'many'"),
    ],
)
def test_wrong_override_is_one_line_that_names_the_key(tmp_path, override, message):
    text = MODEL + "train: {steps: 3}\nenvironment: [{kind: jsonl}, {kind: jsonl}]"
    with pytest.raises(UserError) as error:
        load(tmp_path, text, override)
    assert str(error.value) == message


def test_a_file_changes_its_base_section_by_section(tmp_path):
    (tmp_path / "base.yaml").write_text(
        MODEL + "train: {steps: 3, seed: 5}\nenvironment: {kind: jsonl, path: p}\n"
        "rollout: {sampling: {max_tokens: 7, stop: [a, b]}}"
    )
    own = "base: ../base.yaml\ntrain: {steps: 4}\nrollout: {sampling: {stop: [c]}}"
    (tmp_path / "below").mkdir()
    config = load(tmp_path / "below", own, "train.prompts_per_step=2")
    assert (config.train.steps, config.train.seed, config.train.prompts_per_step) == (4, 5, 2)
    assert config.rollout.sampling.max_tokens == 7 and config.rollout.sampling.stop == ["c"]
    assert config.environment[0].path == "p"


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("nowhere.yaml", r"nowhere\.yaml: No such file"),
        ("3", r"c\.yaml: base: expected a file, got 3"),
        ("c.yaml", r"base: c\.yaml has a base, too; expected a whole configuration"),
    ],
)
def test_a_wrong_base_is_one_line(base, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load(tmp_path, f"base: {base}")


def test_unreadable_files_are_named(tmp_path):
    missing = tmp_path / "missing.yaml"
    with pytest.raises(UserError, match=r"missing\.yaml: No such file or directory; expected"):
        load_config(missing)
    with pytest.raises(UserError, match="Is a directory; expected a YAML file"):
        load_config(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.yaml: not UTF-8 text"):
        load_config(binary)


def test_long_values_are_cut_in_messages(tmp_path):
    with pytest.raises(UserError) as error:
        load(tmp_path, MODEL + f"train: {{steps: x{'y' * 5000}}}")
    assert len(str(error.value)) < 150


def test_floats_are_those_of_yaml_1_2():
    rng = random.Random()
    for _ in range(200):
        value = rng.uniform(-10, 10) * 10.0 ** rng.randint(-12, 12)
        mantissa, exponent = f"{value:e}".split("e")
        for text in (f"{value!r}", f"{value:e}", f"{mantissa}E{int(exponent)}"):
            read = parse_yaml(text)
            assert isinstance(read, float)
            assert read == float(text)
    assert parse_yaml("2e-4") == 2e-4
    assert parse_yaml("'2e-4'") == "2e-4"
    assert isinstance(parse_yaml("12"), int)


@pytest.mark.parametrize("key", ["environment.task", "environment.0.task"])
@pytest.mark.parametrize(
    "environment", ["{kind: jsonl, weight: 2.0}", "[{kind: jsonl, weight: 2.0}]"]
)
def test_overrides_reach_one_environment_with_and_without_index(tmp_path, key, environment):
    config = load(tmp_path, MODEL + f"environment: {environment}", f"{key}=sums")
    assert [(e.kind, e.weight, e.task) for e in config.environment] == [("jsonl", 2.0, "sums")]


def test_overrides_reach_one_of_several_environments(tmp_path):
    text = MODEL + "environment: [{kind: jsonl}, {kind: jsonl}]"
    config = load(tmp_path, text, "environment.1.path=a.jsonl", "environment.0.weight=3")
    assert [(e.path, e.weight) for e in config.environment] == [(None, 3), ("a.jsonl", 1.0)]


def test_overrides_make_sections_that_the_file_lacks(tmp_path):
    config = load(
        tmp_path,
        MODEL,
        "environment.kind=reasoning_gym",
        "environment.params.max_terms=3",
        "step_control.lr.lr=2e-4",
        "rollout.sampling.stop=[a, b]",
        "algorithm=grpo",
        "algorithm.clip_low=0.1",
        "train.responses_per_prompt=2",
        "model.tokenizer=null",
    )
    assert config.environment[0].params == {"max_terms": 3}
    assert config.step_control.lr.lr == 2e-4
    assert config.rollout.sampling.stop == ["a", "b"]
    assert (config.algorithm.name, config.algorithm.clip_low) == ("grpo", 0.1)
    assert config.model.tokenizer is None


def test_later_overrides_win(tmp_path):
    config = load(tmp_path, MODEL + "train: {steps: 1}", "train.steps=2", "train.steps=3")
    assert config.train.steps == 3


def test_a_merge_key_may_be_overridden_beside_it(tmp_path):
    text = "model: {hf: x}\ntrain: &t {steps: 4, seed: 1}\neval: {<<: {problems: 9}, problems: 7}"
    assert load(tmp_path, text).eval.problems == 7


def test_the_resolved_configuration_reads_back_as_itself(tmp_path):
    text = MODEL + "environment: {kind: jsonl, path: a}\nalgorithm: sft\nsketch: {rank: 7}"
    config = load(tmp_path, text, "step_control.kl_budget=3e-3")
    assert load(tmp_path, dump_yaml(config)) == config


def test_sections_cannot_be_changed():
    config = config_from_dict({"model": {"hf": "x"}})
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, or holds a list of."""
    if get_origin(annotation) is list:
        (annotation,) = get_args(annotation)
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def sections(cls: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [section_of(field.annotation) for field in cls.model_fields.values()]
    return [cls, *(found for section in inner if section for found in sections(section))]


def test_every_option_says_what_it_is():
    for section in sections(Config):
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            described = field.description or section_of(field.annotation)
            assert described, f"{section.__name__}.{name}"


def options(cls: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """The dotted keys of all options."""
    found = []
    for name, field in cls.model_fields.items():
        section = section_of(field.annotation)
        found += options(section, f"{prefix}{name}.") if section else [prefix + name]
    return found


@pytest.mark.parametrize("key", options())
def test_a_wrong_value_is_refused_in_one_line_that_names_its_key(key, tmp_path):
    with pytest.raises(UserError) as raised:
        load(tmp_path, MODEL + "environment: {kind: jsonl}\n", f"{key}=[[1]]")
    message = str(raised.value)
    assert "\n" not in message and re.sub(r"\.\d+", "", message).startswith(key), message
