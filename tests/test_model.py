from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import TINY_SPEC, tiny_config, tiny_model
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd import forward_ad

from megatron_logra.errors import UserError
from megatron_logra.model.gpt import forward_head, transformer_config
from megatron_logra.model.norm import Norm
from megatron_logra.model.parameters import local_part, named_parameters, whole_shape
from megatron_logra.model.specs import choose_implementation


def batch(generator: torch.Generator, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(131, (rows, length), generator=generator)
    return tokens, torch.arange(length).expand_as(tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_forward_head_gives_the_models_logits(
    pg: ProcessGroupCollection, generator: torch.Generator, tied: bool
) -> None:
    model = tiny_model(pg, {"share_embeddings_and_output_weights": tied})
    tokens, positions = batch(generator, 3, 11)
    plain = model(tokens, positions, None)
    whole = forward_head(model, tokens, positions, lambda hidden, logits: logits(hidden))
    assert torch.equal(whole.transpose(0, 1), plain)
    rows, places = torch.tensor([0, 2, 1]), torch.tensor([3, 10, 0])

    def some(hidden, logits):
        assert hidden.shape == (11, 3, 48)
        return logits(hidden[places, rows].unsqueeze(1))

    picked = forward_head(model, tokens, positions, some)
    assert picked.shape == (3, 1, 131)
    torch.testing.assert_close(picked[:, 0], plain[rows, places], rtol=1e-5, atol=1e-5)


def test_padding_on_the_right_changes_nothing_before_it(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    model = tiny_model(pg)
    tokens, positions = batch(generator, 2, 16)
    full = model(tokens, positions, None)
    short = model(tokens[:, :9], positions[:, :9], None)
    torch.testing.assert_close(full[:, :9], short, rtol=1e-5, atol=1e-5)
    other = tokens.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 131
    assert torch.equal(model(other, positions, None)[:, :9], full[:, :9])


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("frozen", [False, True])
def test_recomputation_changes_no_gradient(
    pg: ProcessGroupCollection, generator: torch.Generator, recompute: str, frozen: bool
) -> None:
    """Gradients of all weights; or with frozen weights those that each linear passes on."""
    tokens, positions = batch(generator, 2, 12)
    target = torch.randn(12, 2, 131, generator=generator)
    found = []
    for kind in ("none", recompute):
        model = tiny_model(pg, train={"recompute": kind})
        model.requires_grad_(not frozen)
        gradients: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(("linear_proj", "linear_fc2")):

                def keep(_module, grads, name=name, gradients=gradients) -> None:
                    gradients[name] = grads[0].clone()

                module.register_full_backward_pre_hook(keep)
        if frozen and kind != "full":  # which does this by itself
            model.embedding.register_forward_hook(lambda m, i, output: output.requires_grad_(True))
        forward_head(
            model, tokens, positions, lambda hidden, logits: (logits(hidden) * target).sum()
        ).backward()
        gradients |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append(gradients)
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == (4 if frozen else 4 + len(list(model.parameters())))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)


def test_no_gradient_is_asked_for_where_none_is_wanted(pg: ProcessGroupCollection) -> None:
    model = tiny_model(pg, train={"recompute": "full"}).requires_grad_(False)
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        assert not model(tokens, tokens, None).requires_grad


def test_norm_and_rotary_embedding_have_tangents(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    """Tangents of norm and rotary embedding against central differences, in float64."""
    model = tiny_model(pg).double()
    x, dx = torch.randn(2, 7, 2, 48, generator=generator, dtype=torch.float64)
    rotary = model.rotary_pos_emb(7)

    def run(hidden):
        hidden = model.decoder.layers[0].input_layernorm(hidden)
        query = hidden[..., :36].reshape(7, 2, 3, 12)
        return apply_rotary_pos_emb(query, rotary.double(), model.config)

    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, dx))).tangent
    step = 1e-6
    torch.testing.assert_close(
        tangent, (run(x + step * dx) - run(x - step * dx)) / (2 * step), rtol=1e-6, atol=1e-7
    )


def test_random_weights_depend_on_seed_and_name_only(pg: ProcessGroupCollection) -> None:
    first = dict(named_parameters(tiny_model(pg)))
    torch.rand(17)
    outer = torch.get_rng_state()
    again = dict(named_parameters(tiny_model(pg, {"num_layers": 3})))
    assert torch.equal(torch.get_rng_state(), outer)
    other = dict(named_parameters(tiny_model(pg, train={"seed": 1})))
    scaled = ("linear_proj.weight", "linear_fc2.weight")  # Megatron scales these by the depth
    for name, parameter in first.items():
        if not name.endswith(scaled):
            assert torch.equal(parameter, again[name]), name
        assert torch.isfinite(parameter).all()
        assert torch.equal(parameter, other[name]) == (parameter.dim() == 1), name
    matrices = [p for p in again.values() if p.dim() == 2]
    corners = {tuple(p[:2, :2].flatten().tolist()) for p in matrices}
    assert len(corners) == len(matrices)


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_all_ranks_make_the_whole(
    pg: ProcessGroupCollection, generator: torch.Generator, ranks: int
) -> None:
    layer = tiny_model(pg).decoder.layers[0]
    for linear, dim in (
        (layer.self_attention.linear_qkv, 0),
        (layer.self_attention.linear_proj, 1),
        (layer.mlp.linear_fc2, 1),
    ):
        whole = torch.randn(linear.weight.shape, generator=generator)
        parts = [local_part(whole, linear.weight, r, ranks) for r in range(ranks)]
        assert torch.equal(torch.cat(parts, dim), whole)
    gate, up = torch.randn(2, 80, 48, generator=generator)
    weight = layer.mlp.linear_fc1.weight
    parts = [local_part(torch.cat([gate, up]), weight, r, ranks) for r in range(ranks)]
    assert torch.equal(torch.cat([part[: 80 // ranks] for part in parts]), gate)
    assert torch.equal(torch.cat([part[80 // ranks :] for part in parts]), up)
    norm = layer.input_layernorm.weight
    assert torch.equal(local_part(norm, norm, ranks - 1, ranks), norm)
    assert whole_shape(weight, ranks) == (160 * ranks, 48)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_its_formula(
    generator: torch.Generator, normalization: str, zero_centered: bool, dtype: torch.dtype
) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=40,
        num_attention_heads=2,
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        params_dtype=dtype,
    )
    norm = Norm(config, hidden_size=40, eps=1e-3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(40, generator=generator))
    x = torch.randn(3, 5, 40, generator=generator).to(dtype) * 0.1
    wide = x.double()
    if normalization == "LayerNorm":
        wide = wide - wide.mean(-1, keepdim=True)
    scale = norm.weight.double() + (1 if zero_centered else 0)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    if norm.bias is not None:
        want = want + norm.bias.double()
    got = norm(x)
    assert got.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_norms_carry_the_mark_of_sequence_parallelism() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2,
        sequence_parallel=True, normalization="RMSNorm",
    )  # fmt: skip
    assert all(p.sequence_parallel for p in Norm(config, hidden_size=8).parameters())


def test_every_norm_of_the_model_is_ours(pg: ProcessGroupCollection) -> None:
    kinds = {
        n: type(m)
        for n, m in tiny_model(pg).named_modules()
        if n.endswith("layernorm") and not isinstance(m, IdentityOp)
    }
    assert len(kinds) == 2 * 4 + 1
    assert set(kinds.values()) == {Norm}


def test_bf16_models_are_bf16_throughout(
    pg: ProcessGroupCollection, generator: torch.Generator
) -> None:
    wide, narrow = tiny_model(pg), tiny_model(pg, train={"precision": "bf16"})
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
    tokens, positions = batch(generator, 2, 10)
    a, b = (m(tokens, positions, None) for m in (wide, narrow))
    assert b.dtype == torch.bfloat16
    assert (a - b.float()).norm() / a.norm() < 0.05


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"hiden_size": 3}, "model.spec.hiden_size: unknown key; did you mean hidden_size"),
        ({"zzz": 3}, "model.spec.zzz: unknown key"),
        ({"hidden_size": "48"}, "model.spec.hidden_size: expected a positive integer, got '48'"),
        ({"num_layers": 0}, "model.spec.num_layers: expected a positive integer, got 0"),
        ({"num_query_groups": 4}, "model.spec.num_query_groups: expected a divisor"),
        ({"kv_channels": 1.5}, "model.spec.kv_channels: "),
        ({"rotary_base": "big"}, "model.spec.rotary_base: "),
        ({"normalization": "Batch"}, "model.spec.normalization: "),
        (
            {"activation_func": "tanh"},
            "model.spec.activation_func: expected silu, gelu, gelu_tanh, relu",
        ),
        ({"bf16": True}, "model.spec.bf16: set it by train.precision instead"),
        ({"num_moe_experts": 4}, "model.spec.num_moe_experts: not supported"),
        ({"max_sequence_length": 32}, "train.seq_length=64: the model"),
    ],
)
def test_wrong_specs_name_the_key(spec: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as caught:
        transformer_config(tiny_config(spec))
    message = str(caught.value)
    assert message.startswith(text)
    assert "\n" not in message


def test_missing_keys_are_named() -> None:
    config = tiny_config()
    spec = {key: value for key, value in TINY_SPEC.items() if key != "vocab_size"}
    config = config.model_copy(update={"model": config.model.model_copy(update={"spec": spec})})
    with pytest.raises(UserError, match=r"model\.spec\.vocab_size: missing"):
        transformer_config(config)


def test_spec_overrides_the_modern_defaults() -> None:
    config, _ = transformer_config(
        tiny_config(
            {"gated_linear_unit": False, "activation_func": "gelu", "add_bias_linear": True}
        )
    )
    assert not config.gated_linear_unit
    assert config.activation_func is torch.nn.functional.gelu
    assert config.add_bias_linear
    assert config.normalization == "RMSNorm"
    assert config.calculate_per_token_loss


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_transformer_engine_needs_a_gpu() -> None:
    assert choose_implementation("auto") == "local"
    with pytest.raises(UserError, match=r"model\.implementation=transformer_engine"):
        choose_implementation("transformer_engine")
