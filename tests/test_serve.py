"""Real server processes and plain HTTP: answers, what is refused, and how servers end."""

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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import listening, quick, tiny_config
from megatron.core.inference.text_generation_server.dynamic_text_gen_server import endpoints
from megatron.core.process_groups_config import ProcessGroupCollection
from quart import Quart
from sync_runs import STEP, one_update, wait_until
from training import make_learner

from megatron_logra import cli, whole_file
from megatron_logra.config import Config, SamplingConfig, dump_yaml
from megatron_logra.errors import UserError
from megatron_logra.model.tokenizer import BytesTokenizer
from megatron_logra.optimizer.learner import Learner
from megatron_logra.rl import evaluate
from megatron_logra.rollout import http_port
from megatron_logra.rollout.server import application
from megatron_logra.rollout.static_engine import StaticEngine
from megatron_logra.sync.files import FileSender
from megatron_logra.sync.sender import Sender
from megatron_logra.sync.transport import Head

TOKENIZER = BytesTokenizer()
GREEDY = {"temperature": 0, "max_tokens": 12}
PROMPT = "What is 2 + 2?"
PROMPTS = [PROMPT, "List three colours.", "é"]


def chat(text: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **GREEDY, **fields}


def config_for(run_dir: Path, vocab_size: int = 260, **sampling: Any) -> Config:
    return tiny_config(
        {"vocab_size": vocab_size, "max_sequence_length": 128},
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

    def say_all(self) -> list[str]:
        """Greedy answers to `PROMPTS`, asked at the same time."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self.say, [chat(prompt) for prompt in PROMPTS]))

    def end(self, number: signal.Signals) -> str:
        """End it by a signal: with exit code 0 and all its processes; returns what it has said."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        if number == signal.SIGINT:  # a keyboard's comes to all of them
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, said
        for noise in ("Traceback", "most recent call first", "Task was destroyed"):
            assert noise not in said, said
        assert psutil.wait_procs(started, timeout=5)[1] == []
        return said


@contextmanager
def serving(config: Config, *arguments: str) -> Iterator[Server]:
    """A server that follows the run's trainer."""
    file = Path(config.logging.run_dir).parent / "config.yaml"
    file.write_text(dump_yaml(config))
    command = [sys.executable, "-m", "megatron_logra", "serve", str(file), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--follow", *arguments],
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(config_for(tmp_path_factory.mktemp("serve") / "run")) as server:
        yield server


def test_greedy_chats_are_generates(server):
    run_dir = Path(server.config.logging.run_dir)
    expected = evaluate.generate(config_for(run_dir, temperature=0.0, max_tokens=12), PROMPTS)
    answers = server.say_all()
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


def test_no_route_changes_weights_or_stops_the_engine(server):
    """What there is, all told, and that all else that Megatron has is refused."""
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
    everything = Quart("everything Megatron has")
    for blueprint in endpoints.__all__:
        everything.register_blueprint(blueprint)
    theirs = {rule.rule for rule in everything.url_map.iter_rules()}
    kept_back = theirs - {path for path, _ in routes} - {"/static/<path:filename>"}
    assert "/v1/start_profile" in kept_back
    before = server.say(chat())
    for name in ("pause", "suspend", "resume", "stop", "shutdown", "update_weights", "load", "x"):
        kept_back |= {f"/{name}", f"/v1/{name}"}
    for path in kept_back:
        for method in ("GET", "POST", "PUT"):
            assert server.call(path, None if method == "GET" else {}, method)[0] == 404
    for path, known in routes:
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - {known}:
            assert server.call(path, None if method == "GET" else {}, method)[0] == 405
    for name in ("generation_epoch", "weights", "checkpoint", "termination_id", "num_tokens"):
        status, answer = server.call("/v1/chat/completions", chat(**{name: 1}))
        assert status == 400 and f"{name}: not supported" in answer["error"]["message"]
    assert server.call("/v1/health")[1]["ready"] is True
    assert server.say(chat()) == before


def test_nothing_listens_beyond_this_machine(server):
    places = listening(server.process.pid)
    assert len(places) >= 3 and {address for address, _ in places} == {"127.0.0.1"}


def generated(learner: Learner) -> list[str]:
    """What one rank generates with the trainer's own weights, as `Server.say_all`."""
    engine = StaticEngine(
        learner.chunks,
        stop_ids=TOKENIZER.stop_ids,
        pad_id=TOKENIZER.PAD,
        max_sequence_length=96,
        batch_size=8,
        pg=learner.pg,
    )
    prompts = [TOKENIZER.encode_chat(chat(prompt)["messages"]) for prompt in PROMPTS]
    greedy = SamplingConfig(temperature=0.0, max_tokens=12)
    answers = engine.generate(prompts, 1, greedy, seed=0, update=0)
    return [TOKENIZER.decode(response.token_ids) for (response,) in answers]


def assert_follows(server: Server, pg: ProcessGroupCollection) -> None:
    """It serves a trainer's weights once they change; requests under way are answered, too."""
    learner = make_learner(server.config, pg)
    before = generated(learner)
    assert server.say_all() == before, "the first weights are the trainer's"
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
    assert server.say_all() == generated(learner) != before


def test_weights_follow_the_trainer(server, pg):
    assert_follows(server, pg)


def test_a_version_that_cannot_be_had_is_told_and_the_keyboards_signal_ends_all(server):
    directory = Path(server.config.logging.run_dir) / "exchange" / "sync"
    before = server.say_all()
    head = json.dumps(asdict(Head(run="lost", version=1, refresh=1))).encode()
    whole_file.write(directory / "HEAD", head)
    wait_until(lambda: any((directory / "wanted").glob("server_*")))
    assert server.say_all() == before
    said = server.end(signal.SIGINT)
    assert said.count("serve: refresh_0000001: no pieces; asked for whole weights\n") == 1, said


LAYOUTS = {
    "tp2": ("parallel.tensor=2",),
    "tp2-sequence": ("parallel.tensor=2", "parallel.sequence=true"),
    "pp2": ("parallel.pipeline=2",),
    "dp2": (),
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, ["tp2"]))
def test_two_ranks_answer_as_one_follow_the_trainer_and_end(layout, tmp_path, pg):
    """Its vocabulary is odd, so tensor-parallel ranks have a row that is no token."""
    config = config_for(tmp_path / "run", vocab_size=261)
    with serving(config, "--nproc", "2", *LAYOUTS[layout]) as server:
        assert_follows(server, pg)
        # The draws of tensor-parallel ranks and of stages are one, those of replicas are not.
        body = {"prompt": ["a"] * 8, "temperature": 1, "max_tokens": 24}
        choices = server.post("/v1/completions", body)["choices"]
        assert len({choice["text"] for choice in choices}) == 8
        server.end(signal.SIGTERM)


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("parallel.context=2", "parallel.context=2: serve takes 1 only"),
        (
            "parallel.pipeline=2 parallel.virtual_pipeline=2",
            "parallel.virtual_pipeline=2: serve takes 1 only",
        ),
        ("parallel.expert=2", "parallel.expert=2: expected 1"),
        ("parallel.tensor=2", "parallel.tensor=2: need a multiple of 2 ranks"),
    ],
)
def test_layouts_that_cannot_serve_are_one_line(refused, changes, words):
    assert words in refused("--port", "0", *changes.split())


def test_only_a_separate_run_can_be_followed(refused):
    changes = ["rollout.placement=colocated", "rollout.sync=shared"]
    assert "--follow: needs rollout.placement=separate" in refused(
        *changes, "--port", "0", "--follow"
    )
