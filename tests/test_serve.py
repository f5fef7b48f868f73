"""A real server process and plain HTTP: its answers, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import tiny_config
from sync_runs import STEP, one_update
from training import make_learner

from megatron_logra import cli
from megatron_logra.config import Config, SamplingConfig, dump_yaml
from megatron_logra.errors import UserError
from megatron_logra.model.tokenizer import BytesTokenizer
from megatron_logra.rl import evaluate
from megatron_logra.rollout import http_port
from megatron_logra.rollout.server import application
from megatron_logra.rollout.static_engine import StaticEngine
from megatron_logra.sync.files import FileSender
from megatron_logra.sync.sender import Sender

TOKENIZER = BytesTokenizer()
GREEDY = {"temperature": 0, "max_tokens": 12}
PROMPT = "What is 2 + 2?"


def chat(text: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **GREEDY, **fields}


def config_for(run_dir: Path, **sampling: Any) -> Config:
    return tiny_config(
        {"vocab_size": 260, "max_sequence_length": 128},
        rollout={"placement": "separate", "sync": "sketch", "batch_size": 8}
        | {"dynamic": {"block_tokens": 16}, "sampling": sampling},
        train={"seq_length": 96},
        sketch={"rank": 8},
        logging={"run_dir": str(run_dir), "tensorboard": False},
        **STEP,
    )


@dataclass
class Server:
    """A server process and its address."""

    config: Config
    process: subprocess.Popen[str]
    url: str

    def call(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        """Status and answer; `body` is sent as JSON, or as it is if it is text."""
        data = body if isinstance(body, str) or body is None else json.dumps(body)
        request = urllib.request.Request(
            self.url + path,
            data=data.encode() if data is not None else None,
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            is_json = error.headers.get("Content-Type") == "application/json"
            return error.code, json.loads(text) if is_json else text

    def post(self, path: str, body: Any) -> Any:
        status, answer = self.call(path, body)
        assert status == 200, answer
        return answer

    def say(self, body: dict[str, Any]) -> str:
        (choice,) = self.post("/v1/chat/completions", body)["choices"]
        return choice["message"]["content"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("serve")
    config = config_for(directory / "run")
    file = directory / "config.yaml"
    file.write_text(dump_yaml(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_logra", "serve", str(file), "--port", "0", "--follow"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("the first weights of the configuration: http"), (
            process.stderr.read()
        )
        yield Server(config, process, line.split()[-1])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_greedy_chats_are_generates(server):
    prompts = [PROMPT, "List three colours.", "é"]
    run_dir = Path(server.config.logging.run_dir)
    expected = evaluate.generate(config_for(run_dir, temperature=0.0, max_tokens=12), prompts)
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(server.say, [chat(prompt) for prompt in prompts]))
    assert answers == expected
    assert len(set(answers)) > 1, "the model says the same to everything"


def test_completions_take_texts_and_tokens_and_tell_logprobs(server):
    prompt = "user: hi\nassistant: "
    body = {"prompt": [prompt, prompt[:7]], **GREEDY, "logprobs": 2}
    answer = server.post("/v1/completions", body)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        tokens, logprobs = choice["generation_token_ids"], choice["generation_log_probs"]
        assert len(tokens) == len(logprobs) == 12
        tops = choice["logprobs"]["top_logprobs"][1:]
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
            assert max(top.values()) <= logprob + 1e-6  # greedy
            if token < 128:  # several tokens of half a letter have one text
                assert top[chr(token)] == pytest.approx(logprob, abs=1e-6)
    assert answer["usage"]["completion_tokens"] == 24
    ids = [TOKENIZER.encode(text) for text in body["prompt"]]
    again = server.post("/v1/completions", {**body, "prompt": ids})
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]
    text = answer["choices"][0]["text"]
    (echoed,) = server.post("/completions", {"prompt": prompt, **GREEDY, "echo": True})["choices"]
    assert echoed["text"] == prompt + text


def test_chats_tell_logprobs(server):
    (choice,) = server.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=3))["choices"]
    entries = choice["logprobs"]["content"]
    logprobs = [entry["logprob"] for entry in entries]
    assert logprobs == choice["message"]["generation_log_probs"]
    assert len(logprobs) == 12 and max(logprobs) <= 0
    assert all(entry["top_logprobs"] for entry in entries)


def test_a_chat_goes_on_with_what_the_server_has_said(server):
    message = server.post("/v1/chat/completions", chat())["choices"][0]["message"]
    turns = [*chat()["messages"], message, {"role": "user", "content": "And?"}]
    plain = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    given = {"messages": turns, **GREEDY, "max_tokens": 4}
    assert server.say(given) == server.say({**given, "messages": plain})


def test_sampling_is_the_requests(server):
    many = chat(temperature=1, n=16)
    answers = server.post("/v1/chat/completions", many)["choices"]
    assert len({choice["message"]["content"] for choice in answers}) > 8
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        answers = server.post("/v1/chat/completions", many | narrow)["choices"]
        assert {choice["message"]["content"] for choice in answers} == {server.say(chat())}


def test_responses_end_at_stop_tokens_and_at_stop_texts(server):
    body = {"prompt": ["a"] * 64, "temperature": 2, "max_tokens": 40}
    ended = 0
    for choice in server.post("/v1/completions", body)["choices"]:
        tokens = choice["generation_token_ids"]
        assert TOKENIZER.EOS not in tokens[:-1]
        ended += tokens[-1] == TOKENIZER.EOS
        if len(tokens) < 40:
            assert tokens[-1] == TOKENIZER.EOS and choice["finish_reason"] == "stop"
        else:
            assert choice["finish_reason"] == "length"
    assert ended
    (whole,) = server.post("/v1/completions", {"prompt": "a", **GREEDY})["choices"]
    place = next(i for i, t in enumerate(whole["generation_token_ids"]) if 31 < t < 127)
    word = chr(whole["generation_token_ids"][place])
    (cut,) = server.post("/v1/completions", {"prompt": "a", **GREEDY, "stop": word})["choices"]
    assert cut["generation_token_ids"] == whole["generation_token_ids"][:place]
    assert cut["finish_reason"] == "stop"


REFUSED = {
    "no JSON": "{",
    "no object": [],
    "no messages": {"max_tokens": 4},
    "no turn": {"messages": []},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "a stream": chat(stream=True),
    "a tool": chat(tools=[{}]),
    "a seed": chat(seed=1),
    "half a surrogate": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "not finite": '{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "nearly greedy": chat(temperature=1e-30),
    "both filters": chat(top_k=3, top_p=0.5),
    "a large top_k": chat(top_k=259),
    "no tokens": chat(max_tokens=0),
    "many tokens": chat(max_tokens="9"),
    "long prompt": chat("a" * 100),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_bad_chats_are_refused_and_the_server_lives(server, body):
    status, answer = server.call("/v1/chat/completions", body)
    assert status == 400
    assert answer if isinstance(answer, str) else answer["error"]["message"]
    assert server.call("/v1/health")[1]["ready"] is True


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [260]}, "prompt: expected token ids from 0 to 258"),
        ({"prompt": [-1]}, "prompt: expected token ids"),
        ({"prompt": ["a", ""]}, "prompt: expected a text"),
        ({"prompt": [[]]}, "prompt: expected a text"),
        ({"prompt": None}, "prompt"),
        ({"echo": True, "logprobs": 1}, "echo: expected false with logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"ignore_eos": True}, "ignore_eos: not supported; expected one of: model,"),
        ({"n": 2}, "n: expected 1"),
        ({"stop": ""}, "stop"),
    ],
)
def test_bad_completions_are_one_line(fields, words):
    with pytest.raises(UserError) as raised:
        http_port.checked("/v1/completions", {"prompt": "a", **fields}, 259)
    assert str(raised.value).startswith(words) and "\n" not in str(raised.value)


def test_unknown_routes_are_errors_and_none_changes_anything(server):
    rules = application(None, TOKENIZER).url_map.iter_rules()
    routes = {(rule.rule, *sorted(rule.methods - {"HEAD", "OPTIONS"})) for rule in rules}
    assert routes == {
        (f"{prefix}/{name}", method)
        for prefix in ("", "/v1")
        for name, method in (
            *(("completions", "POST"), ("chat/completions", "POST")),
            ("health", "GET"),
        )
    }
    before = server.say(chat())
    for path in ("start_profile", "stop_profile", "suspend", "update_weights", "x"):
        assert server.call(f"/v1/{path}", {})[0] == 404
        assert server.call(f"/{path}", {})[0] == 404
    for method in ("PUT", "PATCH", "DELETE"):
        assert server.call("/v1/completions", {}, method)[0] == 405
    assert server.say(chat()) == before


def test_nothing_listens_beyond_this_machine(server):
    process = psutil.Process(server.process.pid)
    places = [
        connection.laddr.ip
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(places) >= 3 and set(places) == {"127.0.0.1"}


def test_weights_follow_the_trainer(server, pg):
    """Requests that are under way when weights change are answered, too."""
    before = server.say(chat())
    learner = make_learner(server.config, pg)
    directory = Path(server.config.logging.run_dir) / "exchange" / "sync"
    sender = FileSender(directory, Sender(learner, server.config.sketch, "first"))
    sender.start()
    body = {"prompt": ["a"] * 8, "temperature": 1, "max_tokens": 90}
    with ThreadPoolExecutor() as pool:
        under_way = [pool.submit(server.post, "/v1/completions", body) for _ in range(4)]
        for _ in range(2):
            one_update(learner)
            sender.publish()
        for answer in under_way:
            assert len(answer.result()["choices"]) == 8
    deadline = time.monotonic() + 30
    while True:
        (choice,) = server.post("/v1/chat/completions", chat())["choices"]
        if choice["message"]["policy_epoch"] == [[0, learner.update]]:
            break
        assert time.monotonic() < deadline, choice
        time.sleep(0.1)
    engine = StaticEngine(
        learner.chunks,
        stop_ids=TOKENIZER.stop_ids,
        pad_id=TOKENIZER.PAD,
        max_sequence_length=96,
        batch_size=1,
        pg=pg,
    )
    ids = TOKENIZER.encode_chat(chat()["messages"])
    ((response,),) = engine.generate(
        [ids], 1, SamplingConfig(temperature=0.0, max_tokens=12), seed=0, update=0
    )
    assert choice["message"]["content"] == TOKENIZER.decode(response.token_ids) != before


def test_a_signal_from_the_keyboard_ends_the_server_and_its_processes(server):
    started = psutil.Process(server.process.pid).children(recursive=True)
    os.killpg(server.process.pid, signal.SIGINT)
    _, said = server.process.communicate(timeout=30)
    assert server.process.returncode == 0, said
    assert "Traceback" not in said
    assert psutil.wait_procs(started, timeout=5)[1] == []


@pytest.fixture
def refused(tmp_path, capsys):
    """What `serve` says in its one line, with exit code 2."""

    def run(*arguments: str) -> str:
        file = tmp_path / "config.yaml"
        file.write_text(dump_yaml(config_for(tmp_path / "run")))
        assert cli.main(["serve", str(file), *arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith("megatron-logra: error: ")
        return said

    return run


def test_a_port_that_is_in_use_is_one_line(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--host 127.0.0.1 --port {port}: cannot listen there" in refused("--port", port)


def test_an_address_that_cannot_be_is_one_line(refused):
    assert "--port 65536: expected 0 to 65535" in refused("--port", "65536")
    assert "--host 192.0.2.1 --port 0" in refused("--host", "192.0.2.1", "--port", "0")


def test_missing_packages_are_one_line(refused, monkeypatch):
    monkeypatch.setitem(http_port.PACKAGES, "no_such_module", "no-such-distribution")
    assert "no-such-distribution: not installed" in refused()
    assert "pip install 'megatron-logra[serve]'" in refused()


def test_only_a_separate_run_can_be_followed(refused):
    changes = ["rollout.placement=colocated", "rollout.sync=shared"]
    assert "--follow: needs rollout.placement=separate" in refused(
        *changes, "--port", "0", "--follow"
    )
