"""`jaxserve generate`: a file of prompts to a file of answers."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, JaxserveError, RequestError
from jaxserve.offline.llm import LLM
from jaxserve.offline.loop import Completion
from jaxserve.offline.prompts_file import AnswersFile, Line, answers_file, read_prompts
from jaxserve.server.generation import Generation
from jaxserve.terminal import ProgressBar

DEFAULTS = ("system", "max_tokens", "temperature", "top_p", "seed", "stop")


def run_generate(flags: argparse.Namespace) -> int:
    """Answer what has no answer yet. 1 if some could not be answered: their lines say why."""
    if flags.system is not None and not flags.chat:
        raise ConfigError("--system is for a conversation: add --chat")
    given = {name: getattr(flags, name) for name in DEFAULTS}
    defaults = {name: value for name, value in given.items() if value is not None}
    lines = read_prompts(flags.input, flags.format, defaults, flags.chat)
    with answers_file(flags.output, lines, overwrite=flags.overwrite) as answers:
        todo = [line for line in lines if line.index not in answers.done]
        if len(todo) < len(lines):
            print(f"{len(lines) - len(todo)} prompts are answered already", file=sys.stderr)
        if not todo:
            return 0
        with LLM(flags.model, store=flags.store, **engine_options(flags)) as llm:
            return answer_all(llm, todo, answers)


def engine_options(flags: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings. A promise is made only if the flags ask for one."""
    names = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "store"}
    options = {name: value for name, value in vars(flags).items() if name in names}
    if flags.no_promise is None:
        options["no_promise"] = flags.ttft_ms is None and flags.tpot_ms is None
    return options


def answer_all(llm: LLM, lines: list[Line], answers: AnswersFile) -> int:
    """Answer the lines and write each answer as it comes."""
    started, num_tokens, num_failed = time.perf_counter(), 0, 0
    planned: list[Line] = []
    num_done = 0
    with ProgressBar() as bar:
        bar.update("generating", 0, len(lines))

        def made() -> Iterator[Generation]:
            """What can be asked; what cannot is answered with the reason."""
            nonlocal num_failed
            for line in lines:
                try:
                    generation = llm.plan(line.body)
                except RequestError as error:
                    num_failed += 1
                    answers.write(line, {"error": str(error)})
                else:
                    planned.append(line)
                    yield generation

        for index, outcome in llm.complete(made()):
            num_done += 1
            answers.write(planned[index], reply(outcome))
            num_failed += isinstance(outcome, JaxserveError)
            if isinstance(outcome, Completion):
                num_tokens += len(outcome.token_ids)
            bar.update("generating", num_done, len(lines))
    seconds = time.perf_counter() - started
    print(
        f"{len(lines) - num_failed} answers, {num_tokens:,} tokens in {seconds:.1f} s "
        f"({num_tokens / seconds:,.0f} tokens a second)",
        file=sys.stderr,
    )
    if num_failed:
        print(f"{num_failed} could not be answered: see their 'error'", file=sys.stderr)
    return int(num_failed > 0)


def reply(outcome: Completion | JaxserveError) -> Mapping[str, Any]:
    """What the output says of one prompt."""
    if isinstance(outcome, JaxserveError):
        return {"error": str(outcome)}
    return {
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "prompt_tokens": len(outcome.prompt_ids),
        "completion_tokens": len(outcome.token_ids),
    } | ({} if outcome.logprobs is None else {"logprobs": list(outcome.logprobs)})
