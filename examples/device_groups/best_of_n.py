"""Best of n at the numbers game: a group of actors proposes, another scores, and the best answers teach the first.

A question is four numbers and a target; an answer is an expression of these numbers, the better the closer it comes.
All targets here are sums, which nobody tells the sampler: it finds out.
"""

from __future__ import annotations

import argparse
import ast
import operator
import random
from pathlib import Path
from typing import NamedTuple

import yaml

from rolegraph.decorators import function, initialize, take_device_groups, worker

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}


class Question(NamedTuple):
    name: str
    numbers: tuple[int, ...]
    target: int


@worker(group=["sampler", "scorer"])
class BestOfN:
    def __init__(self, questions: int, samples: int) -> None:
        draw = random.Random(0)
        numbers = [tuple(draw.choices(range(1, 10), k=4)) for _ in range(questions)]
        self.questions = [Question(f"q{i}", four, sum(four)) for i, four in enumerate(numbers)]
        self.samples = samples
        self.prepare_sampler()  # in the sampler's actors only: the driver and the scorer pass over it
        self.prepare_scorer()

    @function(group="sampler")
    def prepare_sampler(self) -> None:
        self.policy = dict.fromkeys(OPERATORS, 1.0)

    @function(group="scorer")
    def prepare_scorer(self) -> None:
        self.seen: dict[str, float] = {}

    @function(group="sampler", dispatch="slice", collect="flatten")
    def sample(self, questions: list[Question], n: int, seed: int) -> list[list[str]]:
        """n expressions for each question, whichever actor has it."""
        return [[self._expression(q, random.Random(f"{seed} {q.name} {i}")) for i in range(n)] for q in questions]

    @function(group="sampler")
    def learn(self, answers: list[str]) -> None:
        """Every actor learns the same: how often each operator is in the best answers."""
        text = "".join(answers)
        self.policy = {name: 1.0 + text.count(f" {name} ") for name in OPERATORS}

    @function(group="scorer", dispatch="slice", collect="flatten")
    def score(self, questions: list[Question], answers: list[list[str]]) -> list[list[float]]:
        """1 for an answer that hits its target, less the further it is off."""
        return [
            [1 / (1 + abs(self._value(text) - question.target)) for text in row]
            for question, row in zip(questions, answers, strict=True)
        ]

    def run(self, rounds: int) -> list[float]:
        """Mean score of all answers, round by round."""
        means = []
        for seed in range(rounds):
            answers = self.sample(self.questions, self.samples, seed)
            scores = self.score(self.questions, answers)
            best = [max(zip(marks, texts, strict=True)) for marks, texts in zip(scores, answers, strict=True)]
            self.learn([text for _, text in best])
            means.append(sum(map(sum, scores)) / sum(map(len, scores)))
        return means

    def _expression(self, question: Question, draw: random.Random) -> str:
        first, *rest = draw.sample(question.numbers, len(question.numbers))
        names = draw.choices(list(self.policy), weights=list(self.policy.values()), k=len(rest))
        return str(first) + "".join(f" {name} {number}" for name, number in zip(names, rest, strict=True))

    def _value(self, text: str) -> float:
        def value(node: ast.expr) -> float:
            if isinstance(node, ast.BinOp):
                return float(OPERATORS[NODES[type(node.op)]](value(node.left), value(node.right)))
            return float(ast.literal_eval(node))

        if text not in self.seen:
            self.seen[text] = value(ast.parse(text, mode="eval").body)
        return self.seen[text]


if __name__ == "__main__":
    groups = take_device_groups() or yaml.safe_load(Path(__file__).with_name("cpu.yaml").read_text())
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", action="store_true", help="run in this process, without Ray")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with initialize(groups, use_ray=not args.local):
        for number, mean in enumerate(BestOfN(questions=32, samples=8).run(args.rounds)):
            print(f"round {number}: {mean:.3f}")
