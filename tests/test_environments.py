"""Problems, their split, and scores that always come back."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_logra.config import EnvironmentConfig
from megatron_logra.errors import UserError
from megatron_logra.rl.environments import Mixture, build_environment
from megatron_logra.rl.environments.base import question_digest
from megatron_logra.rl.environments.isolated import IsolatedEnvironment
from megatron_logra.rl.environments.reasoning_gym import create_dataset
from megatron_logra.rl.environments.scoring import Unscorable, last_integer, tagged_answer

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
USER_MODULE = """
import os
import re
import time

class Made:
    def __init__(self, count):
        self.problems = [{"question": f"number {i}?", "answer": str(i)} for i in range(count)]

    def score(self, problem, text):
        if text == "spin":
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    pass
        if text == "regex":  # one C call that holds the interpreter's lock
            re.match(r"(a+)+$", "a" * 60 + "b")
        if text == "sleep":
            time.sleep(1000)
        if text == "crash":
            os._exit(3)
        if text == "raise":
            raise ValueError("no such answer")
        if text == "exit":
            raise SystemExit(0)
        if text.startswith("value:"):
            return eval(text[6:])
        return float(text == problem["answer"])

def make(count=40):
    print("made")
    return Made(count)

def broken():
    raise RuntimeError("no data here")

def partial():
    return object()

number = 3
"""


@pytest.fixture
def build() -> Iterator[Any]:
    """`build_environment` of keyword arguments; closes what it made."""
    made: list[Mixture] = []

    def build(*sections: dict[str, Any], seed: int = 7) -> Mixture:
        made.append(build_environment([EnvironmentConfig(**section) for section in sections], seed))
        return made[-1]

    yield build
    for mixture in made:
        mixture.close()


@pytest.fixture(scope="module")
def one_digit() -> Iterator[Mixture]:
    """One-digit sums under seed 7, for tests that leave them as they are."""
    mixture = build_environment([EnvironmentConfig(**chain_sum())], 7)
    yield mixture
    mixture.close()


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_environment_{random.randrange(10**9)}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def chain_sum(**keys: Any) -> dict[str, Any]:
    section = {"kind": "reasoning_gym", "task": "chain_sum", "params": ONE_DIGIT}
    return section | {"scorer": "last_integer"} | keys


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def only(mixture: Mixture) -> IsolatedEnvironment:
    (environment,) = mixture.environments.values()
    assert isinstance(environment, IsolatedEnvironment)
    return environment


# Splits and order


def test_no_held_out_problem_is_ever_a_training_problem(build: Any) -> None:
    mixture = build(chain_sum(), seed=random.randrange(2**32))
    held_out = mixture.held_out(64, seed=random.randrange(100))
    training = [mixture.train_problem(index) for index in range(1500)]
    held_out_questions = {problem.question for problem in held_out}
    assert len(held_out_questions) == len(held_out)
    assert not held_out_questions & {problem.question for problem in training}
    # Two digits and a sign: 200 problems, of which a search this long sees all on both sides.
    assert len({problem.question for problem in training}) + len(held_out) == 200


def test_held_out_returns_what_there_is_and_depends_on_its_own_seed_only(
    build: Any, one_digit: Mixture
) -> None:
    first, second = one_digit, build(chain_sum(), seed=random.randrange(2**32))
    everything = first.held_out(1000, seed=0)
    assert 20 < len(everything) < 80
    again = first.held_out(1000, seed=5)
    assert {problem.id for problem in again} == {problem.id for problem in everything}
    assert [p.id for p in first.held_out(10, 3)] == [p.id for p in second.held_out(10, 3)]
    assert [p.id for p in first.held_out(10, 3)] != [p.id for p in first.held_out(10, 4)]


def test_training_problem_is_a_pure_function_of_seed_and_position(
    build: Any, tmp_path: Path
) -> None:
    rows = [{"question": f"q{i}", "answer": i} for i in range(50)]
    file = {"kind": "jsonl", "path": write_jsonl(tmp_path / "f.jsonl", rows), "weight": 0.5}
    mixture = build(chain_sum(), file)
    indices = [random.randrange(2**40) for _ in range(50)]
    problems = {index: mixture.train_problem(index) for index in indices}
    other = build(chain_sum(), file)
    for index in reversed(indices):
        assert other.train_problem(index) == problems[index]
    assert len({problem.environment for problem in problems.values()}) == 2


def test_seed_changes_the_order(build: Any, tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": i} for i in range(50)]
    file = {"kind": "jsonl", "path": write_jsonl(tmp_path / "f.jsonl", rows)}
    one, other = build(file, seed=1), build(file, seed=2)
    assert [one.train_problem(i).id for i in range(20)] != [
        other.train_problem(i).id for i in range(20)
    ]


@pytest.mark.parametrize("task", ["ransom_note", "list_functions"])
def test_items_of_careless_generators_do_not_depend_on_process_or_history(
    build: Any, task: str
) -> None:
    # One iterates over sets; one uses the global random state and has no items beyond its size.
    section = {"kind": "reasoning_gym", "task": task}
    program = (
        "import sys; sys.path[:0] = eval(sys.argv[1])\n"
        "from megatron_logra.config import EnvironmentConfig\n"
        "from megatron_logra.rl.environments import build_environment\n"
        f"mixture = build_environment([EnvironmentConfig(**{section!r})], 7)\n"
        "print([mixture.train_problem(i).id for i in (4, 2, 0)])"
    )
    mixture = build(section)
    ours = [mixture.train_problem(index).id for index in range(5)]
    environment = dict(os.environ, PYTHONHASHSEED=str(random.randrange(1, 1000)))
    command = [sys.executable, "-c", program, repr(sys.path)]
    theirs = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert theirs.stdout.strip() == repr([ours[4], ours[2], ours[0]])


def test_mixture_follows_its_weights_and_scores_each_by_its_own(build: Any, tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(50)]
    file = write_jsonl(tmp_path / "mine.jsonl", rows)
    mixture = build(chain_sum(weight=3.0), {"kind": "jsonl", "path": file, "scorer": "exact"})
    problems = [mixture.train_problem(index) for index in range(2000)]
    share = sum(problem.environment == "chain_sum" for problem in problems) / 2000
    assert abs(share - 0.75) < 0.04  # four standard deviations
    chosen = problems[:64]
    right = [bool(random.getrandbits(1)) for _ in chosen]
    texts = [
        str(problem.answer) if good else "-999" for problem, good in zip(chosen, right, strict=True)
    ]
    scores = mixture.score_all(chosen, texts)
    assert [score.value == 1.0 for score in scores] == right
    held_out = mixture.held_out(40, seed=0)
    assert {problem.environment for problem in held_out} == {"chain_sum", "mine"}
    assert sum(problem.environment == "chain_sum" for problem in held_out) == 30


def test_question_held_out_by_one_environment_is_trained_on_in_none(
    build: Any, tmp_path: Path
) -> None:
    rows = [{"question": f"q{i}", "answer": 1} for i in range(300)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    reworded = [{**row, "question": f"  {row['question']}\n"} for row in rows]
    twin = write_jsonl(tmp_path / "b.jsonl", reworded)
    mixture = build(
        {"kind": "jsonl", "path": file, "held_out_fraction": 0.5},
        {"kind": "jsonl", "path": twin, "held_out_fraction": 0.1},
    )
    held_out = {question_digest(p.question) for p in mixture.held_out(1000, seed=0)}
    training = {question_digest(mixture.train_problem(i).question) for i in range(3000)}
    assert len(held_out) > 100 and len(training) > 100
    assert not held_out & training


def test_file_is_passed_through_whole_in_a_new_order_each_time(build: Any, tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": i} for i in range(60)]
    mixture = build({"kind": "jsonl", "path": write_jsonl(tmp_path / "f.jsonl", rows)})
    held_out = mixture.held_out(1000, seed=0)
    size = 60 - len(held_out)
    passes = [[mixture.train_problem(e * size + i).id for i in range(size)] for e in range(3)]
    assert len(set(passes[0])) == size
    assert set(passes[0]) == set(passes[1]) == set(passes[2])
    assert passes[0] != passes[1] != passes[2]


def test_file_of_held_out_problems_is_left_out_of_training(build: Any, tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": i} for i in range(30)]
    file = write_jsonl(tmp_path / "all.jsonl", rows)
    test = write_jsonl(tmp_path / "test.jsonl", rows[::3])
    mixture = build({"kind": "jsonl", "path": file, "held_out_path": test})
    held_out = {problem.question for problem in mixture.held_out(1000, seed=0)}
    training = {mixture.train_problem(index).question for index in range(100)}
    assert held_out == {row["question"] for row in rows[::3]}
    assert training == {row["question"] for row in rows} - held_out


def test_messages_are_system_prompt_question_and_suffix(build: Any, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[dict[str, Any]] = [{"question": f"q{i}", "response": f"r{i}"} for i in range(20)]
    rows += [
        {"messages": [*chat, {"role": "user", "content": f"q{i}"}], "answer": 1} for i in "xyz"
    ]
    file = write_jsonl(tmp_path / "f.jsonl", rows)
    mixture = build(
        {"kind": "jsonl", "path": file, "system_prompt": "Be brief.", "suffix": " Now!"}
    )
    for index in range(20):
        problem = mixture.train_problem(index)
        system, *middle, last = problem.messages
        assert system == {"role": "system", "content": "Be brief."}
        assert last["role"] == "user" and last["content"].endswith(" Now!")
        if problem.response is None:
            assert middle == chat
        else:
            assert not middle
            assert last["content"] == problem.question + " Now!"
            assert problem.response == "r" + problem.question[1:]


# Scores


def test_last_integer_and_tagged_answer_read_what_they_should() -> None:
    n = random.randrange(1000, 10**9)
    assert last_integer(f"First 12, then {n:,}.") == str(n)
    assert last_integer(f"x = -{n}") == str(-n)
    assert tagged_answer(f"<answer>1</answer> no <answer>\n {n} </answer>") == str(n)
    assert tagged_answer(f" {n}\n") == str(n)
    for empty in ("", "no number"):
        with pytest.raises(Unscorable):
            last_integer(empty)
    with pytest.raises(Unscorable):
        tagged_answer("so: <answer> </answer>")


def test_every_response_gets_one_score_even_if_nothing_can_be_extracted(
    one_digit: Mixture,
) -> None:
    mixture = one_digit
    problems = [mixture.train_problem(index) for index in range(40)]
    kinds = [random.choice(["right", "wrong", "empty", "text"]) for _ in problems]
    texts = {
        "right": lambda p: f"That is {p.answer}",
        "wrong": lambda p: str(int(p.answer) + 1),
        "empty": lambda p: "",
        "text": lambda p: "I do not know",
    }
    scores = mixture.score_all(
        problems, [texts[kind](p) for kind, p in zip(kinds, problems, strict=True)]
    )
    assert len(scores) == len(problems)
    assert [score.valid for score in scores] == [kind in ("right", "wrong") for kind in kinds]
    for kind, score in zip(kinds, scores, strict=True):
        assert (score.value == 1.0) == (kind == "right")
        assert (score.reason is None) == score.valid
    with pytest.raises(ValueError, match="zip"):
        only(mixture).score_all(problems, ["1"])


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("1/2", "It is $\\frac{2}{4}$.", 1.0),
        ("\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        (72, "The answer is 72.", 1.0),
        ("$x^2+1$", "We get $1 + x^2$", 1.0),
        ("72", "The answer is 71.", 0.0),
    ],
)
def test_math_verify_compares_expressions(
    build: Any, tmp_path: Path, answer: Any, text: str, value: float
) -> None:
    rows = [{"question": f"q{i}", "answer": answer} for i in range(20)]
    mixture = build({"kind": "jsonl", "path": write_jsonl(tmp_path / "f.jsonl", rows)})
    problem = mixture.train_problem(0)
    found, nothing = mixture.score_all([problem] * 2, [text, "I give up"])
    assert (found.value, found.valid) == (value, True)
    assert not nothing.valid


def test_pathological_latex_is_given_up_within_the_limit(build: Any, tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": "7"} for i in range(20)]
    file = write_jsonl(tmp_path / "f.jsonl", rows)
    mixture = build({"kind": "jsonl", "path": file, "score_time_limit": 1.0})
    problem = mixture.train_problem(0)
    assert mixture.score(problem, "$7$").value == 1.0
    started = time.monotonic()
    tower = mixture.score(problem, "$9^{9^{9^{9^{9^9}}}} + \\sqrt{10^{10^{10}}}$")
    assert time.monotonic() - started < 3
    assert tower.value == 0.0
    assert mixture.score(problem, "$7$").value == 1.0


@pytest.mark.parametrize("in_thread", [False, True], ids=["main", "thread"])
def test_hanging_scorer_is_killed_within_its_limit_and_the_next_score_works(
    build: Any, user_module: str, in_thread: bool
) -> None:
    function = f"{user_module}:make"
    mixture = build({"kind": "python", "function": function, "score_time_limit": 0.5})
    problem = mixture.train_problem(0)
    worker = only(mixture).worker
    pid = worker.pid
    assert pid is not None
    texts = ["spin", str(problem.answer), "regex", "sleep", "crash", "raise", "exit", "wrong"]
    scores: list[Any] = []
    seconds: list[float] = []

    def score() -> None:
        started = time.monotonic()
        scores.extend(mixture.score_all([problem] * len(texts), texts))
        seconds.append(time.monotonic() - started)

    if in_thread:
        thread = threading.Thread(target=score)
        thread.start()
        thread.join(60)
    else:
        score()
    assert [score.valid for score in scores] == [False, True, *[False] * 5, True]
    assert [score.value for score in scores] == [0.0, 1.0, *[0.0] * 6]
    assert "0.5 s" in scores[0].reason and "no such answer" in scores[5].reason
    assert seconds[0] < 60  # three limits and four starts of a process on a busy machine
    assert worker.pid != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert mixture.score(problem, str(problem.answer)).value == 1.0


def test_many_threads_share_a_scorer_without_mixing_up_scores(build: Any, user_module: str) -> None:
    mixture = build({"kind": "python", "function": f"{user_module}:make"})
    problem = mixture.train_problem(0)
    results: dict[int, list[float]] = {}

    def score(number: int) -> None:
        texts = [f"value:{number * 1000 + i}" for i in range(50)]
        results[number] = [s.value for s in mixture.score_all([problem] * 50, texts)]

    threads = [threading.Thread(target=score, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {n: [n * 1000.0 + i for i in range(50)] for n in range(8)}


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "'1'", "None", "[1.0]", "1j"])
def test_reward_that_is_no_number_is_an_error_that_names_it(
    build: Any, user_module: str, value: str
) -> None:
    function = f"{user_module}:make"
    mixture = build({"kind": "python", "function": function, "name": "mine"})
    problem = mixture.train_problem(0)
    with pytest.raises(UserError) as caught:
        mixture.score_all([problem] * 3, ["wrong", f"value:{value}", "wrong"])
    message = str(caught.value)
    assert "mine" in message and repr(eval(value)) in message and "\n" not in message
    assert mixture.score(problem, f"value:{random.randint(2, 9)}").value >= 2


def test_scoring_process_is_small_and_ends_when_told(one_digit: Mixture) -> None:
    one_digit.check()
    pid = only(one_digit).worker.pid
    assert pid is not None
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert sys.executable in Path(f"/proc/{pid}/cmdline").read_text()
    assert "numpy" in maps and "torch" not in maps
    one_digit.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert one_digit.score(one_digit.train_problem(0), "1000").value < 1


def test_scores_of_a_batch_take_milliseconds(one_digit: Mixture) -> None:
    problems = [one_digit.train_problem(index) for index in range(64)]
    texts = [str(problem.answer) for problem in problems]
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        assert all(score.value == 1.0 for score in one_digit.score_all(problems, texts))
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05


# Bad input


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"task": "chain_smu"}, ["chain_smu", "chain_sum"]),
        ({"task": "chain_sum", "params": {"min_term": 1}}, ["params.min_term", "min_terms"]),
        ({"task": "chain_sum", "params": {"seed": 1}}, ["params.seed"]),
        ({"task": "chain_sum", "params": {"min_terms": 0}}, ["min_terms=0"]),
        ({"task": "chain_sum", "params": {"min_terms": "a"}}, ["min_terms='a'"]),
    ],
)
def test_unknown_task_or_parameter_is_one_clear_line(
    section: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        create_dataset(section["task"], section.get("params", {}))
    message = str(caught.value)
    assert all(part in message for part in expected) and "\n" not in message


def test_error_in_the_process_names_its_environment(build: Any) -> None:
    function = {"kind": "python", "function": "no_such_module_anywhere:make", "name": "mine"}
    with pytest.raises(UserError, match=r"environment mine: function: .*no_such_module_anywhere"):
        build(function).check()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("no_such_module_anywhere:make", "no_such_module_anywhere"),
        ("{module}:missing", "missing"),
        ("{module}:broken", "no data here"),
        ("{module}:partial", "problems"),
        ("{module}:number", "not callable"),
        ("{module}", "module:function"),
    ],
)
def test_function_that_cannot_be_used_is_one_clear_line(
    build: Any, user_module: str, function: str, expected: str
) -> None:
    function = function.format(module=user_module)
    with pytest.raises(UserError) as caught:
        build({"kind": "python", "function": function}).check()
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "JSON"),
        ("[1]", "question or messages"),
        ('{"answer": 1}', "question or messages"),
        ('{"question": "", "answer": 1}', "question"),
        ('{"question": "q"}', "answer"),
        ('{"question": "q", "answer": [1]}', "answer"),
        ('{"question": "q", "answer": true}', "answer"),
        ('{"question": "q", "response": 3}', "response"),
        ('{"messages": [], "answer": 1}', "messages"),
        ('{"messages": [{"role": "robot", "content": "x"}], "answer": 1}', "robot"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "answer": 1}', "response"),
    ],
)
def test_malformed_line_is_named_by_its_number(
    build: Any, tmp_path: Path, line: str, expected: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "fine", "answer": 1}\n\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        build({"kind": "jsonl", "path": str(path)})
    message = str(caught.value)
    assert f"{path}:3:" in message and expected in message and "\n" not in message


def test_missing_empty_or_too_small_files_are_errors(build: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.jsonl.*No such file"):
        build({"kind": "jsonl", "path": str(tmp_path / "absent.jsonl")})
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="empty"):
        build({"kind": "jsonl", "path": str(tmp_path / "empty.jsonl")})
    one = write_jsonl(tmp_path / "one.jsonl", [{"question": "q", "answer": 1}])
    with pytest.raises(UserError, match="held_out_fraction"):
        build({"kind": "jsonl", "path": one})


def test_sections_that_do_not_fit_are_errors(build: Any) -> None:
    with pytest.raises(UserError, match="at least one"):
        build()
    with pytest.raises(UserError, match=r"environment\.0\.task"):
        build({"kind": "reasoning_gym"})
    with pytest.raises(UserError, match=r"environment\.1\.path.*jsonl"):
        build(chain_sum(), {"kind": "jsonl"})
    with pytest.raises(UserError, match=r"environment\.0\.path"):
        build(chain_sum(path="x"))
    with pytest.raises(UserError, match="chain_sum"):
        build(chain_sum(), chain_sum())


def test_split_that_leaves_nothing_to_train_on_is_an_error(build: Any) -> None:
    with pytest.raises(UserError, match=r"chain_sum.*training.*held_out_fraction"):
        build(chain_sum(held_out_fraction=1 - 1e-12)).train_problem(0)
