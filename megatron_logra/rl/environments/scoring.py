"""From a response's text to a score. Runs in the worker process, or inline where it cannot hang."""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from megatron_logra.errors import UserError

_INTEGER = re.compile(r"-?\d+")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MEMORY_LIMIT = 16 << 30  # bytes of address space: towers of powers ask for all there is


class Unscorable(Exception):
    """The response has nothing in it that can be scored."""


def last_integer(text: str) -> str:
    """The last integer in a text, thousands separators removed.

    A minus sign counts wherever it touches the digits, so "7-3" ends in -3.
    """
    found = _INTEGER.findall(text.replace(",", ""))
    if not found:
        raise Unscorable("no integer in the response")
    return found[-1]


def tagged_answer(text: str) -> str:
    """What stands in the last <answer>…</answer>, or else the whole text; stripped."""
    found = _TAGGED.findall(text)
    answer = (found[-1] if found else text).strip()
    if not answer:
        raise Unscorable("the response is empty")
    return answer


def score_response(
    scorer: str, text: str, answer: Any, verify: Callable[[str], Any]
) -> tuple[Any, str | None]:
    """Score one response.

    Args:
        scorer: `verifier`, `last_integer`, `exact` or `math_verify`.
        text: the response.
        answer: the reference answer, for `exact` and `math_verify`.
        verify: the environment's own verifier.

    Returns:
        The value as the verifier gave it (not yet checked to be a number) and None, or 0.0 and
        the reason why there is nothing to score.
    """
    try:
        match scorer:
            case "verifier":
                return verify(tagged_answer(text)), None
            case "last_integer":
                return verify(last_integer(text)), None
            case "exact":
                return float(tagged_answer(text) == str(answer).strip()), None
            case "math_verify":
                return math_verify_score(text, str(answer)), None
    except Unscorable as error:
        return 0.0, str(error)
    raise UserError(f"environment.scorer: {scorer}: not known")


def math_verify_score(text: str, answer: str) -> float:
    """1.0 if math-verify finds an expression in the text that equals the answer, else 0.0.

    Raises:
        Unscorable: it finds no expression.
        UserError: it cannot read the answer.
    """
    from math_verify import parse, verify

    gold = _gold(answer)
    found = parse(text, parsing_timeout=None)
    if not found:
        raise Unscorable("no mathematical expression in the response")
    return float(verify(gold, found, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    from math_verify import parse

    marked = "$" in answer or "\\boxed" in answer
    gold = parse(answer if marked else f"${answer}$", parsing_timeout=None)
    if not gold:
        raise UserError(
            f"the answer {answer!r} cannot be read by math_verify; expected a number or LaTeX, "
            "or another scorer"
        )
    return gold


def prepare(scorer: str, *, limit_memory: bool = True) -> None:
    """Do once, before the first time limit runs, what is slow the first time."""
    if limit_memory:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_LIMIT)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    if scorer == "math_verify":
        # math-verify's own limits need the main thread and cannot stop C code; ours can.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        math_verify_score("$\\frac{1}{2}$", "0.5")


class AnswerSource:
    """Scores against reference answers alone; lives in the worker."""

    def __init__(self, scorer: str) -> None:
        self.scorer = scorer
        prepare(scorer)

    def score(self, payload: str, answer: Any, text: str) -> tuple[Any, str | None]:
        """Score a response; `payload` says where the answer is from."""
        try:
            return score_response(self.scorer, text, answer, lambda given: _equal(given, answer))
        except UserError as error:
            raise UserError(f"{payload}: {error}") from None


def _equal(given: str, answer: Any) -> float:
    reference = str(answer).strip()
    try:
        return float(int(given) == int(reference.replace(",", "")))
    except ValueError:
        return float(given == reference)
