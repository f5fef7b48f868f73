"""The planner's numbers are the ones counted on real ranks, in every layout."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import TINY_SPEC, quick, tiny_config
from layout_runs import train
from plan_runs import count_bytes, count_traffic, kept_for_backward, record_collectives
from reference import config_for, make_checkpoint
from training import make_learner

from megatron_logra import cli
from megatron_logra.config import load_config
from megatron_logra.errors import UserError
from megatron_logra.memory import KINDS
from megatron_logra.model.gpt import transformer_config
from megatron_logra.planner import Layout, parameter_shapes, static_memory
from megatron_logra.planner.estimates import PassEstimate
from megatron_logra.planner.report import GIB, plan
from megatron_logra.planner.shapes import Model

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "tp2-sequence": (2, {"tensor": 2, "sequence": True}),
    "dp2": (2, {}),
    "dp3": (3, {}),
    "tp2-dp2": (4, {"tensor": 2, "sequence": True}),
    "dp4": (4, {}),
    "dp2-buckets": (2, {"bucket_size": 1500}),
    "dp4-instances": (4, {"optimizer_instances": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "tp2-cp2": (4, {"tensor": 2, "context": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "pp2-dp2": (4, {"pipeline": 2}),
}
BF16 = {"precision": "bf16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "sharded": {"train": BF16},
    "replicated": {"train": BF16, "optimizer": {"master": "replicated"}},
    "non-targets": {"train": BF16, "optimizer": {"non_targets": "adam"}},
    "gaussian": {"sketch": {"distribution": "gaussian"}, "step_control": {"factor_dtype": "fp32"}},
    "some targets": {"sketch": {"targets": ["linear_fc2", "linear_qkv"]}, "train": BF16},
    "adam": {"train": BF16, "optimizer": {"kind": "adam"}},
    "adam fp32": {"optimizer": {"kind": "adam"}},
}


@pytest.fixture(scope="module")
def odd() -> tuple[dict[str, Any], int]:
    """Sizes of a model that few things divide, and a sketch rank."""
    seed = random.randrange(2**32)
    print("size seed:", seed)
    draw = random.Random(seed)
    spec = {
        "num_layers": 4,
        "hidden_size": 2 * draw.randint(20, 40),
        "ffn_hidden_size": 2 * draw.randint(20, 60),
        "kv_channels": 2 * draw.randint(5, 9),
        "vocab_size": draw.randint(80, 160),
        "qk_layernorm": draw.random() < 0.5,
        "add_bias_linear": draw.random() < 0.5,
        "post_layernorms": draw.random() < 0.5,
    }
    return spec, draw.randint(1, 16)


def sections_of(variant: str, parallel: dict[str, Any], rank: int) -> dict[str, Any]:
    sections = {**VARIANTS[variant], "parallel": parallel}
    return {**sections, "sketch": {**sections.get("sketch", {}), "rank": rank}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_bytes_equal_the_counted_ones_on_every_rank(layout, ranks, odd):
    size, parallel = LAYOUTS[layout]
    spec, sketch_rank = odd
    many = [
        {
            "spec": spec | {"share_embeddings_and_output_weights": number % 2 == 0},
            **sections_of(variant, parallel, sketch_rank),
        }
        for number, variant in enumerate(VARIANTS)
    ]
    for number, by_variant in enumerate(ranks.run(size, count_bytes, many)):
        for variant, arguments, counted in zip(VARIANTS, many, by_variant, strict=True):
            cfg = tiny_config(**arguments)
            assert static_memory(cfg, ranks=size, rank=number) == counted, variant
            planned = plan(cfg, size)["per_rank"][number][cfg.optimizer.kind]
            assert {kind: planned[kind] for kind in counted} == counted, variant


def test_bytes_after_updates_are_still_the_planned_ones(ranks, tmp_path):
    make_checkpoint(tmp_path, "qwen3", False)
    size, parallel = LAYOUTS["tp2-dp2"]
    sections = {"parallel": parallel, "optimizer": {"non_targets": "adam"}, "train": BF16}
    cfg = config_for(tmp_path, **sections)
    for number, run in enumerate(ranks.run(size, train, tmp_path, sections, 2)):
        assert run.bytes_by_kind == static_memory(cfg, ranks=size, rank=number)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_hold_the_whole_model_and_a_tied_copy(stages, tied):
    spec = {"num_layers": 8, "share_embeddings_and_output_weights": tied}
    sketch = {"rank": 7}
    cfg = tiny_config(spec, parallel={"pipeline": stages}, sketch=sketch)
    config, arguments = transformer_config(cfg)
    whole = parameter_shapes(config, arguments)
    parts = [parameter_shapes(config, arguments, stage) for stage in range(stages)]
    copy = TINY_SPEC["vocab_size"] * TINY_SPEC["hidden_size"] if tied else 0
    count = sum(shape.numel for part in parts for shape in part)
    assert count == sum(shape.numel for shape in whole) + copy
    names = Counter(shape.name for part in parts for shape in part)
    assert set(names.values()) == {1}
    assert set(names) == {shape.name for shape in whole} | {"output_layer"}
    # Nothing else differs from one rank: sketches and projections add up, up to padding.
    one, rows = static_memory(tiny_config(spec, sketch=sketch)), plan(cfg)["per_rank"]
    for kind in ("projections", "optimizer"):
        assert sum(row["logra"][kind] for row in rows) == one[kind]
    extra = sum(row["logra"]["sketches"] for row in rows) - one["sketches"]
    assert abs(extra) <= stages * 6 * 2 * cfg.sketch.rank * 64


@pytest.mark.parametrize("variant", ["sharded", "non-targets", "adam"])
def test_context_parallel_ranks_share_like_data_parallel_ones(variant, odd):
    spec, rank = odd
    found = [
        static_memory(tiny_config(spec, **sections_of(variant, parallel, rank)), ranks=4, rank=3)
        for parallel in ({}, {"context": 2}, {"context": 4})
    ]
    assert found[0] == found[1] == found[2]


TRAFFIC: dict[str, dict[str, Any]] = {
    "frozen": {},
    "non-targets": {"optimizer": {"non_targets": "adam"}},
    "recomputed": {"train": {"recompute": "full"}},
    "replicated": {"train": BF16, "optimizer": {"master": "replicated"}},
    "sharded": {"train": BF16},
    "adam": {"optimizer": {"kind": "adam"}},
    "lr": {"step_control": {"mode": "lr", "lr": {"lr": 1e-3}}},
}


TRAFFIC_LAYOUTS = [
    *("tp2", "dp2-buckets", "tp2-dp2", "dp4-instances"),
    *("pp2", "pp2-interleaved", "cp2"),
]


@pytest.mark.parametrize(
    "layout", quick(TRAFFIC_LAYOUTS, set(TRAFFIC_LAYOUTS) - {"tp2", "dp2-buckets", "pp2"})
)
def test_planned_traffic_is_what_the_collectives_carry(layout, ranks):
    size, parallel = LAYOUTS[layout]
    many = []
    for variant in TRAFFIC.values():
        batch = {"prompts_per_step": 4, "micro_batch_size": 1, "seq_length": 32}
        arguments: dict[str, Any] = {
            "spec": {"num_layers": 4, "hidden_size": 96, "ffn_hidden_size": 160},
            "sketch": {"rank": 24},
            "parallel": parallel,
            **variant,
        }
        arguments["train"] = {**batch, **variant.get("train", {})}
        arguments["step_control"] = {"realised_kl_interval": 0, **variant.get("step_control", {})}
        many.append(arguments)
    # Scalars a token, of at most 4 · 32 tokens at a time, are left out of the plan.
    for number, by_variant in enumerate(ranks.run(size, count_traffic, many, 4 * 32 + 1)):
        for variant, arguments, sent in zip(TRAFFIC, many, by_variant, strict=True):
            cfg = tiny_config(**arguments)
            local = cfg.model.model_copy(update={"implementation": "local"})
            cfg = cfg.model_copy(update={"model": local})
            comm = dict(plan(cfg, size)["per_rank"][number][cfg.optimizer.kind]["comm"])
            total, planned = comm.pop("total"), Counter[str]()
            for key, carried in comm.items():
                planned[key.rsplit("/", 1)[0]] += carried
            assert total == sum(planned.values())
            assert planned == pytest.approx(sent, rel=1e-3), variant


# Sizes that nothing shares: hidden 96, qkv 192, ffn 144, 128 tokens of a micro-batch, rank 8.
SMALL_RANK: dict[str, Any] = {
    "spec": {
        "hidden_size": 96,
        "ffn_hidden_size": 144,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 12,
        "vocab_size": 132,
    },
    "sketch": {"rank": 8},
    "step_control": {"realised_kl_interval": 0},
    "train": {"precision": "bf16", "prompts_per_step": 8, "micro_batch_size": 2},
}


def test_over_data_parallel_ranks_targets_send_r_over_k_of_dense(ranks):
    """Counted at the collectives, scalars included, against the dense gradients and parameters."""
    train_section = {**SMALL_RANK["train"], "seq_length": 64}
    shared = {**SMALL_RANK, "train": train_section}
    many = [
        {**shared, "optimizer": {"master": "replicated"}},
        {**shared, "optimizer": {"kind": "adam"}},
    ]
    cfg = tiny_config(**many[0])
    shapes = parameter_shapes(*transformer_config(cfg))
    targets = [s.size for s in shapes if s.short_name in cfg.sketch.targets and len(s.size) == 2]
    dense_weights = sum(d * k for d, k in targets)
    r_over_k = cfg.sketch.rank * sum(d for d, _ in targets) / dense_weights
    for (sketched, told), (dense, dense_told) in ranks.run(2, record_collectives, many):
        sent, dense_sent = (
            sum(c.sent for c in collectives if c.group != "tensor")
            for collectives in (sketched, dense)
        )
        dense_sent *= dense_weights / sum(s.numel for s in shapes)
        assert sent <= 1.05 * r_over_k * dense_sent
        assert sent < 0.15 * dense_sent
        for collectives, counted in ((sketched, told), (dense, dense_told)):
            large = [c for c in collectives if c.name != "all_reduce"]
            assert sum(c.sent for c in large) == sum(counted.values()) > 0


@pytest.mark.parametrize("sequence", [False, True])
def test_over_tensor_parallel_ranks_sketches_add_n_r_and_d_r_alone(sequence, ranks):
    """Beside dense training's own they send P [n, r], S and D [d, r], and never n × k or d × k.

    The layers' P of a micro-batch cross together, and so do their D.
    """
    # No probes, whose passes move activations as any forward pass does.
    control = {"mode": "lr", "realised_kl_interval": 0}
    parallel = {"tensor": 2, "sequence": sequence}
    shared = {**SMALL_RANK, "step_control": control, "parallel": parallel}
    many = [shared, {**shared, "optimizer": {"kind": "adam"}}]
    rank, tokens, hidden = 8, 2 * 64, 96
    for (sketched, _), (dense, _) in ranks.run(2, record_collectives, many):
        added, absent = (
            Counter((c.name, c.elements) for c in mine if c.group == "tensor")
            - Counter((c.name, c.elements) for c in other if c.group == "tensor")
            for mine, other in ((sketched, dense), (dense, sketched))
        )
        # 2 layers with 2 row-parallel targets each, 4 micro-batches.
        micro, row_parallel = 4, 2 * 2
        projected, directions = row_parallel * tokens * rank, row_parallel * hidden * rank
        allowed = {projected, directions} | ({hidden * rank} if sequence else set())
        grams = 2 * 2 * rank * rank
        large = {key: n for key, n in added.items() if key[1] > grams}
        assert {elements for _, elements in large} == allowed
        project = "reduce_scatter" if sequence else "all_reduce"
        assert large[project, projected] == micro
        assert large["all_gather", directions] == 1
        assert large["all_gather", projected] == micro  # as many column-parallel targets
        assert large.get(("reduce_scatter", hidden * rank), 0) == sequence * micro * row_parallel
        # Dense training alone gathers the inputs again, for weight gradients.
        assert (("all_gather", tokens * hidden) in absent) == sequence


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("variant", ["frozen", "non-targets", "adam"])
def test_the_estimate_of_activations_is_near_what_autograd_keeps(variant, recompute, pg):
    spec = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "kv_channels": 32}
    train_section = {"seq_length": 128, "micro_batch_size": 2, "recompute": recompute}
    cfg = tiny_config(
        {**spec, "num_attention_heads": 8, "max_sequence_length": 128},
        **{k: v for k, v in TRAFFIC[variant].items() if k != "train"},
        train={**train_section, "precision": "fp32"},
        sketch={"rank": 32},
        algorithm={"name": "sft", "logprob_chunk": 32},
    )
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"implementation": "local"})})
    model = Model(cfg, Layout())
    estimate = PassEstimate(model, model.stage(0, cfg.optimizer.kind))
    kept = kept_for_backward(make_learner(cfg, pg), cfg)
    assert kept == pytest.approx(estimate.kept(), rel=0.05)


RECIPES: dict[str, tuple[int, float]] = {
    "qwen2.5_7b": (8, 7.6),
    "gemma3_27b": (8, 27.0),
    "llama3_70b": (16, 70.6),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_have_their_models_size_and_fit(recipe, tmp_path, capsys):
    size, billions = RECIPES[recipe]
    file = tmp_path / "plan.json"
    arguments = [str(EXAMPLES / recipe / "train.yaml"), "--ranks", str(size)]
    assert cli.main(["plan", *arguments, "--compare", "adam", "--json", str(file)]) == 0
    shown, found = capsys.readouterr().out, json.loads(file.read_text())
    assert round(found["parameters"] / 1e9, 1) == billions
    assert len(found["per_rank"]) == found["ranks"] == size
    assert found["fits"]["logra"]
    for entry in (*found["per_rank"], found["largest"]):
        for kind in ("logra", "adam"):
            sizes = entry[kind]
            assert sizes["static"] == sum(sizes[name] for name in KINDS)
            assert sizes["total"] == sizes["static"] + sizes["activations"]
            assert sizes["comm"]["total"] == sum(sizes["comm"].values()) / 2
    for kind, sizes in found["largest"].items():
        assert sizes["total"] == max(entry[kind]["total"] for entry in found["per_rank"])
    static = next(line for line in shown.splitlines() if line.startswith("static"))
    assert [float(word) for word in static.split()[1:]] == [
        round(found["largest"][kind]["static"] / GIB, 2) for kind in ("logra", "adam")
    ]


def test_27b_keeps_20_gib_where_dense_adam_keeps_55():
    found = plan(load_config(EXAMPLES / "gemma3_27b" / "train.yaml"), 8)
    assert found["layout"]["tensor"] == 8
    assert found["largest"]["logra"]["static"] <= 20 * GIB
    assert found["largest"]["adam"]["static"] > 55 * GIB


def test_data_parallel_traffic_of_sketches_is_r_over_k_of_dense():
    """Reduction and gather, wire types as they are: (4 + 2)/(4 + 2) · Σ d·r / Σ d·k."""
    cfg = load_config(EXAMPLES / "qwen2.5_7b" / "train.yaml", ["optimizer.master=replicated"])
    found = plan(cfg, 8)["largest"]
    config, arguments = transformer_config(cfg)
    shapes = [s for s in parameter_shapes(config, arguments) if s.short_name in cfg.sketch.targets]
    matrices = [s.size for s in shapes if len(s.size) == 2]
    share = cfg.sketch.rank * sum(d for d, _ in matrices) / sum(d * k for d, k in matrices)
    assert found["logra"]["comm"]["total"] <= 1.05 * share * found["adam"]["comm"]["total"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "12"], ["parallel.tensor=8", "has 12"]),
        (["--ranks", "0"], ["--ranks 0", "1 or more"]),
        (["--ranks", "many"], ["--ranks", "many"]),
        (["--gpu-memory", "-1"], ["--gpu-memory -1"]),
        (["--gpu-memory", "nan"], ["--gpu-memory nan"]),
        (["--compare", "sgd"], ["--compare", "sgd"]),
        (["model.spec.num_attention_heads=36", "model.spec.num_query_groups=4"], ["tensor", "36"]),
        (["model.spec.num_query_groups=4"], ["parallel.tensor: 8", "num_query_groups=4"]),
        (["model.spec.ffn_hidden_size=21500"], ["parallel.tensor: 8", "ffn_hidden_size=21500"]),
        (["parallel.pipeline=4"], ["parallel.pipeline: 4", "num_layers=62"]),
        (["train.seq_length=4095"], ["train.seq_length: 4095", "multiple of 8"]),
        (["sketch.rank=8000"], ["sketch.rank: 8000", "at most"]),
        (["sketch.targets=[q_proj]"], ["sketch.targets", "'q_proj'"]),
        (["--json", "nowhere/plan.json"], ["--json nowhere/plan.json"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_does_not_fit_is_one_line_and_exit_2(arguments, words, capsys):
    assert cli.main(["plan", str(EXAMPLES / "gemma3_27b" / "train.yaml"), *arguments]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("\n") == 1
    assert all(word in stderr for word in words), stderr


def test_recipes_take_a_hugging_face_directory_instead_of_the_spec():
    for recipe in ("qwen2.5_7b", "llama3_70b"):
        overrides = ["model.spec=null", "model.tokenizer=null", "model.hf=somewhere"]
        assert load_config(EXAMPLES / recipe / "train.yaml", overrides).model.hf == "somewhere"


def test_a_list_is_a_tuple_where_megatron_wants_one():
    file = EXAMPLES / "gemma3_27b" / "train.yaml"
    assert transformer_config(load_config(file))[0].window_size == (1023, 0)
    with pytest.raises(UserError, match=r"^model\.spec\.window_size: [^\n]*\(1, 2, 3\)$"):
        transformer_config(load_config(file, ["model.spec.window_size=[1, 2, 3]"]))


def test_a_plan_starts_no_process_group_and_no_model():
    code = (
        "import sys, torch, torch.distributed as dist; from megatron_logra.cli import main\n"
        "assert main(sys.argv[1:]) == 0 and not dist.is_initialized()\n"
        "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    file = str(EXAMPLES / "llama3_70b" / "train.yaml")
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", file, "--ranks", "256", "parallel.pipeline=4"],
        capture_output=True,
        text=True,
        check=True,
        cwd=EXAMPLES.parent,
    )
    assert done.stderr.count("\n") <= 1, done.stderr  # torch may say that it finds no GPU
    assert int(done.stdout.splitlines()[-1]) < 3 * 2**20  # KiB
