"""A wrong command line gives one line and status 2, whichever typer is installed."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from barter.cli import app as command_line
from barter.cli.app import main

MISTAKES = {
    "foo": "No such command 'foo'.",
    "show algorithms": (
        "No such command 'algorithms'. `barter list algorithms` lists them. "
        "Did you mean 'algorithm'?"
    ),
    "run --threads x": "Invalid value for '--threads': 'x' is not a whole number of at least 1.",
    "run --threads 0": "Invalid value for '--threads': '0' is not a whole number of at least 1.",
    "show images a --columns 101": (
        "Invalid value for '--columns': '101' is not a whole number between 1 and 100."
    ),
    "run --device-memory x": "Invalid value for '--device-memory': 'x' is not a number.",
    "compare --target high": "Invalid value for '--target': 'high' is not a number.",
    "run --device gpu": (
        "Invalid value for '--device': 'gpu' is not one of auto, cpu, cuda, cuda:N, or several of "
        "one kind such as cuda:0,cuda:1."
    ),
    "run --device cuda:x": (
        "Invalid value for '--device': 'cuda:x' is not one of auto, cpu, cuda, cuda:N, or several of "
        "one kind such as cuda:0,cuda:1."
    ),
    "--seed 7": "No such option '--seed'.",
    "run --seed 7": "there is no --seed: write --set seed=...",
    "report runs/mine --lve": "No such option '--lve'. Did you mean '--live'?",
    "list foo": (
        "Invalid value for 'WHAT': 'foo' is not one of 'algorithms', 'models', 'families', "
        "'datasets', 'partitions'."
    ),
    "export runs/mine": "Missing option '--to'.",
    "resume": "Missing argument 'RUN'.",
    "run --set": "Option '--set' requires an argument.",
    "run a.toml b.toml": "Got unexpected extra argument (b.toml)",
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.items())
def test_a_mistake_has_the_same_line_with_every_typer(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.err == f"barter: {message}\n"
    assert captured.out == ""


@pytest.mark.parametrize("command", [[], ["show"], ["flower"]])
def test_a_command_that_lacks_its_second_word_prints_the_help(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    captured = capsys.readouterr()
    assert " ".join(["Usage: barter", *command]) in captured.out + captured.err


class CopiedError(Exception):
    """As the base class in a typer that brings its own copy of click: unrelated to the installed click."""

    ctx = None

    def format_message(self) -> str:
        return str(self)


class BadParameter(CopiedError):
    pass


class NoSuchOption(CopiedError):
    option_name = "--nonsense"
    possibilities = ("--near", "--by")


class NoArgsIsHelpError(CopiedError):
    def show(self) -> None:
        typer.echo("all the help")


COPIED = {
    CopiedError("anything else"): "barter: anything else\n",
    BadParameter("Invalid value for '[WHAT]': Value error, no."): (
        "barter: Invalid value for 'WHAT': no.\n"
    ),
    NoSuchOption(): "barter: No such option '--nonsense'. Did you mean '--by' or '--near'?\n",
    NoArgsIsHelpError(): "all the help\n",
}


@pytest.mark.parametrize("error", COPIED, ids=lambda error: type(error).__name__)
def test_errors_of_another_click_than_the_installed_one_are_understood(
    error: CopiedError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(typer, "BadParameter", BadParameter)
    monkeypatch.setattr(command_line, "app", fail)
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out + captured.err == COPIED[error]


@pytest.mark.parametrize("by_status", [True, False])
def test_an_interruption_is_said_whether_typer_raises_or_returns_it(
    by_status: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**_: Any) -> int:
        if by_status:
            return command_line.INTERRUPTED
        raise typer.Abort

    monkeypatch.setattr(command_line, "app", interrupt)
    assert main([]) == 130
    assert capsys.readouterr().err == "barter: interrupted\n"
