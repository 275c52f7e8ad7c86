"""Where each millisecond of decoding goes on this machine, as ratios inside one run, and the bars to be met.

python -m experiments.bench [--repeats 5] [--json FILE]

Two pairs are timed: the target and SSM that ship, where calls rule, and the same two inflated to 100 and 10 million
parameters (``experiments.inflate``), where reading weights rules; both with the trained pair's real acceptance. Exits
with an error where a bar is missed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

import specjax as sj
from experiments import command, config, inflate, prompts
from experiments.bench_attention import attention_ratios
from experiments.bench_draft import drafting_ratios
from experiments.bench_pair import NEW_TOKENS, ROWS, SAMPLED, Pair, SampledTraces
from experiments.bench_round import BYTES, bandwidth
from experiments.bench_verify import verify_ratios
from experiments.timing import Spread, compile_log, samples

ZOO = config.REPOSITORY / "experiments/zoo"
INFLATED = {
    "target": dict(hidden=768, layers=12, ffn=2048, vocab=32_000),
    "ssm_a": dict(hidden=256, layers=2, ffn=768, vocab=32_000),
    "ssm_b": dict(hidden=256, layers=2, ffn=768, vocab=32_000),
}
TRACED, TIMED, LONGEST = 32, 8, 128  # prompts that trees are chosen by, others that are timed, and their tokens


class Bar(NamedTuple):
    """What has to hold."""

    what: str
    value: float
    most: float = float("inf")
    least: float = -float("inf")

    @property
    def met(self) -> bool:
        """Whether it holds."""
        return self.least <= self.value <= self.most

    def text(self) -> str:
        """Its line."""
        bound = f"<= {self.most:g}" if self.most < float("inf") else f">= {self.least:g}"
        return f"bar {'met   ' if self.met else 'MISSED'} {self.what}: {self.value:.3f}, {bound}"


class Measured(NamedTuple):
    """A pair's samples, and what follows from them; ratios are of samples taken in the same turn."""

    pair: Pair
    seconds: dict[tuple[str, str], list[float]]

    def of(self, *keys: tuple[str, str]) -> list[float]:
        """Seconds of these together, turn by turn."""
        return [sum(turn) for turn in zip(*(self.seconds[key] for key in keys))]

    def part(self, kind: str) -> list[float]:
        """Seconds of all of a kind together."""
        return self.of(*(key for key in self.seconds if key[0] == kind))

    def token(self, name: str) -> list[float]:
        """Seconds of a token of a method."""
        _, emitted, _ = self.pair.methods[name].outcome
        return [seconds / emitted for seconds in self.seconds["method", name]]

    def round(self, name: str) -> list[float]:
        """Seconds of a round of a method."""
        *_, rounds = self.pair.methods[name].outcome
        return [seconds / rounds for seconds in self.seconds["method", name]]


def over(above: Sequence[float], below: Sequence[float]) -> Spread:
    """The ratio of two things measured in turns."""
    return Spread.of([a / b for a, b in zip(above, below)])


def minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """The difference of two things measured in turns."""
    return [a - b for a, b in zip(left, right)]


def methods_table(found: Measured) -> tuple[Table, dict[str, Any]]:
    """Methods end to end."""
    table = _table(
        f"{found.pair.name} pair, {TIMED} prompts of HumanEval by {NEW_TOKENS} tokens, batch 1; tokens a round",
        *("method", "tree", "tokens", "ms/token", "speed-up", "predicted", "text"),
    )
    record = {}
    for name, method in found.pair.methods.items():
        texts, emitted, rounds = method.outcome
        times = over(found.token(method.baseline), found.token(name))
        predicted = found.pair.predicted(name)
        expected = "" if predicted is None else f"{predicted:.2f}"
        same = texts == found.pair.methods[method.baseline].outcome[0]
        token = Spread.of([1e3 * second for second in found.token(name)])
        record[name] = dict(
            tree=method.about,
            tokens_per_round=emitted / rounds,
            milliseconds=token,
            speedup=times,
            predicted=predicted,
            same_text=same,
        )
        row = (name, method.about, f"{emitted / rounds:.2f}", token.text(), times.text(), expected)
        table.add_row(*row, "same" if same else "own sample" if method.own_sample else "DIFFERS")
    return table, record


def round_table(found: Measured) -> tuple[Table, dict[str, Any]]:
    """A round of the best tree taken apart."""
    table = _table(f"{found.pair.name} pair, a round of {found.pair.best_tree.about}", "part", "ms", "of target")
    target = found.of(("bare", "target"))
    parts = {f"bare {name}": found.of((kind, name)) for kind, name in found.seconds if kind == "bare"}
    parts["all bare forwards, one after the other"] = found.of(("round", "bare"))
    parts |= {name: found.of((kind, name)) for kind, name in found.seconds if kind == "stage"}
    parts["everything else"] = minus(minus(found.round(found.pair.best_tree.name), target), found.part("stage"))
    parts["round"] = found.round(found.pair.best_tree.name)
    record = {}
    for name, seconds in parts.items():
        milliseconds = Spread.of([1e3 * second for second in seconds])
        table.add_row(name, milliseconds.text(".3f"), f"{over(seconds, target).median:.3f}")
        record[name] = milliseconds
    return table, record


def curve_table(found: Measured) -> Table:
    """One forward of 1 to 64 rows."""
    table = _table(f"{found.pair.name} pair, ms of one forward behind 128 tokens, by rows", "model", *map(str, ROWS))
    for name, curve in zip(("target", "draft"), found.pair.curves):
        table.add_row(name, *(f"{1e3 * second:.2f}" for second in curve.seconds[0, :, 0]))
    return table


def bars(zoo: Measured, inflated: Measured, record: dict[str, Any]) -> list[Bar]:
    """Everything that has to hold."""
    incremental, target = inflated.token("incremental"), inflated.of(("bare", "target"))
    read = over(inflated.of(("machine", "bandwidth")), incremental).median * inflated.pair.weights[0] / BYTES
    overhead = minus(zoo.round("incremental"), zoo.of(("round", "bare incremental")))
    best = inflated.pair.best_tree.name
    tree, bare = inflated.token(best), inflated.of(("round", "bare"))
    hot = [over(inflated.token("incremental at 1"), inflated.token(f"{name} at 1")).median for name, _ in SAMPLED]
    found = [
        Bar("inflated, incremental: bandwidth of its weights over the machine's", read, least=0.75),
        Bar("inflated: round / bare forwards", over(inflated.round(best), bare).median, most=1.05),
        Bar(
            "inflated: drafting, verification and commit / target's forward",
            over(inflated.part("stage"), target).median,
            most=0.35,
        ),
        Bar("inflated: best tree x incremental", over(incremental, tree).median, least=1.2),
        Bar("inflated: best tree x best chain", over(inflated.token("chain"), tree).median, least=1.0),
        Bar("inflated: best verifier at temperature 1 x incremental", max(hot), least=1.1),
        Bar("zoo: ms of an incremental round beyond its forward", 1e3 * Spread.of(overhead).median, most=0.3),
    ]
    for measured in (zoo, inflated):
        name = measured.pair.name
        memory = record[name]["memory"]
        found.append(Bar(f"{name}: arrays and temporaries / weights and caches", memory["ratio"], most=1.15))
        found.append(Bar(f"{name}: MB that decoding grows by", memory["growth_mb"], most=0))
        found.append(Bar(f"{name}: compilations after warm-up", record[name]["compilations"], most=0))
        different = sum(
            method.outcome[0] != measured.pair.methods[method.baseline].outcome[0]
            for method in measured.pair.methods.values()
            if not method.own_sample
        )
        found.append(Bar(f"{name}: greedy and naive methods with another text than incremental", different, most=0))
    return found


def measure(pair: Pair, repeats: int) -> tuple[Measured, dict[str, Any]]:
    """Everything that is timed of a pair, and a record of its memory, its curves, and compilations once it was warm."""
    memory = pair.memory()
    calls = {("machine", "bandwidth"): bandwidth(), **pair.calls()}
    samples(calls, 0)
    for method in pair.methods.values():
        method.outcome  # noqa: B018  decoded before anything is timed
    before = len(compile_log())
    found = Measured(pair, samples(calls, repeats))
    curves = [(1e3 * curve.seconds[0, :, 0]).tolist() for curve in pair.curves]
    return found, {"memory": memory, "curves": curves, "compilations": len(compile_log()) - before}


def tables(found: Measured, record: dict[str, Any]) -> list[Table | str]:
    """What is shown of a pair; its numbers are added to the record."""
    methods, record["methods"] = methods_table(found)
    parts, record["round"] = round_table(found)
    record["prefill"] = prefill = Spread.of([1e3 * second for second in found.of(("prefill", "prefill"))])
    speed = Spread.of([BYTES / second / 1e9 for second in found.of(("machine", "bandwidth"))])
    record["gigabytes_per_second"] = speed
    return [
        f"{found.pair.name} pair: memory is read at {speed.text('.1f')} GB/s; medians, quartiles in parentheses",
        curve_table(found),
        methods,
        parts,
        f"prefill of {len(found.pair.prompts[0])} tokens: {prefill.text('.1f')} ms",
        ", ".join(f"{name} {value:.2f}" for name, value in record["memory"].items()),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables, bars, and the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed turns; medians and quartiles count")
    parser.add_argument("--json", type=Path, default=config.REPOSITORY / "runs/bench.json", help="for the numbers")
    options = parser.parse_args(arguments)
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2, since quartiles are shown; got {options.repeats}")
    screen, began = command.screen(), time.perf_counter()
    compile_log()

    tokenizer = sj.load_tokenizer(ZOO / "target")
    found = prompts.load("humaneval", num_prompts=TRACED + TIMED, max_tokens=LONGEST, tokenizer=tokenizer)
    texts = [list(prompt.tokens) for prompt in found]
    models = [sj.load_model(ZOO / name) for name in INFLATED]
    trace = sj.replay.rank_trace(models[0], models[1:], texts[:TRACED], max_new_tokens=64)
    hot = SampledTraces.of(models[0], models[1], texts[:TRACED])
    measured, record = [], {}
    with tempfile.TemporaryDirectory() as directory:
        for name, sizes in INFLATED.items():
            inflate.inflate(ZOO / name, Path(directory) / name, **sizes)
        for name, folder, sampled in (("zoo", ZOO, None), ("inflated", Path(directory), hot)):
            pair = Pair(name, [folder / model for model in INFLATED], trace, sampled, texts[TRACED:])
            one, record[name] = measure(pair, options.repeats)
            measured.append(one)
            for shown in tables(one, record[name]):
                screen.print(shown, highlight=False)
    zoo, inflated = measured
    ratios = {
        **{f"attention, {name}": value for name, value in attention_ratios(repeats=options.repeats).items()},
        **{
            f"drafting, {name}": value
            for name, value in drafting_ratios(
                [sj.load_model(ZOO / f"ssm_{letter}") for letter in "abc"],
                (3, 2, 1, 1),
                prompt=texts[0],
                repeats=options.repeats,
            ).items()
        },
        **{f"verify, {name}": value for name, value in verify_ratios(repeats=options.repeats).items()},
    }
    for name, value in ratios.items():
        screen.print(f"{name}: {value:.2f}", highlight=False)
    record |= {"ratios": ratios, "compilations": len(compile_log()), "compile_seconds": sum(compile_log())}
    screen.print(
        f"{len(compile_log())} compilations took {sum(compile_log()):.0f} s of {time.perf_counter() - began:.0f} s",
        highlight=False,
    )
    checked = bars(zoo, inflated, record)
    for bar in checked:
        screen.print(bar.text(), highlight=False, soft_wrap=True)
    record["bars"] = [bar._asdict() | {"met": bar.met} for bar in checked]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    screen.print(f"numbers: {options.json}", highlight=False, soft_wrap=True)
    return int(not all(bar.met for bar in checked))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table


if __name__ == "__main__":
    sys.exit(main())
